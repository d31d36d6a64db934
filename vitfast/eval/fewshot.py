"""Few-shot evaluation of frozen features by least squares in closed form, k-NN or a linear probe.

x (n, D) features, y (n,) class numbers 0 .. K-1. Every classifier takes the training pairs and the features of the
images to classify, and returns their classes (m,).
"""

import logging
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.loader import Data
from ..data.samples import counts
from ..data.sources import Source, Subset
from ..errors import InputError
from ..model.baselines import normalized
from ..run.config import Config
from ..run.device import autocast
from .accuracy import evaluating, open_weights

logger = logging.getLogger("vitfast")
SHOTS = (1, 5, 10, 25)
CHUNK = 1024  # images compared with all training images at a time
BIAS = 100.0  # the constant feature: so large that the regularisation hardly touches the bias


class Features(NamedTuple):
    """The features of those images of a source that could be read."""

    x: Tensor  # (n, D) fp32, on the CPU
    y: Tensor  # (n,) class numbers, or (n, K) zeros and ones
    index: Tensor  # (n,) which images of the source they are
    unreadable: int  # how many images are left out


@torch.no_grad()  # FSDP2 would keep tensors of inference mode, which training cannot use
def features(model: nn.Module, data: Data, source: Source, embed: Callable[[Tensor], Tensor] | None = None) -> Features:
    """The inputs of a model's last linear layer (`pre_logits`) for images of `data`, of all ranks.

    model: a ViT or a baseline. embed: computes features (B, D) of its images in place of it. Images that cannot be read
    are left out, with a warning. Raises InputError if no image can be read or more than `max_unreadable` cannot.
    """

    def pre_logits(images: Tensor) -> Tensor:
        return model.forward_head(model.forward_features(normalized(model, images)), pre_logits=True)

    embed = embed or pre_logits
    xs, ys, unreadable = [], [], 0
    with evaluating(model):
        for images, labels, messages in data.in_order(source):
            with autocast(data.device, data.dtype):
                x = embed(images.to(data.device, non_blocking=True))
            xs.append(x.float().cpu())
            ys.append(labels)
            unreadable += data.left_out(messages)
    *everyone, unreadable = zip(*data.ranks.gather((torch.cat(xs), torch.cat(ys), unreadable)))
    x, y = (torch.stack(parts, 1).flatten(0, 1) for parts in everyone)  # the ranks take turns in the images
    index = counts(y).nonzero()[:, 0]
    data.check_left_out(sum(unreadable), len(index))
    return Features(x[index], y[index], index, sum(unreadable))


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


def ridge(x: Tensor, y: Tensor, queries: Tensor, classes: int, l2: float) -> Tensor:
    """Regularised least squares from whitened features and a constant onto {-1, 1}^K, in float64.

    As the released evaluator of the ViT's authors (big_vision, fewshot_lsr) does, it minimises |X W - Y|^2 + l2 |W|^2,
    in which W includes the constant's weights.
    """
    from sklearn.linear_model import Ridge

    whiten = whitening(x)
    design, others = (F.pad(whiten(part), (0, 1), value=BIAS).numpy() for part in (x, queries))
    model = Ridge(l2, fit_intercept=False, copy_X=False).fit(design, 2.0 * F.one_hot(y, classes).double().numpy() - 1)
    scores = model.predict(others).reshape(len(others), classes)  # for one class scikit-learn returns a vector
    return torch.from_numpy(scores.argmax(1))


METHODS = ("ridge", "knn", "linear")
L2 = {"ridge": 2.0**10, "linear": 1.0}  # the defaults


def classify(method: str, x: Tensor, y: Tensor, queries: Tensor, classes: int, l2: float | None = None) -> Tensor:
    """Classes (m,) of the queries by a method of METHODS; `l2` is for those in L2."""
    if method == "knn":
        return knn(x, y, queries, classes)
    l2 = L2[method] if l2 is None else l2
    return (ridge if method == "ridge" else linear)(x, y, queries, classes, l2)


