"""Training on images of many sizes: each image weighs as much, epochs are passes, and what is told is counted."""

import pytest
import torch
from runs import digits

from vitfast import ViT
from vitfast.train.losses import softmax_loss
from vitfast.train.recipes import resolve
from vitfast.train.setup import set_up
from vitfast.train.step import TrainStep
from vitfast.train.trainer import train

CPU = torch.device("cpu")
QUICK = dict(sizes="16:40", tokens_per_step=350, steps=8, warmup_steps=2)


def test_each_image_weighs_as_much():
    """The gradients of a step are those of the mean loss over its images, however they are split."""
    config = digits(accumulate=3, clip_norm=None, label_smoothing=0.0, **QUICK)
    model, data = set_up(config, CPU)
    step = TrainStep(config, model, data)
    images, labels, _ = next(data.train_batches(0, 1))
    assert len(images) == 3 and len({len(some) for some in images}) > 1
    loss, _ = step.accumulate(images, labels, 3, len(labels))
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    truth = softmax_loss(torch.cat([model(some) for some in images]), labels)
    truth.backward()
    assert loss.item() == pytest.approx(truth.item(), abs=1e-6)
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.reports
def test_what_is_told_is_counted(tmp_path):
    summary = train(digits(tmp_path, **QUICK))
    _, data = set_up(digits(**QUICK), CPU)
    batches = [images for images, *_ in data.train_batches(0, 8)]
    images = sum(len(some) for each in batches for some in each)
    patches = sum(len(some.patches) for each in batches for some in each)
    padded = sum(len(some) * max(some.counts) for each in batches for some in each)
    assert summary["images_per_step"] == round(images / 8, 2) and summary["epochs"] == round(images / 1437, 4)
    assert summary["patches_per_image"] == round(patches / images, 2)
    assert summary["padding_not_computed"] == round(1 - patches / padded, 4) > 0.3
    assert sum(summary["sizes"].values()) == images and list(summary["sizes"]) == ["16", "24", "32", "40"]
    text = (tmp_path / "report.html").read_text()
    assert "how many images got each size" in text and "would be padding" in text
    assert "padding not computed" in text and "{&#x27;16" not in text and "{'16" not in text


@pytest.mark.slow
def test_epochs_are_passes_over_the_data(tmp_path):
    config = digits(tmp_path, **QUICK | dict(steps=None, epochs=2, train_images=400))
    summary = train(config)
    expected = pytest.approx(summary["expected_images_per_step"], rel=0.04)
    assert summary["epochs"] == pytest.approx(2, rel=0.04) and summary["images_per_step"] == expected
    before = (tmp_path / "metrics.csv").read_text()
    assert train(config)["steps"] == summary["steps"] and (tmp_path / "metrics.csv").read_text() == before  # finished


@pytest.mark.long
def test_digits_of_many_sizes_reach_the_demos_accuracy(tmp_path):
    """The recipe of the demo with sizes, the mean of three seeds: 0.9889 without; 360 images have an error of 0.0055.

    With torch 2.14 the seeds gave 0.9694, 0.9833 and 0.9944.
    """
    fields = dict(sizes="24:40", tokens_per_step=850, pos_embed="factorized")
    found = [train(digits(tmp_path / str(seed), seed=seed, **fields))["accuracy"] for seed in range(3)]
    assert sum(found) / 3 >= 0.9889 - 2 * 0.0055, found


@pytest.mark.slow
def test_finetuning_takes_sizes(tmp_path):
    """Weights of one size go on at many; the mode of drop path is the recipe's."""
    ViT.from_preset("Nano/8", img_size=32, num_classes=10).save_pretrained(tmp_path / "weights")
    own = dict(data="digits", weights=str(tmp_path / "weights"), output=str(tmp_path / "run"), device="cpu")
    config = resolve("finetune", own | QUICK | dict(drop_path=0.5, drop_path_mode="subset", steps=2))
    assert train(config)["steps"] == 2
    assert ViT.from_pretrained(tmp_path / "run" / "checkpoints" / "last").config["drop_path_mode"] == "subset"
