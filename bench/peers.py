"""The peers: SDPA's backends, flash-attn 3 and 4, ViTs of timm, Hugging Face and torchvision.

The models run in each of their settings. Every library builds the same function: eps 1e-6, erf GELU, no dropout, a
class token, random weights in every parameter. That it is the same function is checked, not assumed: a plain ViT in
float64 reads the peer's own weights (vitfast.model.checkpoint knows everybody's names). It is compared with the peer's
logits in fp32, then with logits and gradients of exactly what is about to be timed, and after timing with these once
more, the peer's weights put back.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import harness
import machine
import pytest
import torch
import torch.nn.functional as F
from harness import Timed, checked_samples, compiled, judge
from machine import cold, median_seconds, peak_bytes, warm_up
from result_files import ACCELERATED, BACKEND
from shapes import Mix, Shape, model_work
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import vitfast
from vitfast import ViT, ops
from vitfast.model.activation_memory import choose_saved_activations
from vitfast.model.checkpoint.formats import to_timm_names
from vitfast.model.presets import preset
from vitfast.tools.cost.work import Kernels, total_flops, update
from vitfast.tools.verify import exact_fp32, worst

STEPS = 3 if machine.GPU else 1  # calls per timed round
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
FLASH = {  # name -> package, the module of its public functions, which have a backward; 2 is in torch
    "flash-attn 3": ("flash_attn_3", "flash_attn_interface"),
    "flash-attn 4": ("flash_attn_4", "flash_attn.cute"),
}


def library_function(package: str, module: str, name: str) -> Callable:
    """A function of a package; skips the case where that is not installed or has none of that name.

    Of several results it returns the first, because some versions of flash-attn return the logsumexp too.
    """
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # an import that looks for a GPU or a shared library may raise anything
        pytest.skip(f"{package} cannot be used: {error}")

    @functools.wraps(function)
    def first_result(*args, **options):
        result = function(*args, **options)
        return result[0] if isinstance(result, tuple) else result

    return first_result


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Three (B, N, H, Dh) -> (B, N, H, Dh) as the libraries do it: transposed views in and out."""
    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def forced(function: Callable, backend: str) -> Callable:
    """`function` with one backend of SDPA allowed; it raises where that one cannot run."""
    return sdpa_kernel(BACKENDS[backend if machine.GPU else "math"])(function)


def best_backend(s: Shape, training: bool) -> str:
    """The fastest backend of SDPA at this shape, by a measurement made now."""

    def fastest() -> str:
        size = (s.batch, s.tokens, s.heads, s.head)
        qkv = [torch.randn(size, device=machine.DEVICE).to(harness.DTYPE).requires_grad_(training) for _ in range(3)]
        upstream = torch.randn(size, device=machine.DEVICE).to(harness.DTYPE)
        run = lambda: torch.autograd.grad(sdpa(*qkv), qkv, upstream) if training else sdpa(*qkv)  # noqa: E731
        times = {}
        for name in ("flash", "cudnn", "efficient"):
            with contextlib.suppress(RuntimeError):  # a backend that cannot run here
                times[name] = median_seconds(forced(run, name), rounds=10)
        return min(times, key=times.get, default="math")

    return machine.once(f"SDPA at {s.name}, {training=}", fastest) if machine.GPU else "math"


LEAN = "least memory"  # backward computes again what it can
INVARIANT = "batch-invariant"  # by vitfast.batch_invariant, only in inference


