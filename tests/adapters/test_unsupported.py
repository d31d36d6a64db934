"""accelerate: what is left alone, and whose errors are told."""

import logging

import pytest
import timm
import torch
from adapter_models import IMAGES, assert_same, classes, hf_vit, left, pair, report, running, snapshot, timm_vit, tv_vit
from checks import assert_close
from timm.models.vision_transformer import Attention, Block
from torch import nn

import vitfast
from vitfast import InputError
from vitfast.adapters import registry

UNKNOWN = [
    ("resnet10t", {}, "nothing in it"),
    ("swin_tiny_patch4_window7_224", dict(depths=(1, 1, 1, 1), embed_dim=16, num_heads=(1, 2, 4, 8)), "windows"),
    ("xcit_nano_12_p16_224", dict(depth=1), "does not know"),
]


@pytest.mark.parametrize("name, options, why", UNKNOWN)
def test_unknown_models_come_back_untouched(name, options, why, caplog):
    model = timm.create_model(name, **options)
    before, types = snapshot(model), classes(model)
    with caplog.at_level(logging.INFO, "vitfast"):
        vitfast.accelerate(model)
    assert snapshot(model) == before and classes(model) == types
    assert not running(model) and all(why in each for each in left(model)) and why in str(report(model))
    assert "nothing on vitfast" in caplog.text and why in caplog.text and caplog.records[0].levelname == "WARNING"


def test_a_subclass_with_code_of_its_own_is_left():
    class Doubled(Block):
        def forward(self, x, **kwargs):
            return 2 * super().forward(x, **kwargs)

    model = vitfast.accelerate(timm_vit(block_fn=Doubled))
    assert type(model.blocks[0]) is Doubled and "Doubled may have code of its own" in str(report(model))


@pytest.mark.parametrize(
    "make, block, path",
    [
        (timm_vit, "blocks.0", "attn.sink"),
        (hf_vit, "vit.layers.0", "attention.sink"),
        (tv_vit, "encoder.layers.encoder_layer_0", "gate"),
    ],
)
def test_a_layer_with_a_part_that_is_not_known_is_left(make, block, path):
    model = make()
    part = nn.Parameter(torch.ones(2)) if "." in path else nn.Linear(2, 2)
    setattr(model.get_submodule(f"{block}.{path}".rpartition(".")[0]), path.rpartition(".")[2], part)
    before = type(model.get_submodule(block))
    vitfast.accelerate(model)
    assert type(model.get_submodule(block)) is before and f"{path} is not known to vitfast" in str(report(model))


WRONG = {
    "size": torch.randn(2, 3, 16, 24),
    "channels": torch.randn(2, 4, 16, 16),
    "integers": torch.zeros(2, 3, 16, 16, dtype=torch.uint8),
    "dtype": torch.randn(2, 3, 16, 16).double(),
}


@pytest.mark.parametrize("name", [*WRONG, "a layer in double"])
def test_bad_input_is_the_originals_error(name):
    errors = []
    for model in pair(timm_vit()):
        if name not in WRONG:
            model.blocks[0].double()
        with pytest.raises(Exception) as error:
            model(WRONG.get(name, IMAGES))
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1]


def test_what_is_left_of_the_last_patch_is_dropped_where_the_library_drops_it():
    images = torch.randn(1, 3, 19, 17)
    assert_close(*(each.vit.embeddings.patch_embeddings(images) for each in pair(hf_vit())), atol=1e-6)


@pytest.mark.parametrize("function", [vitfast.accelerate, vitfast.restore, vitfast.acceleration_report])
def test_what_is_no_module_is_refused(function):
    with pytest.raises(InputError, match="must be a torch.nn.Module, got dict"):
        function({})


@pytest.mark.parametrize("cls", [Block, Attention])
def test_a_forward_that_was_set_after_the_check_is_found(monkeypatch, cls):
    """A script may patch a library's class in a process that has accelerated a model of it before."""
    vitfast.accelerate(timm_vit())
    forward = cls.forward
    try:
        monkeypatch.setattr(cls, "forward", lambda self, x, **kwargs: 2 * forward(self, x, **kwargs))
        model, original = pair(timm_vit())
        assert_same(model, original, dict(x=IMAGES))
        assert len(left(model)) == 2
    finally:
        monkeypatch.undo()
        registry._checked.pop(Block, None)


def test_a_library_that_computes_its_layer_in_another_way_is_left(monkeypatch):
    """A later version, say: found out on a small layer, which leaves no trace in the random numbers."""
    forward = Block.forward
    try:
        for change in (
            lambda self, x, **kwargs: 1.01 * forward(self, x, **kwargs),
            lambda self, x, rope: x,
            lambda self, x: (x,),
        ):
            registry._checked.pop(Block, None)
            monkeypatch.setattr(Block, "forward", change)
            model, state = timm_vit(), torch.get_rng_state()
            vitfast.accelerate(model)
            assert type(model.blocks[0]) is Block and torch.equal(state, torch.get_rng_state())
            why = f"timm {timm.__version__} computes it in another way than vitfast"
            assert len(left(model)) == 2 and all(each.startswith(why) for each in left(model))
    finally:
        monkeypatch.undo()
        registry._checked.pop(Block, None)
    assert not left(vitfast.accelerate(timm_vit()))
