"""vitfast.graphed: what a CUDA graph computes from other images is what the model computes; which models it refuses.

On a CPU a tape stands in for the graph (taped_graphs.py), which makes the recorded calls and launches again.
"""

import copy
import random
import re

import pytest
import taped_graphs
import torch
from adapter_models import hf_vit, tensor, timm_vit
from checks import randomize, slow_but
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import vitfast
from vitfast import InputError, ViT, ops, pack
from vitfast.kernels.launch import INTERPRETED
from vitfast.model import graphs

SMALL = dict(img_size=(16, 12), patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=5)
SIZES = [(16, 12), (8, 12), (4, 4), (20, 8), (4, 32)]  # of images, in patches of 4 x 4
MODELS = {
    "ViT": lambda: randomize(ViT(**SMALL)).eval(),
    "accelerated": lambda: vitfast.accelerate(randomize(timm_vit()).eval()),
    "transformers": lambda: vitfast.accelerate(randomize(hf_vit()).eval()),
    "compiled": lambda: torch.compile(randomize(timm_vit()).eval(), backend="vitfast", options=dict(inner="eager")),
}
KINDS = {
    "class token": {},
    "average": dict(global_pool="avg", class_token=False),
    "MAP head": dict(global_pool="map"),
    "registers": dict(reg_tokens=4, no_embed_class=True, global_pool="avg"),
    "fixed positions": dict(pos_embed="sincos2d"),
    "DINOv3's rope": dict(rope="dinov3", pos_embed="none", reg_tokens=2),
    "positions in each layer": dict(pos_embed_at="layers", pos_embed="factorized"),
    "fp32 stream": dict(residual_in_fp32=True),
}
tapes = pytest.fixture(taped_graphs.tapes)
interpreted = pytest.mark.skipif(not INTERPRETED, reason="interpreted kernels")


def images_of(shape, raw=False):
    return torch.randint(0, 256, shape, dtype=torch.uint8) if raw else torch.randn(shape)


def packed(sizes, raw=True, device="cpu"):
    return pack([images_of((3, *size), raw).to(device) for size in sizes], 4)


@torch.no_grad()
def differs(run, model, images) -> bool:
    """Whether a replay has other bits than the model's own run."""
    return not torch.equal(tensor(run(images)), tensor(model(images)))


def vit(**options) -> ViT:
    return randomize(ViT(**SMALL | options), std=0.2).eval()


# ---- what is computed


@interpreted
@pytest.mark.parametrize("name", slow_but(["ViT"], MODELS))
def test_a_replay_on_other_images_is_a_run_of_the_model(name, tapes):
    torch._dynamo.reset()
    model = MODELS[name]()
    shape = 3, *(SMALL["img_size"] if name == "ViT" else (16, 16))
    kinds = (False, True) if name == "ViT" else (False,)
    with ops.use_kernels("on"):
        run = vitfast.graphed(model, images_of((2, *shape)))
        for count in (2, 3, 2, 1):
            assert not any(differs(run, model, images_of((count, *shape), raw)) for raw in kinds)
    assert len(tapes) == 3 * len(kinds) and len({tape.pool() for tape in tapes}) == 1
    assert [tape.replays for tape in tapes[:: len(kinds)]] == [3, 1, 1]
    assert all(tape.launches > 5 and not tape.read for tape in tapes)


@interpreted
@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_serves_packs_of_other_sizes(kind, tapes):
    """To the bits of a graph of its own, and as the model computes the pack without what fills it up."""
    model = vit(**KINDS[kind])
    with ops.use_kernels("on"):
        run = vitfast.graphed(model, packed(SIZES))
        for sizes in (SIZES[::-1], SIZES[1:] + [(12, 16)]):
            images = packed(sizes, raw=kind != "average" or sizes is SIZES)
            kept = run(images).clone()
            assert torch.equal(kept, vitfast.graphed(model, images)(images))
            with torch.no_grad():
                torch.testing.assert_close(kept, model(images), atol=1e-5, rtol=1e-5)
        kept = run([torch.zeros(3, 8, 4), torch.ones(3, 4, 4)])
        assert kept.shape == (2, 5) and not torch.equal(kept[0], kept[1])
    mine = {id(capture.graph) for capture in run._captures.values()}
    raw = 1 if kind != "average" else 2
    assert len(mine) == raw + 1 and not any(tape.read for tape in tapes)


