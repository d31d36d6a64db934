"""What a ViT costs before it is run: parameters, FLOPs, memory, the floor time of every operation, and from these a step and a whole training.

FLOPs are two per multiply-add of the matrix products; pointwise work counts nothing. By convention training is three times the forward
pass. The operations are counted as they run: no gradient of the images, and attention's backward computes the scores again (2.5 times).

Bytes: every kernel reads its inputs and writes its outputs once, the pointwise work around a product folded into it; left out are row
statistics and one pass of ours, LayerNorm's backward writing LayerNorm's output again (not with keep="all"). The floor of an operation is the sum over its
kernels of max(FLOPs / rate of the matrix units, bytes / rate of the memory).

Memory is that of vitfast's kernels under autocast: fp32 parameters, gradients and optimiser state, 16-bit copies of the linear layers, and
what vitfast.ops keeps for the backward pass.
"""

import copy
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..errors import InputError, unknown
from ..hybrid import HybridEmbed
from ..keep import KEEPS, USABLE, block_bytes
from ..layers import LayerNorm
from ..model import ViT
from . import predicted

GIB = 2**30
DTYPES = {"bf16": 2, "fp16": 2, "fp32": 4}  # bytes of a number; fp32 products run as TF32, at half the rate
EFFICIENCY = {"data sheet": 0.7, "measured": 0.85}  # share of the floors' speed that a whole step is assumed to reach


@dataclass(frozen=True)
class Gpu:
    """Dense bf16 TFLOP/s (fp32 accumulation), GB/s and GiB by the maker's data sheet."""

    teraflops: float
    gigabytes_per_second: float
    memory_gib: float


GPUS = {
    "A10": Gpu(125, 600, 24),
    "L4": Gpu(121, 300, 24),
    "L40S": Gpu(362, 864, 48),
    "A100": Gpu(312, 2039, 80),
    "A100-40": Gpu(312, 1555, 40),
    "H100": Gpu(989, 3350, 80),
    "H100-PCIe": Gpu(756, 2000, 80),
    "H200": Gpu(989, 4800, 141),
    "B200": Gpu(2250, 8000, 180),
    "3090": Gpu(71, 936, 24),
    "4090": Gpu(165.2, 1008, 24),
    "5090": Gpu(209.5, 1792, 32),
}

# Data sets of the paper's pre-training and ours: training images, classes.
DATASETS = {
    "imagenet": (1_281_167, 1000),
    "imagenet21k": (14_197_122, 21_843),
    "jft": (303_000_000, 18_291),
    "digits": (1_437, 10),
}


@dataclass(frozen=True)
class Rates:
    """How fast and how large a device is, and whether its rates come from the "data sheet" or were "measured"."""

    gpu: str
    flops_per_second: float
    bytes_per_second: float
    memory_bytes: float
    source: str


def rates(gpu: str = "H200", dtype: str = "bf16", ceilings: str | Path | None = None) -> Rates:
    """A GPU's rates by its data sheet, or those in a JSON file of measured ceilings. Raises InputError for unknown names and bad files.

    The file holds {"flops_per_second": X, "bytes_per_second": Y}, at the top or under "ceilings", or is what the benchmarks write, with
    "copy" and products by dtype.
    """
    names = {name.lower(): name for name in GPUS}
    name = names.get(gpu.lower().removeprefix("nvidia ").removeprefix("rtx ").replace(" ", "-"))
    if name is None:
        raise unknown("GPU", gpu, GPUS)
    sheet = GPUS[name]
    if ceilings is not None:
        return Rates(name, *_measured(Path(ceilings), dtype), sheet.memory_gib * GIB, "measured")
    return Rates(
        name,
        sheet.teraflops * 1e12 / (2 if dtype == "fp32" else 1),
        sheet.gigabytes_per_second * 1e9,
        sheet.memory_gib * GIB,
        "data sheet",
    )


