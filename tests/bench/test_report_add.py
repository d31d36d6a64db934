"""`report.py --add`: a good archive is added, and damaged or forged ones are refused with the reason.

Every damage is made to an archive that would be taken; a forgery has its hashes made anew, and its other numbers too
where it says so. The committed results of real GPUs, which nobody made up for this, must be possible.
"""

import copy
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import gpu_archive
import plausible
import pytest
import report
import submission
from gpu_archive import add, clocked, fact, fails, member, members, put, recount

ROOT = Path(__file__).parents[2]


def tree(root: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted((root / "bench").rglob("*")) if p.is_file()}


def test_a_good_archive_is_added_and_shown_and_nothing_is_overwritten(place, tmp_path, capsys):
    root, files = place
    results, archive = root / "bench" / "results", tmp_path / "good.tar.gz"
    gpu_archive.write(archive, [*members(files | {"train.log": b"a log"})])
    assert add(root, archive) == 0, capsys.readouterr().err
    assert {p.name for p in (results / "h200").iterdir()} == set(files)
    assert json.loads((results / "h200" / "train.json").read_bytes()) == files["train.json"]
    table = (results / "README.md").read_text()
    assert "## h200" in table and "| timm compile bf16 | 256 |" in table and "is left out" not in table
    assert report.main(["--check"], results, root / "README.md") == 0
    first = tree(results / "h200")
    assert add(root, archive) == 2 and "h200/train.json: it is there already" in capsys.readouterr().err

    def another_run():
        for case in files["train.json"]["benchmarks"]:
            case["stats"]["data"][0] *= 1.01
            case["stats"]["data"] = gpu_archive.clocked(case)
            gpu_archive.recount(case)
        gpu_archive.write(archive, members(files))

    another_run()
    assert add(root, archive) == 0 and tree(results / "h200") == first
    second = f"h200-driver580.159.04-{files['manifest.json']['commit'][:7]}"
    assert {p.name for p in results.iterdir()} == {"README.md", "h200", second}
    another_run()
    before = tree(root)
    assert add(root, archive) == 2 and tree(root) == before and "--replace puts these" in capsys.readouterr().err
    (results / "h200" / "old.json").write_text("{}")
    assert add(root, archive, "--replace") == 0 and not (results / "h200" / "old.json").exists()


def test_the_commit_of_an_installed_package_is_found_by_its_code(place, tmp_path):
    root, files = place
    files["manifest.json"]["commit"] = None
    for file in files.values():
        if "machine_info" in file:
            file["machine_info"]["vitfast"]["commit"] = "vitfast 0.1.0"
    gpu_archive.write(tmp_path / "a.tar.gz", members(files))
    _, manifest, _ = submission.check(tmp_path / "a.tar.gz", root)
    assert re.fullmatch("[0-9a-f]{40}", manifest["commit"])
    assert add(root, tmp_path / "a.tar.gz") == 0
    assert json.loads((root / "bench/results/h200/manifest.json").read_text())["commit"] == manifest["commit"]


def test_a_gpu_whose_data_sheet_is_not_known_is_bounded_by_its_multiprocessors(place, tmp_path, capsys, monkeypatch):
    root, files = place
    sizes = "sm_86, 45 GiB, 84 multiprocessors, L2 6 MiB, CUDA 13.0"
    facts = dict(DEVICE="NVIDIA A40", SIZES=sizes, SHEET=None)
    for rate, code in ((1.1e14, 0), (2e14, 2)):  # 84 * 1024 * 1.98e9 is 1.7e14
        facts["CEILINGS"] = dict(copy=5.8e11, bfloat16=rate, float16=1.1e14, float32=3e13)
        for name, value in facts.items():
            monkeypatch.setattr(gpu_archive, name, value)
        gpu_archive.write(tmp_path / "a.tar.gz", members(gpu_archive.good(files["manifest.json"]["commit"])))
        assert add(root, tmp_path / "a.tar.gz") == code
    said = capsys.readouterr()
    assert "bench/results/a40" in said.out and "ceilings: bfloat16 is 2e+14" in said.err


