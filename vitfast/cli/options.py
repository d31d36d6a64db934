"""Options of several commands, and the settings and arguments that are made of them."""

import argparse
from pathlib import Path

from ..errors import InputError
from ..run.config import FIELDS, Config

INTERPOLATED = "positions are interpolated if it changes"
# Settings that have a flag of their own, whose values `Config` checks.
RUN_OPTIONS = dict(model="NAME", data="SPEC", output="DIR", img_size="N", batch_size="N", epochs="N", steps="N")
RUN_OPTIONS |= dict(lr="X", seed="N", save_every="STEPS")
_SHARED = {
    "--weights": dict(metavar="PATH", required=True, help="file, folder or hf-hub:owner/name"),
    "--device": dict(choices=("cpu", "cuda"), help="default: cuda if there is a GPU"),
    "--dtype": dict(choices=("bfloat16", "float16", "float32")),
    "--json": dict(action="store_true", default=False, help="print the result as JSON"),
    "--num-heads": dict(metavar="N", type=int, help="heads, if neither the weights nor a preset of their size say it"),
    "--img-size": dict(metavar="N", type=int, nargs="+", help=f"side, or height and width; {INTERPOLATED}"),
    "--graphs": dict(action="store_true", default=False, help="run the model as CUDA graphs (default: not)"),
    "--force": dict(action="store_true", default=False, help="replace existing output"),
}


def add_shared(parser: argparse.ArgumentParser, *names: str, **changes) -> None:
    """Adds options that several commands have; `changes` are the keywords that differ in this one."""
    for name in names:
        parser.add_argument(name, **_SHARED[name] | changes)


def add_run_options(parser: argparse.ArgumentParser, recipe: str = "") -> None:
    """Adds the settings of a training run. recipe: what the help says of a run that names no recipe."""
    add = parser.add_argument
    add("--config", metavar="FILE", help="YAML file of settings, such as a run folder's config.yaml; flags win over it")
    recipes = "recipe that the settings start from; `vitfast recipes` lists all recipes"
    add("--recipe", metavar="NAME", help=f"{recipes} (default: {recipe})" if recipe else recipes)
    for name, metavar in RUN_OPTIONS.items():
        meaning = Config.__dataclass_fields__[name].metadata["meaning"]
        given = _filled if metavar in ("N", "X", "STEPS") else str
        add(f"--{name.replace('_', '-')}", metavar=metavar, type=given, help=meaning)
    add_shared(parser, "--device")
    add("--compile", action=argparse.BooleanOptionalAction, help="use torch.compile (default: on cuda)")
    add_set(parser, "any other setting; pretrain --print-config shows all of them")


def add_training_options(parser: argparse.ArgumentParser, weights_help: str, recipe: str) -> None:
    """Adds the settings of a training run that can be resumed."""
    add_run_options(parser, recipe)
    add = parser.add_argument
    add("--weights", metavar="PATH", help=weights_help)
    resume = "auto: continue the run in --output (default); needed to train a finished run for longer; "
    resume += "never: start again; PATH: continue that run"
    add("--resume", metavar="auto|never|PATH", default=None, help=resume)
    told = "print the settings of this run as YAML, with their meanings, and stop"
    add("--print-config", action="store_true", default=False, help=told)


def add_evaluation_options(
    parser: argparse.ArgumentParser,
    data: str = "",
    at_once: str = "images at once (default 256)",
    sizes: bool = False,
) -> None:
    """Adds the settings of an evaluation.

    data: the help of --data, "" for no such option. at_once: the help of --batch-size. sizes: whether to add --sizes.
    """
    add_shared(parser, "--weights")
    add = parser.add_argument
    if data:
        add("--data", metavar="SPEC", required=True, help=data)
    add_shared(parser, "--img-size", help="side, or height and width (default: the model's own)")
    add("--batch-size", metavar="N", type=int, help=at_once)
    if sizes:
        native = "native: the model sees each image whole, at its own size, rounded to whole patches"
        add("--sizes", metavar="native", choices=("native",), help=native)
    add_shared(parser, "--device")
    add_set(parser, "other settings, such as amp=none or data_dir=/data")
    add_shared(parser, "--json")


def setting_layers(args: argparse.Namespace) -> list[dict]:
    """Layers of settings, the weakest first: the config file, then the flags, over which --set wins.

    A flag with the name of a Config's field sets that field, in any command.
    """
    import yaml

    layers = [{k: v for k, v in vars(args).items() if k in ("recipe", *FIELDS)} | dict(getattr(args, "set", []))]
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


def evaluation_layers(args: argparse.Namespace) -> list[dict]:
    """`setting_layers` of an evaluation, in which --batch-size is the number of images at once.

    A Config holds one side only: a height and a width are returned by `evaluation_config` beside it.
    """
    given = {name: value for name, value in vars(args).items() if name != "img_size"}
    if len(sides := getattr(args, "img_size", [])) == 1:
        given["img_size"] = sides[0]
    batch_size = [{"eval_batch_size": args.batch_size}] if hasattr(args, "batch_size") else []
    return setting_layers(argparse.Namespace(**given)) + batch_size


def evaluation_config(args: argparse.Namespace) -> tuple:
    """The Config of an evaluation, and the size of its images: --img-size, over which --set wins.

    The size is None where the model's own is used.
    """
    from ..train.recipes import resolve

    config, by_set = resolve("eval", *evaluation_layers(args)), "img_size" in dict(getattr(args, "set", []))
    return config, config.img_size or None if by_set else overrides(args).get("img_size")


def run_config(args: argparse.Namespace, task: str = "pretrain"):
    """The Config of a training run, or the one that the runs of an experiment start from."""
    from ..train.recipes import resolve

    return resolve(task, *setting_layers(args))


def unless_stopped(function, *args):
    """Returns function(*args), or None where a run was asked to stop; always leaves the process group."""
    from ..experiments.runs import Stopped
    from ..run.distributed import leave

    try:
        return function(*args)
    except Stopped:
        return None
    finally:
        leave()


def overrides(args: argparse.Namespace) -> dict:
    """The flags that are arguments of ViT.from_pretrained."""
    given = {name: getattr(args, name) for name in ("num_heads", "num_classes", "img_size") if hasattr(args, name)}
    if len(given.get("img_size", [0])) > 2:
        raise InputError(f"--img-size takes one number or two, got {len(args.img_size)}")
    return given | ({"img_size": tuple(args.img_size * 2)[:2]} if "img_size" in given else {})


def add_set(parser: argparse.ArgumentParser, text: str, name: str = "--set") -> None:
    """Adds an option that takes settings of a Config."""
    parser.add_argument(name, metavar="FIELD=VALUE", nargs="+", action="extend", type=_set_pair, help=text)


def _filled(text: str) -> str:
    """Returns a flag's number as text. Refuses an empty text, as from an unset variable of the shell."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}")
    return text


def _set_pair(text: str) -> tuple[str, str]:
    field, equals, value = text.partition("=")
    if not equals or not field:
        raise argparse.ArgumentTypeError(f"expected FIELD=VALUE, got {text!r}")
    return field.strip().replace("-", "_"), value.strip()
