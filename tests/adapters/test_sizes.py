"""How often accelerated layers are compiled: equal layers, sizes that change, modes, and the limit of graphs."""

import copy
from collections import Counter

import pytest
import timm
import torch
from adapter_models import IMAGES, assert_same, counted, hf_vit, left, pair, report, timm_vit
from checks import assert_close

import vitfast
from vitfast.backend import eager


@pytest.fixture
def compiled(monkeypatch):
    """How many graphs have attention blocks: of one layer each."""
    found, rewrite = [], eager.replace_blocks

    def counted_rewrite(*arguments, **keywords):
        done = rewrite(*arguments, **keywords)
        found.extend(entry for entry in done if entry.kind == "attention block")
        return done

    monkeypatch.setattr(eager, "replace_blocks", counted_rewrite)
    return found


MAKERS = {
    "timm": lambda: timm_vit(depth=6),
    "drop path": lambda: timm_vit(depth=6, drop_path_rate=0.1),
    "transformers": lambda: hf_vit(num_hidden_layers=6),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_equal_layers_are_compiled_together(name, compiled):
    model, original = pair(MAKERS[name]().train())
    batch = {"pixel_values" if name == "transformers" else "x": IMAGES}
    for _ in range(2):
        assert_same(model, original, batch, atol=1e-4, rtol=1e-3)
        assert 1 <= len(compiled) <= (1 if name == "timm" else 3)
    assert Counter(entry.part for entry in report(model).replaced)["attention block"] == 6


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["train", "eval", "no gradients", "autocast"])
def test_other_batches_and_token_counts_compile_twice_in_a_mode(mode, compiled):
    """A batch of one once more: Dynamo takes lengths of one for constants."""
    model, original = (each.train(mode == "train") for each in pair(timm_vit(dynamic_img_size=True)))
    tolerance = 0.05 if mode == "autocast" else 1e-5

    def check(*size: int) -> None:
        x, found = torch.randn(size[0], 3, *size[1:]), []
        for each in (model, original):
            with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
                with torch.set_grad_enabled(mode != "no gradients"):
                    found.append(each(x).float())
        assert_close(*found, atol=tolerance)

    for size in ((2, 16, 16), (3, 16, 16), (5, 24, 16), (2, 32, 40), (7, 8, 24), (2, 16, 16)):
        check(*size)
    assert 1 <= len(compiled) <= 2
    for size in ((1, 16, 16), (1, 24, 16), (3, 24, 24)):
        check(*size)
    assert len(compiled) <= 3 and not left(model)


@pytest.mark.slow
def test_windows_of_another_batch_keep_their_sides_as_numbers(monkeypatch):
    """Dynamo takes half a minute for Swin's layers where all lengths are symbols."""
    lengths, rewrite = [], eager.replace_blocks

    def watched(graph, *arguments, **keywords):
        shapes = [node.meta["example_value"].shape for node in graph.graph.nodes if node.name == "l_args_0_"]
        lengths.extend([isinstance(n, int) for n in shape] for shape in shapes)
        return rewrite(graph, *arguments, **keywords)

    monkeypatch.setattr(eager, "replace_blocks", watched)
    swin = timm.models.swin_transformer.SwinTransformer(
        img_size=32, patch_size=4, window_size=4, embed_dim=16, depths=(2,), num_heads=(2,), num_classes=3
    )
    model, original = pair(swin.eval())
    with torch.no_grad():
        for batch in (2, 3, 5):
            x = torch.randn(batch, 3, 32, 32)
            assert_close(model(x), original(x), atol=1e-5)
    assert lengths.count([False, True, True, True]) == 2, "once for each of two kinds of layers"


@pytest.mark.skipif(not eager._HAS_LIMIT, reason="torch 2.11 has no limit of our own")
def test_the_limit_is_not_met_in_silence(monkeypatch):
    monkeypatch.setattr(eager, "_LIMIT", dict(recompile_limit=1))
    model, original = pair(timm_vit())
    assert_same(model, original, dict(x=IMAGES))
    assert not left(model)
    model.eval(), original.eval()
    assert_same(model, original, dict(x=IMAGES))
    assert sum("there are as many graphs of such layers as there may be" in why for why in left(model)) >= 2
    assert not counted(model, dict(x=IMAGES))["attention_block"]


@pytest.mark.slow
def test_dynamo_that_is_switched_off_is_said():
    model, original = pair(timm_vit())
    with torch.compiler.set_stance("force_eager"):
        assert_same(model, original, dict(x=IMAGES))
        assert not counted(model, dict(x=IMAGES))
    assert all("torch.compile is switched off" in why for why in left(model)) and left(model)
    assert_same(model, original, dict(x=IMAGES))
    assert not left(model)


@pytest.mark.slow
def test_the_tenth_model_of_a_process_is_accelerated():
    """Dynamo allows eight graphs for one code, which transformers' layers share."""
    model = hf_vit()
    for _ in range(10):
        model = vitfast.accelerate(copy.deepcopy(model)).eval()
        with torch.no_grad():
            assert counted(model, dict(pixel_values=IMAGES))["attention_block"] == 2 and not left(model)
