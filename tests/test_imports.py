"""The start of a process: which modules an import or a command may import, and its processor time beside torch's."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vitfast
from vitfast.cli import COMMANDS
from vitfast.ops.dispatch import constant_when_compiled

ROOT = Path(__file__).parent.parent
PUBLIC = "from vitfast import ViT, accelerate, load_checkpoint, ops, pack"
# Each takes as long as torch or longer to import, or is for a part of the users alone.
LATE = "torch._dynamo torch._inductor sympy timm transformers torchvision PIL yaml tqdm matplotlib sklearn".split()
# Torch's counter of FLOPs, to which the operations give formulas; it takes 5 ms.
COUNTER = {"torch.utils.flop_counter", "torch.utils.module_tracker"}
# Exported programs that call our operations load, and torch.nn.attention knows our name.
REGISTERED = "torch.ops.vitfast.attention.default"
COMMAND = """
import contextlib, io, vitfast.cli
for arguments in {}:
    with contextlib.redirect_stdout(io.StringIO()):
        try: vitfast.cli.main(arguments)
        except SystemExit as stop: assert not stop.code
"""
# The environment of a user: kernels are compiled, and byte code is kept.
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON", "VITFAST", "PYTHONDONT"))}
ENVIRONMENT["PYTHONPATH"] = str(ROOT)


def modules_after(code: str) -> set[str]:
    """The modules of a process that has run this code."""
    code += "\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout))


def test_importing_vitfast_imports_nothing_late():
    """Beside what torch imports itself; whichever of the two is imported first."""
    before = modules_after("import torch")
    for first in ("torch, vitfast", "vitfast, torch"):
        more = modules_after(f"import {first}\n{REGISTERED}\n{PUBLIC}") - before
        assert not more.intersection(LATE), more.intersection(LATE)
        roots = {name.partition(".")[0] for name in more - COUNTER} - sys.stdlib_module_names
        assert {name for name in roots if not name.startswith("_")} <= {"vitfast", "triton", "safetensors", "numpy"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["kernels.launch", "kernels.rows", "ops.reference", "model.layers", "backend.eager", "run.device"]
)
def test_every_room_can_be_imported_first(name):
    """Torch is imported in the middle of it, and then the operations."""
    assert {f"vitfast.{name}", "vitfast.ops.mlp_block"} <= modules_after(f"import vitfast.{name}")


IN_THREADS = """
import concurrent.futures, sys, time, vitfast
def first(): import torch
def second():
    while "torch" not in sys.modules: time.sleep(0.001)
    from vitfast.ops import attention
with concurrent.futures.ThreadPoolExecutor() as pool:
    for each in [pool.submit(first), pool.submit(second)]: each.result()
import torch
assert torch.ops.vitfast.attention.default and vitfast.ViT
"""


@pytest.mark.slow
def test_threads_may_import_torch_and_the_operations_at_once():
    """One has begun with the operations and waits for torch, after which the other would import them."""
    assert {"torch", "vitfast.ops"} <= modules_after(IN_THREADS)


@pytest.mark.slow
def test_torch_is_imported_where_the_operations_cannot_be():
    code = "import sys, vitfast\nsys.modules['vitfast.ops.attention'] = None\nimport torch\nassert torch.zeros(1) == 0"
    code += "\ntry: vitfast.ops\nexcept ImportError as error: assert error.name == 'vitfast.ops.attention'\nelse: 1 / 0"
    assert "torch" in modules_after(code)


@pytest.mark.slow
def test_operations_may_be_imported_again():
    """One file (a notebook's autoreload), and all of vitfast in a process that had it twice before."""
    code = """
import importlib, sys, torch
for _ in range(3):
    import vitfast.ops.layer_norm
    importlib.reload(sys.modules["vitfast.ops.layer_norm"])
    assert torch.ops.vitfast.layer_norm(torch.empty(2, 8, device="meta"), None, None, 1e-6, False)[0].shape == (2, 8)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vitfast"]:
        del sys.modules[name]
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=ENVIRONMENT)


@pytest.mark.slow
def test_docstrings_may_be_stripped():
    """As python -OO does."""
    code = f"import vitfast.cli; {PUBLIC}; assert not ops.__doc__"
    subprocess.run([sys.executable, "-OO", "-c", code], check=True, env=ENVIRONMENT)
    subprocess.run([sys.executable, "-OO", "-m", "vitfast", "eval", "--help"], check=True, env=ENVIRONMENT)


@pytest.mark.slow
def test_commands_that_need_no_torch_import_none():
    """Nor does the help of any command."""
    costs = "cost --model L/16 --epochs 14 --images 303e6", "cost --recipe finetune/cifar10"
    for some in (
        ["--help", "--version"],
        ["recipes", "recipes digits --json"],
        costs,
        [f"{c} --help" for c in COMMANDS],
    ):
        found = modules_after(COMMAND.format([arguments.split() for arguments in some]))
        assert not found.intersection(["torch", "numpy", "triton", *LATE]) and "vitfast.cli.finetune" in found


def seconds(*arguments: str) -> float:
    """The processor time of a Python process with these arguments, user and system."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.slow
def test_imports_are_quick():
    """`import torch` takes 0.9 to 1.3 s on two cores; vitfast adds 0.15 s to it, and a command takes 0.05 s.

    Other processes of the machine slow some down: all take turns, and the least time of each counts.
    """
    torch_alone, *commands = ("-c", "import torch"), "--help", "finetune --help", "recipes", "cost --model B/16"
    most = {torch_alone: 1.0, ("-c", f"import torch, vitfast; {PUBLIC}"): 1.4}
    most |= {("-m", "vitfast", *command.split()): 0.3 for command in commands}
    least = dict.fromkeys(most, float("inf"))
    for turn in range(8):
        least = {arguments: min(before, seconds(*arguments)) for arguments, before in least.items()}
        slow = [arguments for arguments in most if least[arguments] > most[arguments] * least[torch_alone]]
        if turn and not slow:
            break
    assert not slow, least


@pytest.mark.slow
def test_the_batch_invariance_of_the_environment_acts_on_pytorch_at_once():
    code = "import vitfast, sys; assert sys.modules['vitfast.ops._fixed']._library is not None"
    for value, told in (("1", ""), ("2", "VITFAST_BATCH_INVARIANT: must be 0 or 1")):
        environment = ENVIRONMENT | {"VITFAST_BATCH_INVARIANT": value}
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert (run.returncode == 0) == (not told) and told in run.stderr, run.stderr


def test_public_names_are_all_that_dir_shows():
    shown = dir(vitfast)
    assert set(shown) == {*vitfast.__all__, "Embedder", "transform"} and all(hasattr(vitfast, name) for name in shown)
    assert vitfast.ViT is vitfast.model.vit.ViT and vitfast.adapters.accelerate is vitfast.accelerate
    assert vitfast.kernels.tiles  # a module
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        vitfast.nothing  # noqa: B018
    assert not hasattr(vitfast, "nothing.inside") and not hasattr(vitfast, "ops.attention")
    names = {}
    exec("from vitfast import *", names)
    assert set(vitfast.__all__) <= names.keys() and not names.keys() & {"Embedder", "transform"}


def test_the_mark_of_constant_results_is_pytorchs():
    ours, theirs = (mark(lambda: None) for mark in (constant_when_compiled, torch.compiler.assume_constant_result))
    assert vars(ours) == vars(theirs) != {}
