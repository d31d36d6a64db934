"""Runs the questions of gpu.sh: each step in its own time, and every result kept."""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import decide
import report
from asking import Question
from result_files import load

PYTHON = os.environ.get("PYTHON", sys.executable)
SECONDS = 555  # of a run with the limits that questions have; a run of another length scales them
GRACE = 5  # seconds between SIGINT and SIGKILL
# What breaks a process's context for good; not an error of one call, such as a lack of memory or a refused argument.
DEVICE_ERROR = (
    "illegal (memory access|instruction|address space)|misaligned address|invalid program counter"
    "|device-side assert|unspecified launch failure|launch timed out|hardware stack error|uncorrectable"
    "|does not answer any more"
)
PROBE = """
import os, sys, torch
gpu = torch.cuda.is_available()
if not gpu and not os.environ.get("VITFAST_REHEARSE"):
    sys.exit(3)
import triton
device = torch.cuda.get_device_name() if gpu else "a rehearsal on the CPU"
print(f"{device}, torch {torch.__version__}, triton {triton.__version__}, python {sys.version.split()[0]}")
print(f"{torch.cuda.mem_get_info()[0] // 2**30 if gpu else 0} GiB free")
"""


def refuse(why: str):
    print(f"bench/gpu.sh: {why}", file=sys.stderr)
    sys.exit(2)


