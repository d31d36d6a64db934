"""The common part of objectives without labels: a ViT without its head, and evaluations of features."""

import logging
from pathlib import Path

import torch
from torch import Tensor, nn

from ..data.loader import Data
from ..data.sources import Source, Subset, evenly
from ..eval.fewshot import Features, classify, features
from ..model.vit import ViT

PROBED = 10_000  # images that fit the probes at most, and as many that measure them
logger = logging.getLogger("vitfast")


class Unlabelled(nn.Module):
    """A ViT that learns from images alone.

    `forward` returns (loss, the number that `measure` names) of a micro-batch.
    """

    measure = "accuracy"  # the column of metrics.csv for the second result
    views = 1  # crops of an image in a batch

    def __init__(self, vit: ViT):
        super().__init__()
        vit.reset_classifier(0)
        self.vit = vit

    @property
    def blocks(self) -> nn.Sequential:
        """The encoder's layers, the units of compilation and sharding."""
        return self.vit.blocks

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that are usually not decayed."""
        return {f"vit.{name}" for name in self.vit.no_weight_decay()}

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes the ViT, without what only the objective needs."""
        self.vit.save_pretrained(folder)

    def features(self, images: Tensor) -> Tensor:
        """Images (B, C, H, W) -> features (B, D), which a head would read."""
        return self.vit(images)

    def drawn(self, seed: int, device: torch.device) -> tuple[Tensor, ...]:
        """Further arguments of `forward`, drawn by a seed that all ranks share."""
        return ()


def effective_rank(x: Tensor) -> float:
    """The effective rank of features (n, D): exp of the entropy of the centred features' singular values.

    Roy & Vetterli, 2007. It lies between 1 and the smaller of n - 1 and D; 0 where all features are alike.
    """
    values = torch.linalg.svdvals(x.double() - x.double().mean(0))
    if values.sum() <= 1e-9 * x.double().norm():
        return 0.0
    shares = values / values.sum()
    return torch.special.entr(shares).sum().exp().item()


def evaluate_features(model: Unlabelled, data: Data) -> dict:
    """Evaluates features: their `rank`, and where there are labels `accuracy` and `knn`.

    accuracy: of a linear probe that is fitted on the training images of `data.probe` and measured on its validation
    images, as `knn` is; of both at most PROBED. rank: the effective rank of the measured features. They are None where
    there are no labels.
    """
    probe, fitted = data.probe or data, None

    def of_some(source: Source) -> Features:
        return features(model, probe, Subset(source, evenly(len(source), PROBED)), model.features)

    found = of_some(probe.val)
    left_out, scores = found.unreadable, dict(accuracy=None, knn=None)
    if data.probe is not None:
        fitted = of_some(probe.train)
        left_out += fitted.unreadable
    if data.ranks.first:
        scores["rank"] = effective_rank(found.x)
        for name, method in (("accuracy", "linear"), ("knn", "knn")) if fitted and len(fitted.y.unique()) > 1 else ():
            classes = classify(method, fitted.x, fitted.y, found.x, len(probe.classes))
            scores[name] = (classes == found.y).double().mean().item()
    return dict(loss=None, images=len(found.y), unreadable_images=left_out) | data.ranks.gather(scores)[0]
