"""A ViT on images of many sizes: what each image gives alone, whatever comes with it; and the packed batch itself."""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
from checks import Calls
from torch.testing import assert_close
from torch.utils.data import DataLoader

from vitfast import InputError, PackedImages, ViT, ops, pack
from vitfast.model.drop_path import subset_of_packed
from vitfast.model.positions import TokenLayout
from vitfast.model.variable_size import packed_images
from vitfast.ops import reference as ref

SIZES = [(32, 24), (16, 24), (4, 4), (40, 12), (8, 64)]  # of images, in patches of 4 x 4
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
    "no pooling": dict(global_pool=""),
    "positions without antialias": dict(pos_resample="bicubic", reg_tokens=1),
    "SigLIP 2's positions": dict(pos_resample="bilinear_antialias", class_token=False, global_pool="map"),
}
ON_KERNELS = ("class token", "average", "DINOv3's rope", "norms and gates")


def images_of(raw=False, sizes=SIZES):
    if raw:
        return [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size in sizes]
    return [torch.randn(3, *size) for size in sizes]


def model_of(**options):
    torch.manual_seed(1)
    model = ViT(**{**SMALL, **options})
    for p in model.parameters():  # every part counts
        torch.nn.init.normal_(p, std=0.2) if p.dim() > 1 else torch.nn.init.normal_(p, mean=0.5, std=0.2)
    return model


def alone(model, images):
    """The logits of each image by itself, by the path for images of one size."""
    model.dynamic_img_size = True
    logits = torch.cat([model(image[None]).flatten(0, -2) for image in images])
    model.dynamic_img_size = False
    return logits


def close(actual, truth, tolerance=1e-5, least=1.0):
    """Equal to `tolerance` of the largest number."""
    limit = tolerance * max(least, truth.abs().max().item())
    assert actual.shape == truth.shape and (actual - truth).abs().max().item() <= limit


@pytest.mark.quick(11)
@pytest.mark.parametrize(
    "kind, how",
    [
        *((kind, "float64") for kind in KINDS),
        ("class token", "uint8"),
        *(pytest.param(kind, "kernels", marks=pytest.mark.slow) for kind in ON_KERNELS),
    ],
)
def test_a_batch_is_each_image_alone(kind, how):
    """Logits and every gradient. uint8 in an fp32 model; float64 in one of float64, in which both paths round alike."""
    sizes = SIZES if how != "kernels" else [(16, 24), (4, 4), (24, 8)]
    model, images = model_of(**KINDS[kind]).eval(), images_of(how != "float64", sizes)
    if how == "float64":
        model, images = model.double(), [image.double().requires_grad_() for image in images]
    leaves = [*model.parameters(), *(images if how == "float64" else ())]
    truth = alone(model, images)
    upstream = torch.randn_like(truth)
    with ops.use_kernels("on" if how == "kernels" else "off"):
        logits = model(images)
        logits = torch.cat(logits) if isinstance(logits, list) else logits
        ours = torch.autograd.grad(logits, leaves, upstream, allow_unused=True)
    close(logits, truth, 1e-12 if how == "float64" else 1e-5)
    theirs = torch.autograd.grad(truth, leaves, upstream, allow_unused=True)
    for mine, exact in zip(ours, theirs, strict=True):
        assert (mine is None) == (exact is None)
        if mine is not None:
            close(mine, exact, 1e-12 if how == "float64" else 3e-5, 1e-3 if how == "float64" else 1e-2)
    if how == "float64":
        tokens = model.forward_features(images)
        assert [len(t) for t in tokens] == [h // 4 * (w // 4) + model.num_prefix_tokens for h, w in sizes]
        head = model.forward_head(tokens)
        assert torch.equal(torch.cat(head) if isinstance(head, list) else head, logits)
        assert len(model.forward_head(tokens, pre_logits=True)) == 5


# What torch.use_deterministic_algorithms names, or its source (index_reduce), as raising on a GPU.
RAISING = """index_reduce _upsample_bicubic2d_aa_backward upsample_bicubic2d_backward upsample_bilinear2d_backward
_adaptive_avg_pool2d_backward adaptive_max_pool2d_backward nll_loss2d_forward nll_loss2d_backward histc bincount median
put put_ kthvalue grid_sampler_2d_backward reflection_pad2d_backward max_unpool2d""".split()


def test_deterministic_mode_runs_nothing_that_raises_on_a_gpu():
    """Packed samples with a MAP head, and positions resized in training: the same gradients."""
    model = model_of(global_pool="map", dynamic_img_size=True).double()
    packed_images = [image.double() for image in images_of()]
    found = []
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            with Calls() as calls:
                loss = model(packed_images).square().sum() + model(packed_images[0][None, :, :16]).square().sum()
                found.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
        finally:
            torch.use_deterministic_algorithms(False)
    seen = {func.overloadpacket.__name__ for func, *_ in calls.found}
    assert "index_add" in seen and not seen.intersection(RAISING)
    for mine, truth in zip(*found, strict=True):
        assert truth is None or close(mine, truth, 1e-12) is None


class Pack:
    """A collate function that a worker process can be given."""

    def __call__(self, images):
        return pack(images, 4)


def test_one_list_in_every_form():
    """A list, a tuple, packed, packed in a worker, arrays of any layout, nested: the same logits."""
    model, images = model_of().eval(), images_of(raw=True)
    logits = model(images)
    loaded = next(iter(DataLoader(images, batch_size=5, collate_fn=Pack(), num_workers=1)))
    arrays = [np.ascontiguousarray(image.numpy()[:, ::-1, ::-1])[:, ::-1, ::-1] for image in images]
    for form in (tuple(images), pack(images, 4), loaded, arrays):
        assert torch.equal(model(form), logits)
    assert isinstance(loaded, PackedImages) and len(loaded) == 5 and loaded.buffer is not None
    nested = torch.nested.nested_tensor([image.float() for image in images])
    floats = model([image.float() for image in images])
    assert torch.equal(model(nested), floats)
    tokens = model.forward_features(nested)
    assert tokens.layout == torch.jagged and torch.equal(model.forward_head(tokens), floats)
    meta = model.to("meta")
    assert meta([torch.empty(3, 8, 12, device="meta"), torch.empty(3, 4, 4, device="meta")]).shape == (2, 5)


def test_memory_that_a_tensor_gets_later_is_what_is_saved_and_moved():
    made = pack(images_of(raw=True), 4)
    made.patches.data = made.patches + 1
    for again in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), made.to("cpu")):
        assert torch.equal(again.patches, made.patches) and again.counts == made.counts