class Session:
    """The steps of a run and what they left in `out`. scratch: a folder for files that are not kept."""

    def __init__(self, out: Path, scratch: Path, seconds: int):
        self.out, self.ends, self.grace = out, time.monotonic() + seconds, GRACE if seconds > 100 else 1
        self.scale = seconds / SECONDS
        self.steps, self.file, self.failed, self.device_errors = [], out / "steps_decide.json", False, 0
        self.mark = f"VITFAST_RUN={scratch.name}"
        self.environment = os.environ | dict(
            VITFAST_RUN=scratch.name,
            VITFAST_CEILINGS=str(scratch / "ceilings.json"),  # measured by the first that needs them
            PYTEST_DEBUG_TEMPROOT=str(scratch),
        )

    def left(self) -> float:
        """Seconds that a step can still take, so that it can be ended and the report written."""
        return self.ends - time.monotonic() - 3 * self.grace

    def limited(self, command: list[str], log: Path, limit: float, **environment: str) -> tuple[str, int, float]:
        """The state, exit code and seconds of a command that is ended after `limit` seconds."""
        begun = time.monotonic()
        with log.open("w") as file:
            options = dict(stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
            process = subprocess.Popen(command, env=self.environment | environment, **options)
        try:
            code = process.wait(limit)
            state = "failed" if code else "ok"
        except subprocess.TimeoutExpired:
            state, code = self.end(process, "timed out"), 124
        except KeyboardInterrupt:
            state, code = self.end(process, "interrupted"), 130
        self.kill_rest()
        return state, code if code >= 0 else 128 - code, time.monotonic() - begun

    def end(self, process: subprocess.Popen, state: str) -> str:
        """Ends a process and its group; "stuck" if not even SIGKILL does, as it waits for a hung driver."""
        for number, patience in ((signal.SIGINT, self.grace), (signal.SIGKILL, 2)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(patience)
                return state
        return "stuck"

    def kill_rest(self) -> None:
        """Ends what this run has started and is still there, in other sessions too."""
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended, or is not ours
                if self.mark.encode() in (path / "environ").read_bytes().split(b"\0"):
                    os.kill(int(path.name), signal.SIGKILL)

    def step(self, name: str, limit: float, command: list[str], **environment: str) -> dict:
        """Runs a command and records how it ended; raises KeyboardInterrupt after an interrupt."""
        limit, log = min(limit, self.left()), self.out / f"{name}.log"
        print(f"== {name}: at most {limit:.0f} s", flush=True)
        for path in (log, log.with_suffix(".json")):  # an earlier run into the same folder may have left them
            path.unlink(missing_ok=True)
        state, code, taken = self.limited(command, log, limit, **environment)
        text = log.read_text(errors="replace")[-20000:]
        if state == "ok":
            self.device_errors = 0
        else:
            self.failed = True
            self.device_errors = self.device_errors + 1 if re.search(DEVICE_ERROR, text) else 0
            print("\n".join(line[:300] for line in text.splitlines()[-25:]))
        self.steps.append(dict(name=name, state=state, code=code, seconds=round(taken, 1)))
        print(f"{state:12} {name:18} {taken:4.0f} s   exit code {code}", flush=True)
        decide.write(self.file, dict(steps=self.steps))
        if state == "interrupted":
            raise KeyboardInterrupt
        return self.steps[-1]

    def report(self) -> None:
        try:
            (self.out / "report.md").write_text(report.sections(load(self.out)))
        except Exception as error:  # the results are kept whatever the report makes of them
            self.failed = True
            print(f"the report cannot be written: {type(error).__name__}: {error}")

    def ask(self, question: Question, limit: float, workers: int) -> dict:
        """Runs what a question asks for."""
        name, run, limit, environment = question.name, question.run, min(limit, self.left()), {}
        if run.kind == "rivals":
            ends = str(int(time.time() + limit))
            command = [PYTHON, "bench/rivals.py", name, "--folder", str(self.out), "--ends", ends]
        elif run.kind == "bench":
            command = [PYTHON, "-m", "pytest", *run.arguments, "--benchmark-only", "-q", "-ra"]
            command += ["--benchmark-columns=median,iqr,rounds", f"--benchmark-json={self.out / name}.json"]
            command += ["--case-limit", str(int(limit))]
        elif run.kind == "tests":
            environment = dict(VITFAST_SANITIZER_SECONDS=str(int(limit) - 5))
            options = ["-m", "gpu", "-n", str(workers), "--dist", "load", "-q", "-ra"]
            command = [PYTHON, "-m", "pytest", *run.arguments, *options]
        else:
            command = [PYTHON, "-m", "vitfast", "doctor", "--untimed", "--debug", "--jobs", "14"]
        return self.step(name, limit, command, **environment)

    def decide(self, machine: str, only: list[str], workers: int) -> None:
        """Asks what is open until nothing is, or no time is left."""
        gpu = decide.gpu_of(machine)
        while self.device_errors < 2:
            known, tried = decide.answers(gpu, self.out), [step["name"] for step in self.steps]
            question = decide.following(known, tried, self.left() / self.scale, only)
            if question is None:
                return
            print(f"\n== {decide.announcement(question, known)}")
            step = self.ask(question, decide.limit(question, known) * self.scale, workers)
            answer = decide.answer(self.out, step, machine)
            print(f"   -> {answer['follows']}")
            self.report()
        print("two steps in a row broke the device: stopping here")  # more steps would only break it again


def probe(session: Session, scratch: Path) -> tuple[str, int]:
    """The GPU and the versions, and how many GiB are free on it."""
    state, code, _ = session.limited([PYTHON, "-c", PROBE], scratch / "probe", 90)
    lines = (scratch / "probe").read_text().splitlines()
    if state == "interrupted":
        raise KeyboardInterrupt
    if state != "ok" and code == 124:
        refuse("the GPU does not answer: torch has looked for it for 90 s")  # and cannot be ended
    if code == 3:
        refuse(f"no NVIDIA GPU that the torch of {PYTHON} can use (--rehearse does without)")
    facts, free = (
        next((line for line in lines if word in line), "") for word in (", torch ", "GiB free")
    )  # no warning
    if code or not free:
        refuse(f"{PYTHON} cannot use torch and triton: {lines[-1] if lines else code}")
    return facts, int(free.split()[0])


def run(out: Path, scratch: Path, seconds: int, rehearse: bool, only: list[str]) -> int:
    """Runs the questions, and returns the exit code."""
    session = Session(out, scratch, seconds)
    try:
        machine, free = probe(session, scratch)
        try:
            out.mkdir(parents=True, exist_ok=True)
            decide.write(session.file, dict(steps=[]))
        except OSError as error:
            refuse(f"cannot write into {out}: {error.strerror}")
        if others := {a["gpu"] for a in decide.read_all(out.glob("answers/*.json"))} - {decide.gpu_of(machine)}:
            refuse(f"{out} holds answers of {', '.join(others)}: give another folder for {decide.gpu_of(machine)}")
        print(machine, flush=True)
        named = os.environ.get("VITFAST_CACHE")
        for archive in [] if rehearse else [named] if named else sorted(Path("bench/cache").glob("*.tar.xz")):
            session.step("cache", 90, [PYTHON, "-m", "vitfast", "kernels", "install", str(archive)])
        # a worker of the GPU's tests takes 5 GiB
        session.decide(machine, only, max(1, min(len(os.sched_getaffinity(0)), free // 5, 8)))
        code = int(session.failed)
    except KeyboardInterrupt:
        session.kill_rest()
        code = 130
    session.report()
    print(f"\n{report.answers_table(load(out))}", end="")
    return code or int(session.failed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/gpu.sh", description="bench/gpu.sh itself says what it does.")
    parser.add_argument("stage", choices=["decide"])
    parser.add_argument("out", nargs="?", type=Path, default=Path("bench/results/local"), metavar="OUT")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU at a toy's sizes")
    parser.add_argument("--only", action="append", default=[], choices=list(decide.QUESTIONS), metavar="NAME")
    args = parser.parse_args()
    seconds = os.environ.get("VITFAST_SECONDS") or str(SECONDS)
    if not re.fullmatch("[0-9]{2,}", seconds):
        refuse(f"VITFAST_SECONDS must be a whole number of seconds, 10 at least, got {seconds!r}")
    os.environ.pop("VITFAST_REHEARSE", None)
    if args.rehearse:
        os.environ |= dict(VITFAST_REHEARSE="1", CUDA_VISIBLE_DEVICES="")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores HUP
            signal.signal(number, interrupt)
    with tempfile.TemporaryDirectory(prefix="vitfast-", ignore_cleanup_errors=True) as scratch:
        return run(args.out, Path(scratch), int(seconds), args.rehearse, args.only)


def interrupt(number, frame):
    """Raises KeyboardInterrupt, once: what comes later does not disturb the end."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
