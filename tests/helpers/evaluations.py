"""An evaluation on one of two ranks, and by the command line as JSON."""

import json
from pathlib import Path

import torch
from commands import run_cli
from frozen import evaluation

from vitfast import ViT
from vitfast.data.loader import open_data
from vitfast.eval.accuracy import evaluate
from vitfast.run.distributed import join, leave


def of_two(weights: str, data: str, output: Path) -> None:
    """One of two ranks evaluates 16 x 16 images in patches of 8 x 8; the first writes what both found."""
    group, device = join(torch.device("cpu"))
    opened = open_data(evaluation(weights, data, eval_batch_size=3), (16, 16), (8, 8), device, group)
    found = evaluate(ViT.from_pretrained(weights), opened, device, None)
    if group.first:
        output.write_text(json.dumps(found))
    leave()


def result(capsys, command: str, weights, data, *more) -> dict:
    """What a command prints as JSON, on the CPU without workers."""
    flags = ("--weights", weights, "--data", data, "--device", "cpu", "--json", *more)
    code, out, err = run_cli(capsys, command, *flags, "--set", "workers=0", "eval_batch_size=3")
    assert code == 0, err
    return json.loads(out)
