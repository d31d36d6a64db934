"""Bugs planted outside the kernels, by the exact text of the sources, and the test that finds each.

tests/test_planted.py plants one after the other in a copy of the package and runs the test, which must fail.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Planted:
    """`old` becomes `new` where it first occurs in a file of vitfast/; `test` then fails."""

    what: str
    file: str
    old: str
    new: str
    test: str = ""

    @property
    def path(self) -> Path:
        return ROOT / "vitfast" / self.file

    def run(self, folder: Path) -> subprocess.CompletedProcess:
        """The test against a copy of the package in `folder` that has the bug."""
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "vitfast", folder / "vitfast", ignore=skipped)
        shutil.copytree(ROOT / "kernels", folder / "vitfast" / "kernels", ignore=skipped, dirs_exist_ok=True)
        path = folder / "vitfast" / self.file
        path.write_text(path.read_text().replace(self.old, self.new, 1))
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        environment["PYTHONPATH"] = str(folder)  # before the installed package, as pytest's own program leaves it
        pytest = str(Path(sys.executable).with_name("pytest"))
        command = [pytest, "-q", "-x", "-p", "no:cacheprovider", *self.test.split()]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


PLANTED = [
    # weights
    Planted(
        "q and k swapped in CLIP's and SigLIP's names",
        "model/checkpoint/names.py",
        '(".self_attn.q_proj.", ".attn.q."),\n    (".self_attn.k_proj.", ".attn.k."),\n',
        '(".self_attn.q_proj.", ".attn.k."),\n    (".self_attn.k_proj.", ".attn.q."),\n',
        "tests/model/checkpoint/test_hugging_face.py -k CLIP",
    ),
    Planted(
        "heads of Google's projection in another order",
        "model/checkpoint/google.py",
        'kernel$", lambda w: w.flatten(0, 1).T, lambda',
        'kernel$", lambda w: w.transpose(0, 1).flatten(0, 1).T, lambda',
        "tests/model/checkpoint/test_originals.py -k google_npz",
    ),
    Planted(
        "Hugging Face's layer scales swapped",
        "model/checkpoint/names.py",
        '(".layer_scale1.lambda1", ".ls1.gamma"),\n    (".layer_scale2.lambda1", ".ls2.gamma"),\n    (".mlp.gate_proj.',
        '(".layer_scale1.lambda1", ".ls2.gamma"),\n    (".layer_scale2.lambda1", ".ls1.gamma"),\n    (".mlp.gate_proj.',
        "tests/model/checkpoint/test_hugging_face.py -k DINOv3",
    ),
    # the model
    Planted(
        "positions resized without antialiasing",
        "model/positions.py",
        "scale.clamp(min=1.0)",
        "scale.clamp(min=1.0, max=1.0)",
        "tests/model/test_packed_batches.py -k factorized",
    ),
    Planted(
        "the map before a block for that after it",
        "model/intermediates.py",
        "            if i in take:",
        "            if i + 1 in take:",
        "tests/model/test_intermediates.py -k equal_timm",
    ),
    # operations
    Planted(
        "autocast casts LayerNorm's weight",
        "ops/_dispatch.py",
        '"norm_weight", "norm_bias", "inner',
        '"norm_bias", "inner',
        "tests/ops/test_operations.py -k autocast",
    ),
    Planted(
        "gradients that nobody asked for",
        "ops/linear_residual.py",
        "out_dtype=dtype) if needs.out_weight else None, None",
        "out_dtype=dtype), None",
        "tests/ops/test_passes.py -k frozen",
    ),
    # adapters
    Planted(
        "a mask that hides the last key that counts",
        "adapters/masks.py",
        "torch.arange(1, N + 1, device",
        "torch.arange(N, device",
        "tests/adapters/test_masks.py -k padded_batches",
    ),
    Planted(
        "a report that leaves out what is left",
        "adapters/report.py",
        "        entries += found\n",
        "        entries += [e for e in found if e.why is None]\n",
        "tests/adapters/test_acceleration_report.py -k claims_what_runs",
    ),
    Planted(
        "restore leaves the dtype of the residual",
        "adapters/__init__.py",
        'module.__dict__.pop("residual_in_fp32", None)',
        "pass",
        "tests/adapters/test_accelerate.py -k residual_dtype",
    ),
    # data
    Planted(
        "labels of the next image",
        "data/samples.py",
        "return image, label, unreadable",
        "return image, self.source[(index + 1) % len(self.source)][1], unreadable",
        "tests/data/test_loader.py tests/data/test_folders.py tests/data/test_images.py",
    ),
    Planted(
        "evaluation crops nothing off",
        "data/transforms.py",
        "crop_pct=config.crop_pct or 1.0",
        "crop_pct=1.0",
        "tests/data/test_transforms.py -k as_timm_does",
    ),
    Planted(
        "every epoch in the same order",
        "data/samples.py",
        "mix_seed(seed, epoch)",
        "mix_seed(seed, 0)",
        "tests/data/test_loader.py -k each_epoch_once",
    ),
    Planted(
        "the last images of a validation set left out",
        "data/loader.py",
        "for first in range(0, len(mine), size)]",
        "for first in range(0, len(mine) - size + 1, size)]",
        "tests/data/test_loader.py -k digits_split",
    ),
    # training
    Planted(
        "a resumed run draws other random numbers",
        "train/step.py",
        "seed_everything(self.config.seed, step, 1 + self.ranks.rank)",
        "self.seeded = getattr(self, 'seeded', None) or seed_everything(self.config.seed, 1) or True",
        "tests/train/test_train.py -k bit_for_bit",
    ),
    Planted(
        "the model is saved as its average",
        "train/resume.py",
        "get_model_state_dict(model, options=WHOLE) for name, model in train_step.models.items()",
        "get_model_state_dict(train_step.model, options=WHOLE) for name in train_step.models",
        "tests/train/test_train.py -k bit_for_bit",
    ),
    Planted(
        "the momentum is not saved",
        "train/resume.py",
        "if train_step.optimizer.state:",
        "if False:",
        "tests/train/test_train.py -k bit_for_bit",
    ),
    Planted(
        "micro-batches that count as whole batches",
        "train/step.py",
        "(len(some) / (count or self.config.batch_size))",
        "1.0",
        "tests/train/test_train.py -k accumulation",
    ),
    Planted(
        "biases decay",
        "train/optim.py",
        "param_groups_weight_decay(model, **options)",
        "param_groups_weight_decay(model, **options, weight_decay_exclude_1d=False)",
        "tests/train/test_optim.py",
    ),
    Planted(
        "gradients that are not clipped",
        "train/step.py",
        "nn.utils.clip_grads_with_norm_(self.model",
        "nn.utils.get_total_norm(self.model",
        "tests/train/test_train.py -k clip",
    ),
    Planted(
        "the warm-up a step too long",
        "train/optim.py",
        "top * (step + 1) / config.warmup_steps",
        "top * step / config.warmup_steps",
        "tests/train/test_optim.py",
    ),
    Planted(
        "sigmoid loss averaged over the classes",
        "train/losses.py",
        'reduction="sum") / logits.shape[0]',
        'reduction="mean")',
        "tests/train/test_optim.py -k objectives",
    ),
    Planted(
        "colours with the channels in another order",
        "train/masked.py",
        "torch.arange(digits.shape[1] - 1, -1, -1, device",
        "torch.arange(digits.shape[1], device",
        "tests/train/test_masked.py -k colour_classes",
    ),
    # evaluation
    Planted(
        "features that are not whitened",
        "eval/fewshot.py",
        "F.pad(self.whiten(x), (0, 1)",
        "F.pad(x.double(), (0, 1)",
        "tests/eval/test_fewshot.py -k scikit",
    ),
    Planted(
        "top-5 counts the first alone",
        "eval/accuracy.py",
        "top[:, 0].sum(), top.sum()",
        "top[:, 0].sum(), top[:, 0].sum()",
        "tests/eval/test_accuracy.py -k top_5",
    ),
    Planted(
        "the probability of another class",
        "eval/predict.py",
        "probabilities.gather(-1, classes).tolist()",
        "probabilities.sort(-1).values[:, :count].tolist()",
        "tests/eval/test_predict.py",
    ),
    # runs
    Planted(
        "a sweep that takes the worst",
        "experiments/sweep.py",
        'row["held_out_accuracy"], -row["lr"]',
        '-row["held_out_accuracy"], -row["lr"]',
        "tests/experiments/test_sweep.py -k chooses_on_held_out",
    ),
    Planted(
        "a file replaced before it is whole",
        "run/files.py",
        "write(temporaries[path])",
        "write(path), temporaries[path].write_bytes(path.read_bytes())",
        "tests/model/checkpoint/test_replacing.py",
    ),
    Planted(
        "ranks that keep their own sums",
        "run/distributed.py",
        "            dist.all_reduce(values)\n        return values",
        "            pass\n        return values",
        "tests/train/test_distributed.py",
    ),
    # tools
    Planted(
        "a judge that lets NaN pass",
        "tools/verify/__init__.py",
        "if not error <= limit:",
        "if error > limit:",
        "tests/tools/tune/test_tuner.py -k unwritten",
    ),
    Planted(
        "a backward that costs as much as the forward",
        "tools/cost/training.py",
        "train_flops_per_image=3 * flops",
        "train_flops_per_image=2 * flops",
        "tests/tools/cost/test_operations.py -k papers",
    ),
    Planted(
        "an export that takes one batch size",
        "model/export.py",
        'free_batch = {"images": {0: torch.export.Dim("batch")}}',
        "free_batch = None",
        "tests/model/test_export.py -k torch_export",
    ),
]
