"""Compare every kernel on this machine with float64, and time it on a GPU."""

import argparse
import os
import subprocess
import sys

from .options import add_shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_shared(parser, "--json", help="print the results as JSON")
    only = "check only operations whose name contains this, such as attention; can be repeated (default: all)"
    add("--only", metavar="NAME", action="append", default=[], help=only)
    add_shared(parser, "--dtype", default="", help="dtype of the checks (default: all that run here)")
    jobs = "number of processes, at most one for each CPU and for every 4 GiB free on the GPU; "
    jobs += "more than one is quicker but shows no times (default 1)"
    add("--jobs", metavar="N", type=int, default=1, help=jobs)
    add("--untimed", action="store_true", default=False, help="check only, without times")


def run(args: argparse.Namespace) -> int:
    import torch

    from ..kernels.launch import INTERPRETED

    if not torch.cuda.is_available() and not INTERPRETED:
        return _run_interpreted(args)
    from ..tools.doctor import doctor

    return doctor(args.json, args.only, args.dtype, args.jobs, not args.untimed, args.debug)


def _run_interpreted(args: argparse.Namespace) -> int:
    """Runs the command in a process that interprets kernels, as this is chosen before their import."""
    command = [sys.executable, "-m", "vitfast", "doctor", f"--jobs={args.jobs}"]
    command += [f"--only={name}" for name in args.only]
    command += [f"--dtype={args.dtype}"] if args.dtype else []
    command += [f"--{flag}" for flag in ("json", "untimed", "debug") if getattr(args, flag)]
    return subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}).returncode
