"""Compile kernels ahead of the first image, and add them to the cache of the machine that runs them."""

import argparse
from pathlib import Path

from ..errors import InputError
from .options import add_shared

GPUS = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name: str, about: str) -> argparse.ArgumentParser:
        description = f"{about[0].upper()}{about[1:]}."
        sub = commands.add_parser(name, help=about, description=description, argument_default=argparse.SUPPRESS)
        sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return sub

    about = "compile the kernels of models into an archive, without a GPU, for the Triton and the Python that run this"
    sub = action("pack", about)
    add = sub.add_argument
    add("--gpu", choices=GPUS, required=True, help="compute capability of the GPU: sm_90 is an H100's")
    models = "presets, and the side of their images if it is not 224: B/16 'B/16 384' (default B/16)"
    add("--model", metavar="NAME", nargs="+", default=["B/16"], help=models)
    add("--output", metavar="FILE", type=Path, required=True, help="the archive, a .tar.xz")
    add("--jobs", metavar="N", type=int, default=0, help="processes (default: one for each CPU but two, at most 14)")
    add_shared(sub, "--force")
    about = "add an archive to Triton's cache (TRITON_CACHE_DIR or ~/.triton/cache), if it fits this machine"
    action("install", about).add_argument("file", metavar="FILE", type=Path, help="what `pack` wrote")


def run(args: argparse.Namespace) -> None:
    dict(pack=pack, install=install)[args.action](args)


def pack(args: argparse.Namespace) -> None:
    from ..tools.machine_code.packing import pack_models

    if args.jobs < 0:
        raise InputError(f"--jobs must be 1 at least, got {args.jobs}")
    if args.output.is_dir():
        raise InputError(f"--output {args.output} is a folder; give the path of the archive")
    if args.output.exists() and not args.force:
        raise InputError(f"{args.output} exists; --force replaces it")
    count = pack_models(args.output, args.gpu, args.model, args.jobs)
    size = args.output.stat().st_size / 2**20
    print(f"wrote {args.output}: {count} kernels of {', '.join(args.model)} for {args.gpu}, {size:.1f} MiB")


def install(args: argparse.Namespace) -> None:
    import torch

    from ..kernels import archives
    from ..kernels.archives import missing_for_launchers

    if not args.file.is_file():
        raise InputError(f"there is no file {args.file}")
    capabilities = map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))
    try:
        made = archives.manifest(args.file)
        if reason := archives.refusal(made, {10 * major + minor for major, minor in capabilities}):
            raise InputError(f"{args.file} is not installed: {reason}")
        archives.install(args.file)
    except ValueError as error:
        raise InputError(str(error)) from None
    what = f"{made['count']} kernels of {', '.join(made['models'])} for {made['gpu']}"
    print(f"added {what} to {archives.cache_folder()}")
    if missing := missing_for_launchers():
        print(f"Triton cannot build what launches them: {missing}")
