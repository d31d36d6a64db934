"""Bugs planted outside the kernels, by the exact text of the sources, and the test that finds each.

tests/test_planted.py plants one after the other in a copy of the package and runs the test, which must fail. Each has
three lines, as in mutants.py: its name, the file in vitfast/ and the test in tests/; then the text and what it becomes.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mutant import listed

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Planted:
    """`old` becomes `new` where it first occurs in a file of vitfast/; `test` then fails."""

    what: str
    file: str
    old: str
    new: str
    test: str

    @property
    def path(self) -> Path:
        return ROOT / ("" if self.file.startswith("kernels/") else "vitfast") / self.file

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
        tests = (f"tests/{word}" if word.endswith(".py") else word for word in self.test.split())
        command = [pytest, "-q", "-x", "-p", "no:cacheprovider", *tests]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


BUGS = r"""
# weights
q and k swapped in CLIP's and SigLIP's names | model/checkpoint/names.py | model/checkpoint/test_hugging_face.py -k CLIP
- (".self_attn.q_proj.", ".attn.q."),\n    (".self_attn.k_proj.", ".attn.k."),\n
+ (".self_attn.q_proj.", ".attn.k."),\n    (".self_attn.k_proj.", ".attn.q."),\n
heads of Google's projection swapped | model/checkpoint/google.py | model/checkpoint/test_originals.py -k google_npz
- kernel$", lambda w: w.flatten(0, 1).T, lambda
+ kernel$", lambda w: w.transpose(0, 1).flatten(0, 1).T, lambda
Hugging Face's layer scales swapped | model/checkpoint/names.py | model/checkpoint/test_hugging_face.py -k DINOv3
- (".layer_scale1.lambda1", ".ls1.gamma"),\n    (".layer_scale2.lambda1", ".ls2.gamma"),\n    (".mlp.gate_proj.
+ (".layer_scale1.lambda1", ".ls2.gamma"),\n    (".layer_scale2.lambda1", ".ls1.gamma"),\n    (".mlp.gate_proj.
# the model
positions resized without antialiasing | model/positions.py | model/test_packed_batches.py -k factorized
- scale.clamp(min=1.0)
+ scale.clamp(min=1.0, max=1.0)
the map before a block for that after it | model/intermediates.py | model/test_intermediates.py -k equal_timm
-             if i in take:
+             if i + 1 in take:
# operations
autocast casts LayerNorm's weight | ops/_dispatch.py | ops/test_operations.py -k autocast
- "norm_weight", "norm_bias", "inner
+ "norm_bias", "inner
gradients that nobody asked for | ops/linear_residual.py | ops/test_passes.py -k frozen
- out_dtype=dtype) if needs.out_weight else None, None
+ out_dtype=dtype), None
# adapters
layers that are not found | adapters/structure.py | adapters/test_accelerate.py -k contract
- for m in module.modules()) >= 2
+ for m in module.modules()) >= 200
every call runs the library's code | backend/eager.py | adapters/test_accelerate.py -k contract
- if torch._C._functorch.peek_interpreter_stack() is not None:
+ if True:
a kernel inside a transform | backend/eager.py | adapters/test_wrapped.py -k torch_func
- if torch._C._functorch.peek_interpreter_stack() is not None:
+ if False:
hooks that come later are not seen | backend/eager.py | adapters/test_changed_models.py -k kind_of_hook
- skip_nnmodule_hook_guards=False
+ skip_nnmodule_hook_guards=True
a graph for each rate of drop path | backend/eager.py | adapters/test_sizes.py -k equal_layers
-     if module.training:
+     if False:
Inductor's pass rewrites every model | backend/inductor.py | adapters/test_wrapped.py -k leaves_others
- int(key) in found), None)
+ int(key) in found), next(iter(found.values()), None))
a pass that stays after the last model | backend/inductor.py | adapters/test_wrapped.py -k comes_and_goes
- if _models or not _is_in():
+ if True:
a report that leaves out why the library ran | adapters/report.py | adapters/test_changed_models.py -k global_hooks
- if call.why is not None:
+ if False:
a report that leaves out what is left | adapters/report.py | adapters/test_acceleration_report.py -k log_and_report
- e.kind, e.why) for e in found]
+ e.kind, e.why) for e in found if e.why is None]
# data
labels of the next image | data/samples.py | data/test_loader.py data/test_folders.py data/test_images.py
- return image, label, unreadable
+ return image, self.source[(index + 1) % len(self.source)][1], unreadable
evaluation crops nothing off | data/transforms.py | eval/test_pixels.py -k predicts_answers
- crop_pct=config.crop_pct or 1.0
+ crop_pct=1.0
every epoch in the same order | data/samples.py | data/test_loader.py -k each_epoch_once
- mix_seed(seed, epoch)
+ mix_seed(seed, 0)
the last images of a validation set left out | data/loader.py | data/test_loader.py -k digits_split
- for first in range(0, len(mine), size)]
+ for first in range(0, len(mine) - size + 1, size)]
Pillow 13's order of passes as 12's | data/resize.py | data/test_resize.py -k bytes_are_those_of_pillow
- height > h and height - h > 2 * (width - w)
+ False
weights that are truncated | data/resize.py | data/test_resize.py -k bytes_are_those_of_pillow
- np.where(weights < 0, -0.5, 0.5)
+ 0.0
crops at half of what is over, rounded down | data/eval_transforms.py | data/test_transforms.py -k timm
- return round(over / 2) if self.round_half else over // 2, wanted, 0
+ return over // 2, wanted, 0
the bias of this block for the next | kernels/matmul/persistent.py | kernels/test_persistent.py -k linear_and_residual
- acc = first_sums(bias_ptr, pid + programs,
+ acc = first_sums(bias_ptr, pid,
a kernel that does not clip | kernels/resize/passes.py | data/test_resize.py -k kernels_give
- tl.minimum(tl.maximum(acc >> BITS, 0), 255)
+ acc >> BITS
# embeddings
images in the order in which they were read | eval/embedder.py | eval/test_embedder.py -k timm_computes
- yield waiting.popleft().result()
+ yield waiting.pop().result()
rows count the images that could not be read | eval/embed_shards.py | eval/test_embed.py -k embedder_returns
- None if found.vector is None else next(rows) for found
+ None if found.vector is None else results.index(found) for found
the weights of a job are not compared | eval/embed.py | eval/test_embed.py -k another_job
- if name not in MAY_DIFFER and before
+ if name not in (*MAY_DIFFER, "weights_sha256") and before
an image of equal size that was replaced is not seen | eval/embed_shards.py | eval/test_embed.py -k embedded_again
- for (record, before), after in zip(other, now) if before != after
+ for (record, before), after in zip(other, now) if False
new images are embedded though known ones are gone | eval/embed.py | eval/test_embed.py -k gone
- while written.missing == 0 and len(new)
+ while len(new)
a shard in place before it is whole | eval/embed_shards.py | eval/test_embed.py -k full_disk
- with staged(folder, paths[0], name=f"shard-{shard:05d}-") as scratch:
+ for scratch in [folder]:
a batch of images of two shards | eval/embedder.py | eval/test_embedder.py -k two_groups
- if batch and (one.group != batch[-1].group or held
+ if batch and (False or held
# training
a resumed run draws other random numbers | train/step.py | train/test_train.py -k bit_for_bit
- seed_everything(self.config.seed, step, 1 + self.ranks.rank)
+ self.seeded = getattr(self, 'seeded', None) or seed_everything(self.config.seed, 1) or True
the model is saved as its average | train/resume.py | train/test_train.py -k bit_for_bit
- get_model_state_dict(model, options=WHOLE) for name, model in train_step.models.items()
+ get_model_state_dict(train_step.model, options=WHOLE) for name in train_step.models
an image that was replaced is trained on | data/identity.py | train/test_run_data.py -k equal_size
- (known != hashes[moved])
+ (known != known)
the momentum is not saved | train/resume.py | train/test_train.py -k bit_for_bit
- if train_step.optimizer.state:
+ if False:
micro-batches that count as whole batches | train/step.py | train/test_train.py -k accumulation
- (len(some) / (count or self.config.batch_size))
+ 1.0
biases decay | train/optim.py | train/test_optim.py
- param_groups_weight_decay(model, **options)
+ param_groups_weight_decay(model, **options, weight_decay_exclude_1d=False)
gradients that are not clipped | train/step.py | train/test_train.py -k clip
- nn.utils.clip_grads_with_norm_(self.model
+ nn.utils.get_total_norm(self.model
the warm-up a step too long | train/optim.py | train/test_optim.py
- top * (step + 1) / warmup
+ top * step / warmup
a confusion matrix on its side | eval/answers.py | train/test_report.py -k scikit_learn
- (self.labels * classes + self.found)
+ (self.found * classes + self.labels)
the least confident wrong image first | eval/answers.py | train/test_report.py -k confident
- .argsort(descending=True, stable=True)]
+ .argsort(stable=True)]
sigmoid loss averaged over the classes | train/losses.py | train/test_optim.py -k objectives
- reduction="sum") / logits.shape[0]
+ reduction="mean")
colours with the channels in another order | train/masked.py | train/test_masked.py -k colour_classes
- torch.arange(digits.shape[1] - 1, -1, -1, device
+ torch.arange(digits.shape[1], device
# evaluation
features that are not whitened | eval/fewshot.py | eval/test_fewshot.py -k least_squares
- F.pad(whiten(part), (0, 1)
+ F.pad(part.double(), (0, 1)
top-5 counts the first alone | eval/accuracy.py | eval/test_accuracy.py -k top_5
- top[:, 0].sum(), top.sum()
+ top[:, 0].sum(), top[:, 0].sum()
the probability of another class | eval/predict.py | eval/test_pixels.py -k predicts_answers
- probabilities.gather(-1, classes).tolist()
+ probabilities.sort(-1).values[:, :count].tolist()
# runs
a sweep that takes the worst | experiments/sweep.py | experiments/test_sweep.py -k chooses_on_held_out
- row["held_out_accuracy"], -row["lr"]
+ -row["held_out_accuracy"], -row["lr"]
a file replaced before it is whole | run/files.py | model/checkpoint/test_replacing.py
- scratch = Path(made)\n
+ scratch = folder\n
ranks that keep their own sums | run/distributed.py | eval/test_multi_label.py
-             dist.all_reduce(values)\n        return values
+             pass\n        return values
# tools
a judge that lets NaN pass | tools/verify/__init__.py | tools/tune/test_tuner.py -k unwritten
- if not error <= limit:
+ if error > limit:
a backward that costs as much as the forward | tools/cost/training.py | tools/cost/test_operations.py -k papers
- train_flops_per_image=3 * flops
+ train_flops_per_image=2 * flops
an export that takes one batch size | model/export.py | model/test_export.py -k torch_export
- free_batch = {"images": {0: torch.export.Dim("batch")}}
+ free_batch = None
"""
PLANTED = [Planted(what, file, old, new, test) for _, (what, file, test), old, new in listed(BUGS)]
