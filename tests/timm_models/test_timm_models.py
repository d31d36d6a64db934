"""The timm entry points, held to timm's own tests and to its VisionTransformer with the same weights.

timm's tests themselves run where TIMM_TESTS names them:
    pip download --no-binary timm --no-deps timm && tar xf timm-*.tar.gz
    TIMM_TESTS=$PWD/timm-*/tests/test_models.py pytest tests/timm_models -k own_tests
"""

import importlib
import os
import runpy
import subprocess
import sys

import numpy as np
import pytest
import timm
import torch
from checkpoints import google
from timm.models import VisionTransformer, get_model_args
from timm.models._hub import save_for_hf
from timm.models._manipulate import group_parameters
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

import vitfast.timm_models
from vitfast import InputError, ViT

NAME, TWIN = "vit_fast_tiny_patch16_224", "vit_tiny_patch16_224"
SMALL = dict(img_size=32, patch_size=8, embed_dim=48, depth=4, num_heads=3, mlp_ratio=2.0, num_classes=5)
TOL = dict(atol=1e-5, rtol=1e-5)  # fp32 on both sides


def make(name=NAME, **changes):
    return timm.create_model(name, **{**SMALL, **changes}).eval()


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """timm's model with random weights, and a file of them."""
    torch.manual_seed(0)
    truth, path = make(TWIN), tmp_path_factory.mktemp("timm") / "w.pth"
    assert type(truth) is VisionTransformer
    with torch.no_grad():
        for parameter in truth.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    torch.save(truth.state_dict(), path)
    return truth, path


def images(*size, batch=2, chans=3):
    return torch.randn(batch, chans, *(size or (32, 32)))


@pytest.mark.slow
def test_names_and_twins():
    """Every entry point has the configuration, keys and shapes of the timm model it is named after."""
    names = [n for n in vitfast.timm_models.__all__ if n.startswith("vit_")]
    assert sorted(names) == timm.list_models("vit_fast_*", module="vision_transformer") and len(names) == 11
    for name in names:
        cfg, twin = timm.get_pretrained_cfg(name), name.replace("fast_", "")
        assert cfg.input_size == timm.get_pretrained_cfg(twin).input_size == (3, int(name[-3:]), int(name[-3:]))
        with torch.device("meta"):  # timm's huge one comes without head
            ours, theirs = (timm.create_model(n, num_classes=1000) for n in (name, twin))
        shapes = [{key: value.shape for key, value in model.state_dict().items()} for model in (ours, theirs)]
        assert shapes[0] == shapes[1] and ours.default_cfg["first_conv"] + ".weight" in shapes[0], name
        own = ours.num_classes, ours.num_features, ours.head_hidden_size, ours.in_chans, ours.default_cfg["classifier"]
        assert own == (1000, theirs.num_features, theirs.embed_dim, 3, "head")


def test_weights_of_the_twin_load(weights):
    truth, path = weights
    x = images()
    overlay = dict(file=str(path), input_size=(3, 32, 32), num_classes=5)
    for model in (make(checkpoint_path=path), make(pretrained=True, pretrained_cfg_overlay=overlay)):
        torch.testing.assert_close(model(x), truth(x), **TOL)
    changes = dict(pretrained=True, pretrained_cfg_overlay=overlay, img_size=(48, 24), in_chans=1, num_classes=0)
    x = images(48, 24, chans=1)
    torch.testing.assert_close(make(**changes)(x), make(TWIN, **changes)(x), **TOL)
    assert make(num_classes=9, pretrained=True, pretrained_cfg_overlay=overlay).head.out_features == 9


def test_google_weights_load(tmp_path):
    np.savez(tmp_path / "w.npz", **google())
    sizes = dict(depth=2, act_layer="gelu_tanh")
    x = images()
    overlay = dict(file=str(tmp_path / "w.npz"), custom_load=True, num_classes=5)
    for changes in (dict(checkpoint_path=tmp_path / "w.npz"), dict(pretrained=True, pretrained_cfg_overlay=overlay)):
        torch.testing.assert_close(make(**sizes, **changes)(x), make(TWIN, **sizes, **changes)(x), **TOL)
    other = make(**sizes, num_classes=9, img_size=48, checkpoint_path=tmp_path / "w.npz")
    twin = make(TWIN, **sizes, img_size=48, checkpoint_path=tmp_path / "w.npz")
    torch.testing.assert_close(other.pos_embed, twin.pos_embed, **TOL)
    assert other.head.weight.std() > 0


def test_own_weights_there_are_none():
    says = f"{NAME}: vitfast has no weights of its own; those of timm's {TWIN} fit: checkpoint_path="
    with pytest.raises(InputError, match=says):
        timm.create_model(NAME, pretrained=True)


def test_what_timms_factory_and_optimisers_rely_on():
    with pytest.raises(TypeError, match="not_a_model_arg"):
        make(not_a_model_arg=1)
    model = make(device="meta", dtype=torch.float64)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.float64)}
    assert model(images().to("meta")).shape == (2, 5)
    model.reset_classifier(0)
    model.reset_classifier(2)
    head = model.get_classifier()
    assert (head.weight.device.type, head.weight.dtype) == ("meta", torch.float64)
    assert not any(m.training for m in model.modules())
    assert len(set(group_parameters(model, model.group_matcher(), reverse=True).values())) == SMALL["depth"] + 2
    model = make(drop_path_rate=0.3).requires_grad_(False)
    model.reset_classifier(0)
    model.set_input_size(img_size=(64, 32))
    assert not any(p.requires_grad for p in model.parameters())
    with torch.no_grad():
        assert model.to(torch.bfloat16)(images(64, 32).bfloat16()).dtype == torch.bfloat16
    mean = timm.create_model(NAME, **SMALL, pretrained_cfg_overlay=dict(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6)))
    assert (mean.mean, mean.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)) and make(in_chans=1).mean == (0.5,)