def test_packs_are_filled_up_by_an_eighth_and_no_image_is_longer_than_the_longest():
    draw = random.Random(0)
    for _ in range(300):
        most = draw.choice((1, 3, 50))
        sizes = [(4 * draw.randint(1, most), 4) for _ in range(draw.choice((1, 2, 30, 300)))]
        images = packed(sizes)
        slots, longest, patches, *_ = graphs._size(images)
        static = graphs._static(images, images.device)
        static.places.fill_(99), static.grids.fill_(99)
        graphs._fill(static, images)
        counts = static.offsets.diff()
        assert len(counts) == slots > len(images) and len(static.patches) == static.offsets[-1] == patches
        assert tuple(counts[: len(images)].tolist()) == images.counts and 1 <= counts.min() <= counts.max() <= longest
        assert longest <= 2 * images.longest + 2 and slots <= 1.125 * (1.125 * len(images) + 1)
        assert patches <= 1.125 * (len(images.patches) + slots - len(images))
        assert torch.equal(static.patches[: len(images.patches)], images.patches)
        assert not static.places[len(images.patches) :].any() and (static.grids[len(images) :] == 1).all()
    assert [graphs.rounded_up(n) for n in (1, 9, 15, 17, 18, 33)] == [1, 9, 15, 18, 18, 36]
    assert [graphs.rounded_up(n, 1) for n in (1, 3, 5, 7, 9, 13)] == [1, 3, 6, 8, 12, 16]


CHANGES = {
    "in place": lambda model: model.blocks[0].attn.qkv.weight.mul_(0.5),
    "in place, what uint8's normalisation is folded into": lambda model: model.patch_embed.proj.weight.mul_(0.5),
    "a parameter": lambda model: setattr(model.head, "weight", nn.Parameter(torch.randn_like(model.head.weight))),
    "its data": lambda model: setattr(model.head.weight, "data", torch.randn_like(model.head.weight)),
    "a layer": lambda model: setattr(model, "head", nn.Linear(32, 7).eval()),
    "all": lambda model: model.load_state_dict(vit().state_dict()),
    "dtype": lambda model: model.half(),
    "a part is taken away": lambda model: setattr(model, "blocks", model.blocks[:1].eval()),
}


@interpreted
@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_noticed(change, tapes):
    model, images = vit(), images_of((2, 3, 16, 12), raw=True)
    with ops.use_kernels("on"):
        run = vitfast.graphed(model, images)
        assert not differs(run, model, images) and len(tapes) == 1
        before = run(images).clone()
        with torch.no_grad():
            CHANGES[change](model)
        assert not differs(run, model, images) and len(tapes) == 2
        after = run(images)
        assert len(tapes) == 2 and (before.shape != after.shape or not torch.equal(before, after))


def test_a_mode_has_a_graph_of_its_own(tapes):
    model, images = vit(), images_of((2, 3, 16, 12))
    run = vitfast.graphed(model, images)
    for enabled in (False, True, True):
        with vitfast.batch_invariant(enabled):
            assert not differs(run, model, images)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert not differs(run, model, images)
    assert len(tapes) == 3
    with ops.use_kernels("off"):
        run(images)
    assert len(tapes) == 4


def test_no_cast_of_autocast_outlives_the_capture_or_enters_it(tapes):
    model, images = vit(), images_of((2, 3, 16, 12))
    for p in model.parameters():
        assert p.requires_grad  # casts of such parameters are kept
    with torch.autocast("cpu", torch.bfloat16):
        model.head(torch.randn(2, 32))  # a cast from outside
        run = vitfast.graphed(model, images)
        with torch.no_grad():
            for p in model.parameters():
                p.data.mul_(0.5)  # which nobody notices: a graph reads the weights themselves
            run(images)
            kept = run(images).clone()
            assert len(tapes) == 1
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(kept, model(images))


def test_it_serves_inside_inference_mode_and_outside(tapes):
    model, images = vit(), images_of((2, 3, 16, 12), raw=True)
    with torch.inference_mode():
        run = vitfast.graphed(model, images)
    assert not run(images).is_inference() and not run(images).requires_grad and not differs(run, model, images)
    with torch.inference_mode():
        frozen = copy.deepcopy(model)
        assert next(frozen.parameters()).is_inference()
        assert torch.equal(vitfast.graphed(frozen, images)(images), run(images)) and len(tapes) == 2


