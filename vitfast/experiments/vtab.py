"""VTAB: the same weights on many small tasks, and one table of the results.

The protocol is VTAB-1k's ("A Large-scale Study of Representation Learning with the Visual Task Adaptation Benchmark",
Zhai et al., 2019): every task is learned from 1000 images, measured on its whole test set, and weighs the same in the
means of its group and of all. The method is fine-tuning (Table 4 of the ViT paper) or a classifier on frozen features,
whose regularisation is chosen with 800 of the images on the other 200.

Images. The ViT paper (B.1.1) takes "the pre-processing used in Kolesnikov et al. (2020)", BiT, at 384 px for all tasks.
BiT (3.3) resizes to a square, crops a smaller random square and flips; tests resize alone. "In some tasks horizontal
flipping or cropping destroys the label semantics [...] In these cases we omit flipping or cropping": neither paper nor
the released code (google-research/big_transfer, vision_transformer) says for which. VTAB's own code
(google-research/task_adaptation, data_loader.py) resizes for all tasks and does no more. Here a task is augmented only
where its classes are what things are, not where, how many, how far or which way round: FLIPPED, CROPPED.
"""

import dataclasses
import json
import logging
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from torch import Tensor

from ..data.datasets import take
from ..errors import InputError
from ..eval.accuracy import open_weights
from ..eval.fewshot import check_l2, classify, features
from ..run.config import Config, as_plain, course, total_steps
from ..run.distributed import world_size
from ..run.files import as_csv
from ..run.results import Results
from ..train.recipes import resolve
from ..train.trainer import Trainer
from .runs import ended

logger = logging.getLogger("vitfast")

EXAMPLES = 1000
COLUMNS = ("task", "group", "accuracy", "train_images", "test_images", "unreadable_images", "l2")  # columns of vtab.csv
# The 19 tasks by group, and the data set of huggingface.co/clip-benchmark that holds each, labels derived as VTAB does,
# as train/*.tar and test/*.tar. wds_sun397 has no training shards there: put class folders in its place.
VTAB = {
    "natural": dict(
        caltech101="wds_vtab-caltech101",
        cifar100="wds_vtab-cifar100",
        dtd="wds_vtab-dtd",
        flowers102="wds_vtab-flowers",
        pets="wds_vtab-pets",
        sun397="wds_sun397",
        svhn="wds_vtab-svhn",
    ),
    "specialized": dict(
        patch_camelyon="wds_vtab-pcam",
        eurosat="wds_vtab-eurosat",
        resisc45="wds_vtab-resisc45",
        diabetic_retinopathy="wds_vtab-diabetic_retinopathy",
    ),
    "structured": dict(
        clevr_count="wds_vtab-clevr_count_all",
        clevr_distance="wds_vtab-clevr_closest_object_distance",
        dmlab="wds_vtab-dmlab",
        kitti_distance="wds_vtab-kitti_closest_vehicle_distance",
        dsprites_location="wds_vtab-dsprites_label_x_position",
        dsprites_orientation="wds_vtab-dsprites_label_orientation",
        smallnorb_azimuth="wds_vtab-smallnorb_label_azimuth",
        smallnorb_elevation="wds_vtab-smallnorb_label_elevation",
    ),
}
# Without svhn (mirrored digits are no digits, and a crop may lose the one in the middle) and the structured tasks.
FLIPPED = frozenset([*VTAB["natural"], *VTAB["specialized"]]) - {"svhn"}
CROPPED = FLIPPED - {"patch_camelyon"}  # its label is about the central third only, which a crop would move
CROP_SIDE = 384 / 448  # BiT's, as the released code has it (big_vision, configs/transfer.py)
GET = "hf download --repo-type dataset clip-benchmark/{0} --local-dir {1}/{0}"
# The values that are tried where no l2 is given; among equals the first one is taken, which regularises most.
L2 = {"ridge": [4.0**k for k in range(10, -4, -1)], "linear": [10.0**k for k in range(3, -3, -1)]}


