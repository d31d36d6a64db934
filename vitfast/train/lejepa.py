"""LeJEPA: learning from images without labels, teacher or stop-gradient.

The method is that of Balestriero & LeCun, 2025 (arXiv 2511.08544).

Of each of N images there are V views: random crops, the first G of them large (global). The encoder and a projector map
view v of image n to z[v, n] in R^K. Views of one image shall agree, and over the images each view shall be distributed
as N(0, 1) in every direction, which an encoder that maps all images to one point cannot be:

    loss       = (1 - lambda) prediction + lambda SIGReg
    prediction = mean over v, n, k of (c[n, k] - z[v, n, k])^2,  c[n] = mean of z[v, n] over the global views v < G
    SIGReg     = mean over v and m of EP(z[v] a[m]),  a[m] random unit vectors, new in every step, the same on all ranks
    EP(x)      = N * integral over t of exp(-t^2/2) |mean over n of exp(i t x[n]) - exp(-t^2/2)|^2

EP is the statistic of Epps and Pulley for normality. Its integrand is even, and its integral is taken by the trapezoid
rule from 0 to 3, doubled. The 17 knots, the 256 directions (1,024 in their package) and the projector (two hidden
layers of 2048 with BatchNorm and ReLU) are those of the authors' small example, MINIMAL.md of rbalestr-lab/lejepa.

What differs: the projector and the probes read what the ViT's head would read, pooled and normalised, where that
example puts a linear layer of 512 between; and statistics are those of a micro-batch where gradients are accumulated.
They are always those of all ranks.
"""

import logging

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import MLP

from ..model.vit import ViT
from ..ops.packed import PackedImages
from .unlabelled import Unlabelled

KNOTS, LAST_KNOT, DIRECTIONS = 17, 3.0, 256
# Effective dimensions of the projections, of which there are K, below which they count as collapsed: all images lie on
# a point or a line.
COLLAPSED = 1.2
FLOOR = 1e-4  # a variance of projections, which shall be 1, that counts as nothing
logger = logging.getLogger("vitfast")