def test_the_graph_that_was_unused_for_the_longest_leaves(tapes):
    model = vit()
    run = vitfast.graphed(model, images_of((1, 3, 16, 12)), most=2)
    for count, captures in ((2, 2), (1, 2), (3, 3), (1, 3), (2, 4), (1, 4), (3, 5)):
        assert not differs(run, model, images_of((count, 3, 16, 12)))
        assert len(tapes) == captures, count
    assert len(run._captures) == 2 and len({tape.pool() for tape in tapes}) == 1


def test_an_output_is_valid_until_the_next_call(tapes):
    run = vitfast.graphed(vit(), images_of((2, 3, 16, 12)))
    first = run(images_of((2, 3, 16, 12)))
    kept = first.clone()
    second = run(images_of((2, 3, 16, 12)))
    assert first.data_ptr() == second.data_ptr() and torch.equal(first, second) and not torch.equal(kept, second)
    assert "valid until the next call" in vitfast.graphed.__doc__


# ---- the comparison finds planted faults


def test_a_stale_pointer_is_found(tapes, monkeypatch):
    model, images = vit(), images_of((2, 3, 16, 12))
    run, before = vitfast.graphed(model, images), [t.detach() for t in graphs._tensors(model)]
    assert not differs(run, model, images)
    monkeypatch.setattr(graphs, "_tensors", lambda model: before)  # nobody looks for changes
    model.head.weight.data = torch.randn_like(model.head.weight)
    assert differs(run, model, images)


class Scaled(nn.Module):
    """A model that reads a number of its images on the host."""

    def __init__(self):
        super().__init__()
        self.vit = vit()

    def forward(self, images):
        return self.vit(images) * float(images.mean())


class Scratch(nn.Module):
    """A model that writes the size of its batch into memory of its own, only when the size changes."""

    def __init__(self):
        super().__init__()
        self.vit, self.count, self.scale = vit(), 0, torch.zeros(())

    def forward(self, images):
        if self.count != len(images):
            self.count = len(images)
            self.scale.fill_(self.count)
        return self.vit(images) * self.scale


def test_a_python_number_is_found(tapes):
    model, images = Scaled().eval(), images_of((2, 3, 16, 12))
    run = vitfast.graphed(model, images)
    assert tapes[0].read == ["aten._local_scalar_dense.default"]  # a GPU's capture refuses it
    assert not differs(run, model, images) and differs(run, model, images_of((2, 3, 16, 12)))


def test_a_buffer_of_two_graphs_is_found(tapes):
    model, images = Scratch().eval(), images_of((3, 3, 16, 12))
    run = vitfast.graphed(model, images)
    assert not differs(run, model, images) and not differs(run, model, images[:2])
    kept = run(images).clone()
    with torch.no_grad():
        assert not torch.equal(kept, model(images))


# ---- what is refused


def hooked(model, kind):
    getattr(model.blocks[1].attn, f"register_{kind}")(lambda *args: None)
    return model