def test_patches_that_are_dropped():
    """Those that stay keep their places: positions are of the whole grid."""
    images = images_of(raw=True)
    keep = [torch.tensor([7, 3, 40]), None, [0], np.arange(0, 30, 2), None]
    made = pack(images, 4, keep)
    assert made.counts == (3, 24, 1, 15, 32)
    assert made.places[:3].tolist() == [7, 3, 40] and made.places[28:33].tolist() == [0, 2, 4, 6, 8]
    assert torch.equal(made.patches[:3], pack(images, 4).patches[[7, 3, 40]])
    model = model_of(rope="dinov3").eval()
    logits = model(made)
    assert_close(logits[[1, 2, 4]], model(images)[[1, 2, 4]], atol=1e-5, rtol=1e-5)
    shuffled = model(pack(images[:1], 4, [torch.tensor([40, 7, 3])]))  # a set of patches has no order
    assert_close(shuffled, logits[:1], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits[0], model(images)[0], atol=1e-3)
    with_gradients = [image.float().requires_grad_() for image in images]
    assert torch.equal(pack(with_gradients, 4, keep).patches, made.patches.float())


@pytest.mark.parametrize("together", [False, True], ids=["one size", "packed"])
def test_checkpointing_autocast_and_drop_path(together):
    """Blocks that are checkpointed draw the same random numbers again: the same bits."""
    model, found = model_of(drop_path_rate=0.6).train(), []
    images = images_of(True) if together else torch.randint(0, 256, (5, 3, 32, 24), dtype=torch.uint8)
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        torch.manual_seed(3)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(images)
        found.append((logits, *torch.autograd.grad(logits.float().square().sum(), list(model.parameters()))))
    assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.parametrize("qk_norm", [False, True], ids=["fused", "by its modules"])
@pytest.mark.parametrize("together", [False, True], ids=["one size", "packed"])
def test_drop_path_drops_images(together, qk_norm):
    """With a fixed draw: a half of the block is left out for all tokens of an image, or taken times 1 / keep."""
    model = model_of(depth=2, drop_path_rate=0.5, qk_norm=qk_norm).train()
    block = model.blocks[1]  # at rate 0.5
    x, layers = model._embed(packed_images(model, images_of()) if together else torch.randn(5, 3, 32, 24))
    torch.manual_seed(5)
    y = block(x, *layers[1])
    torch.manual_seed(5)
    factors = [torch.empty(5).bernoulli_(0.5).div_(0.5) for _ in range(2)]
    assert {*factors[0].tolist(), *factors[1].tolist()} == {0.0, 2.0}
    for half, factor in zip((block._attention_half, block._mlp_half), factors):
        factor = factor[ref.owners(layers[1][1]["offsets"], len(x)), None] if together else factor[:, None, None]
        x = x + factor * (half(x, None, layers[1][1]) - x)
    assert_close(y, x, atol=1e-5, rtol=1e-5)


