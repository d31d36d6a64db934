"""The command line. Each command imports what it needs when it runs, so that the core works without the extra `train`."""

import argparse
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

from ..errors import InputError
from ..version import __version__

EPILOG = """examples:
  vitfast demo                                                     the whole way on handwritten digits, in a minute or two on a CPU
  vitfast pretrain --recipe plain-s16/imagenet-90ep --data /data/imagenet --output runs/s16
  vitfast finetune --weights runs/s16/checkpoints/last --data torch/cifar10 --output runs/cifar10
  vitfast eval --weights runs/cifar10/checkpoints/last --data torch/cifar10

The same pretrain or finetune command again continues a run that was cut off."""


def _set_pair(text: str) -> tuple[str, str]:
    field, equals, value = text.partition("=")
    if not equals or not field:
        raise argparse.ArgumentTypeError(f"expected FIELD=VALUE, got {text!r}")
    return field.strip().replace("-", "_"), value.strip()


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--config", metavar="FILE", help="YAML file of settings, such as a run folder's config.yaml; flags win over it")
    add("--recipe", metavar="NAME", help="where the settings start from; `vitfast recipes` lists them")
    add(
        "--model",
        metavar="NAME",
        help="preset: Ti/16 S/16 S/32 B/16 B/32 L/16 L/32 H/14, R50+B/16 and the like; R50x1 and the like; timm:NAME",
    )
    add(
        "--data",
        metavar="SPEC",
        help="folder with train/<class>/* and val/<class>/*, 'digits', 'synthetic', or torch/..., hfds/..., wds/...",
    )
    add("--output", metavar="DIR", help="run folder: settings, metrics, checkpoints, summary.json")
    add(
        "--img-size",
        metavar="N",
        type=int,
        help="side of the images in pixels; positions are interpolated where it changes",
    )
    add("--batch-size", metavar="N", type=int, help="images per optimiser step, over all devices")
    add("--epochs", metavar="N", type=float, help="length of the run in passes over the data")
    add("--steps", metavar="N", type=int, help="length of the run in optimiser steps")
    add("--lr", metavar="X", type=float, help="learning rate after the warm-up")
    add("--seed", metavar="N", type=int, help="of initialisation, order and augmentation (default 0)")
    add("--save-every", metavar="STEPS", type=int, help="steps between checkpoints (default: at each evaluation)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--compile", action=argparse.BooleanOptionalAction, help="torch.compile (default: on cuda)")
    add(
        "--set",
        metavar="FIELD=VALUE",
        nargs="+",
        action="extend",
        type=_set_pair,
        help="any other setting; pretrain --print-config shows them",
    )


def _add_training_options(parser: argparse.ArgumentParser, weights_help: str) -> None:
    _add_run_options(parser)
    parser.add_argument("--weights", metavar="PATH", help=weights_help)
    parser.add_argument(
        "--resume", metavar="auto|never|PATH", default="auto", help="auto: go on where the run folder stopped (default)"
    )
    parser.add_argument(
        "--print-config", action="store_true", default=False, help="print the settings of this run as YAML and stop"
    )


def _add_evaluation_options(parser: argparse.ArgumentParser, data: str = "") -> None:
    add = parser.add_argument
    add("--weights", metavar="PATH", required=True, help="file, folder or hf-hub:owner/name")
    if data:
        add("--data", metavar="SPEC", required=True, help=data)
    add("--img-size", metavar="N", type=int, help="default: the model's own")
    add(
        "--batch-size",
        metavar="N",
        type=int,
        help="images at once (default 256)" if data else "images at once; of finetune, per optimiser step",
    )
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add(
        "--set",
        metavar="FIELD=VALUE",
        nargs="+",
        action="extend",
        type=_set_pair,
        help="such as amp=none or data_dir=/data",
    )
    add("--json", action="store_true", default=False, help="print the result as JSON")


def _shots(text: str) -> int | None:
    return None if text == "all" else int(text)


