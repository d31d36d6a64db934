"""Masked patch prediction: its targets, its corruption, its loss; it learns from the other patches."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checks import assert_close, randomize
from runs import digits, finetuning, records, training_tensors, weights

from vitfast import ViT
from vitfast.train.masked import Corruption, MaskedPatches, colour_classes, corruption
from vitfast.train.optim import make_optimizer
from vitfast.train.trainer import train

TARGETS = ("mean", "downsized", "pixels")
SHAPE = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5)
VARIANTS = [
    dict(),
    dict(reg_tokens=2, no_embed_class=True),
    dict(global_pool="avg", class_token=False, pos_embed="sincos2d"),
    dict(pos_embed="none", residual_in_fp32=True, representation_size=16),
]
OTHERS = [
    dict(pos_embed="learn2d"),
    dict(pos_embed_at="layers"),
    dict(pos_embed="relative"),
    dict(backbone=dict(layers=[1], width=0.5)),
]


def make(target: str = "mean", share: float = 0.5, **options) -> MaskedPatches:
    return MaskedPatches(randomize(ViT(**{**SHAPE, **options})).eval(), target, share)


def pixels(count: int, size: int = 32) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8)


def cut(images: torch.Tensor, patch: int) -> np.ndarray:
    """(B, C, H, W) -> (B, N, C, P, P), row by row, by slicing."""
    ends = range(patch, images.shape[-1] + 1, patch)
    return np.stack([images.numpy()[:, :, y - patch : y, x - patch : x] for y in ends for x in ends], axis=1)


def colours(patches: np.ndarray, cells: int) -> np.ndarray:
    """(..., C, P, P) -> (..., cells * cells) by whole numbers alone.

    Areas of an odd patch overlap by a pixel, as adaptive pooling has it.
    """
    size, found = patches.shape[-1], []
    for y in range(cells):
        for x in range(cells):
            rows, columns = (slice(i * size // cells, -(-(i + 1) * size // cells)) for i in (y, x))
            area = patches[..., rows, columns].astype(np.int64)
            mean = area.sum((-1, -2)) // (area.shape[-1] * area.shape[-2]) >> 5
            found.append(mean[..., 0] * 64 + mean[..., 1] * 8 + mean[..., 2])
    return np.stack(found, axis=-1)


@pytest.mark.parametrize("patch, cells", [(8, 1), (16, 1), (16, 4), (14, 4), (32, 1)])
def test_colour_classes_are_three_bits_a_channel(patch, cells):
    patches = np.random.default_rng(0).integers(0, 256, (40, 3, patch, patch), dtype=np.uint8)
    edge = np.arange(40, dtype=np.uint8)[:, None, None] % 8 * 32  # on the edge between two classes, and one below it
    patches[:20, 0], patches[20:, 1] = edge[:20], np.maximum(edge[20:], 1) - 1
    assert np.array_equal(colour_classes(torch.from_numpy(patches), cells).numpy(), colours(patches, cells))


@pytest.mark.parametrize("patches, share, count", [(16, 0.5, 8), (16, 0.15, 2), (49, 0.5, 24), (3, 0.1, 1)])
def test_corruption_has_its_shares(patches, share, count):
    images = 3000
    chosen, masked, source = (t.numpy() for t in corruption(torch.rand(images, 3, patches), share))
    assert chosen.shape == (images, count) and all(len(set(row)) == count for row in chosen)
    own = np.broadcast_to(np.arange(patches), source.shape)
    hit = np.zeros((images, patches), bool)
    np.put_along_axis(hit, chosen, True, 1)
    swapped = source != own
    assert not (masked & ~hit).any() and not (swapped & ~hit).any() and not (masked & swapped).any()
    for what, expected in ((masked, 0.8), (swapped, 0.1), (hit & ~masked & ~swapped, 0.1)):
        total = images * count
        assert abs(what.sum() - expected * total) < 5 * math.sqrt(total * expected * (1 - expected))
    offsets = ((source - own) % patches)[swapped] - 1
    for drawn, kinds in ((chosen.ravel(), patches), (offsets, patches - 1)):  # all patches, all others alike
        bins = np.bincount(drawn, minlength=kinds)
        expected = bins.sum() / len(bins)
        assert ((bins - expected) ** 2 / expected).sum() < len(bins) + 6 * math.sqrt(2 * len(bins))
    for row, moved in zip(source, swapped):
        assert len(set(row[moved])) == moved.sum()  # no patch is taken twice


def by_hand(vit: ViT, images: torch.Tensor, mask_token: torch.Tensor, plan: Corruption) -> torch.Tensor:
    """The patches after corruption, positions added, in front of the encoder."""
    pixels, proj = (images.float() / 255 - 0.5) / 0.5, vit.patch_embed.proj
    x = F.conv2d(pixels, proj.weight, proj.bias, stride=8).flatten(2).transpose(1, 2)
    clean = x.clone()
    for b in range(len(x)):
        for n in range(x.shape[1]):
            x[b, n] = mask_token[0, 0] if plan.masked[b, n] else clean[b, plan.source[b, n]]
    prefix = vit.num_prefix_tokens
    if vit.pos_embed is not None:
        x = x + vit.pos_embed[:, 0 if vit.no_embed_class else prefix :]
    first = [t for t in (vit.cls_token, vit.reg_token) if t is not None]
    if first:
        first = torch.cat(first, 1)
        first = first if vit.pos_embed is None or vit.no_embed_class else first + vit.pos_embed[:, :prefix]
        x = torch.cat([first.expand(len(x), -1, -1), x], 1)
    return x


@pytest.mark.parametrize("options", [*VARIANTS, *OTHERS], ids=str)
def test_without_corruption_it_is_the_vit(options):
    model, images = make(**options), pixels(8)
    vit, kept = model.vit, torch.arange(16).expand(8, -1)
    nothing = Corruption(kept[:, :0], torch.zeros(8, 16, dtype=torch.bool), kept)
    with torch.no_grad():
        own = vit.fc_norm(vit.forward_features(images))[:, vit.num_prefix_tokens :]
        assert_close(model.encode(images, nothing), own, atol=1e-5)
        changed = model.encode(images, corruption(torch.rand(8, 3, 16), 0.5))
        assert (changed - own).abs().amax((1, 2)).min() > 0.01


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_patches_are_corrupted_before_they_get_their_positions(options):
    model, images = make(**options), pixels(8)
    vit = model.vit
    with torch.no_grad():
        plan = corruption(torch.rand(8, 3, 16), 0.5)
        assert (plan.source != torch.arange(16)).any() and plan.masked.any()
        expected = vit.fc_norm(vit.norm(vit.blocks(by_hand(vit, images, model.mask_token, plan))))
        assert_close(model.encode(images, plan), expected[:, vit.num_prefix_tokens :], atol=1e-4)


@pytest.mark.parametrize("target", TARGETS)
def test_the_targets_are_those_of_the_corrupted_patches(target):
    """Perfect predictions in place of the encoder have no loss; the same ones a patch further on a large one."""
    model, images = make(target), pixels(4)
    patches = cut(images, 8)
    if target == "pixels":
        perfect = torch.from_numpy((patches / 255 - 0.5) / 0.5).float().flatten(2)
    else:
        classes = torch.from_numpy(colours(patches, 1 if target == "mean" else 4))
        perfect = 50.0 * F.one_hot(classes, 512).float().flatten(2)
    model.predict = torch.nn.Identity()
    model.encode = lambda images, plan: perfect
    loss, share = model(images)
    assert loss < 1e-6 and share > 0.97
    model.encode = lambda images, plan: perfect.roll(1, 1)
    loss, share = model(images)
    assert loss > 0.3 and share < 0.5


def test_losses_of_one_colour_are_known():
    images = torch.tensor([200, 100, 10], dtype=torch.uint8)[:, None, None].expand(2, 3, 32, 32)
    for target, known in (
        ("mean", math.log(512)),
        ("downsized", math.log(512)),
        ("pixels", np.mean((np.array([200, 100, 10]) / 127.5 - 1) ** 2)),
    ):
        model = make(target)
        torch.nn.init.zeros_(model.predict.weight)
        torch.nn.init.zeros_(model.predict.bias)
        loss, share = model(images)
        assert loss.item() == pytest.approx(known, rel=1e-5) and share == 0
    model = make("mean")
    torch.nn.init.zeros_(model.predict.weight)
    model.predict.bias.data[6 * 64 + 3 * 8 + 0] = 30.0
    loss, share = model(images)
    assert loss < 1e-6 and share == 1


@pytest.mark.parametrize("target, options", list(zip(TARGETS, VARIANTS)), ids=str)
def test_every_parameter_has_a_gradient(target, options):
    model = make(target, **options)
    model(pixels(4))[0].backward()
    assert all(p.grad is not None for p in model.parameters())
    moved = (model.mask_token, model.predict.weight, model.vit.patch_embed.proj.weight)
    assert all(p.grad.abs().max() > 0 for p in moved)
    model.mask_token.grad = None
    noise = torch.rand(2, 3, 16)
    noise[:, 1] = 0.95  # all left as they are
    model(pixels(2), corruption(noise, 0.5))[0].backward()
    assert (model.mask_token.grad == 0).all()


def test_mask_and_positions_do_not_decay():
    model = make()
    groups = make_optimizer(digits(weight_decay=0.1), model).param_groups
    decayed, rest = ({id(p) for p in group["params"]} for group in groups)
    assert {id(model.mask_token), id(model.vit.pos_embed), id(model.vit.cls_token), id(model.predict.bias)} <= rest
    assert {id(model.predict.weight), id(model.vit.patch_embed.proj.weight)} <= decayed


@pytest.mark.slow
def test_compiled_equals_eager():
    """In one graph, on the same random numbers.

    Lowering is left out: it costs half a minute and knows nothing of this file.
    """
    model, images = make("mean", depth=1), pixels(4)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    results = []
    for run in (model, compiled):
        torch.manual_seed(5)
        model.zero_grad()
        loss, share = run(images)
        loss.backward()
        results.append((loss.detach(), share, model.mask_token.grad.clone()))
    for got, expected in zip(*results):
        assert_close(got, expected, atol=1e-6)


def test_autocast():
    model, images = make(), pixels(4)
    plan = corruption(torch.rand(4, 3, 16), 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        low, _ = model(images, plan)
    low.backward()
    assert low.dtype == torch.float32 and low.item() == pytest.approx(model(images, plan)[0].item(), rel=0.02)


def test_wrong_input_is_named():
    model = make()
    with pytest.raises(TypeError, match="raw uint8, whose colours are the targets, got torch.float32"):
        model(torch.rand(2, 3, 32, 32))
    with pytest.raises(ValueError, match=r"images must be \(B, 3, 32, 32\), got \(2, 3, 16, 16\)"):
        model(pixels(2, 16))


@pytest.mark.slow
def test_masked_pretraining_then_few_labels(tmp_path):
    run = tmp_path / "masked"
    summary = train(digits(run, steps=12, objective="masked", hidden_head=False, train_images=700, log_every=2))
    losses = [float(loss) for loss in records(run, "train", "loss")]
    assert losses[-1] < losses[0] and summary["top5"] is None and summary["val_images"] == 360
    assert summary["accuracy"] > 0.2 and summary["knn"] > 0.2 and summary["rank"] > 2  # of its features, by labels
    assert not any("mask_token" in key or "predict" in key for key in weights(run))
    assert any("mask_token" in key for key in training_tensors(run))
    assert train(finetuning(run, tmp_path / "fine", steps=2, shots=5))["train_images"] == 50