def _measured(path: Path, dtype: str) -> tuple[float, float]:
    """(FLOP/s, bytes/s) of a file of ceilings."""
    try:
        found = json.loads(path.read_text())
        for key in ("machine_info", "vitfast", "ceilings"):
            found = found.get(key, found)
        product = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[dtype]
        both = found.get("flops_per_second", found.get(product)), found.get("bytes_per_second", found.get("copy"))
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"--ceilings {path} cannot be read as a JSON object ({error})") from None
    if not all(isinstance(rate, (int, float)) and rate > 0 for rate in both):
        raise InputError(
            f"--ceilings {path} must hold positive numbers flops_per_second and bytes_per_second, got {both[0]} and {both[1]}"
        )
    return both


# ---- FLOPs and bytes

Kernel = tuple[float, float]  # FLOPs, bytes


@dataclass(frozen=True)
class Operation:
    """A part of a step that runs `times` times: the kernels of one forward and one backward, which follow one another."""

    name: str
    times: int
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]

    def row(self, device: Rates) -> dict:
        """One run's FLOPs, bytes and floor in seconds, forward and backward."""
        found = dict(name=self.name, times=self.times)
        for direction, kernels in (("forward", self.forward), ("backward", self.backward)):
            found[f"{direction}_flops"] = sum(flops for flops, _ in kernels)
            found[f"{direction}_bytes"] = sum(moved for _, moved in kernels)
            found[f"{direction}_floor"] = sum(
                max(flops / device.flops_per_second, moved / device.bytes_per_second) for flops, moved in kernels
            )
        return found


def operations(model: ViT, batch: int, size: int = 2, pixel_size: int = 1, keep: str = "least") -> list[Operation]:
    """The operations of a training step on `batch` images, in order. size: bytes of a number; pixel_size: bytes of an image's value.

    keep: "least" or "all", which dropout overrules.
    """

    def product(
        m: int, n: int, k: int, extra: int = 0
    ) -> Kernel:  # (m, k) x (k, n); extra: elements read or written besides
        return 2.0 * m * n * k, size * (m * k + k * n + m * n + extra)

    def linear(
        name: str, times: int, m: int, n: int, k: int, extra: int = 0
    ) -> Operation:  # (m, k) -> (m, n); dX, then dW with db
        return Operation(name, times, (product(m, n, k, n + extra),), (product(m, k, n), product(n, k, m, n)))

    def moved(elements: int) -> tuple[Kernel]:
        return ((0.0, size * elements),)

    stem, block, depth = model.patch_embed, model.blocks[0], len(model.blocks)
    _check(model)
    keep = "least" if _dropout(model) else keep
    d, f, tokens = model.embed_dim, block.mlp.fc1.out_features, model.num_prefix_tokens + stem.num_patches
    m, rows = batch * tokens, batch if model.global_pool else batch * tokens  # rows: what the head reads
    u = m * d
    patches, length = batch * stem.num_patches, stem.proj.weight[0].numel()
    hybrid = isinstance(stem, HybridEmbed)
    embed = (
        2.0 * patches * d * length,
        (size if hybrid else pixel_size) * patches * length + size * (u + d * length + tokens * d),
    )
    ops = [_cnn(stem.backbone, batch, (model.in_chans, *stem.img_size), size)[0]] if hybrid else []
    ops += [
        Operation(
            "patch embedding", 1, (embed,), (embed, embed) if hybrid else (embed,)
        ),  # a map wants a gradient, images do not
        Operation(
            "LayerNorm 1", depth, moved(2 * u + 2 * d), moved(4 * u + 3 * d)
        ),  # backward: dy, x, the residual's gradient -> dx
        linear("QKV", depth, m, 3 * d, d),
        Operation(
            "attention", depth, ((4.0 * m * tokens * d, size * 4 * u),), ((10.0 * m * tokens * d, size * 8 * u),)
        ),
        linear("projection + residual", depth, m, d, d, u),
        Operation("LayerNorm 2", depth, moved(2 * u + 2 * d), moved(4 * u + 3 * d)),
        linear("fc1 + GELU", depth, m, f, d, m * f),  # writes the pre-activation too
        # backward reads the pre-activation, writes its gradient and, unless it was kept, the activation again
        Operation(
            "fc2 + residual",
            depth,
            (product(m, d, f, d + u),),
            (product(m, f, d, (1 if keep == "all" else 2) * m * f), product(d, f, m, d)),
        ),
    ]
    if isinstance(model.norm, LayerNorm):
        ops.append(Operation("last LayerNorm", 1, moved(2 * u + 2 * d), moved(3 * u + 3 * d)))
    if model.global_pool == "avg":
        ops.append(Operation("mean of the patches", 1, moved(u + rows * d), moved(u + rows * d)))
    if isinstance(model.fc_norm, LayerNorm):
        ops.append(Operation("last LayerNorm", 1, moved(2 * rows * d + 2 * d), moved(3 * rows * d + 3 * d)))
    for name, layer in (("hidden layer of the head", getattr(model.pre_logits, "fc", None)), ("head", model.head)):
        if isinstance(layer, torch.nn.Linear):
            ops.append(linear(name, 1, rows, layer.out_features, layer.in_features))
    return ops


