"""Images of many sizes (mixes.py): attention, and training steps of a ViT, packed and padded.

FLOPs and bytes are of what is needed, without padding, for everybody; `padded_share` is the share of the pairs of a
query and a key, or of a step's tokens, that an implementation has for padding, the ends of tiles not counted. Truth is
float64 of each image alone, compared image by image. What depends on the sizes alone (offsets, a block mask) is made
once, outside of what is timed, as a model makes it once for all its layers.

Attention: ops.attention with offsets, and peers that take packed tensors too; q, k and v come apart.

A step is forward and backward, in bf16 weights on a GPU and fp32 on a CPU; the optimiser is everybody's own. Our ViT,
packed; timm's NaFlexVit (NaFlex, SigLIP 2), whose patches its own loader pads to the longest image, with a mask of
every pair; and that same model accelerated, which leaves the padding out.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import clock
import harness
import pytest
import torch
import torch.nn.functional as F
from clock import allocated, peak_bytes, warm_up
from harness import Case, bench, compiled, describe, measure, values
from mixes import MIXES, PATCH, Mix
from peers import FLASH, library_function, randomised
from shapes import model_work
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import vitfast
from vitfast import ViT, ops
from vitfast.model.activation_memory import settle
from vitfast.ops import reference as ref
from vitfast.tools.cost import work
from vitfast.tools.verify import exact_fp32, worst

HOW = ("compile", "eager") if clock.GPU or clock.REHEARSED else ("eager",)
STEPS = 3 if clock.GPU else 1  # calls per timed round
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


# ---- attention


def offsets_of(mix: Mix) -> Tensor:
    """(S + 1,) int32."""
    return torch.tensor([0, *mix.lengths], device=clock.DEVICE).cumsum(0).int()


def flash(mix: Mix, name: str) -> Attention:
    """flash-attn's varlen."""
    function, offsets, longest = library_function(*FLASH[name], "flash_attn_varlen_func"), offsets_of(mix), mix.longest
    sizes = dict(cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest, max_seqlen_k=longest)
    return functools.partial(function, **sizes)


def torch_varlen(mix: Mix) -> Attention:
    """torch.nn.attention.varlen (torch 2.10 and later), with the backend that torch picks."""
    function = library_function("torch", "torch.nn.attention.varlen", "varlen_attn")
    offsets, longest = offsets_of(mix), mix.longest
    return lambda q, k, v: function(q, k, v, offsets, offsets, longest, longest)


def nested(mix: Mix) -> Attention:
    """SDPA on jagged nested tensors, with the backend that torch picks."""
    offsets = offsets_of(mix).long()
    sizes = dict(min_seqlen=min(mix.lengths), max_seqlen=mix.longest)  # else torch asks the device for them

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        jagged = [torch.nested.nested_tensor_from_jagged(x, offsets, **sizes).transpose(1, 2) for x in (q, k, v)]
        return F.scaled_dot_product_attention(*jagged).transpose(1, 2).values()

    return attention


def flex(mix: Mix, how: str) -> Attention:
    """flex_attention over all tokens as one sequence, compiled ("compile", "max-autotune").

    Its mask is block-diagonal: blocks without a pair are left out.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    images = torch.arange(mix.batch, device=clock.DEVICE)
    owner = images.repeat_interleave(torch.tensor(mix.lengths, device=clock.DEVICE))
    same = lambda b, h, i, j: owner[i] == owner[j]  # noqa: E731
    # compiled, so that the mask of every pair is not in memory
    mask = create_block_mask(same, None, None, mix.rows, mix.rows, device=clock.DEVICE, _compile=True)
    function = compiled(flex_attention, how, fullgraph=True)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = [x.transpose(0, 1)[None] for x in (q, k, v)]  # views (1, H, tokens, Dh)
        return function(*heads, block_mask=mask)[0].transpose(0, 1)

    return attention


IMPLEMENTATIONS: dict[str, Callable[[Mix], Attention]] = {  # those not installed skip their cases
    "vitfast": lambda mix: functools.partial(ops.attention, offsets=offsets_of(mix), longest=mix.longest),
    **{name: functools.partial(flash, name=name) for name in FLASH},
    "torch varlen": torch_varlen,
    "torch nested": nested,
    "flex compile": functools.partial(flex, how="compile"),
    "flex max-autotune": functools.partial(flex, how="max-autotune"),
}


def plain_packed(mix: Mix, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Plain attention of each image alone, whose logits are made again for backward: not all would fit."""
    images = zip(*(x[None].split(mix.lengths, 1) for x in (q, k, v)))
    return torch.cat([checkpoint(ref.attention, *image, use_reentrant=False)[0] for image in images])