# ---- drop_path_mode="subset"


@pytest.mark.parametrize("together", [False, True], ids=["one size", "packed"])
def test_a_subset_is_computed_and_added_back(together, monkeypatch):
    """On a fixed draw: what "mask" gives with factors samples / kept for these samples and 0 for the others."""
    model = model_of(drop_path_rate=0.5, drop_path_mode="subset", rope="dinov3").train()
    images = images_of() if together else torch.randn(5, 3, 32, 24)
    block, computed = model.blocks[2], []
    x, layers = model._embed(packed_images(model, images) if together else images)
    _, options, drawn = layers[2]
    if together:
        owner = ref.owners(options["offsets"], len(x))
        masks = [torch.zeros(len(x)).index_fill(0, s.rows, 5 / 2) for s in drawn]
        assert all(len(owner[s.rows].unique()) == 2 and (s.factors == 2.5).all() for s in drawn)
    else:
        torch.manual_seed(5)
        masks = [torch.zeros(5).index_fill(0, torch.randperm(5)[:2], 5 / 2) for _ in range(2)]
        torch.manual_seed(5)
    for name in ("_attention_half", "_mlp_half"):
        half = getattr(block, name)
        monkeypatch.setattr(block, name, lambda x, *a, half=half: (computed.append(len(x)), half(x, *a))[1])
    y = block(x, *layers[2])
    monkeypatch.undo()
    leaves = [*block.parameters(), *((x,) if x.requires_grad else ())]
    upstream = torch.randn_like(y)
    grads = torch.autograd.grad(y, leaves, upstream, retain_graph=True)
    truth = block._mlp_half(block._attention_half(x, masks[0], options), masks[1])
    exact = torch.autograd.grad(truth, leaves, upstream)
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


# ---- derivatives of derivatives, and what cannot be


@pytest.mark.parametrize("pool", ["token", "avg", "map"])
def test_pooling_can_be_differentiated_twice(pool):
    model, images = model_of(global_pool=pool).double().eval(), [image.double() for image in images_of()]
    weight = model.blocks[0].mlp.fc1.weight

    def second(logits):
        (grad,) = torch.autograd.grad(logits.square().sum(), weight, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), weight)[0]

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        close(second(model(images)), second(alone(model, images)))


def test_vmap_over_the_images_of_a_list():
    model, (image, *_) = model_of().eval(), images_of()
    stack = torch.stack([image, image.flip(1), image * 2])
    together = torch.func.vmap(lambda x: model([x, x[:, :8]]))(stack)
    close(together, torch.stack([model([x, x[:, :8]]) for x in stack]))


IMAGE, SHAPE, NUMBERS = torch.randn(3, 8, 8), r"\(C, H, W\)", r"keep\[0\] must be whole numbers of patches from 0 to 3"
SIDES = r"images\[0\] must have sides that are multiples of the patch 4 x 4"
REFUSED = [
    (lambda: pack([], 4), ValueError, "images is empty"),
    (lambda: pack([IMAGE, torch.randn(8, 8)], 4), ValueError, rf"images\[1\] must be {SHAPE}, got \(8, 8\)"),
    (lambda: pack([torch.randn(3, 8, 9)], 4), ValueError, f"{SIDES}, got 8 x 9"),
    (lambda: pack([torch.randn(3, 8, 0)], 4), ValueError, f"{SIDES}, got 8 x 0"),
    (lambda: pack([torch.zeros(32, 32, 4)], 8), ValueError, f"got 32 x 4; it must be {SHAPE}, channels first"),
    (lambda: pack([IMAGE, IMAGE.byte()], 4), ValueError, r"dtype torch.float32 of images\[0\]"),
    (lambda: pack([IMAGE, torch.randn(1, 8, 8)], 4), ValueError, r"channels 3 of images\[0\], 1 of images\[1\]"),
    (lambda: pack([IMAGE.int()], 4), TypeError, r"images\[0\] must be uint8 or floating point, got torch.int32"),
    (lambda: pack(["cat.jpg"], 4), TypeError, r"images\[0\] must be a tensor or an array, got str"),
    (lambda: pack(IMAGE[None], 4), TypeError, "images must be a list of .* got Tensor"),
    (lambda: pack([IMAGE], 4, [None, None]), ValueError, "keep must have an entry for each of 1 images, got 2"),
    *(
        (lambda keep=keep: pack([IMAGE], 4, [keep]), ValueError, NUMBERS)
        for keep in (torch.tensor([4]), torch.tensor([1, 1]), [], ["a"], torch.tensor([0.0]), [True])
    ),
    *(
        (lambda size=size: pack([IMAGE], size), ValueError, r"patch_size must be P or \(P, Q\) in pixels")
        for size in (0, "4", 4.0, True, (4, 4, 4), (4, 0))
    ),
    *(
        (lambda to=to: pack([IMAGE], 4).to(*to), TypeError, r"PackedImages.to: \w+ cannot be .*dataclasses.replace")
        for to in ((torch.float32,), ("cpu", torch.float32), (None,))
    ),
    (lambda: model_of(pos_embed="relative")(images_of()), InputError, "pos_embed='relative' takes images of one size"),
    (lambda: model_of()(pack([torch.randn(1, 8, 8)], 8)), ValueError, "images must have 3 channels .* got 1 channels"),
    (lambda: model_of().forward_intermediates(images_of()), TypeError, "a list is for forward and forward_features"),
    (lambda: model_of().forward_features(images_of(), lambda x: x), NotImplementedError, "change_patches"),
    (lambda: model_of()(image for image in images_of()), TypeError, rf"a list of {SHAPE}, got generator"),
    (lambda: model_of().forward_head([]), ValueError, "the tokens of at least one image are wanted"),
]


