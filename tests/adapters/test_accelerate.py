"""accelerate, one contract for all models: in place, numbers, reports, second sizes, copies, restore.

Which spellings of a layer are replaced, and which changed ones are left, is tested in tests/backend, in place too. The
numbers and operations of each family are the page of families'.
"""

import copy
import pickle

import pytest
import torch
from adapter_models import (
    IMAGES,
    NAMED,
    NOT_CALLED,
    PIXTRAL,
    TOKENS,
    assert_same,
    claimed,
    counted,
    left,
    outputs,
    pair,
    report,
    said,
    snapshot,
    tensor,
    timm_vit,
)
from checks import assert_close, randomize, slow_but
from torch import nn
from vision_families import Family, timm_model

import vitfast
from vitfast import ops
from vitfast.backend import eager
from vitfast.kernels.launch import launches_made

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's tests; test_gpu.py has the GPU's")


def open_clip_block() -> nn.Module:
    return pytest.importorskip("open_clip.transformer").ResidualAttentionBlock(32, 2, 2.0, 0.5)


class Segmenter(nn.Module):
    """Two towers inside a model of the user's, called by another method than forward."""

    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleList([timm_vit(num_classes=0, global_pool="") for _ in range(2)])
        self.neck = nn.Conv2d(32, 4, 1)

    def forward(self, x):
        return sum(
            self.neck(tower.forward_intermediates(x, 1, norm=True, intermediates_only=True)[0]) for tower in self.towers
        )


CAUSAL = torch.full((5, 5), float("-inf")).triu(1)
DYNAMIC = dict(dynamic_img_size=True, dynamic_img_pad=True)
DROPS = dict(drop_path_rate=0.5, patch_drop_rate=0.3, init_values=0.5, reg_tokens=1, proj_drop_rate=0.2)
# What no family has: the maker, and the input.
VARIANTS = {
    "timm dynamic size": (timm_model(**DYNAMIC), dict(x=torch.randn(3, 3, 21, 30))),
    "timm drop path, dropout": (timm_model(**DROPS), dict(x=IMAGES)),
    "in a model of the user's": (Segmenter, dict(x=IMAGES)),
    "open_clip's block, causal": (open_clip_block, dict(q_x=TOKENS, attn_mask=CAUSAL)),
}
FEW = "timm EVA-02; timm q and k norm; timm BEiT; timm SAM; transformers Vivit; transformers SigLIP 2, padded; "
FEW += "transformers CLIP; transformers DINOv3; transformers AIMv2; transformers Pixtral; transformers ViTDet; "
FEW += "transformers Qwen2.5-VL; transformers Qwen3-VL; torchvision ViT; torch nn.TransformerEncoder; open_clip CLIP"
CASES = {name: NAMED[name] for name in FEW.split("; ")}
CASES |= {name: Family("torch", name, make, lambda b=batch: b) for name, (make, batch) in VARIANTS.items()}


def another_batch(name: str, batch: dict) -> dict:
    """The same samples and one more, for which layers have a graph of any size; nothing where samples lie in rows."""
    rows = any(word in name for word in ("Qwen", "Pixtral", "tokens first", "MAE", "size"))
    if rows or (not eager._HAS_LIMIT and name.startswith("torch")):  # in 2.11, torch's fused layer has no dynamic fake
        return {}
    return {k: torch.cat([x, x[:1]]) if len(x) == len(tensor(batch)) else x for k, x in batch.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_contract(name):
    found = CASES[name]
    pytest.importorskip(found.library)
    model = randomize(found.make())
    original, batch = copy.deepcopy(model), found.batch()
    before, text = snapshot(model), repr(model)
    assert vitfast.accelerate(model) is model
    assert snapshot(model) == before and repr(model) == text
    for training in (True, False):
        assert_same(model.train(training), original.train(training), batch, found.valid)
        ran = counted(model, batch)
        assert ran and ran == claimed(model), report(model)
        assert f"{len(report(model).replaced)} parts on vitfast" in str(report(model))
    with torch.no_grad():
        expected = outputs(original, batch)
        for out, truth in zip(outputs(model, batch, found.valid), outputs(original, batch, found.valid), strict=True):
            assert_close(out, truth, atol=2e-5, rtol=1e-4)
        ran = counted(model, batch)
        assert ran, report(model)
        if more := another_batch(name, batch):
            assert_close(outputs(model, more)[0], outputs(original, more)[0], atol=2e-5, rtol=1e-4)
            assert counted(model, more) == ran, report(model)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), vitfast.restore(model)):
            assert not counted(twin, batch) and {*left(twin)} == {NOT_CALLED}
            assert all(map(torch.equal, outputs(twin, batch), expected))
            assert twin is model or {map(id, twin.parameters())}.isdisjoint(map(id, model.parameters()))
    assert snapshot(model) == before and not any("_compiled_call_impl" in vars(m) for m in model.modules())


@pytest.mark.slow
def test_a_copy_can_be_accelerated_itself():
    model, original = pair(timm_vit(depth=1))
    model(IMAGES)
    twin = vitfast.accelerate(copy.deepcopy(model))
    assert_same(twin, original, dict(x=IMAGES))
    assert counted(twin, dict(x=IMAGES)) == counted(model, dict(x=IMAGES)) == claimed(twin)


# On the interpreted kernels, with the launches at least of one forward and backward.
ON_KERNELS = {
    "timm ViT": (timm_model(init_values=0.5, reg_tokens=1, drop_path_rate=0.5, act_layer="gelu_tanh"), 34),
    **{name: (NAMED[name].make, 20) for name in ("timm EVA-02", "timm q and k norm", PIXTRAL)},
}


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("name", ON_KERNELS)
def test_kernels_run_and_equal_the_original(name):
    make, launches = ON_KERNELS[name]
    model, original = pair(make())
    before = launches_made()
    with ops.use_kernels("on"):
        assert_same(model.train(), original.train(), NAMED[name].batch())
    assert launches_made() - before >= launches


@pytest.mark.parametrize("function", [vitfast.accelerate, vitfast.restore, vitfast.acceleration_report])
def test_what_is_no_module_is_refused(function):
    with pytest.raises(vitfast.InputError, match="must be a torch.nn.Module, got dict"):
        function({})


def test_a_model_without_layers_comes_back_untouched(caplog):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 2))
    before = snapshot(model)
    vitfast.accelerate(model)
    assert snapshot(model) == before and said(caplog) == ["accelerate: Sequential has nothing that vitfast replaces"]
    assert "nothing in it that vitfast replaces" in str(report(model))


WRONG = {"size": torch.randn(2, 3, 16, 24), "integers": torch.zeros(2, 3, 16, 16, dtype=torch.uint8)}


@pytest.mark.parametrize("name", slow_but(["size"], [*WRONG, "a layer in double"]))
def test_bad_input_is_the_originals_error(name):
    errors = []
    for model in pair(timm_vit()):
        model(IMAGES)
        if name not in WRONG:
            model.blocks[0].double()
        with pytest.raises(Exception) as error:
            model(WRONG.get(name, IMAGES))
        text = str(error.value).split("\n")[0]
        errors.append((error.type, text) if name in WRONG else error.type)  # operations name others
    assert errors[0] == errors[1]