@dataclass(frozen=True)
class Setting:
    """A library, a way to run it and a precision: a setting of a whole model.

    library: a key of BUILDERS. how: eager, graphed (vitfast.graphed) or as harness.compiled takes it. precision: bf16
    (weights too), amp (fp32 weights) or fp32. option: LEAN or INVARIANT, for our models.
    """

    library: str
    how: str
    precision: str
    option: str = ""

    name = property(lambda self: f"{self.library} {self.how} {self.precision} {self.option}".rstrip())
    # dtypes: of the matrix products, and of weights and images
    dtype = property(lambda self: torch.float32 if self.precision == "fp32" else torch.bfloat16)
    stored = property(lambda self: torch.bfloat16 if self.precision == "bf16" else torch.float32)
    # torch does not see the pool of CUDA graphs
    peak_known = property(lambda self: self.how not in ("reduce-overhead", "max-autotune-graphs", "graphed"))

    def autocast(self):
        return torch.autocast(machine.DEVICE.type, torch.bfloat16, enabled=self.precision == "amp")


def _timm(s: Shape) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(img_size=s.image, **preset(s.model))


def _hugging_face(s: Shape) -> nn.Module:
    from transformers import AttentionInterface, ViTConfig, ViTForImageClassification
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # Under "sdpa" a compiled model makes a mask of ones (before torch 2.14), which flash refuses; under a name of our
    # own it makes none.
    AttentionInterface.register("sdpa_plain", sdpa_attention_forward)
    sizes = dict(hidden_size=s.width, num_hidden_layers=s.depth, num_attention_heads=s.heads)
    sizes |= dict(image_size=s.image, patch_size=s.patch, intermediate_size=s.hidden, num_labels=1000)
    same = dict(hidden_act="gelu", layer_norm_eps=1e-6, attn_implementation="sdpa_plain")
    return ViTForImageClassification(ViTConfig(**sizes, **same))


def _torchvision(s: Shape) -> nn.Module:
    from torchvision.models.vision_transformer import VisionTransformer

    sizes = dict(num_layers=s.depth, num_heads=s.heads, hidden_dim=s.width, mlp_dim=s.hidden)
    return VisionTransformer(s.image, s.patch, **sizes)


BUILDERS = {
    "vitfast": lambda s: ViT.from_preset(s.model, img_size=s.image),
    "timm": _timm,
    "huggingface": _hugging_face,
    "torchvision": _torchvision,
    ACCELERATED: lambda s: vitfast.accelerate(_timm(s)),
    BACKEND: _timm,  # in each setting compiled by the backend: "eager" is its inner compiler then
}


def logits_of(output) -> Tensor:
    """The logits in a model's output; a Hugging Face model returns more than logits."""
    return getattr(output, "logits", output)


