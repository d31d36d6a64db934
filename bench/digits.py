"""Two small offline results on scikit-learn's digits: masked patch prediction, and positions.

As in the paper's section 4.6 and Table 8.

    python bench/digits.py masked       # 5 seeds; writes masked.json to bench/results/digits
    python bench/digits.py positions    # 8 kinds and places, 3 seeds; writes positions.json and positions.md there

Everything else than what is compared is equal: data, labels, steps, rates, augmentation. Small-scale evidence about our
code, not about the paper's claims.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch

from vitfast.experiments.positions import positions
from vitfast.train.recipes import resolve
from vitfast.train.trainer import train

RESULTS = Path(__file__).parent / "results" / "digits"
COMMON = dict(recipe="digits", data="digits", device="cpu", hidden_head=False, label_smoothing=0.0)
MASKED = dict(objective="masked", train_images=718, steps=1500, batch_size=64, lr=1e-3, warmup_steps=200)
FEW = dict(shots=5, steps=400, batch_size=50, lr=1e-3, warmup_steps=40)


def masked(seeds: int) -> dict:
    """Test accuracy with 5 labels a class: masked pre-training on half of the digits, or none."""

    def trained(**fields) -> float:
        return train(resolve("pretrain", COMMON | fields))["accuracy"]

    entries = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            few = FEW | dict(seed=seed, eval_every=FEW["steps"])
            right = trained(**MASKED, seed=seed, eval_every=1000, output=f"{folder}/masked")
            fine = trained(**few, output=f"{folder}/fine", weights=f"{folder}/masked/checkpoints/last")
            scratch = trained(**few, output=f"{folder}/scratch")
        entries.append(dict(seed=seed, masked=fine, scratch=scratch, colours_right=right))
        print(entries[-1], flush=True)
    means = {kind: statistics.mean(entry[kind] for entry in entries) for kind in ("masked", "scratch")}
    spread = {f"{kind}_stdev": statistics.stdev(e[kind] for e in entries) if seeds > 1 else 0.0 for kind in means}
    question = "5 labels a class: masked pre-training on half of the digits, or from scratch"
    return dict(question=question, **means, **spread, seeds=entries, pretraining=MASKED, training=FEW)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("masked", "positions"))
    parser.add_argument("--seeds", type=int, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    RESULTS.mkdir(parents=True, exist_ok=True)
    if args.what == "masked":
        result = masked(args.seeds or 5)
        (RESULTS / "masked.json").write_text(json.dumps(result | dict(torch=torch.__version__), indent=2) + "\n")
        print(f"masked {result['masked']:.4f}, scratch {result['scratch']:.4f}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        config = resolve("pretrain", COMMON | dict(output=folder, epochs=16, eval_every=10_000))
        positions(config, args.seeds or 3)
        for name in ("positions.json", "positions.md"):
            (RESULTS / name).write_text((Path(folder) / name).read_text())
    print((RESULTS / "positions.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