def _add_weights_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--num-heads", metavar="N", type=int, help="where neither the weights nor a preset of their size tell"
    )
    parser.add_argument(
        "--img-size",
        metavar="N",
        type=int,
        nargs="+",
        help="side, or height and width; positions are interpolated where it changes",
    )
    parser.add_argument("--force", action="store_true", default=False, help="replace what is there")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vitfast",
        description="Vision Transformers, trained and run fast.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vitfast {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, text: str, run) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=text, description=text[0].upper() + text[1:] + ".", argument_default=argparse.SUPPRESS
        )
        sub.set_defaults(run=run)
        sub.add_argument("--debug", action="store_true", default=False, help="show the traceback of an error")
        return sub

    _add_training_options(
        command("pretrain", "train a ViT, from scratch or from weights whose head it keeps", _train),
        "start from these weights instead of from scratch",
    )
    sub = command(
        "finetune", "adapt trained weights to other data: the head is replaced by a zero linear layer", _train
    )
    _add_training_options(sub, "file, folder or hf-hub:owner/name (required)")
    sub.add_argument(
        "--sweep",
        action="store_true",
        default=False,
        help="try the recipe's learning rates on a held-out part of the training set first",
    )
    sub = command("eval", "measure a model's accuracy on the validation split of some data", _eval)
    _add_evaluation_options(sub, data="as for pretrain; its validation split is used")
    sub.add_argument(
        "--real",
        metavar="FILE",
        nargs="?",
        const="",
        help="count ImageNet's reassessed labels too: their real.json, or timm's copy of it",
    )
    sub = command(
        "fewshot",
        "measure a model's frozen features: a closed-form classifier from few images, k-NN or a linear probe",
        _fewshot,
    )
    _add_evaluation_options(
        sub, data="as for pretrain; learned on its training split, measured on its validation split"
    )
    sub.add_argument(
        "--method",
        choices=("ridge", "knn", "linear"),
        default="ridge",
        help="ridge: regularised least squares (default)",
    )
    sub.add_argument(
        "--shots",
        metavar="N",
        nargs="+",
        type=_shots,
        default=None,
        help="training images a class, or all (ridge: 1 5 10 25, others: all)",
    )
    sub.add_argument("--seeds", metavar="N", type=int, default=3, help="draws of each number of images (default 3)")
    sub.add_argument(
        "--l2", metavar="X", type=float, default=None, help="regularisation (default ridge: 1024, linear: 1)"
    )
    sub = command("vtab", "fine-tune or probe the same weights on many small tasks, 1000 images each: one table", _vtab)
    _add_evaluation_options(sub)
    given = sub.add_mutually_exclusive_group(required=True)
    given.add_argument(
        "--root",
        metavar="DIR",
        type=Path,
        default=None,
        help="folder that holds VTAB's data sets, such as wds_vtab-pets/",
    )
    given.add_argument(
        "--tasks",
        metavar="FILE",
        type=Path,
        default=None,
        help="YAML list of other tasks: SPECs, or name, group, data and settings",
    )
    sub.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        required=True,
        help="for vtab.txt, .csv and .json, and the runs of finetune",
    )
    sub.add_argument(
        "--method", choices=("finetune", "ridge", "knn", "linear"), default="finetune", help="default finetune"
    )
    sub.add_argument(
        "--examples", metavar="N", type=int, default=1000, help="training images of each task (default 1000)"
    )
    sub.add_argument(
        "--l2",
        metavar="X",
        type=float,
        default=None,
        help="of ridge and linear (default: chosen on a fifth of the images)",
    )
    sub.add_argument("--recipe", metavar="NAME", help="of finetune (default finetune/vtab)")
    sub = command("demo", "pre-train and fine-tune a small ViT on handwritten digits, and write a report", _demo)
    sub.add_argument("--output", metavar="DIR", default="runs/demo", help="default runs/demo")
    sub.add_argument("--seed", metavar="N", type=int, default=0, help="default 0")
    sub.add_argument("--device", choices=("cpu", "cuda"), default="", help="default: cuda where there is one")
    sub = command("doctor", "check every kernel on this machine against float64, and time it on a GPU", _doctor)
    sub.add_argument("--json", action="store_true", default=False, help="print the results as JSON")
    names = "an operation such as attention, or those whose name contains this; can be repeated (default: all)"
    sub.add_argument("--only", metavar="NAME", action="append", default=[], help=names)
    sub.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="", help="default: all that run here"
    )
    jobs = "processes at once, at most one a CPU; more than one is quicker and shows no times (default 1, interpreted one a CPU)"
    sub.add_argument("--jobs", metavar="N", type=int, default=None, help=jobs)
    sub.add_argument("--untimed", action="store_true", default=False, help="check only, without times")
    interpreted = (
        "without any GPU: in Triton's interpreter, at the edges of tiles too, watching for races and wrong accesses"
    )
    sub.add_argument("--interpreted", action="store_true", default=False, help=interpreted)
    sub = command(
        "tune", "find this GPU's fastest tiles, kernels against libraries, and keep them in your own table", _tune
    )
    sub.add_argument(
        "--model",
        metavar="NAME",
        nargs="+",
        default=["B/16"],
        help="whose sizes: S/16 B/16 'B/16 384' L/16 H/14 (default B/16)",
    )
    sub.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="default bfloat16")
    sub.add_argument(
        "--only", metavar="NAME", default="", help="operations whose name contains this, such as attention or gelu"
    )
    sub.add_argument(
        "--seconds",
        metavar="N",
        type=float,
        default=None,
        help="in all (default 400 a model); what is found by then is kept",
    )
    sub.add_argument(
        "--batch-size",
        metavar="N",
        type=int,
        default=None,
        help="of the shapes that are timed (default: 48 to 240 by model)",
    )
    deterministic = "leave out libraries whose backward may give other bits each time; ours never does"
    sub.add_argument("--deterministic", action="store_true", default=False, help=deterministic)
    sub = command(
        "convert",
        "write weights of any format in another one: vitfast, timm, huggingface, npz (Google's) or torchvision",
        _convert,
    )
    sub.add_argument("source", metavar="IN", help="file, folder or hf-hub:owner/name")
    sub.add_argument("path", metavar="OUT", help="a folder, or a file whose suffix suits the format")
    sub.add_argument(
        "--format", dest="form", required=True, choices=("vitfast", "timm", "huggingface", "npz", "torchvision")
    )
    _add_weights_options(sub)
    sub.add_argument(
        "--num-classes", metavar="N", type=int, help="other than the weights' own: a new head of zeros, 0 for none"
    )
    sub = command("export", "write a model as a file that runs without vitfast, and check its numbers", _export)
    sub.add_argument("--weights", metavar="PATH", required=True, help="file, folder or hf-hub:owner/name")
    sub.add_argument(
        "--output", metavar="FILE", type=Path, required=True, help=".onnx for onnx, .pt2 for torch and aoti"
    )
    sub.add_argument(
        "--format",
        dest="form",
        required=True,
        choices=("onnx", "torch", "aoti"),
        help="aoti: compiled for this machine",
    )
    _add_weights_options(sub)
    sub.add_argument(
        "--uint8", action="store_true", default=False, help="take raw pixels in place of normalised floats"
    )
    sub.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where it will run (default cpu)")
    sub = command(
        "inspect",
        "draw what a model learned: its filters, positions, attention distances and attention rollout on images",
        _inspect,
    )
    sub.add_argument(
        "--weights", metavar="PATH", required=True, help="file, folder or hf-hub:owner/name, in any format"
    )
    sub.add_argument(
        "--data", metavar="SPEC", required=True, help="a folder of images, in class folders or not, or as for eval"
    )
    sub.add_argument(
        "--output", metavar="DIR", required=True, help="for report.html, the figures as PNG, and the numbers"
    )
    sub.add_argument("--images", metavar="N", type=int, default=32, help="evenly spread over the data (default 32)")
    sub.add_argument(
        "--img-size",
        metavar="N",
        type=int,
        nargs="+",
        help="side, or height and width; positions are interpolated where it changes",
    )
    sub.add_argument(
        "--num-heads", metavar="N", type=int, help="where neither the weights nor a preset of their size tell"
    )
    sub.add_argument("--device", choices=("cpu", "cuda"), default="", help="default: cuda where there is one")
    sub = command(
        "cost",
        "tell what training a model costs: parameters, FLOPs, memory, floor times, and time on a named GPU",
        _cost,
    )
    sub.add_argument(
        "--model",
        metavar="NAME",
        help="preset: Ti/16 S/16 S/32 B/16 B/32 L/16 L/32 H/14, R50+B/16 and such (required without --recipe)",
    )
    sub.add_argument("--recipe", metavar="NAME", help="take model, size, batch and length from it; other flags win")
    sub.add_argument("--img-size", metavar="N", type=int, help="side of the images in pixels (default 224)")
    sub.add_argument(
        "--batch-size", metavar="N", type=int, help="images per optimiser step, over all GPUs (default 256)"
    )
    sub.add_argument(
        "--epochs", metavar="N", type=float, help="passes over the data, for the cost of the whole training"
    )
    sub.add_argument("--images", metavar="N", type=float, help="images in an epoch, such as 303e6")
    sub.add_argument(
        "--gpu",
        metavar="NAME",
        default="H200",
        help="A10 L4 L40S A100 A100-40 H100 H100-PCIe H200 B200 3090 4090 5090 (default H200)",
    )
    sub.add_argument(
        "--gpus", metavar="N", type=int, default=1, help="that share the batch, at no cost for their talk (default 1)"
    )
    sub.add_argument(
        "--ceilings",
        metavar="FILE",
        help="JSON of measured flops_per_second and bytes_per_second, or what bench/ writes, for the data sheet's",
    )
    sub.add_argument(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        default="bf16",
        help="of the matrix products (default bf16; fp32 as TF32)",
    )
    sub.add_argument(
        "--keep",
        choices=("auto", "all", "least"),
        default="auto",
        help="what blocks keep for backward; auto: all where it fits (default)",
    )
    sub.add_argument(
        "--efficiency",
        metavar="X",
        type=float,
        help="share of the floors' speed that is reached (default: 0.7, of measured ceilings 0.85)",
    )
    sub.add_argument("--json", action="store_true", default=False, help="print all numbers as JSON")
    sub = command("scaling", "train models of several sizes for several lengths: accuracy against compute", _scaling)
    _add_run_options(sub)
    sub.add_argument(
        "--models", metavar="NAME", nargs="+", required=True, help="presets, R50x1 and the like, or timm:NAME"
    )
    sub.add_argument(
        "--lengths",
        metavar="EPOCHS",
        nargs="+",
        type=float,
        required=True,
        help="every model is trained this long, from the start each time",
    )
    sub = command("positions", "train with every kind of position embedding (the paper's Table 8)", _positions)
    _add_run_options(sub)
    sub.add_argument("--seeds", metavar="N", type=int, default=3, help="runs of each kind (default 3)")
    sub = command("recipes", "list the recipes, or tell everything about one", _recipes)
    sub.add_argument("recipe", metavar="NAME", nargs="?", default=None)
    sub.add_argument("--json", action="store_true", default=False, help="as a list of objects with every field")
    return parser


