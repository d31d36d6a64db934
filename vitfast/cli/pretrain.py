"""Train a ViT, from scratch or from weights whose head it keeps."""

import argparse

from .options import add_training_options, setting_layers, unless_stopped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_training_options(parser, "start from these weights instead of from scratch")


def run(args: argparse.Namespace) -> int:
    """Also `finetune`, whose --sweep makes several runs of one."""
    from ..config import as_plain
    from ..train.recipes import resolve

    config = resolve(args.command, *setting_layers(args))
    if args.print_config:
        import yaml

        print(yaml.safe_dump(as_plain(config), sort_keys=False), end="")
        return 0
    from ..distributed import is_first_rank
    from ..experiments.sweep import sweep
    from ..train.trainer import train

    summary = unless_stopped(sweep if getattr(args, "sweep", False) else train, config, args.resume)
    if summary and summary["finished"] and is_first_rank():
        speed = f"{summary['images_per_second']:,.0f} images/s, {summary['seconds']:.0f} s"
        print(f"accuracy {summary['accuracy']:.4f}, {speed}, in {config.output}")
    return 0
