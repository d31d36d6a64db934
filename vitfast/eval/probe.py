"""Frozen features, and two classifiers on them: a weighted k-NN and a linear probe.

x (n, D) features, y (n,) class numbers 0 .. K-1. Every classifier takes the training pairs and the features of the
images to classify, and returns their classes (m,).
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..baselines import normalized
from ..device import autocast
from ..errors import InputError

CHUNK = 1024  # images compared with all training images at a time


@torch.inference_mode()
def features(
    model: nn.Module, batches: Iterable, device: torch.device, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """The inputs of a model's last linear layer (`pre_logits`) for batches (images, labels).

    model: a ViT or a baseline. Returns fp32 features (n, D) and labels (n,), on the CPU. Raises InputError where there
    are no images.
    """
    was_training = model.training
    model.eval()
    xs, ys = [], []
    for images, labels in batches:
        with autocast(device, dtype):
            x = model.forward_features(normalized(model, images.to(device, non_blocking=True)))
            x = model.forward_head(x, pre_logits=True)
        xs.append(x.float().cpu())
        ys.append(labels)
    model.train(was_training)
    if not xs:
        raise InputError("no images to take features of")
    return torch.cat(xs), torch.cat(ys)


def whitening(x: Tensor) -> Callable[[Tensor], Tensor]:
    """A function of features (m, D), in float64: under it the columns of x have mean 0 and deviation 1.

    1e-5 is added to the deviation.
    """
    mean, scale = x.double().mean(0), x.double().std(0, correction=0) + 1e-5
    return lambda features: (features.double() - mean) / scale


def knn(x: Tensor, y: Tensor, queries: Tensor, classes: int, k: int = 20, temperature: float = 0.07) -> Tensor:
    """The vote of the k training images nearest by cosine, each of weight exp(similarity / temperature).

    Wu et al., 2018, with the numbers of DINO, 2021.
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
