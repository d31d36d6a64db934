"""LeJEPA: its loss by its definition, all crops in one packed batch, several ranks, resumed runs, a collapse."""

import logging
import math

import numpy as np
import pytest
import torch
from checks import assert_close, randomize
from runs import cut_at, records, same_runs, training_tensors, weights, without_labels
from scipy.integrate import trapezoid

from vitfast import ViT, pack
from vitfast.errors import InputError
from vitfast.train.lejepa import COLLAPSED, Collapse, LeJEPA, draw_directions, effective_dimensions, sigreg
from vitfast.train.trainer import train

SHAPE = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, class_token=False, global_pool="avg")


def make(dtype: torch.dtype = torch.float64, **options) -> LeJEPA:
    return LeJEPA(randomize(ViT(**{**SHAPE, **options})), 2, 3, 0.05, width=48, dim=8).to(dtype).train()


def crops(count: int = 6, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Two global and three local views of `count` images, of which each differs."""
    return [torch.randn(count, 3, side, side, dtype=dtype) for side in (32, 32, 16, 16, 16)]


def packed(views: list[torch.Tensor]):
    return pack([crop for view in views for crop in view], 8)


def by_definition(z: np.ndarray, directions: np.ndarray, share: float, global_crops: int) -> float:
    """The loss in NumPy, with complex exponentials: z (V, N, K), directions (K, M)."""
    views, images, _ = z.shape
    t = np.linspace(0, 3, 17)
    statistics, directions = [], directions / np.linalg.norm(directions, axis=0)
    for v in range(views):
        for direction in directions.T:
            x = z[v] @ direction
            phi = np.array([np.exp(1j * knot * x).mean() for knot in t])
            error = np.abs(phi - np.exp(-(t**2) / 2)) ** 2 * np.exp(-(t**2) / 2)
            statistics.append(images * 2 * trapezoid(error, t))
    centre = z[:global_crops].mean(0)
    prediction = np.mean([(centre - z[v]) ** 2 for v in range(views)])
    return (1 - share) * prediction + share * np.mean(statistics)


def test_the_loss_is_that_of_its_definition():
    model, views, directions = make(), crops(), draw_directions(8, seed=5)
    loss, _ = model(packed(views), directions)
    model.vit.dynamic_img_size = True
    z = model.projector(torch.cat([model.vit(view) for view in views])).unflatten(0, (5, -1)).detach().numpy()
    expected = by_definition(z, directions.double().numpy(), 0.05, 2)
    assert loss.item() == pytest.approx(expected, rel=1e-12)


def test_sigreg_is_small_for_normal_projections_alone():
    """Its mean over normal samples is the integral of w (1 - exp(-t^2)), by the variance of exp(i t x)."""
    torch.manual_seed(0)
    directions = draw_directions(16, seed=1).double()[:, :24]
    t = np.linspace(0, 3, 17)
    expected = 2 * trapezoid(np.exp(-(t**2) / 2) * (1 - np.exp(-(t**2))), t)
    normal = torch.randn(80, 100, 16, dtype=torch.float64)
    assert sigreg(normal, directions).item() == pytest.approx(expected, rel=0.15)
    for other in (3 * normal, normal + 1, torch.zeros_like(normal)):
        assert sigreg(other, directions) > 5 * expected


@pytest.mark.parametrize("options", [{}, dict(reg_tokens=2), dict(class_token=True, global_pool="token")], ids=str)
def test_one_packed_batch_equals_separate_forwards(options):
    """Features and gradients of all crops at once, to 1e-9 in float64; BatchNorm sees all views in both."""
    model, views, directions = make(**options), crops(), draw_directions(8, seed=3)
    features = model.vit(packed(views))
    loss, _ = model(packed(views), directions)
    loss.backward()
    together = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.vit.dynamic_img_size = True
    apart = torch.cat([model.vit(view) for view in views])
    assert_close(features, apart, atol=1e-9)
    z = model.projector(apart).unflatten(0, (5, -1))
    prediction = (z[:2].mean(0) - z).square().mean()
    (0.95 * prediction + 0.05 * sigreg(z, directions)).backward()
    assert together.keys() == {name for name, p in model.named_parameters() if p.grad is not None}
    for name, p in model.named_parameters():
        if name in together:
            assert_close(together[name], p.grad, atol=1e-9)
    assert together["vit.patch_embed.proj.weight"].abs().max() > 1e-6


def test_checkpointed_blocks_give_the_same_gradients():
    results = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = make()
        model.vit.set_grad_checkpointing(checkpointing)
        torch.manual_seed(1)
        model(packed(crops()), draw_directions(8, seed=3))[0].backward()
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    for one, other in zip(*results, strict=True):
        assert_close(one, other, atol=1e-12)


@pytest.mark.slow
def test_the_compiled_encoder_gives_the_same_loss():
    model, views, directions = make(torch.float32), crops(dtype=torch.float32), draw_directions(8, seed=3)
    eager, dimensions = model(packed(views), directions)
    model.compile(backend="eager", fullgraph=True)
    loss, same = model(packed(views), directions)
    assert_close(loss, eager, atol=1e-6)
    assert_close(same, dimensions, atol=1e-4)


def test_autocast():
    model, views, directions = make(torch.float32), crops(dtype=torch.float32), draw_directions(8, seed=3)
    exact, _ = model(packed(views), directions)
    with torch.autocast("cpu", torch.bfloat16):
        low, _ = model(packed(views), directions)
    low.backward()
    assert low.dtype == torch.float32 and low.item() == pytest.approx(exact.item(), rel=0.05)


def test_effective_dimensions():
    torch.manual_seed(0)
    z, line = torch.randn(1, 4000, 12, dtype=torch.float64), torch.randn(12, dtype=torch.float64)
    variances = np.linalg.eigvalsh(np.cov(z[0].numpy().T, bias=True))
    expected = variances.sum() ** 2 / ((variances**2).sum() + 12e-4)
    assert effective_dimensions(z).item() == pytest.approx(expected, rel=1e-9) and expected > 11.5
    on_a_line = z[..., :1] * line
    assert effective_dimensions(on_a_line).item() == pytest.approx(1, abs=0.01)
    assert effective_dimensions(1e-4 * z) < 0.01 and effective_dimensions(torch.ones_like(z)) == 0
    views = torch.cat([z, -z])  # views that differ, of images that do not
    assert effective_dimensions(views) < 1e-6


def test_directions_follow_the_seed_alone():
    torch.manual_seed(0)
    first = draw_directions(16, seed=7)
    torch.manual_seed(1)
    assert torch.equal(first, draw_directions(16, seed=7)) and not torch.equal(first, draw_directions(16, seed=8))


def test_wrong_input_is_named():
    model = make()
    with pytest.raises(ValueError, match="LeJEPA: crops must be 5 for each image, got 7"):
        model(pack([torch.randn(3, 16, 16, dtype=torch.float64)] * 7, 8), draw_directions(8, 0))
    with pytest.raises(InputError, match="relative positions takes images of one size|images of one size"):
        LeJEPA(ViT(**SHAPE, pos_embed="relative"))


# ---- runs


def test_a_run_is_resumed_bit_for_bit(tmp_path, monkeypatch):
    train(without_labels(tmp_path / "whole", steps=5, save_every=2))
    cut_at(monkeypatch, 3)
    with pytest.raises(KeyError):
        train(without_labels(tmp_path / "cut", steps=5, save_every=2))
    monkeypatch.undo()
    train(without_labels(tmp_path / "cut", steps=5, save_every=2))
    assert same_runs(tmp_path / "whole", tmp_path / "cut")
    assert not any("projector" in key for key in weights(tmp_path / "cut"))
    assert any("projector" in key for key in training_tensors(tmp_path / "cut"))
    model = ViT.from_pretrained(tmp_path / "cut" / "checkpoints" / "last")
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 64)


def test_accumulated_steps_take_all_images(tmp_path):
    """Two micro-batches have statistics of their own, and together as many crops."""
    summary = train(without_labels(tmp_path / "run", steps=2, accumulate=2))
    assert summary["steps"] == 2 and math.isfinite(summary["rank"])


@pytest.mark.slow
@pytest.mark.reports
def test_a_planted_collapse_is_named_within_two_epochs(tmp_path, monkeypatch, caplog):
    """From step 15 on, after two and a half epochs of six steps, all images have the same features."""
    call = LeJEPA.forward

    def planted(self, *args):
        self.steps = getattr(self, "steps", 0) + 1
        for parameter in self.vit.fc_norm.parameters() if self.steps >= 15 else ():
            parameter.data.zero_()
        return call(self, *args)

    monkeypatch.setattr(LeJEPA, "forward", planted)
    with caplog.at_level(logging.WARNING, logger="vitfast"):
        train(without_labels(tmp_path / "run", steps=30, eval_every=100, save_every=100))
    (message,) = [record.message for record in caplog.records if "collapsed" in record.message]
    assert "since epoch 2." in message and "sigreg_lambda" in message
    ranks = [(float(epoch), float(rank)) for epoch, rank in records(tmp_path / "run", "train", "epoch", "rank")]
    assert all(rank > COLLAPSED for epoch, rank in ranks if epoch < 2.2) and ranks[-1][1] < 0.1
    page = (tmp_path / "run" / "report.html").read_text()
    assert "The model has collapsed: from epoch 2." in page and "Neighbours" in page


@pytest.mark.slow
def test_without_sigreg_a_run_collapses_and_says_so(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="vitfast"):
        train(
            without_labels(
                tmp_path / "run", steps=72, sigreg_lambda=0.0, lr=3e-3, lr_end=3e-3, eval_every=100, save_every=100
            )
        )
    assert [record.message for record in caplog.records if "has collapsed" in record.message]


@pytest.mark.parametrize("per_epoch", [1, 4, 50])
def test_collapses_are_named_once_and_in_time(per_epoch, caplog):
    watch = Collapse()
    with caplog.at_level(logging.WARNING, logger="vitfast"):
        for step in range(1, 3 * per_epoch + 1):
            watch.add(step / per_epoch, 8.0)
        assert not caplog.records
        named = None
        for step in range(3 * per_epoch + 1, 9 * per_epoch + 1):
            watch.add(step / per_epoch, 1.0)
            named = named or (step / per_epoch if caplog.records else None)
    assert named <= 5 and len(caplog.records) == 1
    resumed = Collapse(50.0)
    resumed.add(50.5, 1.0)
    assert len(caplog.records) == 1  # half an epoch since it was resumed
    watch.add(10, 8.0)
    watch.add(11, 1.0)
    watch.add(12, 1.0)
    assert len(caplog.records) == 2 and "since epoch 10.0" in caplog.records[1].message


@pytest.mark.slow
def test_a_compiled_run_is_the_eager_one(tmp_path, monkeypatch):
    """The encoder is one graph of crops and, in evaluations, one of whole images; lowering is left out."""
    compiled = []

    def compile_it(module, **options):
        compiled.append(module)
        module._compiled_call_impl = torch.compile(module._call_impl, backend="aot_eager", fullgraph=True)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_it)
    found = []
    for name, compiling in (("eager", False), ("compiled", True)):
        summary = train(without_labels(tmp_path / name, steps=4, compile=compiling, drop_path=0.0))
        losses = [float(loss) for loss in records(tmp_path / name, "train", "loss")]
        found.append([*losses, summary["rank"]])  # k-NN counts images, and rounding may move one
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    (encoder,) = compiled
    assert isinstance(encoder, ViT)
