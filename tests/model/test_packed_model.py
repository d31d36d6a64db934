"""A ViT on images of many sizes: what each image gives alone, whatever comes with it."""

import pickle

import numpy as np
import pytest
import torch
from many_sizes import SIZES, images_of
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from vitfast import InputError, PackedImages, ViT, ops, pack, packed
from vitfast.block import subset_of_packed
from vitfast.packed import TokenLayout

SMALL = dict(img_size=(32, 24), patch_size=4, embed_dim=32, depth=3, num_heads=2, num_classes=5)
KINDS = {
    "class token": {},
    "average": dict(global_pool="avg", class_token=False),
    "MAP head": dict(global_pool="map"),
    "registers": dict(reg_tokens=4, no_embed_class=True, global_pool="avg"),
    "joined positions": dict(pos_embed="learn2d"),
    "factorized positions": dict(pos_embed="factorized"),
    "fixed positions": dict(pos_embed="sincos2d"),
    "DINOv3's rope": dict(rope="dinov3", pos_embed="none", reg_tokens=2),
    "EVA's rope": dict(rope="cat", ref_feat_shape=(16, 16)),
    "positions in each layer": dict(pos_embed_at="layers", reg_tokens=1),
    "shared positions": dict(pos_embed_at="layers_shared", pos_embed="factorized"),
    "norms and gates": dict(qk_norm=True, norm_layer="rmsnorm", swiglu_mlp=True, init_values=0.1, pre_norm=True),
    "fp32 stream": dict(residual_in_fp32=True),
}


def model_of(**options):
    torch.manual_seed(1)
    model = ViT(**{**SMALL, **options})
    for p in model.parameters():  # every part counts
        torch.nn.init.normal_(p, std=0.2) if p.dim() > 1 else torch.nn.init.normal_(p, mean=0.5, std=0.2)
    return model


def alone(model, images):
    """The logits of each image by itself, by the path for images of one size."""
    model.dynamic_img_size = True
    logits = torch.cat([model(image[None]) for image in images])
    model.dynamic_img_size = False
    return logits


def close(actual, truth, tolerance=1e-5):
    """Equal to `tolerance` of the largest number."""
    limit = tolerance * max(1.0, truth.abs().max().item())
    assert actual.shape == truth.shape and (actual - truth).abs().max().item() <= limit


