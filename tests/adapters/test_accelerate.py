"""accelerate, one contract for all families: numbers, parameters, operations, reports, copies, restore."""

import copy
import pickle
from functools import partial

import pytest
import torch
from adapter_models import (
    BLOCKS,
    IMAGES,
    NAFLEX,
    NAMED,
    NOT_CALLED,
    PIXTRAL,
    QWEN,
    TEXT,
    TOKENS,
    assert_same,
    claimed,
    counted,
    family,
    left,
    outputs,
    pair,
    report,
    said,
    snapshot,
    tensor,
    timm_vit,
)
from checks import assert_close, randomize
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel
from vision_families import Family, hugging_face_model, naflexvit, timm_model, torchvision_model

import vitfast
from vitfast import ops
from vitfast.backend import eager
from vitfast.kernels.launch import launches_made

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's tests; test_gpu.py has the GPU's")
# How many operations a training forward runs at least: (whole blocks, all). Of all other families MOST.
MOST = (4, 6)
OPERATIONS = {
    "timm CLIP": (4, 7),
    "timm SigLIP": (5, 7),
    "timm q and k norm": (2, 12),
    "timm Perception Encoder": (5, 8),
    NAFLEX: (4, 5),
    "timm SAM": (2, 8),
    "transformers Vivit": (4, 5),
    "transformers VideoMAE": (4, 5),
    "transformers SigLIP": (5, 7),
    "transformers SigLIP 2, padded": (5, 6),
    "transformers CLIP": (4, 7),
    "transformers OWL-ViT": (4, 7),
    "transformers AIMv2": (4, 7),
    "transformers Data2Vec": (4, 5),
    "transformers InternVL": (2, 11),
    PIXTRAL: (4, 5),
    "transformers SAM": (2, 8),
    "transformers ViTDet": (2, 4),
    "transformers Qwen2-VL": (2, 6),
    QWEN: (2, 6),
    "transformers Qwen3-VL": (2, 8),
    "torchvision ViT": (4, 5),
    "torch nn.TransformerEncoder": (4, 5),
    "torch nn.TransformerEncoder, tokens first": (4, 5),
    "open_clip CLIP": (4, 6),
    "open_clip OpenAI's CLIP": (4, 6),
}


def hybrid() -> nn.Module:
    from timm.layers import HybridEmbed

    stem = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.ReLU())
    stem.num_features = 8
    return timm_vit(
        embed_layer=lambda **options: HybridEmbed(stem, feature_size=(4, 4), **{**options, "patch_size": 2})
    )


def encoder_layer(**options) -> nn.Module:
    given = dict(dropout=0.0, activation="gelu", norm_first=True, batch_first=True)
    return nn.TransformerEncoderLayer(32, 2, 64, **given | options)


def causal_text() -> nn.Module:
    return CLIPTextModel(CLIPTextConfig(**TEXT, hidden_act="gelu", attn_implementation="sdpa"))


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


EVA, HF = partial(timm_model, "eva:Eva"), partial(hugging_face_model, "ViTForImageClassification", num_labels=5)
BARE = dict(global_pool="", final_norm=False, qkv_bias=False, proj_bias=False, pos_embed="none")
DYNAMIC = dict(dynamic_img_size=True, dynamic_img_pad=True)
MASK, CAUSAL = torch.tensor([[1] * 4 + [0]] * 2), torch.full((5, 5), float("-inf")).triu(1)
GRIDS = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]])
PADDED = dict(
    x=torch.randn(3, 6, 192, generator=torch.manual_seed(0)),
    patch_coord=GRIDS.expand(3, 6, 2),
    patch_valid=torch.arange(6) < torch.tensor([5, 6, 2])[:, None],
)
# What no family has: the maker, the operations as above, the input where it is another.
VARIANTS = {
    "timm pooled, norm after it": (timm_model(global_pool="avgmax", class_token=False, no_embed_class=True), (4, 6)),
    "timm bare": (timm_model(**BARE), (4, 5)),
    "timm dynamic size, padded": (timm_model(**DYNAMIC), (4, 5), dict(x=torch.randn(3, 3, 21, 30))),
    "timm ReLU": (timm_model(act_layer="relu"), (2, 6)),
    "timm drop path, patch dropout": (
        timm_model(drop_path_rate=0.5, patch_drop_rate=0.3, init_values=0.5, reg_tokens=1),
        (4, 5),
    ),
    "timm dropout": (timm_model(proj_drop_rate=0.2, pos_drop_rate=0.1, drop_rate=0.1), (0, 4)),
    "timm hybrid": (hybrid, (4, 6)),
    "timm in a model of the user's": (Segmenter, (8, 11)),
    "timm EVA, norm after": (EVA(use_post_norm=True, dynamic_img_size=False), (0, 6)),
    "NaFlexViT, rotary, registers": (
        naflexvit(rope_type="mixed", class_token=True, reg_tokens=1, drop_path_rate=0.4),
        (4, 5),
        PADDED,
    ),
    "HF ViT, eager attention, no biases": (HF(attn_implementation="eager", qkv_bias=False), (4, 6)),
    "HF ViT, masked": (HF(), (4, 6), dict(pixel_values=IMAGES, attention_mask=MASK)),
    "HF ViT, attention dropout": (HF(attention_probs_dropout_prob=0.1), (2, 4)),
    "HF CLIP text, causal": (causal_text, (2, 5), dict(input_ids=torch.tensor([[1, 2, 3, 98]]))),
    "torchvision, dropout": (torchvision_model(dropout=0.2, attention_dropout=0.1), (0, 3)),
    "open_clip's block, causal": (open_clip_block, (2, 2), dict(q_x=TOKENS, attn_mask=CAUSAL)),
    "torch's layer, ReLU, no biases": (
        partial(encoder_layer, activation="relu", bias=False),
        (1, 2),
        dict(src=TOKENS),
    ),
    "torch's layer, norm after": (partial(encoder_layer, norm_first=False), (0, 3), dict(src=TOKENS)),
}