def sum_over_ranks(x: Tensor) -> Tensor:
    """The sum of the ranks' tensors; the gradient of each is the sum of all of theirs."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return x
    from torch.distributed.nn.functional import all_reduce

    return all_reduce(x)


def mean_over_ranks(x: Tensor) -> tuple[Tensor, Tensor]:
    """(mean over the first dimension of all ranks' tensors (n, ...), how many rows they have together)."""
    sums = sum_over_ranks(torch.cat([x.sum(0).flatten(), x.new_full((1,), len(x))]))
    count = sums[-1].detach()
    return sums[:-1].view(x.shape[1:]) / count, count


class BatchNorm(nn.BatchNorm1d):
    """BatchNorm by the batch of all ranks, without running statistics, on (B, D).

    nn.SyncBatchNorm, which it equals, refuses tensors of the CPU.
    """

    def __init__(self, width: int):
        super().__init__(width, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        centred = x - mean_over_ranks(x)[0]
        variance = mean_over_ranks(centred.square())[0]
        return centred * (variance + self.eps).rsqrt() * self.weight + self.bias


def draw_directions(dim: int, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Random directions, the columns of (dim, DIRECTIONS), by the seed alone: the same on all ranks."""
    drawn = torch.randn(dim, DIRECTIONS, generator=torch.Generator().manual_seed(seed))
    return drawn.to(device, non_blocking=True)


def sigreg(z: Tensor, directions: Tensor) -> Tensor:
    """SIGReg of projections (V, N, K) along directions (K, M): a scalar, near 1 where they are normal."""
    directions = F.normalize(directions.to(z.dtype), dim=0)
    t = torch.linspace(0, LAST_KNOT, KNOTS, device=z.device, dtype=z.dtype)
    normal = torch.exp(-t.square() / 2)
    weights = torch.full_like(t, 2 * LAST_KNOT / (KNOTS - 1))  # twice, for the integral from -3 to 3
    weights[0], weights[-1] = weights[0] / 2, weights[-1] / 2
    x = (z.transpose(0, 1) @ directions)[..., None] * t  # (N, V, M, knots)
    means, count = mean_over_ranks(torch.stack([x.cos(), x.sin()], -1))
    error = (means[..., 0] - normal).square() + means[..., 1].square()
    return (error @ (weights * normal)).mean() * count


@torch.no_grad()
def effective_dimensions(z: Tensor) -> Tensor:
    """In how many dimensions the images differ, of K: (sum of variances)^2 / sum of their squares.

    z: projections (V, N, K). The variances are those along the principal axes of the images' means over their views. K
    of them that are all 1, as SIGReg wants, give K; K that are far below 1e-2 give nearly 0, as of one point.
    """
    centres = z.mean(0)
    mean, count = mean_over_ranks(centres)
    covariance = sum_over_ranks((centres - mean).T @ (centres - mean)) / count
    return covariance.trace().square() / (covariance.square().sum() + len(covariance) * FLOOR)


class Collapse:
    """Warns once the effective dimensions of the projections stayed below COLLAPSED for an epoch."""

    def __init__(self, epoch: float = 0.0):
        self.last, self.since, self.named = epoch, None, False  # epochs: of the last call, of the start of a collapse

    def add(self, epoch: float, dimensions: float | None) -> None:
        """Takes the mean since the last call, up to this epoch; None for objectives without projections."""
        if dimensions is None or dimensions >= COLLAPSED:
            self.since, self.named = None, False
        elif self.since is None:
            self.since = self.last
        self.last = epoch
        if self.since is not None and not self.named and epoch - self.since >= 1:
            self.named = True
            what = f"since epoch {self.since:.1f} all images have nearly the same projections"
            advice = "a larger sigreg_lambda, a lower --lr, a longer warm-up or a larger --batch-size may help"
            logger.warning("the model has collapsed: %s (effective dimensions %.2f); %s", what, dimensions, advice)


class LeJEPA(Unlabelled):
    """A ViT that learns by LeJEPA; `vit` is an ordinary ViT without its head.

    global_crops, local_crops: how many views of an image there are. sigreg_lambda: SIGReg's share in the loss. width,
    dim: of the projector's two hidden layers and of its projections, K. Raises InputError for a ViT that takes images
    of one size alone.
    """

    measure = "rank"

    def __init__(
        self,
        vit: ViT,
        global_crops: int = 2,
        local_crops: int = 6,
        sigreg_lambda: float = 0.05,
        width: int = 2048,
        dim: int = 16,
    ):
        vit.check_many_sizes()
        super().__init__(vit)
        self.global_crops, self.views = global_crops, global_crops + local_crops
        self.sigreg_lambda, self.dim = sigreg_lambda, dim
        weight, projector = next(vit.parameters()), MLP(vit.embed_dim, [width, width, dim], norm_layer=BatchNorm)
        self.projector = projector.to(weight.device, weight.dtype)

    def compile(self, *args, **options) -> None:
        """Compiles the encoder, which takes nearly all of the time; the loss communicates between ranks."""
        self.vit.compile(*args, **options)

    def drawn(self, seed: int, device: torch.device) -> tuple[Tensor]:
        return (draw_directions(self.dim, seed, device),)

    def forward(self, crops: PackedImages, directions: Tensor) -> tuple[Tensor, Tensor]:
        """The crops of N images, packed view by view -> (loss, effective dimensions of the projections).

        crops: view 0 of all images, then view 1, and so on, the global ones first; raw uint8 or normalised floats.
        directions: (K, M) as `draw_directions` makes them. Raises ValueError for another number of crops.
        """
        if len(crops) % self.views or not len(crops):
            raise ValueError(f"LeJEPA: crops must be {self.views} for each image, got {len(crops)}")
        z = self.projector(self.vit(crops)).unflatten(0, (self.views, -1))
        with torch.autocast(z.device.type, enabled=False):
            z = z.to(torch.promote_types(z.dtype, torch.float32))
            prediction = (z[: self.global_crops].mean(0) - z).square().mean()
            loss = (1 - self.sigreg_lambda) * prediction + self.sigreg_lambda * sigreg(z, directions)
            return loss, effective_dimensions(z)