def _cnn(backbone: torch.nn.Module, batch: int, image: tuple[int, int, int], size: int) -> tuple[Operation, int]:
    """The CNN of a hybrid, in the dtype of the products, and the bytes that it keeps for its backward, its input too.

    Its kernels are the convolutions, norms and pooling (activations, residual additions and the standardisation of weights are folded in). They
    are PyTorch's, whose autocast computes the norms in fp32: it moves and keeps more.
    """
    forward, backward, kept = [], [], {}

    def count(module, inputs, output):
        x, convolution = inputs[0], isinstance(module, torch.nn.Conv2d)
        work = 2.0 * output.numel() * module.weight[0].numel() if convolution else 0.0
        moved = size * (x.numel() + output.numel() + (module.weight.numel() if convolution else 0))
        first = convolution and not forward  # the images want no gradient
        forward.append((work, moved))
        backward.extend(
            [(work, moved)] * (1 if first else 2) if convolution else [(0.0, size * (2 * x.numel() + output.numel()))]
        )

    def keep(tensor):
        kept[tensor.untyped_storage()._cdata] = (
            tensor  # held: a storage that is gone would give its place to the next one
        )
        return tensor

    backbone = copy.deepcopy(backbone).to("meta").train()
    for module in backbone.modules():
        if isinstance(module, (torch.nn.Conv2d, torch.nn.GroupNorm, torch.nn.MaxPool2d)):
            module.register_forward_hook(count)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        backbone(torch.empty(batch, *image, device="meta"))
    for parameter in backbone.parameters():
        kept.pop(parameter.untyped_storage()._cdata, None)
    total = sum(t.untyped_storage().nbytes() // 4 * size for t in kept.values())
    return Operation("ResNet", 1, tuple(forward), tuple(backward)), total


def _check(model: ViT) -> None:
    if model.config.get("pos_embed") == "relative":
        raise InputError(
            "cost: relative positions run on PyTorch's attention, which is not counted; plain and hybrid ViTs with other positions are"
        )


def _dropout(model: ViT) -> float:
    """Of the blocks: where it is on they run on the smaller operations, and `keep` has no effect."""
    return model.blocks[0].attn.proj_drop.p


def optimizer_step(parameters: int, optimizer: str = "adamw", averaged: bool = False) -> Operation:
    """Clipping by norm and the update, fp32: gradients are read for their norm; p, g, m (and v) are read, p, m (and v) written; then the average."""
    passes = (8 if optimizer == "adamw" else 6) + (3 if averaged else 0)
    return Operation("clipping + update", 1, (), ((0.0, 4.0 * passes * parameters),))


def flops_per_image(model: ViT) -> float:
    """FLOPs of the forward pass for one image."""
    return sum(op.times * flops for op in operations(model, 1) for flops, _ in op.forward)


# ---- memory


def kept_bytes(model: ViT, batch: int, size: int = 2, pixel_size: int = 1, keep: str = "least") -> dict[str, int]:
    """What a forward pass that trains keeps for its backward, by kind: the tensors that vitfast.ops saves, without the parameters.

    keep: "least" or "all". Where dropout is on, the blocks run on the smaller operations, which keep more: the norms' outputs, the activation, and masks.
    """
    _check(model)
    block, depth, d = model.blocks[0], len(model.blocks), model.embed_dim
    f, m = block.mlp.fc1.out_features, batch * (model.num_prefix_tokens + model.patch_embed.num_patches)
    norm, rows = isinstance(model.norm, LayerNorm), batch if model.global_pool else m
    stem, image = model.patch_embed, (model.in_chans, *model.patch_embed.img_size)
    kept = {
        "images": 0 if isinstance(stem, HybridEmbed) else batch * math.prod(image) * pixel_size,
        "ResNet": _cnn(stem.backbone, batch, image, size)[1] if isinstance(stem, HybridEmbed) else 0,
    }
    dropout = _dropout(model) > 0
    kept |= {kind: depth * held for kind, held in block_bytes(block, m, size, "least" if dropout else keep).items()}
    kept["statistics"] += 2 * 4 * (m if norm else rows)  # of the last norm
    if dropout:
        kept["norms and activations (dropout)"] = depth * m * (2 * d + f) * size
        kept["masks (dropout)"] = (depth * m * (2 * d + f) + (m * d if model.pos_drop.p > 0 else 0)) * 1
    # The last norm's input, and its output, of which the head reads rows; a mean keeps neither.
    pooled = rows * d if model.global_pool == "avg" else m * d
    kept["head"] = size * (
        (m * d if norm else pooled) + pooled + (rows * model.head_hidden_size if hasattr(model.pre_logits, "fc") else 0)
    )
    return kept


def state_bytes(model: ViT, size: int = 2, optimizer: str = "adamw", averaged: bool = False) -> dict[str, int]:
    """What stays from step to step: fp32 parameters, gradients, optimiser state and running average, and 16-bit copies of the linear layers."""
    total = sum(p.numel() for p in model.parameters())
    copied = sum(
        p.numel()
        for layer in model.modules()
        if isinstance(layer, (torch.nn.Linear, torch.nn.Conv2d))
        for p in layer.parameters()
    )
    return {
        "parameters": 4 * total,
        "gradients": 4 * total,
        "optimiser state": (8 if optimizer == "adamw" else 4) * total,
        "16-bit copies": size * copied if size < 4 else 0,
        "running average": 4 * total if averaged else 0,
    }


def working_bytes(model: ViT, batch: int, size: int = 2) -> int:
    """What comes and goes at the peak, the backward of the last MLP: gradients of its output and pre-activation, the activation, the logits.

    An estimate, not measured.
    """
    m, f = batch * (model.num_prefix_tokens + model.patch_embed.num_patches), model.blocks[0].mlp.fc1.out_features
    return m * (
        model.embed_dim * (4 if model.residual_in_fp32 else size) + 2 * f * size
    ) + batch * model.num_classes * (2 * size + 2 * 4)


# ---- all of it


def estimate(
    model: ViT,
    device: Rates,
    *,
    batch_size: int = 256,
    gpus: int = 1,
    dtype: str = "bf16",
    images: float | None = None,
    optimizer: str = "adamw",
    averaged: bool = False,
    efficiency: float | None = None,
    keep: str = "least",
) -> dict:
    """Everything about training this model (on the meta device if you like) there, as JSON holds it. Times in seconds, sizes in bytes.

    batch_size: of an optimiser step, over all GPUs; what does not fit into memory is accumulated. images: how many are seen in the whole
    training. efficiency: the share of the floors' speed that is assumed, EFFICIENCY unless given. Every GPU holds the whole state, and
    their talk is taken to cost nothing, as are the passes that dropout adds. keep: what blocks keep for backward; "auto" is "all" where that
    fits without smaller parts of the batch. Raises InputError where a number makes no sense.
    """
    for name, value in (("batch_size", batch_size), ("gpus", gpus), ("images", images), ("efficiency", efficiency)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise InputError(f"cost: {name} must be positive, got {value}")
    size, efficiency = DTYPES[dtype], efficiency or EFFICIENCY[device.source]
    if keep not in KEEPS:
        raise InputError(f"cost: keep must be one of {', '.join(KEEPS)}, got {keep!r}")
    working, on_each = working_bytes(model, 1, size), math.ceil(batch_size / gpus)
    choices = {}
    for choice in ("least", "all"):
        one, two = (kept_bytes(model, images_, size, keep=choice) for images_ in (1, 2))
        each = {kind: two[kind] - one[kind] for kind in one}
        state = state_bytes(model, size, optimizer, averaged) | {
            "standardised filters": sum(one.values()) - sum(each.values())
        }  # a ResNet's
        most = max(0, int((USABLE * device.memory_bytes - sum(state.values())) / (sum(each.values()) + working)))
        choices[choice] = dict(kept_per_image=each, largest_batch=most)
    if _dropout(model):
        keep = "least"
    elif keep == "auto":
        keep = (
            "all"
            if choices["all"]["largest_batch"] >= min(on_each, max(1, choices["least"]["largest_batch"]))
            else "least"
        )
    kept, largest = choices[keep]["kept_per_image"], choices[keep]["largest_batch"]
    more = sum(choices["all"]["kept_per_image"].values()) - sum(choices["least"]["kept_per_image"].values())
    parts = math.ceil(on_each / max(1, min(largest, on_each)))
    micro = math.ceil(on_each / parts)
    parameters, flops = sum(p.numel() for p in model.parameters()), flops_per_image(model)
    rows = [op.row(device) for op in operations(model, micro, size, keep=keep)]
    update = optimizer_step(parameters, optimizer, averaged).row(device)
    inference = parts * sum(row["times"] * row["forward_floor"] for row in rows)
    floor = (
        parts * sum(row["times"] * (row["forward_floor"] + row["backward_floor"]) for row in rows)
        + update["backward_floor"]
    )
    ports = (
        predicted.step(model, device.gpu, micro, parts)
        if (dtype, optimizer, averaged) == ("bf16", "adamw", False)
        else None
    )
    if ports:  # no step is faster than its floor, whatever the model says
        ports |= dict(training=max(ports["training"], floor), inference=max(ports["inference"], inference))
    return dict(
        img_size=list(model.patch_embed.img_size),
        tokens=model.num_prefix_tokens + model.patch_embed.num_patches,
        params=parameters,
        flops_per_image=flops,
        train_flops_per_image=3 * flops,
        train_flops=None if images is None else 3 * flops * images,
        train_images=images,
        dtype=dtype,
        device=asdict(device),
        gpus=gpus,
        batch_size=batch_size,
        micro_batch=micro,
        accumulate=parts,
        largest_batch=largest,
        dropout=_dropout(model),
        memory=dict(state=state, kept_per_image=kept, working_per_image=working),
        keep=dict(
            taken=keep,
            more_per_image=more,
            largest_batch={choice: found["largest_batch"] for choice, found in choices.items()},
        ),
        operations=[*rows, update],
        floor=_pace(floor, batch_size, images, gpus),
        predicted=dict(efficiency=efficiency, **_pace(floor / efficiency, batch_size, images, gpus)),
        port_model=ports,
    )


def _pace(step: float, batch_size: int, images: float | None, gpus: int) -> dict:
    seconds = None if images is None else images / batch_size * step
    days = None if seconds is None else seconds * gpus / 86_400
    return dict(step_seconds=step, images_per_second=batch_size / step, train_seconds=seconds, gpu_days=days)


def as_text(name: str, found: dict) -> str:
    """`estimate`'s result for people."""
    device, memory = found["device"], found["memory"]
    lines = [
        f"{name}, {found['img_size'][0]} x {found['img_size'][1]} px, {found['tokens']} tokens: {found['params']:,} parameters, "
        f"{found['flops_per_image'] / 1e9:,.2f} GFLOP an image forward, {found['train_flops_per_image'] / 1e9:,.2f} in training",
        "",
        f"{'each, batch ' + format(found['micro_batch'], ','):<28}{'times':>6}{'GFLOP fwd / bwd':>20}{'MB fwd / bwd':>20}{'floor us fwd / bwd':>20}",
    ]
    for row in found["operations"]:
        pairs = (("flops", 1e-9, ",.1f"), ("bytes", 1e-6, ",.0f"), ("floor", 1e6, ",.0f"))
        cells = (
            f"{row[f'forward_{key}'] * scale:{form}} / {row[f'backward_{key}'] * scale:{form}}"
            for key, scale, form in pairs
        )
        lines.append("{:<28}{:>6}{:>20}{:>20}{:>20}".format(row["name"], row["times"], *cells))
    lines += ["", f"fixed memory, GiB: {_listed(memory['state'], GIB)}"]
    lines.append(
        f"kept for backward, MiB an image: {_listed(memory['kept_per_image'], 2**20)}; {memory['working_per_image'] / 2**20:.2f} more at the peak"
    )
    keep, largest = found["keep"], found["keep"]["largest_batch"]
    more = f"'all' keeps {keep['more_per_image'] / 2**20:.2f} MiB an image more than 'least', which backward then does not write again"
    batches = f"largest batch {largest['all']:,} with 'all', {largest['least']:,} with 'least'"
    lines.append(
        "keep has no effect with dropout" if found["dropout"] else f"keep={keep['taken']!r} taken; {more}; {batches}"
    )
    speed = f"{device['flops_per_second'] / 1e12:,.0f} TFLOP/s in {found['dtype']}, {device['bytes_per_second'] / 1e9:,.0f} GB/s ({device['source']})"
    fits = (
        f"largest batch on each {found['largest_batch']:,} (estimate)"
        if found["largest_batch"]
        else "not even one image fits beside the fixed memory"
    )
    lines += [f"{device['gpu']}: {speed}; {USABLE:.0%} of {device['memory_bytes'] / GIB:.0f} GiB: {fits}", ""]
    where = f"batch {found['batch_size']:,} on {found['gpus']} x {device['gpu']}"
    where += f" in {found['accumulate']} parts of {found['micro_batch']:,}" if found["accumulate"] > 1 else ""
    for how, pace in (
        ("the floors", found["floor"]),
        (f"{found['predicted']['efficiency']:.0%} of that (assumed)", found["predicted"]),
    ):
        line = f"{where}, {how}: {1e3 * pace['step_seconds']:,.1f} ms a step, {pace['images_per_second']:,.0f} images/s"
        trained = pace["gpu_days"] is not None
        lines.append(
            line + (f", {pace['train_seconds'] / 3600:,.1f} hours, {pace['gpu_days']:,.1f} GPU-days" if trained else "")
        )
    if ports := found["port_model"]:
        training, inference = (found["batch_size"] / ports[direction] for direction in ("training", "inference"))
        times = f"{1e3 * ports['training']:,.1f} ms a training step, {training:,.0f} images/s; inference {inference:,.0f} images/s"
        lines.append(f"{where}, {ports['source']}: predicted {times}")
    if found["dropout"]:
        lines.append(
            "dropout runs the layers on smaller operations: their further passes over memory are not in these times"
        )
    if found["train_flops"] is not None:
        lines.append(
            f"the whole training: {found['train_images']:,.0f} images, {found['train_flops'] / 1e18:,.4g} exaFLOP"
        )
    return "\n".join(lines)


def _listed(sizes: dict[str, int], unit: int) -> str:
    return f"{sum(sizes.values()) / unit:,.2f} ({', '.join(f'{name} {size / unit:,.2f}' for name, size in sizes.items() if size)})"
