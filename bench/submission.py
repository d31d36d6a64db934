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

import gzip
import hashlib
import io
import json
import math
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
from plausible import Refused, take

from vitfast.cli.report_gpu import SAMPLED, SCHEMA, digests, slug

MOST_BYTES, MOST_FILES = 64 * 2**20, 100
MANIFEST = dict(schema=int, vitfast=str, device=str, started=int, finished=int, exit_code=int, sources=dict, files=dict)
SECONDS = 900  # from start to end, packing included
LEAST_BUSY = 3  # samples: a fast GPU is busy for half a minute in all
SKEW = 86400  # seconds that a clock may be ahead or behind
LOOKED_AT = 300  # commits, for the code of an installed package
CHECKED = ("smoke", "vitfast doctor")  # of steps_first.json: these must have passed
STATES = re.compile("ok|failed|timed out|stuck|skipped|interrupted")  # of a step of gpu.sh
OUT_OF_TIME = (124, 130, 137)  # exit codes
CODE = ("kernels", "vitfast", "bench")
OTHERS = {  # the files that hold no benchmarks, each with its keys: any other might be read as a benchmark
    "manifest.json": {*MANIFEST, "commit"},
    "clocks.json": {"interval", "samples"},
    "steps_first.json": {"stage", "steps", "checks"},
    "smoke.json": {"machine", "results", "not_examined"},
    "doctor.json": {"machine", "results", "not_examined"},
}
NEEDED = "clocks.json steps_first.json smoke.json doctor.json train.json".split()


# ---- the archive


def read_members(path: Path) -> dict[str, bytes]:
    """The files of a .tar.gz by name, all in memory; nothing is extracted."""
    try:
        with gzip.open(path) as stream:
            content = stream.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise Refused(f"it unpacks to more than {MOST_BYTES // 2**20} MiB")
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            return _members(tar, len(content))
    except Refused:
        raise
    except (OSError, EOFError, ValueError, zlib.error, tarfile.TarError) as error:
        raise Refused(f"it cannot be read as a .tar.gz: {error}") from None


def _members(tar: tarfile.TarFile, most: int) -> dict[str, bytes]:
    found = {}
    for member in tar:
        name = member.name
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
            raise Refused(f"{name!r} is not a regular file")
        if not re.fullmatch(r"[A-Za-z0-9_]{1,60}\.(json|log)", name):
            raise Refused(f"{name!r} is not the name of a file that report-gpu writes")
        if name in found:
            raise Refused(f"{name} is in it twice")
        if len(found) == MOST_FILES or not 0 <= member.size <= most:
            raise Refused(f"it holds more than {MOST_FILES} files, or a size that is wrong")
        found[name] = tar.extractfile(member).read()
    return found