def case_of(mix: Mix) -> Case:
    """A mix, its images one after the other."""
    make = lambda: [values(mix.rows, mix.heads, mix.head) for _ in "qkv"]  # noqa: E731
    needed = work.attention(mix.rows, mix.tokens, mix.width, harness.DTYPE.itemsize)
    cut = lambda x: x.split(mix.lengths)  # noqa: E731
    return Case("packed attention", mix.shape, functools.partial(plain_packed, mix), make, 0, needed, cut)


def wanted() -> list:
    """(mix, direction, impl) of attention's cases; on a CPU those that run there."""
    impls = IMPLEMENTATIONS if clock.GPU else ("vitfast", "torch nested")
    directions = ("forward", "backward", "both") if clock.GPU else ("forward", "both")
    found = [(mix, direction, impl) for mix in MIXES for direction in directions for impl in impls]
    return [pytest.param(*case, id="-".join(case)) for case in found]


@pytest.mark.parametrize("mix, direction, impl", wanted())
def test_attention_packed(benchmark, mix, direction, impl):
    mix = MIXES[mix]
    facts = dict(padded_share=None if impl.startswith("flex") else 0.0, images=mix.batch, tokens=mix.rows)
    bench(benchmark, case_of(mix), impl, IMPLEMENTATIONS[impl](mix), direction, **facts)


# ---- training steps


def vit(mix: Mix) -> nn.Module:
    return ViT.from_preset(mix.model, depth=mix.depth, dynamic_img_size=True)


def naflex(mix: Mix) -> nn.Module:
    from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg

    sizes = dict(patch_size=PATCH, embed_dim=mix.width, depth=mix.depth, num_heads=mix.heads)
    return NaFlexVit(NaFlexVitCfg(**sizes, class_token=True, global_pool="token"), num_classes=1000)


def packed(images: list[Tensor], mix: Mix) -> list:
    return [(vitfast.pack(images, PATCH), slice(None))]


def whole(images: list[Tensor], mix: Mix) -> list:
    """Of images of one size."""
    return [(torch.stack(images), slice(None))]


def padded(images: list[Tensor], mix: Mix) -> list:
    """As timm's loader does it, to the longest image."""
    from timm.data.naflex_dataset import NaFlexCollator
    from timm.data.naflex_transforms import Patchify

    samples = [(Patchify(PATCH)(image.cpu()), 0) for image in images]
    found, _ = NaFlexCollator(max(len(sample["patches"]) for sample, _ in samples))(samples)
    kept = {name: found[name].to(clock.DEVICE) for name in ("patches", "patch_coord", "patch_valid")}
    return [(kept | dict(patches=kept["patches"].to(images[0].dtype)), slice(None))]


@dataclass(frozen=True)
class Way:
    """A way to train on a mix. build: the model, in plain PyTorch where it is not `fast`.

    lay_out: (images, mix) -> [(what the model takes, which images)], made beforehand as a loader would. alone: the same
    for one image, of which the truth is made.
    """

    build: Callable[[Mix], nn.Module]
    lay_out: Callable[[list[Tensor], Mix], list]
    alone: Callable[[list[Tensor], Mix], list]
    fast: Callable[[nn.Module], nn.Module] = lambda model: model


WAYS = {
    "vitfast": Way(vit, packed, whole),
    "timm NaFlexVit": Way(naflex, padded, padded),
    "vitfast.accelerate(NaFlexVit)": Way(naflex, padded, padded, vitfast.accelerate),
}


def model_of(build: Callable, mix: Mix, dtype: torch.dtype) -> nn.Module:
    """The same random weights every time."""
    torch.manual_seed(0)
    with clock.DEVICE:
        return randomised(build(mix)).to(dtype).train()


def images_of(mix: Mix, dtype: torch.dtype) -> list[Tensor]:
    """(3, height, width) each, the same every time."""
    torch.manual_seed(1)
    return [torch.randn(3, *size, device=clock.DEVICE).to(dtype) for size in mix.images]


def train_step(forward: Callable, batches: list, upstream: Tensor) -> Tensor:
    """Logits (S, 1000) in float64; the gradients add up in the model's parameters."""
    logits = torch.zeros_like(upstream)
    for images, which in batches:
        found = forward(images)
        found.backward(upstream[which].to(found.dtype))
        logits[which] = found.detach().double()
    return logits