def case(name: str, make, _, batch=None) -> Family:
    library = "transformers" if name.startswith("HF") else "timm"
    images = dict(pixel_values=IMAGES) if library == "transformers" else {"x": IMAGES}
    return Family(library, name, make, lambda: batch or images)


CASES = {**NAMED, **{name: case(name, *row) for name, row in VARIANTS.items()}}


def another_batch(name: str, batch: dict) -> dict:
    """The same samples and one more, for which layers have a graph of any size; nothing where samples lie in rows."""
    rows = any(word in name for word in ("Qwen", "Pixtral", "tokens first", "MAE", "size"))
    if rows or (not eager._TOLD and name.startswith("torch")):  # 2.11 has no fake of torch's fused layer of any size
        return {}
    return {k: torch.cat([x, x[:1]]) if len(x) == len(tensor(batch)) else x for k, x in batch.items()}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == QWEN)) for name in CASES])
def test_contract(name):
    found = CASES[name]
    pytest.importorskip(found.library)
    model = randomize(found.make())
    original, batch = copy.deepcopy(model), found.batch()
    before, text = snapshot(model), repr(model)
    assert vitfast.accelerate(model) is model
    assert snapshot(model) == before and repr(model) == text
    blocks, least = VARIANTS[name][1] if name in VARIANTS else OPERATIONS.get(name, MOST)
    for training in (True, False):
        assert_same(model.train(training), original.train(training), batch, found.valid)
        ran = counted(model, batch)
        assert ran == claimed(model), report(model)
        assert sum(ran[block] for block in BLOCKS) >= blocks and sum(ran.values()) >= least, report(model)
        assert f"{len(report(model).replaced)} parts on vitfast" in str(report(model))
    with torch.no_grad():
        expected = outputs(original, batch)
        for out, truth in zip(outputs(model, batch, found.valid), outputs(original, batch, found.valid), strict=True):
            assert_close(out, truth, atol=2e-5, rtol=1e-4)
        ran = counted(model, batch)
        assert sum(ran.values()) >= least, report(model)
        if more := another_batch(name, batch):
            assert_close(outputs(model, more)[0], outputs(original, more)[0], atol=2e-5, rtol=1e-4)
            assert counted(model, more) == ran, report(model)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), vitfast.restore(model)):
            assert not counted(twin, batch) and {*left(twin)} == {NOT_CALLED}
            assert all(map(torch.equal, outputs(twin, batch), expected))
            assert twin is model or {map(id, twin.parameters())}.isdisjoint(map(id, model.parameters()))
    assert snapshot(model) == before and not any("_compiled_call_impl" in vars(m) for m in model.modules())


def test_a_copy_can_be_accelerated_itself():
    model, original = pair(timm_vit(init_values=0.5))
    model(IMAGES)
    twin = vitfast.accelerate(copy.deepcopy(model))
    assert_same(twin, original, dict(x=IMAGES))
    assert sum(counted(twin, dict(x=IMAGES)).values()) == sum(counted(model, dict(x=IMAGES)).values()) == 6


@pytest.mark.parametrize(
    "name", ["timm EVA-02", pytest.param(NAFLEX, marks=pytest.mark.slow), "transformers DINOv3 H+"]
)
def test_in_double_precision(name):
    model = family(name).make()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in NAMED[name].batch().items()}
    assert_same(*pair(model.double()), batch, atol=1e-11, rtol=1e-9)


# On the interpreted kernels, with the launches at least of one forward and backward.
ON_KERNELS = {
    "timm": (timm_model(init_values=0.5, reg_tokens=1, drop_path_rate=0.5, act_layer="gelu_tanh"), 34),
    "transformers DINOv2": (NAMED["transformers DINOv2"].make, 34),
    "timm EVA-02": (NAMED["timm EVA-02"].make, 20),
    "timm q and k norm": (NAMED["timm q and k norm"].make, 20),
    PIXTRAL: (NAMED[PIXTRAL].make, 20),
}


@interpreted
@pytest.mark.parametrize("name", ON_KERNELS)
def test_kernels_run_and_equal_the_original(name):
    make, launches = ON_KERNELS[name]
    model, original = pair(make())
    batch = NAMED[name].batch() if name in NAMED else dict(x=IMAGES)
    before = launches_made()
    with ops.use_kernels("on"):
        assert_same(model.train(), original.train(), batch)
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


WRONG = {
    "size": torch.randn(2, 3, 16, 24),
    "channels": torch.randn(2, 4, 16, 16),
    "integers": torch.zeros(2, 3, 16, 16, dtype=torch.uint8),
    "dtype": torch.randn(2, 3, 16, 16).double(),
}


@pytest.mark.parametrize("name", [*WRONG, "a layer in double"])
@pytest.mark.parametrize("called", [False, True])
def test_bad_input_is_the_originals_error(name, called):
    errors = []
    for model in pair(timm_vit()):
        if called:
            model(IMAGES)
        if name not in WRONG:
            model.blocks[0].double()
        with pytest.raises(Exception) as error:
            model(WRONG.get(name, IMAGES))
        text = str(error.value).split("\n")[0]
        errors.append((error.type, text) if name in WRONG else error.type)  # operations name others
    assert errors[0] == errors[1]
