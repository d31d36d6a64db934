"""Pretrained weights fine-tuned on a folder of images, in a loop of plain PyTorch.

    python examples/fine_tune.py photos --weights hf-hub:timm/vit_small_patch16_224.augreg_in21k --output tuned

`photos` has the folders train/CLASS/ and val/CLASS/. The loop is short, to be copied and changed. `vitfast finetune`
does more: it resumes, keeps the best model, tries learning rates and writes a report.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from vitfast import ViT


def loader(folder: str, size: tuple[int, int], batch_size: int, training: bool) -> DataLoader:
    """Batches of uint8 images (B, 3, H, W), which the model normalises, and classes (B,)."""
    if training:
        cut = [v2.RandomResizedCrop(size, scale=(0.25, 1)), v2.RandomHorizontalFlip()]
    else:
        cut = [v2.Resize(size)]
    images = ImageFolder(folder, v2.Compose([*cut, v2.PILToTensor()]))
    options = dict(num_workers=2, persistent_workers=True, pin_memory=torch.cuda.is_available())
    return DataLoader(images, batch_size, shuffle=training, **options)


@torch.inference_mode()
def accuracy(model: ViT, batches: DataLoader, device: str) -> float:
    model.eval()
    right = sum((model(images.to(device)).argmax(1).cpu() == labels).sum().item() for images, labels in batches)
    return right / len(batches.dataset)


def main(argv: list[str] | None = None) -> float:
    """Fine-tunes; returns the accuracy on val/."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="a folder with train/ and val/")
    parser.add_argument("--weights", required=True, help="file, folder or hf-hub:owner/name")
    parser.add_argument("--output", default="tuned", help="folder of the new weights (default tuned)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-4)
    args = parser.parse_args(argv)
    if args.epochs < 1:
        parser.error(f"--epochs must be 1 or more, got {args.epochs}")
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    model = ViT.from_pretrained(args.weights, drop_path_rate=0.1)
    size = model.patch_embed.img_size
    train = loader(f"{args.data}/train", size, args.batch_size, training=True)
    val = loader(f"{args.data}/val", size, args.batch_size, training=False)
    if train.dataset.classes != val.dataset.classes:  # ImageFolder numbers the classes of each folder by itself
        parser.error(f"train/ has the classes {train.dataset.classes}, val/ has {val.dataset.classes}")
    model.reset_classifier(len(train.dataset.classes))
    model.class_names = train.dataset.classes
    model.to(device)
    decaying, spared = [], []  # biases, norms, tokens and positions do not decay
    for name, parameter in model.named_parameters():
        (spared if parameter.ndim < 2 or name in model.no_weight_decay() else decaying).append(parameter)
    groups = [dict(params=decaying, weight_decay=0.05), dict(params=spared, weight_decay=0)]
    optimizer = torch.optim.AdamW(groups, args.lr)
    steps = args.epochs * len(train)
    warmup = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    for epoch in range(args.epochs):
        model.train()
        for images, labels in train:
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                logits = model(images.to(device, non_blocking=True))
            loss = F.cross_entropy(logits.float(), labels.to(device), label_smoothing=0.1)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        found = accuracy(model, val, device)
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}, accuracy {found:.4f}")
    model.save_pretrained(args.output)
    return found


if __name__ == "__main__":
    main()