def parse(name: str, content: bytes) -> dict:
    """A JSON object without NaN, infinities and repeated keys."""

    def no_number(word: str):
        raise ValueError(f"{word} is no number")

    def finite(word: str) -> float:
        return float(word) if math.isfinite(float(word)) else no_number(word)

    def once(pairs: list[tuple]) -> dict:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError(f"a key is there twice among {', '.join(found)}")
        return found

    try:
        found = json.loads(content.decode(), parse_constant=no_number, parse_float=finite, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise Refused(f"{name} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise Refused(f"{name} is not a JSON object")
    return found


def check_manifest(files: dict[str, bytes]) -> dict:
    """The manifest, whose hashes are those of the files."""
    if "manifest.json" not in files:
        raise Refused("it has no manifest.json: send the archive that report-gpu names at its end")
    manifest = parse("manifest.json", files["manifest.json"])
    for key, kind in MANIFEST.items():
        take(manifest, key, kind, "manifest.json")
    if not re.fullmatch(r"\d+(\.\w+)+", manifest["vitfast"]):
        raise Refused(f"manifest.json: vitfast is {manifest['vitfast'][:60]!r}, which is no version")
    if manifest["schema"] != SCHEMA:
        raise Refused(f"manifest.json has schema {manifest['schema']}, this checkout reads {SCHEMA}")
    if odd := manifest["files"].keys() ^ (files.keys() - {"manifest.json"}):
        raise Refused(f"manifest.json and the archive differ about {', '.join(sorted(odd))}")
    for name, content in files.items():
        if name != "manifest.json" and manifest["files"][name] != hashlib.sha256(content).hexdigest():
            raise Refused(f"{name} was changed after it was measured: its sha256 is not that of the manifest")
    if lost := [name for name in NEEDED if name not in files]:
        raise Refused(f"it lacks {', '.join(lost)}")
    if not 0 <= manifest["finished"] - manifest["started"] <= SECONDS:
        raise Refused(f"it took {manifest['finished'] - manifest['started']} s, of at most {SECONDS}")
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
    said, commit = manifest["sources"], manifest.get("commit")
    if commit is None:  # an installed package
        every = _git(root, "log", f"-{LOOKED_AT}", "--format=%H", "--", *CODE) or b""
        commit = next((c for c in every.decode().split() if sources_of(root, c) == said), None)
        if commit is None:
            raise Refused(f"no commit of this repository has the code of its vitfast {manifest['vitfast']}")
    if not isinstance(commit, str) or not re.fullmatch("[0-9a-f]{40}", commit):
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


# ---- steps, correctness, clocks


def check_steps(content: dict, seconds: int) -> None:
    if content.get("stage") != "first":
        raise Refused(f"steps_first.json is of the stage {content.get('stage')!r}")
    checks, took = take(content, "checks", dict, "steps_first.json"), 0
    for name, code in checks.items():
        if not plausible.WORDS.fullmatch(name) or type(code) not in (int, type(None)):
            raise Refused(f"steps_first.json: {name[:60]!r} has no exit code")
    for name in CHECKED:
        if checks.get(name) in OUT_OF_TIME:
            raise Refused(f"{name} ran out of time: a second run finds the kernels compiled, as few CPUs have to")
        if checks.get(name) != 0:
            raise Refused(f"{name} has not passed (exit code {checks.get(name)}): please open an issue about that")
    if odd := checks.keys() - {*CHECKED, "first gpu tests"}:
        raise Refused(f"steps_first.json has checks that this stage does not make: {', '.join(sorted(odd))}")
    if checks.get("first gpu tests") not in (0, None, *OUT_OF_TIME):
        raise Refused("the gpu tests have failed: please open an issue about that")
    for step in take(content, "steps", list, "steps_first.json"):
        took += (one := take(step, "seconds", int, "steps_first.json"))
        if one < 0:
            raise Refused(f"steps_first.json: a step took {one} s")
        if type(step.get("code")) not in (int, type(None)):
            raise Refused(f"steps_first.json: code is {step.get('code')!r}")
        for key, words in dict(name=plausible.WORDS, state=STATES).items():
            if not words.fullmatch(take(step, key, str, "steps_first.json")):
                raise Refused(f"steps_first.json: {key} is {step[key][:60]!r}")
    if lost := {"smoke", "doctor", "train"} - {step["name"] for step in content["steps"]}:
        raise Refused(f"steps_first.json lacks the steps {', '.join(sorted(lost))}")
    if took > seconds + 5:
        raise Refused(f"its steps took {took} s, and the whole run {seconds} s")


def check_clocks(content: dict, machine: plausible.Machine, seconds: int) -> None:
    interval, samples = take(content, "interval", int, "clocks.json"), take(content, "samples", list, "clocks.json")
    if not 0 < interval <= 10 or len(samples) * 5 * interval < seconds:
        raise Refused(f"clocks.json has {len(samples)} samples of {seconds} s: too few")
    busy, before = [], -1.0
    for sample in samples:
        if odd := [key for key in SAMPLED if type(sample.get(key, "")) not in (float, int, type(None))]:
            raise Refused(f"clocks.json: {odd[0]} is {sample.get(odd[0])!r}")
        mhz, at = take(sample, "clocks.sm", float, "clocks.json"), take(sample, "seconds", float, "clocks.json")
        if not 0 < mhz <= machine.most_mhz:
            raise Refused(f"clocks.json: {mhz} MHz, where the GPU has at most {machine.most_mhz}")
        if not before < at <= seconds + 5:
            raise Refused(f"clocks.json: a sample at {at} s is out of order")
        before = at
        reasons, use = take(sample, "reasons", int, "clocks.json"), sample.get("utilization.gpu", 0)
        if use is None or use > 50:  # a slice of a GPU does not know how busy it is
            busy.append(reasons)
    if len(busy) < LEAST_BUSY:
        raise Refused(f"clocks.json: the GPU was busy in {len(busy)} of {len(samples)} samples: is it another GPU's?")
    for bit, reason in plausible.THROTTLED.items():
        found = sum(bool(bits & bit) for bits in busy)
        if found > max(1, plausible.THROTTLED_SHARE * len(busy)):  # one moment is none
            raise Refused(f"the clocks were throttled ({reason}) in {found / len(busy):.0%} of the samples under load")


# ---- the whole


def check(archive: Path, root: Path) -> tuple[dict[str, bytes], dict, plausible.Machine]:
    """The files of an archive, its manifest (with the commit found) and its machine; raises Refused."""
    files = read_members(archive)
    manifest = check_manifest(files)
    contents = {name: parse(name, content) for name, content in files.items() if name.endswith(".json")}
    for name, keys in OTHERS.items():
        if odd := contents[name].keys() ^ keys:
            raise Refused(f"{name} has other keys than it should: {', '.join(sorted(odd))[:80]!r}")
    label = manifest.get("commit") or f"vitfast {manifest['vitfast']}"
    manifest["commit"] = check_sources(manifest, root)
    seconds = manifest["finished"] - manifest["started"]
    measured = {name: content for name, content in contents.items() if name not in OTHERS}
    older = f" (for results of an older vitfast by its own rules: git checkout {manifest['commit'][:12]})"
    older = older if sources_of(root, "HEAD") != manifest["sources"] else ""
    try:
        machine = plausible.check_machine(measured, manifest["device"], label)
        check_steps(contents["steps_first.json"], seconds)
        for name in ("smoke.json", "doctor.json"):
            plausible.check_doctor(contents[name], name, machine, whole=name == "doctor.json")
        if (version := contents["doctor.json"]["machine"].get("vitfast")) != manifest["vitfast"]:
            raise Refused(f"doctor.json is of vitfast {version}, the manifest of {manifest['vitfast']}")
        check_clocks(contents["clocks.json"], machine, seconds)
        told = {}
        for name, content in measured.items():
            plausible.check_date(content, name, manifest["started"], manifest["finished"])
            plausible.check_benchmarks(content, name, machine, told)
    except Refused as reason:
        raise Refused(f"{reason}{older}") from None
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError) as error:
        raise Refused(f"it has another form than report-gpu writes: {type(error).__name__}: {error}") from error
    return files, manifest, machine


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
    folder = results / slug(machine.device)
    check_new(files, results, folder if replace else None)
    if folder.exists() and not replace:
        folder = folder.with_name(f"{folder.name}-driver{machine.driver}-{manifest['commit'][:7]}")
        if folder.exists():
            raise Refused(f"{folder} is there already; --replace puts these in the place of {slug(machine.device)}")
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
