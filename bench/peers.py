"""The peers: each backend of SDPA, and whole ViTs of timm, Hugging Face and torchvision.

The models in each of their settings. Every library builds the same function: eps 1e-6, erf GELU, no dropout, a class
token, random weights in every parameter. That it is the same function is checked, not assumed: a plain ViT in float64
reads the peer's own weights (vitfast.model.checkpoint knows everybody's names); the peer's logits in fp32 are compared
with it, and then logits and gradients of exactly what is about to be timed; and once more of what has been timed, its
weights put back.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass

import clock
import harness
import pytest
import torch
import torch.nn.functional as F
from clock import median_seconds
from harness import checked_samples, compiled, judge
from shapes import Shape
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import vitfast
from vitfast import ViT, ops
from vitfast.model.checkpoint.formats import to_timm_names
from vitfast.model.presets import preset
from vitfast.tools.verify import exact_fp32, worst

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def sdpa(qkv: Tensor) -> Tensor:
    """Packed (B, N, 3, H, Dh) -> (B, N, H, Dh) as the libraries do it: transposed views in and out."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def sdpa_separate(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Three (B, N, H, Dh) -> (B, N, H, Dh): views in and out."""
    return F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


FLASH = {  # name -> package, the module of its public functions, which have a backward
    "flash-attn 2": ("flash_attn", "flash_attn"),
    "flash-attn 3": ("flash_attn_3", "flash_attn_interface"),
    "flash-attn 4": ("flash_attn_4", "flash_attn.cute"),
}
FLASH_ATTENTION = ("flash-attn 3", "flash-attn 4")  # peers of attention; 2 is SDPA's


def library_function(package: str, module: str, name: str) -> Callable:
    """A function of a package; skips the case where that is not installed or has none of that name.

    Of several results it returns the first: some versions of flash-attn return the logsumexp too.
    """
    try:
        function = getattr(importlib.import_module(module), name, None)
    except ImportError as error:
        pytest.skip(f"{package} cannot be imported: {error}")
    if function is None:
        pytest.skip(f"{package} has no {module}.{name}")

    @functools.wraps(function)
    def first_result(*args, **options):
        result = function(*args, **options)
        return result[0] if isinstance(result, tuple) else result

    return first_result


def forced(function, backend: str):
    """`function` with one backend of SDPA allowed; it raises where that one cannot run."""

    @functools.wraps(function)
    def wrapper(*args):
        with sdpa_kernel(BACKENDS[backend if clock.GPU else "math"]):
            return function(*args)

    return wrapper


@functools.cache
def best_backend(batch: int, tokens: int, heads: int, head: int, training: bool) -> str:
    """The fastest backend of SDPA at this shape, by a measurement made now."""
    if not clock.GPU:
        return "math"
    qkv = torch.randn(batch, tokens, 3, heads, head, device=clock.DEVICE).to(harness.DTYPE).requires_grad_(training)
    upstream = torch.randn(batch, tokens, heads, head, device=clock.DEVICE).to(harness.DTYPE)
    times = {}
    for name in ("flash", "cudnn", "efficient"):
        function = forced(sdpa, name)
        with contextlib.suppress(RuntimeError):  # a backend that cannot run here
            times[name] = median_seconds(
                lambda f=function: torch.autograd.grad(f(qkv), qkv, upstream) if training else f(qkv), rounds=10
            )
    return min(times, key=times.get, default="math")


@dataclass(frozen=True)
class Setting:
    """A library, a way to run it and a precision: a setting of a whole model.

    library: a key of BUILDERS. how: eager, compile or max-autotune (harness.compiled). precision:
    bf16 (weights too), amp (fp32 weights) or fp32. again: measured a second time; the slower one counts.
    """

    library: str
    how: str
    precision: str
    again: bool = False

    @property
    def name(self) -> str:
        return f"{self.library} {self.how} {self.precision}{' again' if self.again else ''}"

    @property
    def dtype(self) -> torch.dtype:
        """Of the matrix products."""
        return torch.float32 if self.precision == "fp32" else torch.bfloat16

    def cast(self, model: nn.Module, images: Tensor) -> tuple[nn.Module, Tensor]:
        return (model.to(self.dtype), images.to(self.dtype)) if self.precision == "bf16" else (model, images)

    def autocast(self):
        return torch.autocast(clock.DEVICE.type, torch.bfloat16, enabled=self.precision == "amp")