def _layers(args: argparse.Namespace) -> list[dict]:
    """Settings from the weakest to the strongest: config file, flags, --set."""
    import yaml

    given = {
        k: v
        for k, v in vars(args).items()
        if k not in ("command", "run", "debug", "resume", "print_config", "config", "set", "json", "sweep")
    }
    layers = [given, dict(getattr(args, "set", []))]
    if getattr(args, "config", None):
        path = Path(args.config)
        try:
            content = yaml.safe_load(path.read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise InputError(f"--config {path} cannot be read as YAML: {str(error).splitlines()[0]}") from None
        if not isinstance(content, dict):
            raise InputError(f"--config {path} must hold settings such as 'lr: 0.001', got {type(content).__name__}")
        layers.insert(0, content)
    return layers


def _train(args: argparse.Namespace) -> int:
    from ..train.recipes import resolve

    config = resolve(args.command, *_layers(args))
    if args.print_config:
        import yaml

        from ..train.recipes import as_plain

        print(yaml.safe_dump(as_plain(config), sort_keys=False), end="")
        return 0
    from ..distributed import is_first_rank, leave
    from ..experiments.runs import Stopped
    from ..experiments.sweep import sweep
    from ..train.trainer import train

    try:
        summary = sweep(config, args.resume) if getattr(args, "sweep", False) else train(config, args.resume)
    except Stopped:
        return 0
    finally:
        leave()
    if summary["finished"] and is_first_rank():
        print(
            f"accuracy {summary['accuracy']:.4f}, {summary['images_per_second']:,.0f} images/s, {summary['seconds']:.0f} s, in {config.output}"
        )
    return 0


def _evaluation(args: argparse.Namespace, *names: str) -> tuple[list[dict], dict]:
    """The settings of an evaluation, and the flags that are not settings."""
    options = {name: vars(args).pop(name) for name in names if hasattr(args, name)}
    layers = _layers(args)
    if hasattr(args, "batch_size"):
        layers.append({"eval_batch_size": args.batch_size})
    return layers, options


def _eval(args: argparse.Namespace) -> int:
    from ..eval.accuracy import evaluate_weights
    from ..train.recipes import resolve

    layers, options = _evaluation(args, "real")
    result = evaluate_weights(resolve("eval", *layers), getattr(args, "img_size", None), **options)
    text = ", ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in result.items())
    print(json.dumps(result) if args.json else text)
    return 0


def _fewshot(args: argparse.Namespace) -> int:
    from ..eval.fewshot import few_shot
    from ..train.recipes import resolve

    layers, options = _evaluation(args, "method", "shots", "seeds", "l2")
    result = few_shot(resolve("eval", *layers), img_size=getattr(args, "img_size", None), **options)
    lines = [
        f"{r['shots']:>4} images a class: accuracy {r['accuracy']:.4f} ({' '.join(f'{a:.4f}' for a in r['accuracies'])})"
        for r in result["results"]
    ]
    print(json.dumps(result) if args.json else "\n".join(lines))
    return 0


def _vtab(args: argparse.Namespace) -> int:
    from ..experiments.vtab import read_tasks, table, tasks_in, vtab

    layers, options = _evaluation(args, "root", "tasks", "output", "method", "examples", "l2")
    root, file = options.pop("root"), options.pop("tasks")
    result = vtab(tasks_in(root) if root else read_tasks(file), layers=layers, **options)
    if result:
        print(json.dumps(result) if args.json else table(result))
    return 0


def _experiment(args: argparse.Namespace, run, *names: str) -> list[dict] | None:
    """The rows of an experiment, None where it was asked to stop."""
    from ..distributed import leave
    from ..experiments.runs import Stopped
    from ..train.recipes import resolve

    options = [vars(args).pop(name) for name in names]
    config = resolve("pretrain", *_layers(args))
    if not config.output:
        raise InputError("no place for the results: add --output FOLDER")
    try:
        return run(config, *options)
    except Stopped:
        return None
    finally:
        leave()


def _scaling(args: argparse.Namespace) -> int:
    from ..experiments.scaling import scaling

    for row in _experiment(args, scaling, "models", "lengths") or ():
        print(
            f"{row['model']:<10} {row['epochs']:>6g} epochs  {row['exaflops']:.4g} exaFLOPs  accuracy {row['accuracy']:.4f}"
        )
    return 0


def _positions(args: argparse.Namespace) -> int:
    from ..experiments.positions import positions, positions_table

    rows = _experiment(args, positions, "seeds")
    print(positions_table(rows) if rows else "", end="")
    return 0


def _demo(args: argparse.Namespace) -> int:
    from ..experiments.demo import demo

    demo(Path(args.output), args.seed, args.device)
    return 0


def _doctor(args: argparse.Namespace) -> int:
    import torch

    from ..kernels.launch import INTERPRETED

    if (
        args.interpreted or not torch.cuda.is_available()
    ) and not INTERPRETED:  # chosen before the kernels are imported
        command = [sys.executable, "-m", "vitfast", "doctor"]
        command += [f"--jobs={args.jobs}"] if args.jobs is not None else []
        command += [f"--only={name}" for name in args.only]
        command += [f"--dtype={args.dtype}"] if args.dtype else []
        command += [f"--{flag}" for flag in ("json", "untimed", "debug", "interpreted") if getattr(args, flag)]
        return subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}).returncode
    from ..doctor import doctor

    return doctor(args.json, args.only, args.dtype, args.jobs, not args.untimed, args.debug, args.interpreted)


