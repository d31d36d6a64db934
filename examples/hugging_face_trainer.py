"""A Hugging Face ViT under Trainer, on vitfast's operations: scikit-learn's handwritten digits.

    python examples/hugging_face_trainer.py [--steps 500] [--output runs/trainer] [--plain]

The only addition is `vitfast.accelerate(model)` before `Trainer(model=...)`. Arguments, checkpoints, evaluation, LoRA
and `from_pretrained` stay Hugging Face's. --plain runs the same without vitfast.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification

import vitfast


def digits() -> list[dict]:
    """1797 items with `pixel_values` (3, 32, 32) and `labels`, shuffled."""
    data, order = load_digits(), torch.randperm(1797, generator=torch.manual_seed(0)).tolist()
    images = F.interpolate(torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1, 32).expand(-1, 3, -1, -1)
    return [dict(pixel_values=images[i], labels=int(data.target[i])) for i in order]


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def main(argv: list[str] | None = None) -> tuple[list[float], float]:
    """Trains and tests; returns the losses and the test accuracy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--output", default="runs/trainer")
    parser.add_argument("--plain", action="store_true", help="without vitfast")
    args = parser.parse_args(argv)
    torch.manual_seed(0)

    config = ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_labels=10,
    )
    model = ViTForImageClassification(config)  # or .from_pretrained("google/vit-base-patch16-224-in21k", num_labels=10)
    if not args.plain:
        vitfast.accelerate(model)
        print(vitfast.acceleration_report(model))

    gpu = torch.cuda.is_available()
    arguments = TrainingArguments(
        args.output,
        max_steps=args.steps,
        per_device_train_batch_size=64,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        weight_decay=0.05,
        logging_steps=1 if args.steps <= 50 else 50,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        bf16=gpu,
        use_cpu=not gpu,
    )
    data = digits()
    trainer = Trainer(
        model=model, args=arguments, train_dataset=data[:1500], eval_dataset=data[1500:], compute_metrics=accuracy
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.evaluate()["eval_accuracy"]


if __name__ == "__main__":
    print("test accuracy", main()[1])