def test_only_a_commit_of_the_history_counts(place, tmp_path, capsys):
    """Not its tree, nor a commit beside the history, as of a proposal that nobody merged."""
    root, files = place
    git = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    say = lambda *command: subprocess.check_output([*git, *command], text=True).strip()  # noqa: E731
    beside = say("commit-tree", "-m", "beside", "HEAD^{tree}")
    for commit in (say("rev-parse", "HEAD^{tree}"), beside):
        files["manifest.json"]["commit"] = commit
        for file in files.values():
            if "machine_info" in file:
                file["machine_info"]["vitfast"]["commit"] = commit
        gpu_archive.write(tmp_path / "a.tar.gz", members(files))
        assert add(root, tmp_path / "a.tar.gz") == 2 and "not in the history of its HEAD" in capsys.readouterr().err


def test_results_under_the_name_of_another_gpu_are_a_copy(place, tmp_path, capsys, monkeypatch):
    root, files = place
    gpu_archive.write(tmp_path / "a.tar.gz", members(copy.deepcopy(files)))
    assert add(root, tmp_path / "a.tar.gz") == 0
    for name, value in dict(DEVICE="NVIDIA H100 80GB HBM3", SIZES=gpu_archive.SIZES.replace("140", "79")).items():
        monkeypatch.setattr(gpu_archive, name, value)
    monkeypatch.setattr(gpu_archive, "CEILINGS", dict(gpu_archive.CEILINGS, copy=3e12))
    forged = gpu_archive.good(files["manifest.json"]["commit"])
    for case, true in zip(forged["train.json"]["benchmarks"], files["train.json"]["benchmarks"]):
        case["stats"]["data"] = gpu_archive.clocked(true, 1.1)[::-1]
        gpu_archive.recount(case)
    gpu_archive.write(tmp_path / "a.tar.gz", members(forged))
    assert add(root, tmp_path / "a.tar.gz") == 2
    assert "h200/train.json: it is there already, or a copy" in capsys.readouterr().err


@pytest.mark.parametrize(
    "path", ["h100/train.json", "h200/train.json", "h200/inference.json", "h200/ops_attention.json"]
)
def test_what_real_gpus_did_is_possible(path):
    """Their FLOPs, bytes, rates and errors, counted again; nothing is faster than it can be."""
    content = json.loads((ROOT / "bench" / "results" / path).read_text())
    facts = content["machine_info"]["vitfast"]
    plausible.check_form(content, plausible.BENCHMARKS, path)
    machine = plausible.check_machine({"train.json": content}, facts["device"], facts["commit"])
    planned = {full: facts for name in plausible.FILES for full, facts in plausible.plan(name).items()}
    known = [case for case in content["benchmarks"] if case["fullname"] in planned]  # `first` has not all operations
    assert known and (len(known) == len(content["benchmarks"]) or "ops_" in path)
    for case in known:
        plausible.check_case(case, planned[case["fullname"]], machine)


# ---- damages: of one value, which the reason names; of the files; of the list of members; of the bytes