def _tune(args: argparse.Namespace) -> int:
    import torch

    from ..tune.tuner import tune

    return tune(args.model, getattr(torch, args.dtype), args.only, args.seconds, args.batch_size, args.deterministic)


def _overrides(args: argparse.Namespace) -> dict:
    """The arguments of from_pretrained among the flags."""
    given = {name: getattr(args, name) for name in ("num_heads", "num_classes", "img_size") if hasattr(args, name)}
    if len(given.get("img_size", [0])) > 2:
        raise InputError(f"--img-size takes one number or two, got {len(args.img_size)}")
    return given | ({"img_size": tuple(args.img_size * 2)[:2]} if "img_size" in given else {})


def _convert(args: argparse.Namespace) -> int:
    from ..convert import convert

    notes = convert(args.source, args.path, args.form, force=args.force, **_overrides(args))
    print("\n".join([f"wrote {args.path}", *(f"note: {note}" for note in notes)]))
    return 0


def _export(args: argparse.Namespace) -> int:
    import torch

    from ..export import check_target, export
    from ..model import ViT

    check_target(args.output, args.form, args.force)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: no CUDA device here")
    model = ViT.from_pretrained(args.weights, **_overrides(args)).to(args.device)
    difference = export(model, args.output, args.form, uint8=args.uint8, force=args.force)
    checked = (
        "not checked, onnxruntime is not installed"
        if difference is None
        else f"max difference {difference:.2g} from PyTorch"
    )
    print(f"wrote {args.output}: {checked}")
    return 0