class Check:
    """Judges logits and gradients against the plain model in float64 that sees one image at a time.

    Some images are compared; the upstream gradient of all others is zero, though every way computes the whole batch.
    The limit comes from the error of the plain model in the same dtype. Gradients are compared as one vector.
    """

    def __init__(self, mix: Mix, build: Callable, alone: Callable, dtype: torch.dtype):
        by_length = sorted(range(mix.batch), key=mix.lengths.__getitem__)
        self.mix, self.dtype, self.chosen = mix, dtype, sorted({0, by_length[0], by_length[-1], mix.batch - 1})
        self.upstream = torch.zeros(mix.batch, 1000, dtype=torch.float64, device=clock.DEVICE)
        self.upstream[self.chosen] = torch.randn(len(self.chosen), 1000, dtype=torch.float64, device=clock.DEVICE)
        truth, own = (self._alone(model_of(build, mix, d), alone, d) for d in (torch.float64, dtype))
        self.truth, self.own = [t.cpu() for t in truth], worst(own, truth)  # its memory is nobody's who is measured

    def _alone(self, model: nn.Module, alone: Callable, dtype: torch.dtype) -> list[Tensor]:
        model.set_grad_checkpointing()  # a document's logits of all layers in float64 would be tens of GB
        images = images_of(self.mix, dtype)
        singles = [
            (alone([images[i]], replace(self.mix, images=self.mix.images[i : i + 1]))[0][0], [i]) for i in self.chosen
        ]
        with ops.use_kernels("off"), exact_fp32():
            return self._results(model, model, singles)

    def _results(self, model: nn.Module, forward: Callable, batches: list) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        logits = train_step(forward, batches, self.upstream)
        flat = torch.cat([p.grad.double().flatten() for p in model.parameters()])
        model.zero_grad(set_to_none=True)
        return [*logits[self.chosen], flat]

    def judge(self, impl: str, model: nn.Module, forward: Callable, batches: list, when: str = "") -> dict[str, float]:
        result, truth = self._results(model, forward, batches), [t.to(clock.DEVICE) for t in self.truth]
        return harness.judge(impl, f"{self.mix.shape}{when}", result, truth, self.own, self.dtype)


check_of = functools.lru_cache(maxsize=1)(Check)  # kept for the next way of the same mix
TRAINED = list(MIXES) if clock.GPU or clock.REHEARSED else list(MIXES)[:1]
STEP_CASES = [(mix, way, how) for mix in TRAINED for way in WAYS for how in HOW]


@pytest.mark.parametrize("mix, way, how", [pytest.param(*case, id="{}-{} {}".format(*case)) for case in STEP_CASES])
def test_train_packed(benchmark, mix, way, how):
    mix, impl, of = MIXES[mix], f"{way} {how}", WAYS[way]
    dtype = torch.bfloat16 if clock.GPU else torch.float32
    benchmark.group = f"train packed {mix.shape}"
    with ops.use_kernels("on" if clock.GPU and way.startswith("vitfast") else "auto"):
        check, before = check_of(mix, of.build, of.alone, dtype), allocated()
        model, batches = of.fast(model_of(of.build, mix, dtype)), of.lay_out(images_of(mix, dtype), mix)
        forward = model
        if how != "eager":
            if isinstance(model, ViT):
                settle(model, mix.rows, dtype)  # before torch.compile, which takes what it finds
            forward = compiled(model, how, fullgraph=isinstance(model, ViT))
        errors = check.judge(impl, model, forward, batches)
        upstream = torch.randn(mix.batch, 1000, dtype=torch.float64, device=clock.DEVICE)

        def run():
            for _ in range(STEPS):
                train_step(forward, batches, upstream)
                model.zero_grad(set_to_none=True)

        warm_up(run, seconds=clock.WARM_SECONDS)
        peak = peak_bytes(run, before)
        seconds = measure(benchmark, run, calls=STEPS, rounds=max(3, clock.ROUNDS // 3))
        errors["error_after"] = check.judge(impl, model, forward, batches, " after timing")["error"]
    share = mix.padded_tokens if way == "timm NaFlexVit" else 0.0
    facts = dict(op="train packed", shape=mix.shape, direction="both", padded_share=share, **errors)
    facts |= dict(images=mix.batch, tokens=mix.rows, steps_per_second=1 / seconds)
    needed = model_work(mix, dtype.itemsize).of("both")  # without padding
    describe(benchmark, impl, needed, seconds, dtype, peak, **facts)