REFUSED = {
    "the model is in training mode": (lambda: vit().train(), {}),
    "blocks.0.norm1 is in training": (lambda: (m := vit(), m.blocks[0].norm1.train())[0], {}),
    "blocks.1.attn has a hook": (lambda: hooked(vit(), "forward_hook"), {}),
    "blocks.1.attn has a hook, ": (lambda: hooked(vit(), "forward_pre_hook"), {}),
    "blocks.1.attn has a hook, <": (lambda: hooked(vit(), "full_backward_hook"), {}),
    "most must be a whole number from 1, got 0": (vit, dict(most=0)),
    "most must be a whole number from 1, got True": (vit, dict(most=True)),
    "must be on one GPU, and this one is on cpu and meta": (lambda: (m := vit(), m.head.to("meta"))[0], {}),
    "must be on one GPU, and this one is on none": (lambda: nn.Identity().eval(), {}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_model_is_refused_in_one_line(message, tapes):
    make, options = REFUSED[message]
    with pytest.raises(InputError, match=re.escape(message)) as error:
        vitfast.graphed(make(), images_of((1, 3, 16, 12)), **options)
    assert str(error.value).startswith("graphed: ") and "\n" not in str(error.value) and not tapes


def test_a_model_that_is_refused_later_is_refused_by_the_call(tapes):
    model, images = vit(), images_of((1, 3, 16, 12))
    run = vitfast.graphed(model, images)
    hook = register_module_forward_hook(lambda *args: None)
    try:
        with pytest.raises(InputError, match="graphed: a hook on all modules is set; remove it"):
            run(images)
    finally:
        hook.remove()
    with pytest.raises(InputError, match="training mode"):
        model.train(), run(images)
    assert not differs(run, model.eval(), images)


def test_without_a_gpu_it_is_refused():
    with pytest.raises(InputError, match="^graphed: a model that runs as CUDA graphs must be on one GPU, and this one"):
        vitfast.graphed(vit(), images_of((1, 3, 16, 12)))
    with pytest.raises(TypeError, match="^graphed: model must be a module, got function"):
        vitfast.graphed(lambda images: images, images_of((1, 3, 16, 12)))


@pytest.mark.parametrize("given", [{}, None, [], [torch.zeros(3, 8, 8)], "list"])
def test_images_of_another_kind_are_refused(given, tapes):
    plain = randomize(timm_vit()).eval()
    with pytest.raises(TypeError, match=r"graphed: images must be a tensor \(B, C, H, W\), or for a ViT"):
        vitfast.graphed(plain, given)
    with pytest.raises(InputError, match="graphed: this ViT does not pool"):
        vitfast.graphed(vit(global_pool=""), packed(SIZES))
    with pytest.raises(InputError, match="a hybrid's CNN takes images of one size"):
        vitfast.graphed(vit(backbone=dict(layers=[1], width=0.5), patch_size=4), [torch.zeros(3, 8, 8)])
    assert not tapes


def test_a_vit_without_pooling_takes_images_of_one_size(tapes):
    model, images = vit(global_pool=""), images_of((2, 3, 16, 12))
    assert not differs(vitfast.graphed(model, images), model, images)


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_cuda_graphs_replay_the_model(name, dtype):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MODELS[name]().cuda().to(dtype)
    shape = 3, *(SMALL["img_size"] if name == "ViT" else (16, 16))
    run = vitfast.graphed(model, images_of((2, *shape)).to(dtype))
    for count in (2, 3, 2, 3, 1, 2):
        for raw in (False, True) if name == "ViT" else (False,):
            images = images_of((count, *shape), raw)
            images = images if raw else images.to(dtype)
            with torch.no_grad():
                torch.testing.assert_close(tensor(run(images.pin_memory())), tensor(model(images.cuda())))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_cuda_graph_serves_packs(kind):
    model = vit(**KINDS[kind]).cuda()
    run = vitfast.graphed(model, packed(SIZES))
    for sizes in (SIZES[::-1], SIZES[1:] + [(12, 16)], SIZES * 9, SIZES[:1]):
        for device in ("cpu", "cuda"):
            images = packed(sizes, device=device)
            with torch.no_grad():
                torch.testing.assert_close(run(images), model(images), atol=1e-3, rtol=1e-3)
    assert len(run._captures) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("change", CHANGES)
def test_a_cuda_graph_is_captured_anew_for_changed_weights(change):
    model, images = vit().cuda(), images_of((2, 3, 16, 12), raw=True).cuda()
    run = vitfast.graphed(model, images, most=1)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(run(images), model(images), atol=1e-4, rtol=1e-4)
            run(images[:1])  # the only graph leaves, and its memory is used again
            CHANGES[change](model)
            model.cuda()
    assert len(run._captures) == 1
    model.cpu()
    with pytest.raises(InputError, match="this one is on cpu"):
        run(images)


@pytest.mark.gpu
def test_a_cuda_graph_reads_weights_and_casts_that_live():
    """Memory that was freed since the capture would be written by others."""
    model, images = vit().cuda(), images_of((2, 3, 16, 12), raw=True).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        run = vitfast.graphed(model, images)
    with torch.no_grad():
        model(images)  # folds the normalisation anew, for another stream
        others = [torch.full((1 << 16,), float("nan"), device="cuda") for _ in range(200)]
        with torch.autocast("cuda", torch.bfloat16):
            torch.testing.assert_close(run(images), model(images), atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(run(images), model(images), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(run(images), model(images), atol=1e-4, rtol=1e-4)
    assert len(others) == 200
