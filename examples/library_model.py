"""A ViT of timm or torchvision on vitfast's operations, trained on scikit-learn's handwritten digits.

    python examples/library_model.py [--library timm|torchvision] [--steps 500] [--plain]

Prints the losses and the test accuracy. --plain runs the same without vitfast.
"""

import argparse

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torchvision.models import VisionTransformer

import vitfast


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """(1797, 3, 32, 32) images and their classes, shuffled."""
    data, order = load_digits(), torch.randperm(1797, generator=torch.manual_seed(0))
    images = F.interpolate(torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1, 32)
    return images.expand(-1, 3, -1, -1)[order], torch.tensor(data.target)[order]


def build(library: str) -> nn.Module:
    """A small ViT of the library, or timm.create_model(NAME, pretrained=True), models.vit_b_16(weights="DEFAULT")."""
    if library == "timm":
        sizes = dict(img_size=32, patch_size=8, embed_dim=64, num_heads=4, depth=4)
        return timm.create_model("vit_tiny_patch16_224", num_classes=10, **sizes)
    sizes = dict(image_size=32, patch_size=8, num_layers=4, num_heads=4, hidden_dim=64, mlp_dim=256)
    return VisionTransformer(num_classes=10, **sizes)


def main(argv: list[str] | None = None) -> tuple[list[float], float]:
    """Trains and tests; returns the losses and the test accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=("timm", "torchvision"), default="timm")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--plain", action="store_true", help="without vitfast")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    model = build(args.library)
    if not args.plain:
        vitfast.accelerate(model)
        print(vitfast.acceleration_report(model))

    model.to(device)
    images, labels = (t.to(device) for t in digits())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.05)
    losses = []
    for step in range(args.steps):
        batch = torch.randint(0, 1500, (64,)).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = F.cross_entropy(model(images[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 50 == 0 or step == args.steps - 1:
            print(f"step {step}: loss {losses[-1]:.4f}")
    model.eval()
    with torch.inference_mode():
        accuracy = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    print(f"test accuracy {accuracy:.4f}")
    return losses, accuracy


if __name__ == "__main__":
    main()