MODEL = "train/benchmarks/0"
INFO, STATS, OF_DOCTOR = f"{MODEL}/extra_info", f"{MODEL}/stats", "doctor/results/0"
VALUES = {  # by path: what is written there in place of what is true, or made of it
    "manifest/schema": [2],
    "manifest/started": ["now"],
    "manifest/exit_code": [True],
    "manifest/note": ["trust me"],
    "manifest/vitfast": ["mine"],
    "manifest/commit": ["--output=/tmp/x", "0" * 40],
    "manifest/sources/kernels": ["0" * 64],
    "manifest/sources/vitfast": ["0" * 64],
    "manifest/sources/bench": ["0" * 64],
    "manifest/device": ["NVIDIA B200", "NVIDIA ../..", "NVIDIA +", "cpu"],
    "steps_first/stage": ["ops"],
    "steps_first/datetime": [[1]],  # it would break the report
    "steps_first/checks/vitfast doctor": [1, 124],
    "steps_first/checks/first gpu tests": [1],
    "steps_first/checks/compute-sanitizer": [0],  # nobody made it
    "steps_first/checks/more": ["0"],
    "steps_first/steps": [[]],
    "steps_first/steps/0/state": ["<b>", "fine"],
    "steps_first/steps/3/seconds": [400, -400],
    "smoke/results": [[]],
    "doctor/machine/gpu": ["NVIDIA L4, sm_89, 22 GiB"],
    "doctor/machine/torch": ["2.9.0"],
    "doctor/machine/vitfast": ["0.0.1"],
    "doctor/not_examined": [3],
    f"{OF_DOCTOR}/error": [0.5, 0.0],
    f"{OF_DOCTOR}/passed": [False],
    "clocks/interval": [0],
    "clocks/samples": [lambda old: old[:9]],
    "clocks/samples/5/clocks.sm": [2600.0],
    "clocks/samples/7/seconds": [1.0],
    "train/datetime": ["2020-01-01T00:00:00+00:00"],
    f"{MODEL}/fullname": ["bench/x.py::y"],
    f"{STATS}/median": [lambda t: 0.8 * t],
    f"{STATS}/data": ["0.05"],
    f"{STATS}/q1": [1e-9],
    f"{STATS}/iqr": [1e-9],
    f"{STATS}/padded_share": [0.0],  # a column of its own
    f"{INFO}/op": ["attention"],
    f"{INFO}/impl": ["timm compile bf16", "vitfast compile bf16 for free", "<b>"],
    f"{INFO}/device": ["NVIDIA B200"],
    f"{INFO}/shape": ["B/16 224 B8"],
    f"{INFO}/batch": [512],
    f"{INFO}/flops": [lambda old: old // 2],
    f"{INFO}/bytes": [lambda old: old // 2],
    f"{INFO}/percent_of_floor": [99.0],
    f"{INFO}/images_per_second": [9000.0],
    f"{INFO}/mfu_datasheet": [0.9],
    f"{INFO}/model_flops": [10**14],
    f"{INFO}/tflops": [10**400],
    f"{INFO}/peak_mib": [2e5, 40.0, None],
    f"{INFO}/error": [0.05, 1e-9],
    f"{INFO}/error_after": [0.5],
    f"{INFO}/error_limit": [9.0, 0.012],
    f"{INFO}/median": [1e-3],  # it would hide the other one
}
FACTS = {  # of the machine, in every file
    "ptxas": ["<b>12.8"],
    "gpu": [lambda old, of=of: old.replace(*of) for of in (("sm_90", "sm_75"), ("132", "999"), ("140", "192"))],
    "driver_version": ["new"],
    "timm": ["absent"],
    "commit": ["f00"],
    "datasheet_bf16_flops": [1e15],
    "ceilings": [lambda old, of=of: old | of for of in (dict(copy=6e12), dict(copy=5e11), dict(bfloat16=2e15))],
}
FACTS["ceilings"] += [lambda old, of=of: old | of for of in (dict(float32=-1.0), {"<b>": 1.0})]


def times(name: str, number: int, change: Callable[[dict], list[float]]) -> Callable[[dict], None]:
    """A careful forger: other times, and all that follows from them is right."""

    def forge(files: dict) -> None:
        case = files[f"{name}.json"]["benchmarks"][number]
        case["stats"]["data"] = change(case)
        recount(case)

    return forge


def faster(name: str, number: int, factor: float) -> Callable[[dict], None]:
    return times(name, number, lambda case: clocked(case, factor))


def lost(path: str) -> Callable[[dict], None]:
    parent, _, key = path.rpartition("/")
    return put(parent, lambda old: [x for x in old[1:]] if key == "0" else {k: v for k, v in old.items() if k != key})


def without(name: str, impl: str) -> Callable[[dict], None]:
    return put(f"{name}/benchmarks", lambda old: [case for case in old if case["extra_info"]["impl"] != impl])


def twice(path: str) -> Callable[[dict], None]:
    return put(path, lambda old: [*old, old[0]])


def hides(name: str) -> Callable[[dict], None]:
    """Another file says that timm's training step failed, which a table would believe, as it is newer."""

    def change(files: dict) -> None:
        case = files["train.json"]["benchmarks"][1]
        failure = dict(name=case["name"], fullname=case["fullname"], reason="RuntimeError: no kernel")
        file = files.setdefault(f"{name}.json", dict(copy.deepcopy(files["train.json"]), benchmarks=[]))
        file["failed"].append(failure)

    return change


def text(old: str, new: str) -> Callable[[dict], None]:
    """Changes train.json's text, before it is hashed."""
    return lambda files: files.update({"train.json": json.dumps(files["train.json"]).replace(old, new, 1).encode()})


def bytes_of(content: bytes) -> Callable[[dict], None]:
    return lambda files: files.update({"train.json": content})


def throttled(files: dict) -> None:
    for sample in files["clocks.json"]["samples"][::4]:
        sample["reasons"] |= 0x40


def idle(files: dict) -> None:
    for sample in files["clocks.json"]["samples"]:
        sample["utilization.gpu"] = 0.0


FILES = {
    "no manifest": (lambda f: f.pop("manifest.json"), "has no manifest.json"),
    "a package of no commit": (
        lambda f: f["manifest.json"].update(commit=None, sources=dict(kernels="", vitfast="", bench="")),
        "no commit of this repository has the code",
    ),
    "hours": (put("manifest/finished", lambda t: t + 7200), "its seconds is 7760"),
    "before its commit": (
        lambda f: f["manifest.json"].update(started=10**9, finished=10**9 + 500),
        "before its commit .* was made",
    ),
    "no file of times": (lambda f: f.pop("train.json"), "it lacks train.json"),
    "no clocks": (lambda f: f.pop("clocks.json"), "it lacks clocks.json"),
    "NaN": (text('"error": 0.01', '"error": NaN'), "train.json is not valid JSON: NaN is no number"),
    "infinity": (text('"error": 0.01', '"error": 1e999'), "extra_info: error is no number: inf"),
    "a key twice": (text('"failed": []', '"failed": [], "failed": []'), "a key is there twice"),
    "half a file": (lambda f: bytes_of(json.dumps(f["train.json"])[:-9].encode())(f), "not valid JSON"),
    "not UTF-8": (bytes_of(b'{"\xff": 1}'), "train.json is not valid JSON"),
    "nested without end": (bytes_of(b"[" * 100000), "train.json is not valid JSON"),
    "a list": (bytes_of(b"[]"), "train.json must be of type dict"),
    "another object": (bytes_of(b"{}"), "train.json lacks machine_info"),
    "no stage of ours": (lambda f: f.update({"mine.json": f["train.json"]}), "mine.json is not a file of this stage"),
    "two machines": (put("attention/machine_info/vitfast/power.limit", "300.00 W"), "attention.json was .* another"),
    "another GPU": (lambda f: fact("device", "cpu")(f), "machine_info: device is 'cpu', .* 'NVIDIA H200'"),
    "a tag as a failure": (
        lambda f: f["train.json"]["failed"].append(dict(name="<b>", fullname="a::<b>", reason="no")),
        "train.json: the fullname a::<b> is of no case",
    ),
    "no smoke test": (lost("steps_first/checks/smoke"), "smoke has not passed"),
    "an excuse for a wrong one": (
        lambda f: f["doctor.json"]["results"][0].update(error=0.5, torch_error=0.4),
        "PyTorch's own error is 0.4",
    ),
    "an operation left out": (lost(OF_DOCTOR), "doctor.json lacks \\w+ in \\w+"),
    "a check twice": (twice("doctor/results"), "there twice"),
    "a case twice": (twice("train/benchmarks"), "there twice"),
    "heat": (throttled, "share of hardware thermal slowdown is 0.25556"),
    "an idle GPU": (idle, "busy GPU is 0"),
    "clocks without reasons": (lost("clocks/samples/7/reasons"), "clocks.json: samples: 7 lacks reasons"),
    "benchmarks among the clocks": (
        lambda f: f["clocks.json"].update(f["train.json"]),
        "clocks.json has other keys than report-gpu writes: 'machine_info",
    ),
    "times alone": (put(f"{STATS}/data", lambda old: [t / 2 for t in old]), "median is .* and by everything else"),
    "few rounds": (put(f"{STATS}/data", lambda old: old[:3]), "number of times is 3,"),
    "times as text": (put(f"{STATS}/data/0", "0.05"), "stats: data: 0 must be of type float"),
    "twice as fast as bytes allow": (faster("norm_and_patches", 0, 0.4), "its shortest time is 4.5"),
    "twice as fast as FLOPs allow": (faster("blocks", 9, 0.3), "its shortest time is 0.00035"),
    "one time too short": (
        times("attention", 0, lambda case: [*clocked(case)[1:], clocked(case, 1e-2)[0]]),
        "shortest time is 1.1\\d*e-06",
    ),
    "faster than a matrix product": (faster("train", 0, 0.45), "vitfast.* mfu_ceiling is 1.2"),
    "a peer slowed down": (faster("train", 1, 9.0), "timm.* mfu_ceiling is 0.06"),
    "times scaled": (
        times("train", 0, lambda case: [0.9 * t for t in case["stats"]["data"]]),
        "which no GPU's clock says: were the times scaled",
    ),
    "a peer's time hidden by another operation": (hides("attention"), "timm compile bf16.* is of no case"),
    "a peer's time hidden by a newer file": (hides("accelerate"), "timm compile bf16. is there twice"),
    "a device that broke": (hides("train_peers"), "the device broke in a training step of ours"),
    "no timm at all": (without("train", "timm compile bf16"), "says nothing of .*test_train.* compile bf16"),
    "timm failed": (fails("train", "timm compile bf16"), "the headline is not there: .*timm compile bf16"),
    "a silent peer": (without("attention", "sdpa cudnn"), "says nothing of .*test_attention.*sdpa cudnn"),
    "no peer that ran": (fails("blocks", "eager", "compile"), "has a time, and all of its peers failed"),
    "a failure without a reason": (fails("blocks", "eager", reason=""), "blocks.json: failed: 0: reason is ''"),
    "ours wrong": (fails("blocks", "vitfast", reason="harness.WrongResult: vitfast is wrong"), "is wrong: please open"),
}
for table, change in ((VALUES, put), (FACTS, fact)):
    for path, values in table.items():
        key = next(part for part in reversed(path.split("/")) if not part.isdecimal())
        FILES |= {f"{path} {i}": (change(path, value), f"(?i){key}") for i, value in enumerate(values)}


def more(**facts) -> Callable[[list], list]:
    return lambda of: [*of, member(**facts)]


def changed_after(of: list) -> list:
    """train.json is changed, and its hash stays."""
    return [(i, c.replace(b'"batch": 256', b'"batch": 257') if i.name == "train.json" else c) for i, c in of]


MEMBERS = {
    "changed after hashing": (changed_after, "train.json was changed after"),
    "a file not in the manifest": (more(name="more.json"), "differ about more.json"),
    "a file lost": (lambda of: of[1:], "differ about train.json"),
    "a file twice": (lambda of: [*of, of[0]], "is in it twice"),
    "a path up": (more(name="../../x.json"), "'../../x.json' is not the name of a file"),
    "an absolute path": (more(name="/tmp/x.json"), "'/tmp/x.json' is not the name"),
    "a folder's file": (more(name="a/x.json"), "'a/x.json' is not the name"),
    "code": (more(name="x.py"), "'x.py' is not the name"),
    "a symbolic link": (more(name="x.json", content=b"", type=b"2", linkname="/etc/passwd"), "not a regular file"),
    "a hard link": (more(name="x.json", content=b"", type=b"1", linkname="train.json"), "not a regular file"),
    "a device": (more(name="x.json", content=b"", type=b"3"), "not a regular file"),
    "an odd sparse file": (more(name="x.json", pax_headers={"GNU.sparse.map": "0,x"}), "cannot be read as a .tar.gz"),
    "a folder": (more(name="x.json", content=b"", type=b"5"), "not a regular file"),
    "many files": (lambda of: [*of, *(member(f"x{i}.log") for i in range(100))], "more than 100 files"),
    "a bomb": (more(name="x.log", content=bytes(65 * 2**20)), "unpacks to more than 64 MiB"),
}
BYTES = {
    "cut": (lambda b: b[: len(b) // 2], "cannot be read as a .tar.gz"),
    "no archive": (lambda b: b"PK\3\4" + b, "cannot be read as a .tar.gz"),
    "one byte": (lambda b: b[: len(b) // 2] + bytes([b[len(b) // 2] ^ 255]) + b[len(b) // 2 + 1 :], "cannot be read"),
    "empty": (lambda b: b"", "cannot be read|has no manifest"),
    "more after its end": (lambda b: b + b"more", "cannot be read as a .tar.gz"),
}
DAMAGES = {**FILES, **MEMBERS, **BYTES}


@pytest.mark.parametrize("what", DAMAGES)
def test_what_is_damaged_or_forged_is_refused_with_the_reason(what, place, tmp_path, capsys):
    (root, files), (change, reason), archive = place, DAMAGES[what], tmp_path / "a.tar.gz"
    if what in FILES:
        change(files)
    found = members(files)
    gpu_archive.write(archive, change(found) if what in MEMBERS else found)
    if what in BYTES:
        archive.write_bytes(change(archive.read_bytes()))
    before = tree(root)
    assert add(root, archive) == 2 and tree(root) == before
    said = capsys.readouterr().err
    assert said.startswith(f"{archive} is refused: ") and said.count("\n") == 1 and re.search(reason, said), said


def test_a_file_that_is_not_there_is_refused(place, tmp_path, capsys):
    assert add(place[0], tmp_path / "none.tar.gz") == 2 and "No such file" in capsys.readouterr().err
    assert len(DAMAGES) >= 50
