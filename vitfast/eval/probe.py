"""Frozen features, and two classifiers on them: a weighted k-NN and a linear probe.

x (n, D) features, y (n,) class numbers 0 .. K-1. Every classifier takes the training pairs and the features of the
images to classify, and returns their classes (m,).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.loader import Data
from ..data.samples import counts
from ..errors import InputError
from ..model.baselines import normalized
from ..run.device import autocast
from .accuracy import evaluating

CHUNK = 1024  # images compared with all training images at a time


class Features(NamedTuple):
    """Features of the images of a source that could be read."""

    x: Tensor  # (n, D) fp32, on the CPU
    y: Tensor  # (n,) class numbers
    index: Tensor  # (n,) which images of the source they are
    unreadable: int  # how many are left out


@torch.inference_mode()
def features(model: nn.Module, data: Data, source, device: torch.device, dtype: torch.dtype | None) -> Features:
    """The inputs of a model's last linear layer (`pre_logits`) for the images of a source of `data`.

    model: a ViT or a baseline. Images that cannot be read are left out, with a warning. Raises InputError if no image
    can be read or more than `max_unreadable` cannot, and if images have several classes.
    """
    if data.multi_label:
        raise InputError(f"images of {data.config.data!r} have several classes; features are classified by one")
    xs, ys, unreadable = [], [], 0
    with evaluating(model):
        for images, labels, messages in data.in_order(source):
            with autocast(device, dtype):
                x = model.forward_features(normalized(model, images.to(device, non_blocking=True)))
                x = model.forward_head(x, pre_logits=True)
            xs.append(x.float().cpu())
            ys.append(labels)
            unreadable += data.left_out(messages)
    y = torch.cat(ys) if ys else torch.empty(0)
    index = counts(y).nonzero()[:, 0]
    data.check_left_out(unreadable, len(index))
    return Features(torch.cat(xs)[index], y[index], index, unreadable)


def whitening(x: Tensor) -> Callable[[Tensor], Tensor]:
    """A function of features (m, D), in float64, that gives the columns of x mean 0 and deviation 1.

    1e-5 is added to the deviation.
    """
    mean, scale = x.double().mean(0), x.double().std(0, correction=0) + 1e-5
    return lambda features: (features.double() - mean) / scale


def knn(x: Tensor, y: Tensor, queries: Tensor, classes: int, k: int = 20, temperature: float = 0.07) -> Tensor:
    """The vote of the k training images nearest by cosine, each of weight exp(similarity / temperature).

    The method is that of Wu et al., 2018, the values of k and temperature are those of DINO, 2021.
    """
    x, y, votes = F.normalize(x.float(), dim=1), y.to(x.device), []
    for chunk in queries.split(CHUNK):
        similarity, nearest = (F.normalize(chunk.float(), dim=1) @ x.T).topk(min(k, len(x)))
        votes.append((F.one_hot(y[nearest], classes) * (similarity / temperature).exp()[..., None]).sum(1).argmax(1))
    return torch.cat(votes)


def linear(x: Tensor, y: Tensor, queries: Tensor, classes: int, l2: float = 1.0) -> Tensor:
    """Multinomial logistic regression on whitened features: scikit-learn's L-BFGS.

    Minimises the summed loss + l2 / 2 |W|^2. Raises InputError where the training images are of one class.
    """
    from sklearn.linear_model import LogisticRegression

    if len(y.unique()) < 2:
        raise InputError("a linear probe needs training images of two classes at least")
    whiten = whitening(x)
    model = LogisticRegression(C=1 / l2, max_iter=1000).fit(whiten(x).numpy(), y.numpy())
    return torch.from_numpy(model.predict(whiten(queries).numpy()))