def check_l2(method: str, l2: float | None) -> None:
    """Raises InputError where a regularisation is not positive, or is given to a method that has none."""
    if l2 is not None and not 0 < l2 < math.inf:
        raise InputError(f"l2 must be positive, got {l2}")
    if l2 is not None and method not in L2:
        raise InputError(f"{method} has no l2; it is for {' and '.join(L2)}")


def draw_shots(labels: np.ndarray, classes: int, shots: int, seed: int) -> np.ndarray:
    """Indices of `shots` images of every class, or all of a class that has fewer.

    With one seed, a draw of fewer shots is contained in a draw of more.
    """
    generator = np.random.default_rng(seed)
    orders = [generator.permutation(np.flatnonzero(labels == k)) for k in range(classes)]
    return np.concatenate([order[:shots] for order in orders])


def training_features(model, data: Data, shots: list[int | None], seeds: int) -> tuple[Features, dict]:
    """The features of all training images that were drawn, and the rows of each draw, by (shots, seed).

    Where labels are known beforehand, only the images drawn are read; `None` shots stands for all images. A draw lacks
    an image that cannot be read.
    """

    def draws(labels: np.ndarray) -> dict:
        every = {(None, 0): np.arange(len(labels))} if None in shots else {}
        return every | {(n, s): draw_shots(labels, len(data.classes), n, s) for n in shots if n for s in range(seeds)}

    source = data.train
    labels = None if None in shots or source.multi_label else source.labels
    if labels is None:
        found = features(model, data, source)
        return found, draws(found.y.numpy())
    drawn = draws(np.array(labels))
    kept = np.unique(np.concatenate(list(drawn.values())))
    found = features(model, data, Subset(source, kept.tolist()))
    kept = kept[found.index.numpy()]
    return found, {key: np.searchsorted(kept, indices[np.isin(indices, kept)]) for key, indices in drawn.items()}


def few_shot(
    config: Config,
    method: str = "ridge",
    shots: list[int | None] | None = None,
    seeds: int = 3,
    l2: float | None = None,
    img_size: int | tuple[int, int] | None = None,
) -> dict:
    """The accuracy of frozen `config.weights` on `config.data` with few labelled images of each class.

    It is measured on the validation split. method: one of METHODS. shots: numbers of images a class, None for all (the
    default of knn and linear; that of ridge is SHOTS). seeds: draws of each number. Raises InputError for wrong input.
    """
    shots = shots or (list(SHOTS) if method == "ridge" else [None])
    if any(n is not None and n < 1 for n in shots) or seeds < 1:
        raise InputError("few-shot evaluation takes positive numbers of shots and seeds")
    check_l2(method, l2)
    if config.sizes:
        raise InputError("fewshot takes images of one size: leave sizes out")
    model, data = open_weights(config, img_size)
    if data.multi_label:
        raise InputError(f"images of {config.data!r} have several classes; features are classified by one")
    (x, y, _, left_out), drawn = training_features(model, data, shots, seeds)
    queries, truth, _, also_left_out = features(model, data, data.val)
    at = data.device if method == "knn" else torch.device("cpu")
    results = []
    for n in shots:
        draws, accuracies = [indices for (number, _), indices in drawn.items() if number == n], []
        wanted = (n or 0) * len(data.classes)
        if (least := min(map(len, draws))) < wanted:
            said = "%d images a class: some have fewer that can be read, and %d of %d are used"
            logger.warning(said, n, least, wanted)
        for chosen in draws:
            found = classify(method, x[chosen].to(at), y[chosen].to(at), queries.to(at), len(data.classes), l2)
            accuracies.append((found.cpu() == truth).double().mean().item())
        results.append(dict(shots=n or "all", accuracy=sum(accuracies) / len(accuracies), accuracies=accuracies))
    used = dict(l2=L2[method] if l2 is None else l2) if method in L2 else {}
    images = dict(classes=len(data.classes), images=len(truth), unreadable_images=left_out + also_left_out)
    return dict(weights=config.weights, data=config.data, method=method, **used, **images, results=results)