class _Logits(nn.Module):
    """A Hugging Face model that returns its logits alone."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(pixel_values=images).logits


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
    return _Logits(ViTForImageClassification(ViTConfig(**sizes, **same)))


def _torchvision(s: Shape) -> nn.Module:
    from torchvision.models.vision_transformer import VisionTransformer

    sizes = dict(num_layers=s.depth, num_heads=s.heads, hidden_dim=s.width, mlp_dim=s.hidden)
    return VisionTransformer(s.image, s.patch, **sizes)


BUILDERS = {
    "vitfast": lambda s: ViT.from_preset(s.model, img_size=s.image),
    "timm": _timm,
    "huggingface": _hugging_face,
    "torchvision": _torchvision,
    "vitfast.accelerate(timm)": lambda s: vitfast.accelerate(_timm(s)),
}


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
    with clock.DEVICE:
        return randomised(BUILDERS[library](s))


class Peer:
    """A library's model in one setting, ready to be called on images of one batch size."""

    def __init__(self, setting: Setting, shape: Shape, training: bool):
        self.setting, self.shape, self.training = setting, shape, training
        model = make_model(setting.library, shape).train(training)
        # fp32, timm's names: what the truth is made of
        self.state = {k: v.detach().clone() for k, v in to_timm_names(model.state_dict()).state.items()}
        images = torch.randn(shape.batch, 3, shape.image, shape.image, device=clock.DEVICE)
        self.model, self.images = setting.cast(model, images)
        ours = setting.library.startswith("vitfast")
        self.backend = None if ours else best_backend(shape.batch, shape.tokens, shape.heads, shape.head, training)
        self.kernels = "on" if ours and clock.GPU else "auto"
        if training and setting.library == "vitfast":  # eager training finds it out, torch.compile takes what it finds
            self.model.decide_keep(shape.batch, setting.dtype)
        self.function = self.model if setting.how == "eager" else compiled(self.model, setting.how)

    def __call__(self, images: Tensor) -> Tensor:
        """Logits (B, 1000)."""
        with self.setting.autocast(), sdpa_kernel(BACKENDS[self.backend]) if self.backend else contextlib.nullcontext():
            return self.function(images)

    def check(self) -> dict[str, float]:
        """Compares logits, and in training the gradients of every parameter, with the plain ViT in float64.

        As in harness.Check: the whole batch is computed, some samples are compared, the upstream gradient of the others
        is zero, and the limit comes from the error of the plain ViT in the same precision. Errors are by norm, of all
        gradients together.
        """
        self.chosen = checked_samples(self.shape.batch)
        self.upstream = torch.randn(len(self.chosen), 1000, device=clock.DEVICE, dtype=torch.float64)
        few = self.images[self.chosen].float()
        plain = self._plain()
        with ops.use_kernels("off"):
            with torch.no_grad(), exact_fp32():
                single = plain(few).double()
            truth = self._run(plain.double(), few.double(), self.upstream)
            model, same = self.setting.cast(plain.float(), few)  # fp32 to float64 and back loses nothing
            with self.setting.autocast():
                own = self._run(model, same, self.upstream)
        with torch.no_grad(), exact_fp32():
            logits = make_model(self.setting.library, self.shape)(few).double()
        fp32 = Setting(self.setting.library, "eager", "fp32")
        judge(fp32.name, self.shape.name, [logits], truth[:1], worst([single], truth[:1]), fp32.dtype)
        self.own = worst(own, truth)
        self.truth = [t.cpu() for t in truth]  # neither its memory nor that of the weights is the peer's
        self.weights = [p.detach().to("cpu", copy=True) for p in self.model.parameters()] if self.training else []
        self.state.clear()
        del plain, model, own, truth
        return self._judge_timed()

    def check_again(self) -> dict[str, float]:
        """The same after timing: the same function, images, and weights as they were at `check`."""
        with torch.no_grad():
            for parameter, before in zip(self.model.parameters(), self.weights):
                parameter.copy_(before)
        return dict(error_after=self._judge_timed(" after timing")["error"])

    def _judge_timed(self, when: str = "") -> dict[str, float]:
        """Judges logits and gradients of the function that is timed, of the chosen samples."""
        whole = torch.zeros(self.shape.batch, 1000, device=clock.DEVICE)
        whole[self.chosen] = self.upstream.float()
        result = self._run(self.model, self.images, whole, self, self.chosen)
        truth = [t.to(clock.DEVICE) for t in self.truth]
        return judge(self.setting.name, f"{self.shape.name}{when}", result, truth, self.own, self.setting.dtype)

    def _plain(self) -> ViT:
        """The plain ViT with the peer's weights, in fp32."""
        with clock.DEVICE:
            plain = ViT.from_preset(self.shape.model, img_size=self.shape.image)
        plain.load_state_dict(self.state)
        return plain

    def _run(self, model: nn.Module, images: Tensor, upstream: Tensor, call=None, chosen=slice(None)) -> list[Tensor]:
        """Logits of the chosen samples and, in training, all gradients in one vector, by timm's names."""
        with torch.set_grad_enabled(self.training):
            logits = (call or model)(images)
            if not self.training:
                return [logits[chosen].double()]
            logits.backward(upstream.to(logits.dtype))
        gradients = to_timm_names({name: p.grad for name, p in model.named_parameters()}).state
        model.zero_grad(set_to_none=True)
        flat = torch.cat([gradients[name].double().flatten() for name in sorted(gradients)])
        return [logits[chosen].detach().double(), flat]
