"""DINO's two sizes of crops in one pass, without padding, on scikit-learn's handwritten digits.

    python examples/two_crops.py [--steps 300] [--drop-path 0.3] [--apart]

Learning without labels: the student sees 2 global and 8 local crops of every image (DINO, Caron et al., 2021), the
teacher, a moving average of it, the global ones alone; of each crop the student has to find the teacher's other crop
of the same image (He et al., 2020). All crops of a step are one list, packed. With a drop path the student computes
the branches of the kept crops only (drop_path_mode="subset", as DINOv2). --apart runs the sizes one after the other:
the same losses.

Prints the losses, and how often the classes of the nearest neighbours among labelled images are right.
"""

import argparse
import copy

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn

from vitfast import ViT, pack

PATCH, GLOBAL, LOCAL, LOCALS = 8, 32, 16, 8


def projector(dim: int) -> nn.Module:
    """Features (B, D) -> what crops are compared by, (B, 64)."""
    return nn.Sequential(nn.Linear(dim, 256), nn.GELU(), nn.Linear(256, 64))


def digits() -> tuple[Tensor, Tensor]:
    """(1797, 3, 32, 32) images and their classes, shuffled."""
    data, order = load_digits(), torch.randperm(1797, generator=torch.manual_seed(0))
    images = F.interpolate(torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1, GLOBAL)
    return images.expand(-1, 3, -1, -1)[order], torch.tensor(data.target)[order]


def crops(images: Tensor, size: int, low: float, high: float) -> Tensor:
    """A random square of each image, of a share low..high of its sides, resized to size x size."""
    side = torch.empty(len(images)).uniform_(low, high)
    middle = torch.empty(2, len(images)).uniform_(-1, 1) * (1 - side)
    theta = torch.stack([side, 0 * side, middle[0], 0 * side, side, middle[1]], 1).view(-1, 2, 3).to(images)
    grid = F.affine_grid(theta, [len(images), 3, size, size], align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def student_features(model: ViT, views: list[Tensor], apart: bool) -> Tensor:
    """The features (crops, D) of all views (B, 3, H, W), one view after the other."""
    if apart:
        model.dynamic_img_size = True
        return torch.cat([model(torch.cat(views[:2])), model(torch.cat(views[2:]))])
    return model(pack([crop for view in views for crop in view], PATCH))  # one list of crops of both sizes


def agreement(student: list[Tensor], teacher: list[Tensor]) -> Tensor:
    """How well each crop finds the teacher's other global crop of its image, among those of all images."""
    student, teacher = ([F.normalize(x, dim=-1) for x in views] for views in (student, teacher))
    right = torch.arange(len(teacher[0]), device=teacher[0].device)
    pairs = [(t, s) for i, t in enumerate(teacher) for j, s in enumerate(student) if i != j]
    return sum(F.cross_entropy(s @ t.T / 0.1, right) for t, s in pairs) / len(pairs)


@torch.no_grad()
def neighbours(model: ViT, images: Tensor, labels: Tensor) -> float:
    """The accuracy of 20 nearest neighbours: the first 1,500 images are labelled."""
    features = F.normalize(model.eval()(images), dim=-1).cpu()
    model.train()
    labels = labels.cpu()
    known = KNeighborsClassifier(20).fit(features[:1500], labels[:1500])
    return known.score(features[1500:], labels[1500:])


def main(argv: list[str] | None = None) -> tuple[list[float], float]:
    """Trains and tests; returns the losses and the accuracy of the neighbours."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32, help="images, of ten crops each")
    parser.add_argument("--drop-path", type=float, default=0.3)
    parser.add_argument("--apart", action="store_true", help="the two sizes in two passes")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    shape = dict(img_size=GLOBAL, patch_size=PATCH, embed_dim=64, depth=4, num_heads=4, num_classes=0)
    shape |= dict(global_pool="avg", class_token=False)
    student = ViT(**shape, drop_path_rate=args.drop_path, drop_path_mode="subset").to(device)
    head = projector(64).to(device)
    teacher, teacher_head = (copy.deepcopy(module).requires_grad_(False).eval() for module in (student, head))
    images, labels = (t.to(device) for t in digits())
    optimizer = torch.optim.AdamW([*student.parameters(), *head.parameters()], 1e-3, weight_decay=0.04)
    losses = []
    for step in range(args.steps):
        batch = images[torch.randint(0, 1500, (args.batch_size,))]
        views = [crops(batch, GLOBAL, 0.7, 1.0) for _ in range(2)]
        views += [crops(batch, LOCAL, 0.35, 0.65) for _ in range(LOCALS)]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            with torch.no_grad():
                answers = list(teacher_head(teacher(torch.cat(views[:2]))).chunk(2))
            found = head(student_features(student, views, args.apart)).chunk(len(views))
            loss = agreement(found, answers)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, theirs in zip(
                (*teacher.parameters(), *teacher_head.parameters()), (*student.parameters(), *head.parameters())
            ):
                mine.lerp_(theirs, 0.02)
        losses.append(loss.item())
        if step % 50 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {losses[-1]:.4f}")
    accuracy = neighbours(teacher, images, labels)
    tokens = pack([crop for view in views for crop in view], PATCH)
    print(f"{len(tokens)} crops of a step in {len(tokens.patches):,} patches; padded {len(tokens) * tokens.longest:,}")
    print(f"accuracy of the nearest neighbours {accuracy:.4f}")
    return losses, accuracy


if __name__ == "__main__":
    main()