@pytest.mark.parametrize("change", [dict(size=(48, 32)), dict(pool="avg")], ids=str)
def test_timm_saves_it_after_changes(tmp_path, weights, change):
    """create_model makes this very model again of what save_for_hf wrote, and vitfast reads it too."""
    model = make(checkpoint_path=weights[1])
    model.set_input_size(img_size=change.get("size", (32, 32)))
    model.reset_classifier(3, change.get("pool"))
    torch.nn.init.normal_(model.head.weight)
    save_for_hf(model, tmp_path, safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = images(*change.get("size", ()))
    assert get_model_args(again) == get_model_args(model) and torch.equal(again(x), model(x))
    assert torch.equal(ViT.from_pretrained(tmp_path).eval()(x), model(x))


@pytest.mark.parametrize("chosen", [{}, dict(out_indices=(0, 2))], ids=["all", "some"])
def test_feature_extraction_equals_timms(weights, chosen):
    x, size = images(48, 32), (48, 32)
    overlay = dict(file=str(weights[1]), input_size=(3, 32, 32))
    options = dict(features_only=True, pretrained=True, pretrained_cfg_overlay=overlay, img_size=size, **chosen)
    ours, theirs = make(**options).train(), make(TWIN, **options).train()
    for info in ("channels", "reduction"):
        assert getattr(ours.feature_info, info)() == getattr(theirs.feature_info, info)()
    maps = ours(x)
    for a, b in zip(maps, theirs(x), strict=True):
        torch.testing.assert_close(a, b, **TOL)
    sum((m * torch.randn_like(m)).sum() for m in maps).backward()
    assert all(p.grad is not None for p in ours.parameters())  # no parameter that DDP would wait for


def test_pruned_models_keep_their_maps_and_train(weights):
    model, x = make(checkpoint_path=weights[1]), images()
    maps = model.forward_intermediates(x, intermediates_only=True)
    for i in range(SMALL["depth"]):
        pruned = make(checkpoint_path=weights[1]).train()
        take = pruned.prune_intermediate_layers([i], prune_norm=True)
        selected = pruned.forward_intermediates(x, indices=take, intermediates_only=True)
        torch.testing.assert_close(selected[0], maps[i], **TOL)
        (selected[0].square().sum() + pruned(x).square().sum()).backward()
        assert len(pruned.blocks) == i + 1 and all(p.grad is not None for p in pruned.parameters())


def test_fx_is_bit_equal_and_trains(weights):
    model, x = make(checkpoint_path=weights[1]), images()
    expected = model(x)
    train, evaluate = get_graph_node_names(model)
    traced = create_feature_extractor(model, train_return_nodes=train[-1:], eval_return_nodes=evaluate[-1:])
    assert torch.equal(*traced.eval()(x).values(), expected)
    next(iter(traced.train()(x).values())).backward(torch.randn_like(expected))
    assert all(p.grad is not None for p in traced.parameters())


def test_a_script_runs_with_the_models_known(tmp_path, monkeypatch, capsys):
    """`python -m vitfast.timm_models SCRIPT ...`: main, arguments and neighbours as Python has them."""
    (tmp_path / "neighbour.py").write_text("import timm\nmake = timm.create_model")
    script = "import sys, neighbour\nassert __name__ == '__main__'\n"
    script += "print(sys.argv[1:], type(neighbour.make(sys.argv[2], img_size=32, depth=1)).__name__)\nsys.exit(3)"
    (tmp_path / "train.py").write_text(script)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "argv", ["-m", str(tmp_path / "train.py"), "--model", NAME])
    with pytest.raises(SystemExit, match="3"):
        runpy.run_module("vitfast.timm_models", run_name="__main__")
    assert capsys.readouterr().out == f"['--model', '{NAME}'] TimmViT\n"
    monkeypatch.setattr(sys, "argv", ["-m"])
    with pytest.raises(SystemExit, match="usage: python -m vitfast.timm_models SCRIPT"):
        runpy.run_module("vitfast.timm_models", run_name="__main__")


@pytest.mark.skipif(
    "TIMM_TESTS" not in os.environ,
    reason="TIMM_TESTS does not name timm's tests/test_models.py (the docstring says how to get it)",
)
def test_timms_own_tests():
    """All but TorchScript: the operations choose kernels in Python, which torch.jit.script cannot take."""
    command = [sys.executable, *"-m pytest -q -p vitfast.timm_models -p no:cacheprovider".split()]
    command += [os.environ["TIMM_TESTS"], "-k", f"{NAME} and not torchscript"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0 and " passed" in result.stdout, result.stdout[-5000:]


def test_what_is_missing_is_named(monkeypatch):
    """timm cannot be imported without torchvision: `pip install timm` alone is no help."""
    for missing in ("torchvision", "timm"):
        with monkeypatch.context() as context:
            for name in [name for name in sys.modules if name.partition(".")[0] in ("timm", "torchvision")]:
                context.delitem(sys.modules, name)
            for name in [name for name in sys.modules if name.startswith("vitfast.timm_models")]:
                context.delitem(sys.modules, name)
            context.setitem(sys.modules, missing, None)
            needs = r"^vitfast.timm_models needs timm and torchvision \(.*\): pip install timm torchvision$"
            with pytest.raises(ImportError, match=needs):
                importlib.import_module("vitfast.timm_models")