@dataclass(frozen=True)
class Task:
    """One data set: `settings` are fields of Config, `data` (a SPEC) at least."""

    name: str
    group: str
    settings: dict = field(default_factory=dict)


def preparation(name: str) -> dict:
    """The settings that cut and augment the images of one of the 19 tasks, whatever the recipe."""
    share = CROP_SIDE**2 if name in CROPPED else 1.0
    crops = dict(crop_mode="squash", crop_pct=1.0, train_crop_mode="squash", crop_scale=(share, share))
    return crops | dict(hflip=0.5 if name in FLIPPED else 0.0, auto_augment="", random_erasing=0.0)


def tasks_in(root: Path) -> list[Task]:
    """Those of the 19 tasks that lie in `root`, each in a folder of its own name or its data set's.

    A folder holds shards, or train/ and test/ with class folders. Raises InputError where there are none.
    """
    found, missing = [], []
    for group, tasks in VTAB.items():
        for name, repository in tasks.items():
            folder = next((root / f for f in (name, repository) if (root / f).is_dir()), None)
            if folder is None:
                missing.append(name)
                continue
            shards = any([*folder.glob("train*.tar"), *folder.glob("train/*.tar")])
            found.append(Task(name, group, dict(data=f"wds/{folder}" if shards else str(folder)) | preparation(name)))
    if not found:
        example = "wds_vtab-pets"
        command = GET.format(example, root)
        raise InputError(f"no task of VTAB in {root}; it takes folders such as {root / example}: {command}")
    if missing:
        logger.info("not in %s: %s", root, ", ".join(missing))
    return found


def read_tasks(path: Path) -> list[Task]:
    """Tasks of a YAML list: each a SPEC, or `data` with optional `name`, `group`, other settings."""
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"--tasks {path} cannot be read as YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(content, list) or not content:
        example = "'- {name: pets, group: natural, data: hfds/timm/oxford-iiit-pet}'"
        raise InputError(f"--tasks {path} must hold a list of tasks such as {example}")
    tasks = []
    for item in content:
        settings = dict(item) if isinstance(item, dict) else dict(data=str(item))
        if not settings.get("data"):
            raise InputError(f"--tasks {path}: a task without data: {item}")
        name = str(settings.pop("name", Path(str(settings["data"])).name))
        if not name or name != Path(name).name or name.startswith("."):
            problem = f"the name {name!r} of a task is no name of a folder in --output"
            raise InputError(f"--tasks {path}: {problem}; give one without a slash, and without a dot in front")
        tasks.append(Task(name, str(settings.pop("group", "tasks")), settings))
    if len({task.name for task in tasks}) < len(tasks):
        raise InputError(f"--tasks {path}: two tasks have the same name")
    return tasks


def best_l2(method: str, x: Tensor, y: Tensor, classes: int) -> float:
    """The value of L2 whose classifier, fitted to four fifths, is right most often on the other fifth.

    A single image leaves none to hold out: the first value of L2 is returned.
    """
    cut = len(x) * 4 // 5
    if not cut:
        return L2[method][0]

    def right(l2: float) -> int:
        return int((classify(method, x[:cut], y[:cut], x[cut:], classes, l2) == y[cut:]).sum())

    return max(L2[method], key=right)


def evaluate_frozen(
    config: Config, method: str, examples: int, l2: float | None = None, img_size: int | None = None
) -> dict:
    """The accuracy of a classifier of fewshot.METHODS on frozen features of `examples` training images."""
    if config.sizes:
        raise InputError("vtab takes images of one size: leave sizes out")
    model, data = open_weights(config, img_size)
    x, y, _, left_out = features(model, data, take(data.train, examples))
    queries, truth, _, also_left_out = features(model, data, data.val)
    used = {} if method not in L2 else dict(l2=best_l2(method, x, y, len(data.classes)) if l2 is None else l2)
    found = classify(method, x, y, queries, len(data.classes), **used)
    images = dict(train_images=len(x), test_images=len(truth), unreadable_images=left_out + also_left_out)
    return dict(accuracy=(found == truth).double().mean().item(), **images, **used)


