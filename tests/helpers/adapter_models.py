"""Shared by the tests of `accelerate`: small models, comparisons with the library's code, counts of operations."""

import contextlib
import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from checks import assert_close, outputs, randomize, results
from same_bits import floats
from torch import Tensor, nn
from vision_families import FAMILIES, Family, hugging_face_model, timm_model

import vitfast
from vitfast.ops import dispatch
from vitfast.ops.dispatch import kernels_wanted

NAMED = {f"{family.library} {family.name}": family for family in FAMILIES}
NAFLEX, SIGLIP = "timm NaFlexViT, padded", "transformers SigLIP 2, padded"
PIXTRAL = "transformers Pixtral"
IMAGES = torch.linspace(-2, 2, 2 * 3 * 16 * 16).view(2, 3, 16, 16).sin()
TOKENS = torch.randn(2, 5, 32, generator=torch.manual_seed(1))
TEXT = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=99)
Q_AND_V = ("q_proj", "v_proj", "query", "value")  # of transformers, as its versions call them
ALL_PARTS = 6  # of a model with two layers: the patch projection, four blocks, the last norm
NOT_CALLED = "vitfast.accelerate was not called on it; copies run the library's code"
# The operation behind each kind of part in a report.
OPERATION = {
    "attention block": "attention_block",
    "MLP block": "mlp_block",
    "gated MLP block": "gated_mlp_block",
    "LayerNorm": "layer_norm",
    "RMSNorm": "rms_norm",
    "patch embedding": "patch_embed",
    "patch projection": "patch_embed",
    "attention": "attention",
    "MLP": "mlp",
}


def timm_vit(**options) -> nn.Module:
    return timm_model(**options)()


def hf_vit(model: str = "ViTForImageClassification", **options) -> nn.Module:
    return hugging_face_model(model, **{"num_labels": 5, **options})()


def lora(*targets: str, **options) -> Callable[[nn.Module], nn.Module]:
    """Wraps linear layers of these names, those that there are; the adapters act."""

    def change(model: nn.Module) -> nn.Module:
        peft = pytest.importorskip("peft")
        torch.manual_seed(5)
        config = peft.LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False, **options)
        return peft.get_peft_model(model, config)

    return change


def family(name: str) -> Family:
    pytest.importorskip(NAMED[name].library)
    return NAMED[name]


def pair(model: nn.Module, **options) -> tuple[nn.Module, nn.Module]:
    """(accelerated, original) with the same random weights."""
    model = randomize(model)
    return vitfast.accelerate(copy.deepcopy(model), **options), model


def report(model: nn.Module) -> vitfast.adapters.Report:
    return vitfast.acceleration_report(model)


def left(model: nn.Module) -> list[str]:
    """The reasons for what is left."""
    return [entry.why for entry in report(model).left]


def said(caplog) -> list[str]:
    """vitfast's lines in the log."""
    return [record.message for record in caplog.records if record.name == "vitfast"]


def tensor(output) -> Tensor:
    """The first tensor of what a model returns."""
    return floats(output)[0]


def assert_same(ours: nn.Module, theirs: nn.Module, batch: dict, valid: str = "", atol=2e-5, rtol=1e-4) -> None:
    """Two models give the same outputs and the same gradients, of the same parameters."""
    (outs, given), (expected, wanted) = results(ours, ours, batch, valid), results(theirs, theirs, batch, valid)
    for i, (out, truth) in enumerate(zip(outs, expected, strict=True)):
        assert_close(out, truth, atol=atol, rtol=rtol, name=f"output {i}")
    assert [name for name in given if given[name] is not None] == [name for name in wanted if wanted[name] is not None]
    for name, truth in wanted.items():
        if truth is not None:
            assert_close(given[name], truth, atol=atol, rtol=rtol, name=name)


def snapshot(model: nn.Module) -> tuple:
    """Everything that accelerate must not touch."""
    parameters = [(name, id(p), p.data_ptr(), p.requires_grad, p.stride()) for name, p in model.named_parameters()]
    modules = [(name, id(m), type(m), {*vars(m)} - {"_compiled_call_impl"}) for name, m in model.named_modules()]
    return parameters, [(name, id(b)) for name, b in model.named_buffers()], list(model.state_dict()), modules


@contextlib.contextmanager
def counting() -> Iterator[Counter]:
    """Counts the calls of operations inside, by name: each asks whether kernels or plain PyTorch are to run."""
    seen = Counter()

    def asked(op, *arguments, **options):
        seen[op] += 1
        return kernels_wanted(op, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_key", lambda leaves: None)  # no call goes where another went, without asking
        for name, module in list(sys.modules.items()):
            if name.startswith("vitfast.ops.") and hasattr(module, "kernels_wanted"):
                patch.setattr(module, "kernels_wanted", asked)
        yield seen


def counted(model: nn.Module, batch: dict) -> Counter:
    """The operations that one forward calls, whatever does them."""
    outputs(model, batch)  # proofs of the first call in a mode count too
    with counting() as seen:
        outputs(model, batch)
    return Counter(seen)


def claimed(model: nn.Module) -> Counter:
    """The same from the report on the last call."""
    return Counter(OPERATION[entry.part] for entry in report(model).replaced)


def dtypes(model: nn.Module, images: Tensor, norms: bool = False) -> list[torch.dtype]:
    """The dtype that each block puts out, with `norms` each norm outside of them too, and the output's."""
    seen = []
    kinds = ("Block", "ViTLayer", "Dinov2Layer", "EncoderBlock", *["LayerNorm"] * norms)
    found = [module for module in model.modules() if type(module).__name__ in kinds]
    inner = {part for module in found for part in list(module.modules())[1:]}
    hooks = [m.register_forward_hook(lambda _, __, out: seen.append(out.dtype)) for m in found if m not in inner]
    seen.append(tensor(model(images)).dtype)
    for hook in hooks:
        hook.remove()
    return seen