@torch.no_grad()
def randomised(model: nn.Module) -> nn.Module:
    """The model with random numbers in every parameter."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        else:
            fan_in = parameter[0].numel()
            parameter.copy_(torch.randn_like(parameter) * min(0.5, fan_in**-0.5))
    return model


def make_model(library: str, s: Shape) -> nn.Module:
    """A library's ViT with 1000 classes in fp32, every parameter random.

    Zero biases and unit norms would hide what is mixed up.
    """
    torch.manual_seed(0)
    with machine.DEVICE:
        return randomised(BUILDERS[library](s))


class Peer(Timed):
    """A library's model in one setting, called on batches, and judged before and after it is timed.

    op: "train" is a whole step (learner), "latency" one call from cold caches, "throughput" calls back to back.

    As in harness.Operation: the whole batch is computed, some samples are compared, the upstream gradient of the others
    is zero, and the limit comes from the error of the plain model in the same precision. Errors are by norm: of each
    sample's logits, and in training of the gradients of every parameter together.
    """

    calls, rounds = STEPS, machine.MODEL_ROUNDS

    def __init__(self, setting: Setting, shape: Shape | Mix, op: str):
        self.setting, self.shape, self.training = setting, shape, op.startswith("train")
        self.before = torch.cuda.memory_allocated()  # 0 without a GPU
        self.impl, self.dtype, self.group, self.more = setting.name, setting.dtype, f"{op} {shape.name}", dict(op=op)
        self.single = machine.GPU and op == "latency"
        if self.single:
            self.calls, self.rounds = 1, machine.ROUNDS
        training, ours = self.training, setting.library == "vitfast"
        self.build()
        if training and ours:  # eager training finds it out, torch.compile takes what it finds
            self.model.set_keep("least" if setting.option == LEAN else "auto")
            choose_saved_activations(self.model, shape.rows, setting.dtype)
        elif training and setting.library == ACCELERATED:
            vitfast.accelerate(self.model, keep="least" if setting.option == LEAN else "all")
        graphed = setting.how == "graphed"
        self.function, how = self.model, "eager" if graphed else setting.how
        if setting.library == BACKEND:
            self.function = compiled(self.model, "compile" if graphed else how, fullgraph=True, backend="vitfast")
        elif how != "eager":
            self.function = compiled(self.model, how, fullgraph=ours)
        if graphed and machine.GPU:
            self.function = vitfast.graphed(self.function, self.images)

    def build(self) -> None:
        """Sets the model, its images, those to compare, and SDPA's backend (None: the model's own)."""
        setting, shape = self.setting, self.shape
        self.model, self.backend = make_model(setting.library, shape).train(self.training).to(setting.stored), None
        self.images = torch.randn(shape.batch, 3, shape.image, shape.image, device=machine.DEVICE).to(setting.stored)
        self.chosen = checked_samples(shape.batch).tolist()
        if not setting.library.startswith("vitfast"):
            self.backend = best_backend(shape, self.training)

    def __call__(self, images) -> Tensor:
        """Logits (B, 1000)."""
        forcing = sdpa_kernel(BACKENDS[self.backend]) if self.backend else contextlib.nullcontext()
        with self.setting.autocast(), forcing:
            return logits_of(self.function(images))

    def plain(self) -> nn.Module:
        """The plain ViT with the peer's weights, in fp32; compared with the peer's own logits in fp32."""
        own = make_model(self.setting.library, self.shape)  # the same random weights every time
        with machine.DEVICE:
            plain = ViT.from_preset(self.shape.model, img_size=self.shape.image)
        plain.load_state_dict(to_timm_names(own.state_dict()).state)
        (few,) = self.few(torch.float32)
        fp32 = Setting(self.setting.library, "eager", "fp32")
        with torch.no_grad(), exact_fp32():
            with ops.use_kernels("off"):
                single, truth = plain(few), plain.double()(few.double())
            logits = logits_of(own(few))
        judge(fp32.name, self.shape.name, worst([logits], [truth]), worst([single], [truth]), fp32.dtype)
        return plain

    def few(self, dtype: torch.dtype) -> list:
        """The samples that are compared, as batches for the plain model."""
        return [self.images[self.chosen].to(dtype)]

    def named(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradients by the names of the plain model."""
        return to_timm_names(gradients).state

    def compare(self, when: str) -> dict[str, float]:
        """Compares logits and gradients of exactly what is timed with the plain model in float64.

        After timing, the function, the images and the weights are the same as before it.
        """
        if not when:
            self._find_truth()
        elif self.training:
            with torch.no_grad():
                for parameter, before in zip(self.model.parameters(), self.weights):
                    parameter.copy_(before)
        found = self._run(self.model, [self.images], self.upstream, self)
        if self.setting.library == BACKEND and (done := vitfast.backend.report()).left:
            raise AssertionError(f"{self.setting.name}: blocks of {self.shape.name} are left\n{done}")
        found = [found[i] for i in self.chosen] + found[self.shape.batch :]
        error = worst(found, [t.to(machine.DEVICE) for t in self.truth])
        return judge(self.setting.name, f"{self.shape.name}{when}", error, self.own, self.setting.dtype)

    def _find_truth(self) -> None:
        """Keeps the plain model's logits and gradients in float64, its own error, and the weights."""
        self.upstream = torch.zeros(self.shape.batch, 1000, dtype=torch.float64, device=machine.DEVICE)
        self.upstream[self.chosen] = torch.randn_like(self.upstream[self.chosen])
        plain, upstream = self.plain(), self.upstream[self.chosen]
        plain.set_grad_checkpointing(self.training)  # a document's logits of all layers in float64 are tens of GB
        with ops.use_kernels("off"), exact_fp32():
            truth = self._run(plain.double(), self.few(torch.float64), upstream)
            with self.setting.autocast():  # from fp32 to float64 and back nothing is lost
                own = self._run(plain.to(self.setting.stored), self.few(self.setting.stored), upstream)
        self.own, self.truth = worst(own, truth), [t.cpu() for t in truth]
        self.weights = [p.detach().to("cpu", copy=True) for p in self.model.parameters()] if self.training else []

    def _run(self, model: nn.Module, batches: list, upstream: Tensor, call: Callable | None = None) -> list[Tensor]:
        """The logits of each sample and, in training, all gradients in one vector.

        The gradients are in the order of the plain model's names.
        """
        found = []
        with torch.set_grad_enabled(self.training):
            for images in batches:
                logits = (call or model)(images)
                if self.training:
                    logits.backward(upstream[len(found) :][: len(logits)].to(logits.dtype))
                found += logits.detach().double()
        if self.training:
            gradients = self.named({name: p.grad for name, p in model.named_parameters()})
            model.zero_grad(set_to_none=True)
            found.append(torch.cat([gradients[name].double().flatten() for name in sorted(gradients)]))
        return found

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        invariant = vitfast.batch_invariant(self.setting.option == INVARIANT)  # installed once, not for each call
        with super().context(), invariant, torch.inference_mode(not self.training):
            yield

    @property
    def work(self) -> Kernels:
        """The kernels of a forward pass or of a training step."""
        work = model_work(self.shape, self.dtype.itemsize)
        if not self.training:
            return work.forward
        parameters = sum(p.numel() for p in self.model.parameters())
        return work.of("both") + update(parameters, size=self.setting.stored.itemsize)

    def step(self) -> Callable:
        """The function of images that is timed."""
        if not self.training:
            return self
        step, _ = learner(self, lr=1e-5)
        labels = torch.randint(0, 1000, (self.shape.batch,), device=machine.DEVICE)
        return lambda images: step(images, labels)

    def ready(self, seconds: float) -> None:
        self.call = functools.partial(self.step(), self.images)
        self.call()  # compiled before anybody waits
        warm_up(self.call, seconds=seconds)
        self.peak = peak_bytes(self.call, self.before) if self.setting.peak_known else None

    def prepare(self) -> tuple:
        if self.single:
            cold()
        return ()

    def facts(self, seconds: float) -> dict:
        """The facts that tables show of a whole model.

        FLOPs are the forward pass's, three times in training: the convention of MFU (Chowdhery et al., 2022). The
        shares are of the product measured in this run and of the data sheet's.
        """
        shape, promised = self.shape, machine.promised_flops()
        flops = (3 if self.training else 1) * total_flops(model_work(shape, 2).forward)
        ceiling = machine.ceilings()[str(self.dtype).removeprefix("torch.")]
        facts = dict(direction="both" if self.training else "forward", shape=shape.name, batch=shape.batch)
        facts |= dict(precision=self.setting.precision, attention=self.backend or "its own", model_flops=int(flops))
        facts |= dict(images_per_second=shape.batch / seconds, mfu_ceiling=flops / seconds / ceiling)
        facts |= dict(mfu_datasheet=promised and flops / seconds / promised)
        return super().facts(seconds) | facts


def learner(peer: Peer, lr: float) -> tuple[Callable[[Tensor, Tensor], Tensor], torch.optim.Optimizer]:
    """A training step of a peer, which takes images and labels and returns the loss, and its optimiser.

    Forward, cross-entropy, backward, clipping at norm 1 and fused AdamW.
    """
    parameters = list(peer.model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.05, fused=True)

    def step(images: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(peer(images).float(), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step, optimizer