@pytest.mark.parametrize("call, error, message", REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_what_cannot_be_packed_or_run_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ---- the packed batch


def test_a_buffer_holds_everything():
    images = images_of()
    made = pack(images, 4)
    ends = made.buffer.data_ptr(), made.buffer.data_ptr() + made.buffer.numel()
    for part in (made.patches, made.places, made.offsets, made.grids):
        assert ends[0] <= part.data_ptr() and part.data_ptr() % 16 == ends[0] % 16
        assert part.data_ptr() + part.numel() * part.element_size() <= ends[1]
    assert made.shape == (135, 3, 4, 4) and made.dtype == torch.float32 and made.device.type == "cpu"
    assert made.counts == (48, 24, 1, 30, 32) and made.longest == 48
    assert made.offsets.tolist() == [0, 48, 72, 73, 103, 135] and made.grids.tolist()[3] == [10, 3]
    for i, image in enumerate(images):
        part = made.patches[made.offsets[i] : made.offsets[i + 1]].unflatten(0, made.grids[i].tolist())
        assert torch.equal(part.permute(2, 0, 3, 1, 4).reshape(image.shape), image)


def images_between(images, first, end):
    """Those images of a batch, as one would write it: views of the same memory."""
    rows = slice(sum(images.counts[:first]), sum(images.counts[:end]))
    parts = dict(patches=images.patches[rows], places=images.places[rows], grids=images.grids[first:end])
    parts |= dict(offsets=images.offsets[first : end + 1] - rows.start, counts=images.counts[first:end])
    return dataclasses.replace(images, **parts, longest=max(parts["counts"]))


def views_of(images):
    patches = images.patches
    changed = {
        "itself": patches,
        "normalised": patches / 255,
        "one channel": patches[:, :1],
        "transposed": patches.transpose(-1, -2),
        "other bits": patches.view(torch.int32),
    }
    views = {kind: dataclasses.replace(images, patches=made) for kind, made in changed.items()}
    views |= {"two images": images_between(images, 0, 2), "all but the first": images_between(images, 1, 5)}
    return views | {"shifted places": dataclasses.replace(images, places=images.places.flip(0))}


@pytest.mark.parametrize("kind", views_of(pack(images_of(), 4)))
def test_a_part_of_a_batch_stays_that_part(kind, monkeypatch):
    """Views of the buffer are not what the buffer would be cut into, when it is sent, copied or saved."""
    part = views_of(pack(images_of(), 4))[kind]
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda buffer: buffer.clone())  # without a GPU there is none
    copies = part.to("cpu"), pickle.loads(pickle.dumps(part)), copy.deepcopy(part), part.pin_memory(), part.cpu()
    for again in copies:
        for name in ("patches", "places", "offsets", "grids"):
            assert torch.equal(getattr(again, name), getattr(part, name)), name
        assert (again.counts, again.longest) == (part.counts, part.longest)


def test_a_packed_batch_is_saved_once(tmp_path):
    images = pack(images_of(raw=True), 4)
    torch.save(images, tmp_path / "batch.pt")
    assert (tmp_path / "batch.pt").stat().st_size < 1.5 * images.buffer.numel() + 5000
    again = torch.load(tmp_path / "batch.pt", weights_only=False)
    assert torch.equal(again.patches, images.patches) and again.counts == images.counts and again.buffer is not None
    assert repr(again) == "PackedImages(5 images, patches (135, 3, 4, 4) torch.uint8 on cpu)"