@pytest.mark.parametrize("raw", [False, True], ids=["float64", "uint8"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_list_is_each_image_alone(kind, raw):
    """uint8 in an fp32 model; float64 in one of float64, in which both paths round alike or not at all."""
    model, images = model_of(**KINDS[kind]).eval(), images_of(raw)
    if not raw:
        model, images = model.double(), [image.double().requires_grad_() for image in images]
    leaves = list(model.parameters()) + ([] if raw else images)
    logits, truth = model(images), alone(model, images)
    close(logits, truth, 1e-5 if raw else 1e-12)
    upstream = torch.randn_like(truth)
    ours, theirs = (torch.autograd.grad(y, leaves, upstream, allow_unused=True) for y in (logits, truth))
    for mine, exact in zip(ours, theirs, strict=True):
        assert (mine is None) == (exact is None)
        if mine is not None:
            limit = (2e-5 if raw else 1e-12) * max(1e-3, exact.abs().max().item())
            assert (mine - exact).abs().max().item() <= limit
    tokens = model.forward_features(images)
    assert [len(t) for t in tokens] == [h // 4 * (w // 4) + model.num_prefix_tokens for h, w in SIZES]
    assert torch.equal(model.forward_head(tokens), logits)
    assert model.forward_head(tokens, pre_logits=True).shape == (5, 32)


# What torch.use_deterministic_algorithms names, or its source (index_reduce), as raising on a GPU.
RAISING = """index_reduce _upsample_bicubic2d_aa_backward upsample_bicubic2d_backward upsample_bilinear2d_backward
_adaptive_avg_pool2d_backward adaptive_max_pool2d_backward nll_loss2d_forward nll_loss2d_backward histc bincount median
put put_ kthvalue grid_sampler_2d_backward reflection_pad2d_backward max_unpool2d""".split()


class Names(TorchDispatchMode):
    """Collects the names of PyTorch's operations."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_deterministic_mode_runs_nothing_that_raises_on_a_gpu():
    """Packed samples with a MAP head, and positions resized in training: the same gradients."""
    model = model_of(global_pool="map", dynamic_img_size=True).double()
    packed_images = [image.double() for image in images_of()]
    found = []
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            with Names() as names:
                names.seen = set()
                loss = model(packed_images).square().sum() + model(packed_images[0][None, :, :16]).square().sum()
                found.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
        finally:
            torch.use_deterministic_algorithms(False)
    assert "index_add" in names.seen and not names.seen.intersection(RAISING)
    for mine, truth in zip(*found, strict=True):
        if truth is not None:
            assert_close(mine, truth, atol=1e-12 * max(1.0, truth.abs().max().item()), rtol=0)


@pytest.mark.parametrize("kind", ["class token", "average", "DINOv3's rope", "norms and gates"])
def test_on_kernels(kind):
    model, images = model_of(**KINDS[kind]).eval(), images_of(raw=True, sizes=[(16, 24), (4, 4), (24, 8)])
    truth = alone(model, images)
    parameters = list(model.parameters())
    exact = torch.autograd.grad(truth, parameters, torch.ones_like(truth), allow_unused=True)
    with ops.use_kernels("on"):
        logits = model(images)
        ours = torch.autograd.grad(logits, parameters, torch.ones_like(truth), allow_unused=True)
    close(logits, truth)
    for mine, theirs in zip(ours, exact, strict=True):
        if theirs is not None:
            assert (mine - theirs).abs().max().item() <= 3e-5 * max(1e-2, theirs.abs().max().item())


def test_one_list_in_every_form(tmp_path):
    """A list, a tuple, packed, packed in a worker, pinned in one buffer, nested: the same logits."""
    model, images = model_of().eval(), images_of(raw=True)
    logits = model(images)
    packed_images = pack(images, 4)
    again = pickle.loads(pickle.dumps(packed_images))
    loaded = next(iter(DataLoader(images, batch_size=5, collate_fn=Pack(), num_workers=1)))
    copied = packed_images.to("cpu")._shared()
    for form in (tuple(images), packed_images, again, loaded, copied, [image.numpy() for image in images]):
        assert torch.equal(model(form), logits)
    assert isinstance(loaded, PackedImages) and len(loaded) == 5 and loaded.buffer is not None
    nested = torch.nested.nested_tensor([image.float() for image in images])
    floats = model([image.float() for image in images])
    assert torch.equal(model(nested), floats)
    tokens = model.forward_features(nested)
    assert tokens.layout == torch.jagged and torch.equal(model.forward_head(tokens), floats)


class Pack:
    """A collate function that a worker process can be given."""

    def __call__(self, images):
        return pack(images, 4)


def test_patches_that_are_dropped():
    """Those that stay keep their places: positions are of the whole grid."""
    images = images_of(raw=True)
    keep = [torch.tensor([7, 3, 40]), None, torch.tensor([0]), torch.arange(0, 30, 2), None]
    made = pack(images, 4, keep)
    assert made.counts == (3, 24, 1, 15, 32)
    assert made.places[:3].tolist() == [7, 3, 40] and made.places[28:33].tolist() == [0, 2, 4, 6, 8]
    whole = pack(images, 4)
    assert torch.equal(made.patches[:3], whole.patches[[7, 3, 40]])
    model = model_of(rope="dinov3").eval()
    logits = model(made)
    assert_close(logits[[1, 2, 4]], model(images)[[1, 2, 4]], atol=1e-5, rtol=1e-5)
    shuffled = model(pack(images[:1], 4, [torch.tensor([40, 7, 3])]))  # a set of patches has no order
    assert_close(shuffled, logits[:1], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits[0], model(images)[0], atol=1e-3)
    with_gradients = [image.float().requires_grad_() for image in images]
    assert torch.equal(pack(with_gradients, 4, keep).patches, made.patches.float())


@pytest.mark.slow(30)
def test_compiled_once_for_all_sizes():
    torch._dynamo.reset()
    model, graphs = model_of(reg_tokens=1, depth=1), torch._dynamo.utils.counters["stats"]
    compiled, seen = torch.compile(model, fullgraph=True), []
    for sizes in (SIZES, SIZES[1:3], [(8, 8)] * 7, [(64, 64), (4, 4), (12, 20)]):
        images = pack(images_of(True, sizes), 4)
        logits, truth = compiled(images), model(images)
        close(logits, truth)
        upstream = torch.randn_like(truth)
        ours, exact = (torch.autograd.grad(y, list(model.parameters()), upstream) for y in (logits, truth))
        for mine, theirs in zip(ours, exact, strict=True):
            assert (mine - theirs).abs().max().item() <= 1e-4 * max(1.0, theirs.abs().max().item())
        seen.append(graphs["unique_graphs"])
    assert seen[1:] == [seen[1]] * 3, seen
    again = torch.compile(model, backend="aot_eager")
    assert again(images_of(True)).shape == (5, 5)  # a list is packed outside the graph
    torch._dynamo.reset()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_checkpointing_autocast_and_drop_path(checkpointing):
    model, images = model_of(drop_path_rate=0.6).train(), images_of(True)
    model.set_grad_checkpointing(checkpointing)
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(images)
    grads = torch.autograd.grad(logits.float().square().sum(), list(model.parameters()))
    model.set_grad_checkpointing(False)
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16):
        truth = model(images)
    exact = torch.autograd.grad(truth.float().square().sum(), list(model.parameters()))
    assert torch.equal(logits, truth)
    assert all(torch.equal(a, b) for a, b in zip(grads, exact))


def test_drop_path_drops_images():
    """With a fixed draw: an image's branch is left out for all of its tokens, or taken times 1 / keep."""
    model, images = model_of(depth=2, drop_path_rate=0.5).train(), images_of()
    block = model.blocks[1]  # at rate 0.5
    x, layers, layout = model._embed_packed(model._packed(images))
    torch.manual_seed(5)
    y = block(x, *layers[1])
    torch.manual_seed(5)
    factors = [torch.empty(5).bernoulli_(0.5).div_(0.5) for _ in range(2)]
    owner = packed.owners(layout.offsets, len(x))
    block.eval()
    attended = block._attend(None, x, factors[0][owner], None, layout)
    assert_close(y, block._transform(attended, factors[1][owner]), atol=1e-5, rtol=1e-5)
    assert {*factors[0].tolist(), *factors[1].tolist()} == {0.0, 2.0}


# ---- drop_path_mode="subset"


@pytest.mark.parametrize("together", [False, True], ids=["one size", "packed"])
@pytest.mark.parametrize("rope", [None, "dinov3"])
def test_a_subset_is_computed_and_added_back(together, rope, monkeypatch):
    """On a fixed draw: what "mask" gives with factors samples / kept for these samples and 0 for the others."""
    model = model_of(drop_path_rate=0.5, drop_path_mode="subset", rope=rope).train()
    images = images_of() if together else torch.randn(5, 3, 32, 24)
    block, computed = model.blocks[2], []
    if together:
        x, layers, layout = model._embed_packed(model._packed(images))
        given, owner = layers[2], packed.owners(layout.offsets, len(x))
        drawn = given[4]
        masks = [torch.zeros(len(x)).index_fill(0, s.rows, 5 / 2) for s in drawn]
        assert all(len(owner[s.rows].unique()) == 2 and (s.factors == 2.5).all() for s in drawn)
    else:
        (x, layers), layout = model._embed(images), None
        given = layers[2]
        torch.manual_seed(5)
        masks = [torch.zeros(5).index_fill(0, torch.randperm(5)[:2], 5 / 2) for _ in range(2)]
        torch.manual_seed(5)
    for name in ("_attend", "_transform"):
        run = getattr(block, name)
        monkeypatch.setattr(
            block, name, lambda *a, run=run, at=name == "_attend": (computed.append(len(a[at])), run(*a))[1]
        )
    y = block(x, *given)
    monkeypatch.undo()
    leaves = [p for p in block.parameters()]
    upstream = torch.randn_like(y)
    grads = torch.autograd.grad(y, [*leaves, x] if x.requires_grad else leaves, upstream, retain_graph=True)
    whole = block._attend(None, x, masks[0], given[2], layout)
    truth = block._transform(whole, masks[1])
    exact = torch.autograd.grad(truth, [*leaves, x] if x.requires_grad else leaves, upstream)
    assert_close(y, truth, atol=1e-5, rtol=1e-5)
    for mine, theirs in zip(grads, exact, strict=True):
        assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    rows = [int((m > 0).sum()) for m in masks]
    assert computed == rows and max(rows) < len(x)


def test_subsets_are_fair():
    """Each sample is kept as often as the others, two of five here, and factors make up for it."""
    layout = TokenLayout(torch.tensor([0, 3, 4, 9, 11, 12]), 5)
    sizes, kept = layout.offsets.diff(), torch.zeros(12)
    for _ in range(2000):
        subset = subset_of_packed(sizes, layout, 0.5)
        kept.index_add_(0, subset.rows, subset.factors)
        assert subset.layout.offsets[-1] == len(subset.rows) and len(subset.layout.offsets) == 3
    assert (kept / 2000 - 1).abs().max() < 0.12  # 4 standard errors of a mean of 0 and 2.5


def test_subset_leaves_evaluation_and_rate_1_alone():
    images = torch.randn(5, 3, 32, 24)
    subset, mask = (model_of(drop_path_rate=0.5, drop_path_mode=m).eval() for m in ("subset", "mask"))
    assert torch.equal(subset(images), mask(images)) and subset.config["drop_path_mode"] == "subset"
    model = model_of(depth=2, drop_path_rate=1.0, drop_path_mode="subset").train()
    for given in (images, images_of()):  # the last block, at rate 1, does nothing
        y = model(given)
        blocks, model.blocks = model.blocks, model.blocks[:1]
        assert_close(y, model(given))
        model.blocks = blocks
    model = model_of(depth=2, drop_path_rate=0.3, drop_path_mode="subset").train()
    compiled = torch.compile(model, backend="aot_eager")
    assert compiled(images).isfinite().all() and compiled(pack(images_of(), 4)).isfinite().all()


# ---- what cannot be


def test_models_that_take_one_size_say_so():
    with pytest.raises(InputError, match="pos_embed='relative' takes images of one size"):
        model_of(pos_embed="relative")(images_of())
    with pytest.raises(
        ValueError, match="images must have 3 channels in patches of 4 x 4, got 1 channels in patches of 8 x 8"
    ):
        model_of()(pack([torch.randn(1, 8, 8)], 8))
    with pytest.raises(TypeError, match="a list is for forward and forward_features"):
        model_of().forward_intermediates(images_of())
    with pytest.raises(NotImplementedError, match="change_patches is for images of one size"):
        model_of().forward_features(images_of(), lambda x: x)


def test_without_pooling_every_token_has_logits():
    model, images = model_of(global_pool="").eval(), images_of()
    logits = model(images)
    assert [t.shape for t in logits] == [(h * w // 16 + 1, 5) for h, w in SIZES]
    tokens = model.forward_features(images)
    for mine, theirs in zip(logits, model.forward_head(tokens), strict=True):
        assert torch.equal(mine, theirs)


def test_arrays_of_any_layout_and_lists_of_numbers():
    array = np.random.default_rng(0).random((3, 8, 12), dtype=np.float32)
    flipped = pack([array[:, ::-1, ::-1]], 4)
    assert torch.equal(flipped.patches, pack([torch.tensor(array).flip(1, 2)], 4).patches)
    assert torch.equal(pack([array], 4, [[0, 2, 5]]).places, pack([array], 4, [torch.tensor([0, 2, 5])]).places)
    assert torch.equal(pack([array], 4, [np.array([1])]).patches, pack([array], np.int64(4), [[1]]).patches)
    with pytest.raises(ValueError, match=r"got 32 x 4; it must be \(C, H, W\), channels first"):
        pack([torch.zeros(32, 32, 4)], 8)
    for wrong in ("4", 4.0, True, (4, 4, 4), (4, 0)):
        with pytest.raises(ValueError, match=r"patch_size must be P or \(P, Q\) in pixels"):
            pack([array], wrong)
    with pytest.raises(TypeError, match=r"a tensor \(B, C, H, W\) or a list of \(C, H, W\), got generator"):
        model_of()(image for image in images_of())


@pytest.mark.parametrize("pool", ["token", "avg", "map"])
def test_pooling_can_be_differentiated_twice_and_forward(pool):
    model, images = model_of(global_pool=pool).double().eval(), [image.double() for image in images_of()]
    weight = model.blocks[0].mlp.fc1.weight

    def second(logits):
        (grad,) = torch.autograd.grad(logits.square().sum(), weight, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), weight)[0]

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        close(second(model(images)), second(alone(model, images)))
    tokens = model.forward_features(images)
    assert torch.equal(model.pool(tokens), model._pool_many(tokens, pool)) and model.pool(tokens, "") is tokens


def test_on_the_meta_device():
    model = model_of(global_pool="avg").to("meta")
    assert model([torch.empty(3, 8, 12, device="meta"), torch.empty(3, 4, 4, device="meta")]).shape == (2, 5)


def test_vmap_over_the_images_of_a_list():
    model, (image, *_) = model_of().eval(), images_of()
    stack = torch.stack([image, image.flip(1), image * 2])
    together = torch.func.vmap(lambda x: model([x, x[:, :8]]))(stack)
    close(together, torch.stack([model([x, x[:, :8]]) for x in stack]))


def test_no_tokens_are_no_batch():
    with pytest.raises(ValueError, match="the tokens of at least one image are wanted"):
        model_of().forward_head([])