def _inspect(args: argparse.Namespace) -> int:
    import torch

    from ..inspect.figures import read_images, write_inspection
    from ..model import ViT

    if args.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: no CUDA device here")
    model = ViT.from_pretrained(args.weights, **_overrides(args)).to(
        args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    )
    images = read_images(args.data, args.images, model.patch_embed.img_size, model.in_chans)
    print(f"wrote {write_inspection(model, images, args.output, args.weights, args.data)}")
    return 0


def _cost(args: argparse.Namespace) -> int:
    import torch

    from ..cost import DATASETS, as_text, estimate, rates
    from ..model import ViT
    from ..presets import preset

    device = rates(args.gpu, args.dtype, getattr(args, "ceilings", None))
    given = {k: getattr(args, k) for k in ("model", "img_size", "batch_size", "epochs", "recipe") if hasattr(args, k)}
    epochs, images, options, training = (
        given.get("epochs"),
        getattr(args, "images", None),
        {"img_size": given.get("img_size", 224)},
        {},
    )
    if "recipe" in given:
        from ..train.recipes import resolve
        from ..train.setup import model_arguments

        config = resolve("pretrain", given)
        per_epoch, classes = DATASETS.get(config.name.rpartition("/")[2].partition("-")[0], (None, 1000))
        given.update(model=config.model, batch_size=config.batch_size)
        epochs, images = (1, config.steps * config.batch_size) if config.steps else (config.epochs, images or per_epoch)
        options = model_arguments(config) | {"num_classes": classes}
        options["representation_size"] = preset(config.model)["embed_dim"] if config.hidden_head else None
        training = dict(optimizer=config.optimizer, averaged=bool(config.ema_decay))
    elif "model" not in given:
        raise InputError("cost of what? give --model NAME or --recipe NAME")
    if (epochs is None) != (images is None):
        raise InputError("the length of a training takes both --epochs N and --images N, the images in an epoch")
    with torch.device("meta"):
        model = ViT(**{**preset(given["model"]), **options})
    total = None if epochs is None else epochs * images
    where = dict(
        batch_size=given.get("batch_size", 256),
        gpus=args.gpus,
        dtype=args.dtype,
        efficiency=getattr(args, "efficiency", None),
        keep=args.keep,
    )
    found = dict(model=given["model"], **estimate(model, device, images=total, **where, **training))
    print(json.dumps(found, indent=2) if args.json else as_text(given["model"], found))
    return 0


