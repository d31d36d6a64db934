"""Results that others send in: an archive of `vitfast report-gpu` is checked and added.

Nothing in an archive is believed that can be found otherwise. It holds regular files of known names, of which
manifest.json has the sha256; the code is that of a commit in the history of this repository; every operation agreed
with float64; the clocks were not throttled; no key is there that a table would show unchecked; nothing is written about
peers that is not a time or a reason; no training step is a copy of one that is here; and every number of a benchmark
follows from its times, which a device's clock can say and no GPU of that kind can fall below (plausible.py). The reason
of a refusal is one line.

It finds what is damaged, changed or thoughtless. Who makes up every number with care is not found out: who measures
other code than the manifest says, rounds times that were scaled as a clock does, within what a GPU can do, slows a peer
down by a factor under five, or writes errors that rounding could have made.
"""

import datetime
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
import zlib
from pathlib import Path

import plausible
from plausible import FILES, FORMS, Machine, Refused, check_form, within

from vitfast.cli.report_gpu import SCHEMA, digests, slug

MOST_BYTES, MOST_FILES = 64 * 2**20, 100
SECONDS = 900  # from start to end, packing included
THROTTLED = {  # nvidia-smi's clocks_event_reasons; a power cap is how a GPU is sold
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
THROTTLED_SHARE = 0.1
LEAST_BUSY = 3  # samples: a fast GPU is busy for half a minute in all
SKEW = 86400  # seconds that a clock may be ahead or behind
LOOKED_AT = 300  # commits, for the code of an installed package
OUT_OF_TIME = (124, 130, 137)  # exit codes
PASSED = {"smoke": (0,), "vitfast doctor": (0,), "first gpu tests": (0, None, *OUT_OF_TIME)}  # exit codes of the checks
CODE = ("kernels", "vitfast", "bench")
NEEDED = "clocks.json steps_first.json smoke.json doctor.json train.json".split()


# ---- the archive


def read_members(path: Path) -> dict[str, bytes]:
    """The files of a .tar.gz by name, all in memory; nothing is extracted."""
    found = {}
    try:
        with gzip.open(path) as stream:
            content = stream.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise Refused(f"it unpacks to more than {MOST_BYTES // 2**20} MiB")
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            for member in tar:
                name = member.name
                if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
                    raise Refused(f"{name!r} is not a regular file")
                if not re.fullmatch(r"[A-Za-z0-9_]{1,60}\.(json|log)", name):
                    raise Refused(f"{name!r} is not the name of a file that report-gpu writes")
                if name in found:
                    raise Refused(f"{name} is in it twice")
                if len(found) == MOST_FILES or not 0 <= member.size <= len(content):
                    raise Refused(f"it holds more than {MOST_FILES} files, or a size that is wrong")
                found[name] = tar.extractfile(member).read()
    except (OSError, EOFError, ValueError, zlib.error, tarfile.TarError) as error:
        raise Refused(f"it cannot be read as a .tar.gz: {error}") from None
    return found


def parse(name: str, content: bytes) -> dict:
    """A JSON object of the form that this file has, without NaN and repeated keys."""

    def no_number(word: str):
        raise ValueError(f"{word} is no number")

    def once(pairs: list[tuple]) -> dict:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError(f"a key is there twice among {', '.join(found)}")
        return found

    try:
        found = json.loads(content.decode(), parse_constant=no_number, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise Refused(f"{name} is not valid JSON: {error}") from None
    if name not in FORMS:
        raise Refused(f"{name} is not a file of this stage")
    check_form(found, FORMS[name], name)
    return found


def check_manifest(files: dict[str, bytes]) -> dict:
    """The manifest, whose hashes are those of the files."""
    if "manifest.json" not in files:
        raise Refused("it has no manifest.json: send the archive that report-gpu names at its end")
    manifest = parse("manifest.json", files["manifest.json"])
    if manifest["schema"] != SCHEMA:
        raise Refused(f"manifest.json has schema {manifest['schema']}, this checkout reads {SCHEMA}")
    if odd := manifest["files"].keys() ^ (files.keys() - {"manifest.json"}):
        raise Refused(f"manifest.json and the archive differ about {', '.join(sorted(odd))}")
    for name, digest in manifest["files"].items():
        if digest != hashlib.sha256(files[name]).hexdigest():
            raise Refused(f"{name} was changed after it was measured: its sha256 is not that of the manifest")
    if lost := [name for name in NEEDED if name not in files]:
        raise Refused(f"it lacks {', '.join(lost)}")
    if "train_peers.json" in files:
        raise Refused("the device broke in a training step of ours: please open an issue about that")
    within("its seconds", manifest["finished"] - manifest["started"], 0, SECONDS, "the run ends by itself")
    return manifest


# ---- the code


def _git(root: Path, *command: str) -> bytes | None:
    try:
        run = subprocess.run(["git", "-C", str(root), *command], capture_output=True)
    except OSError:
        return None
    return run.stdout if run.returncode == 0 else None


def sources_of(root: Path, commit: str) -> dict[str, str] | None:
    """The hashes of the code at a commit; None where the repository does not have it."""
    content = _git(root, "archive", commit, *CODE)
    if content is None:
        return None
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        return digests({member.name: tar.extractfile(member).read() for member in tar if member.isfile()})


def check_sources(manifest: dict, root: Path) -> str:
    """The commit whose code was measured."""
    said, commit = manifest["sources"], manifest["commit"]
    if commit is None:  # an installed package
        every = _git(root, "log", f"-{LOOKED_AT}", "--format=%H", "--", *CODE) or b""
        commit = next((c for c in every.decode().split() if sources_of(root, c) == said), None)
        if commit is None:
            raise Refused(f"no commit of this repository has the code of its vitfast {manifest['vitfast']}")
    if not re.fullmatch("[0-9a-f]{40}", commit):
        raise Refused(f"manifest.json: commit must be 40 hexadecimal digits, got {commit!r}")
    true = sources_of(root, commit)
    if true is None or _git(root, "merge-base", "--is-ancestor", commit, "HEAD") is None:  # also of a tree
        raise Refused(f"commit {commit} is not in this repository, or not in the history of its HEAD")
    for name, digest in true.items():
        if said.get(name) != digest:
            raise Refused(f"its {name}/ is not that of commit {commit[:12]}: the code was changed")
    made = int(_git(root, "log", "-1", "--format=%ct", commit))
    if not made - SKEW <= manifest["started"] <= time.time() + SKEW:
        raise Refused(f"it was measured before its commit {commit[:12]} was made, or in the future")
    return commit


# ---- steps, clocks


def check_steps(content: dict, seconds: int) -> None:
    checks, steps = content["checks"], content["steps"]
    if odd := checks.keys() - PASSED.keys():
        raise Refused(f"steps_first.json has checks that this stage does not make: {', '.join(sorted(odd))[:60]!r}")
    for name, passed in PASSED.items():
        if (code := checks.get(name)) not in passed:
            more = "a second run finds the kernels compiled, as few CPUs have to" if code in OUT_OF_TIME else ""
            raise Refused(f"{name} has not passed (exit code {code}): {more or 'please open an issue about that'}")
    if lost := {"smoke", "doctor", "train"} - {step["name"] for step in steps}:
        raise Refused(f"steps_first.json lacks the steps {', '.join(sorted(lost))}")
    for each in steps:
        within(f"steps_first.json: the seconds of {each['name']}", each["seconds"], 0, seconds, "those of the run")
    took = sum(each["seconds"] for each in steps)
    within("steps_first.json: the seconds of its steps", took, 0, seconds + 5, "those of the run")


def check_clocks(content: dict, machine: Machine, seconds: int) -> None:
    interval, samples, before = content["interval"], content["samples"], -1e-9
    within("clocks.json: interval", interval, 1, 10, "seconds")
    within("clocks.json: its samples", len(samples), seconds / (5 * interval), 1e6, f"there are {seconds} s")
    for sample in samples:
        within("clocks.json: clocks.sm", sample["clocks.sm"], 1, machine.most_mhz, "MHz of this GPU")
        within("clocks.json: seconds", sample["seconds"], before, seconds + 5, "samples are in order")
        before = sample["seconds"]
    # a slice of a GPU does not know how busy it is
    busy = [s["reasons"] for s in samples if s["utilization.gpu"] is None or s["utilization.gpu"] > 50]
    within("clocks.json: its samples of a busy GPU", len(busy), LEAST_BUSY, 1e6, "are the others of another GPU?")
    for bit, reason in THROTTLED.items():
        share = sum(bool(bits & bit) for bits in busy) / len(busy)
        most = max(1 / len(busy), THROTTLED_SHARE)  # one moment is none
        within(f"clocks.json: the share of {reason}", share, 0, most, "the clocks were throttled under load")


# ---- the whole


def check(archive: Path, root: Path) -> tuple[dict[str, bytes], dict, Machine]:
    """The files of an archive, its manifest (with the commit found) and its machine; raises Refused."""
    files = read_members(archive)
    manifest = check_manifest(files)
    commit, seconds = check_sources(manifest, root), manifest["finished"] - manifest["started"]
    older = f" (for results of an older vitfast by its own rules: git checkout {commit[:12]})"
    try:
        contents = {name: parse(name, content) for name, content in files.items() if name.endswith(".json")}
        measured = {name: content for name, content in contents.items() if name in FILES}
        label = manifest["commit"] or f"vitfast {manifest['vitfast']}"
        machine = plausible.check_machine(measured, manifest["device"], label)
        check_steps(contents["steps_first.json"], seconds)
        for name in ("smoke.json", "doctor.json"):
            plausible.check_doctor(contents[name], name, machine, whole=name == "doctor.json")
        plausible.agree("doctor.json: vitfast", contents["doctor.json"]["machine"]["vitfast"], manifest["vitfast"])
        check_clocks(contents["clocks.json"], machine, seconds)
        told = {}
        for name, content in measured.items():
            at = datetime.datetime.fromisoformat(content["datetime"]).timestamp() - manifest["started"]
            within(f"{name}: datetime", at, -5, seconds + 5, "seconds after the start of the run")
            plausible.check_benchmarks(content, name, machine, told)
    except (Refused, ValueError, OverflowError) as error:
        what = error if isinstance(error, Refused) else f"it has another form than report-gpu writes: {error!r}"
        raise Refused(f"{what}{older if sources_of(root, 'HEAD') != manifest['sources'] else ''}") from error
    return files, manifest | dict(commit=commit), machine


def _pattern(case: dict) -> tuple[float, ...]:
    """How the times of a case lie to each other, in whatever order and however they are scaled."""
    data = sorted(case["stats"]["data"])
    return tuple(round(t / data[-1], 4) for t in data)


def check_new(files: dict[str, bytes], results: Path, replaced: Path | None) -> None:
    """Raises Refused where a training step is in `results` already, under whatever GPU or commit."""
    steps = json.loads(files["train.json"])["benchmarks"]
    for path in results.glob("*/train*.json"):
        if path.parent != replaced:
            known = {_pattern(case) for case in json.loads(path.read_bytes()).get("benchmarks", [])}
            if same := [case["name"] for case in steps if _pattern(case) in known]:
                raise Refused(f"the times of {same[0]} are those of {path}: it is there already, or a copy")


def add(archive: Path, results: Path, root: Path, replace: bool = False) -> Path:
    """Adds a good archive's JSON files to a folder of its GPU, which it returns.

    Raises Refused, before anything is written, where the archive is not good. Results of a GPU that
    has a folder already go to a second one, named by driver and commit; with `replace` they take the first one's place.
    """
    files, manifest, machine = check(archive, root)
    files["manifest.json"] = json.dumps(manifest, indent=1).encode()  # with the commit that was found
    folder = results / slug(manifest["device"])
    check_new(files, results, folder if replace else None)
    if folder.exists() and not replace:
        folder = folder.with_name(f"{folder.name}-driver{machine.facts['driver_version']}-{manifest['commit'][:7]}")
        if folder.exists():
            raise Refused(f"{folder} is there already; --replace puts these in the place of {slug(manifest['device'])}")
    staged = Path(tempfile.mkdtemp(prefix=".", dir=results))
    try:
        for name, content in files.items():
            if name.endswith(".json"):
                (staged / name).write_bytes(content)
        staged.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(staged, folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return folder