def fine_tune(config: Config, examples: int) -> dict:
    """Accuracy after fine-tuning on so many images; a finished run is only measured. Raises Stopped."""
    steps = total_steps(config, examples)
    settings = dict(steps=steps, epochs=None, eval_every=steps, save_every=max(1, steps // 5))
    summary = ended(Trainer(dataclasses.replace(config, **settings), examples=examples).fit())
    images = dict(train_images=summary["train_images"], test_images=summary["val_images"])
    images["unreadable_images"] = summary["unreadable_images"] + summary["val_unreadable_images"]
    return dict(accuracy=summary["accuracy"], **images)


def vtab(
    tasks: list[Task], method: str, layers: list[dict], output: Path, examples: int = EXAMPLES, l2: float | None = None
) -> dict:
    """Runs all tasks by `method`, "finetune" or one of fewshot.METHODS. Returns the content of vtab.json.

    layers: settings as `resolve` takes them, `weights` among them. Writes output/vtab.txt, .csv and .json, and what a
    fine-tuning leaves into output/<task>-<examples>/; the same call again goes on where it stopped. Raises InputError,
    and Stopped where a fine-tuning was asked to stop.
    """
    if world_size() > 1:
        raise InputError("vtab runs in one process, its tasks are small; start it without torchrun")
    if examples < 1:
        raise InputError(f"vtab takes a positive number of examples, got {examples}")
    check_l2(method, l2)
    named = [layer["recipe"] for layer in layers if layer.get("recipe")]  # a task's settings win over the recipe
    layers = [{k: v for k, v in layer.items() if k != "recipe"} for layer in layers]
    first = [{"recipe": named[-1] if named else "finetune/vtab"}] if method == "finetune" else []
    settings = [[*first, task.settings, *layers, {"output": str(output / f"{task.name}-{examples}")}] for task in tasks]
    kind = "finetune" if method == "finetune" else "eval"
    configs = [resolve(kind, *given) for given in settings]  # all are checked before the first begins
    plain = {task.name: course(as_plain(config), length=True) for task, config in zip(tasks, configs)}
    files = [f"vtab.{suffix}" for suffix in ("csv", "txt", "json")]
    results = Results(output, "vtab", dict(method=method, examples=examples, l2=l2, tasks=plain), files)
    records = []
    for task, given, config in zip(tasks, settings, configs):
        size = next((layer["img_size"] for layer in reversed(given) if "img_size" in layer), None)
        if method == "finetune":
            result = fine_tune(config, examples)
        else:
            result = evaluate_frozen(config, method, examples, l2, size)
        records.append(dict(task=task.name, group=task.group, **result))
        logger.info("%s: accuracy %.4f", task.name, result["accuracy"])
    names = dict.fromkeys(task.group for task in tasks)
    groups = {name: statistics.mean(r["accuracy"] for r in records if r["group"] == name) for name in names}
    mean = statistics.mean(record["accuracy"] for record in records)
    summary = dict(weights=configs[0].weights, method=method, examples=examples, mean=mean, groups=groups)
    summary["tasks"] = records
    results.write("vtab.csv", as_csv(COLUMNS, _rows(summary)))
    results.write("vtab.txt", table(summary) + "\n")
    results.write("vtab.json", json.dumps(summary, indent=2) + "\n")
    return summary


def _rows(summary: dict) -> list[dict]:
    """The rows of the table: the tasks, and the means of the groups and of all."""
    means = [*summary["groups"].items(), ("all", summary["mean"])]
    return summary["tasks"] + [dict(task="mean", group=group, accuracy=mean) for group, mean in means]


def table(summary: dict) -> str:
    """The results as lines of text."""
    lines = (f"{row['task']:<24}{row['group']:<14}{row['accuracy']:.4f}" for row in _rows(summary))
    return "\n".join([f"{'task':<24}{'group':<14}accuracy", *lines])
