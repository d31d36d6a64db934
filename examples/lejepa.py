"""LeJEPA in a plain training loop, on scikit-learn's handwritten digits: learning from images without their labels.

    python examples/lejepa.py [--steps 200] [--batch-size 64] [--apart]

Each image gives 2 large and 6 small random crops. The encoder and a projector map each crop to a point; the loss draws
the points of one image together, and keeps the points of all images normally distributed (Balestriero & LeCun, 2025;
vitfast/train/lejepa.py has the equations). All crops of a step are one packed batch, so that the small ones cost no
padding. --apart takes the two sizes in two passes and writes out the loss: the losses are the same.

Prints the losses, and how often the 20 nearest of 1,500 labelled digits name the class of another one.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor

from vitfast import ViT, pack
from vitfast.eval.fewshot import knn
from vitfast.train.lejepa import LeJEPA, draw_directions, sigreg

PATCH, LARGE, SMALL = 8, 32, 16  # pixels
LARGES, SMALLS = 2, 6  # crops of an image
KNOWN = 1500  # images to learn from, whose labels are known to the nearest neighbours alone


def digits() -> tuple[Tensor, Tensor]:
    """(1797, 3, 32, 32) images and their classes, shuffled."""
    data, order = load_digits(), torch.randperm(1797, generator=torch.manual_seed(0))
    images = F.interpolate(torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1, LARGE)
    return images.expand(-1, 3, -1, -1)[order], torch.tensor(data.target)[order]


def crops(images: Tensor, size: int, low: float, high: float) -> Tensor:
    """A random square of each image, of a share low..high of its area, resized to size x size."""
    side = torch.empty(len(images)).uniform_(low, high).sqrt()
    middle = torch.empty(2, len(images)).uniform_(-1, 1) * (1 - side)
    theta = torch.stack([side, 0 * side, middle[0], 0 * side, side, middle[1]], 1).view(-1, 2, 3).to(images)
    grid = F.affine_grid(theta, [len(images), 3, size, size], align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def loss_apart(model: LeJEPA, views: list[Tensor], directions: Tensor) -> Tensor:
    """What `model` computes of packed crops, by a pass for each size."""
    features = torch.cat([model.vit(torch.cat(views[:LARGES])), model.vit(torch.cat(views[LARGES:]))])
    z = model.projector(features).unflatten(0, (len(views), -1))  # (views, images, K)
    prediction = (z[:LARGES].mean(0) - z).square().mean()
    return (1 - model.sigreg_lambda) * prediction + model.sigreg_lambda * sigreg(z, directions)


@torch.no_grad()
def neighbours(model: LeJEPA, images: Tensor, labels: Tensor) -> float:
    """The accuracy of 20 nearest neighbours by the features of whole images."""
    model.eval()
    features = model.features(images).float()
    model.train()
    classes = knn(features[:KNOWN], labels[:KNOWN], features[KNOWN:], 10)
    return (classes == labels[KNOWN:]).double().mean().item()


def main(argv: list[str] | None = None) -> tuple[list[float], float]:
    """Trains and tests; returns the losses and the accuracy of the neighbours."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=64, help="images, of eight crops each")
    parser.add_argument("--apart", action="store_true", help="the two sizes in two passes")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    shape = dict(img_size=LARGE, patch_size=PATCH, embed_dim=64, depth=2, num_heads=4, num_classes=0)
    vit = ViT(**shape, global_pool="avg", class_token=False, dynamic_img_size=args.apart)
    model = LeJEPA(vit, LARGES, SMALLS, sigreg_lambda=0.1, width=256, dim=16).to(device)
    images, labels = (t.to(device) for t in digits())
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3, weight_decay=0.05)
    losses = []
    for step in range(args.steps):
        batch = images[torch.randint(0, KNOWN, (args.batch_size,))]
        views = [crops(batch, LARGE, 0.5, 1.0) for _ in range(LARGES)]
        views += [crops(batch, SMALL, 0.2, 0.5) for _ in range(SMALLS)]
        directions = draw_directions(model.dim, step, device)[:, :64]  # fewer are faster on a CPU
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            if args.apart:
                loss = loss_apart(model, views, directions)
            else:
                loss, _ = model(pack([crop for view in views for crop in view], PATCH), directions)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 20 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {losses[-1]:.4f}")
    count, patches = LARGES + SMALLS, LARGES * (LARGE // PATCH) ** 2 + SMALLS * (SMALL // PATCH) ** 2
    packed, padded = args.batch_size * patches, args.batch_size * count * (LARGE // PATCH) ** 2
    print(f"{args.batch_size * count} crops of a step in {packed:,} patches; padded {padded:,}")
    accuracy = neighbours(model, images, labels)
    print(f"accuracy of the 20 nearest neighbours {accuracy:.4f}")
    return losses, accuracy


if __name__ == "__main__":
    main()