def _recipes(args: argparse.Namespace) -> int:
    import dataclasses

    from ..train.recipes import RECIPES, get

    if args.recipe:
        found = dataclasses.asdict(get(args.recipe))
        about = found.pop("about")
        print(
            json.dumps(found | dict(about=about), indent=2)
            if args.json
            else "\n".join([about, *(f"  {k}: {v}" for k, v in found.items())])
        )
        return 0
    rows = [dataclasses.asdict(recipe) for recipe in RECIPES.values()]
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        length = f"{row['steps']} steps" if row["steps"] else f"{row['epochs']:g} epochs"
        print(
            f"{row['name']:<26} {row['model']:<8} {row['img_size']:>4} px  batch {row['batch_size']:<5} {length:<12} {row['optimizer']:<6} lr {row['lr']:g}"
        )
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs one command. Exit codes: 0 done (or stopped and saved), 1 failed on the way, 2 wrong input, 130 interrupted."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for name in ("timm", "httpx", "datasets", "fsspec", "torch", "onnxscript", "onnx_ir"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("vitfast: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if args.debug:
            raise
        return _tell(error)


def _tell(error: Exception) -> int:
    """One line for an error that a user can mend, the exception itself for the others."""
    text = " ".join(str(error).split())
    if isinstance(error, InputError):
        print(f"vitfast: error: {text}", file=sys.stderr)
        return 2
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("vitfast"):
        print(
            f"vitfast: error: {error.name} is not installed; this command needs pip install 'vitfast[train]'",
            file=sys.stderr,
        )
        return 2
    if type(error).__name__ == "TrainingError" or isinstance(error, OSError):
        print(f"vitfast: error: {text}", file=sys.stderr)
        return 1
    raise error


if __name__ == "__main__":
    sys.exit(main())
