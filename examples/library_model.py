"""A timm ViT on vitfast's operations, trained on scikit-learn's handwritten digits.

    python examples/timm_model.py [--steps 500] [--model vit_tiny_patch16_224] [--plain]

Prints the losses and the test accuracy. --plain runs the same without vitfast.
"""

import argparse

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import vitfast

# Data and training are those of torchvision_model.py: each example is one file, to be copied and changed as it is.


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """(1797, 3, 32, 32) images and their classes, shuffled."""
    data, order = load_digits(), torch.randperm(1797, generator=torch.manual_seed(0))
    images = F.interpolate(torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1, 32)
    return images.expand(-1, 3, -1, -1)[order], torch.tensor(data.target)[order]


def main(argv: list[str] | None = None) -> tuple[list[float], float]:
    """Trains and tests; returns the losses and the test accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_tiny_patch16_224", help="a timm VisionTransformer")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--plain", action="store_true", help="without vitfast")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    model = timm.create_model(args.model, img_size=32, patch_size=8, embed_dim=64, num_heads=4, depth=4, num_classes=10)
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
