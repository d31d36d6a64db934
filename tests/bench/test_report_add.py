"""`report.py --add`: a good archive is added, and damaged or forged ones are refused with the reason.

Every damage is made to an archive that would be taken; a forgery has its hashes made anew, and its other numbers too
where it says so. The committed results of real GPUs, which nobody made up for this, must be possible.
"""

import copy
import json
import re
import subprocess
from pathlib import Path

import gpu_archive
import plausible
import pytest
import report
import submission
from gpu_archive import add, member, members
from gpu_damages import (
    ceiling,
    changed_after,
    everywhere,
    fails,
    faster,
    hides,
    idle,
    less_work,
    lost,
    more,
    named,
    one_time,
    put,
    scaled,
    text,
    throttled,
    without,
)

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
    assert "bench/results/a40" in said.out and "the ceiling bfloat16, 2e+14, is not what" in said.err


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


@pytest.mark.parametrize("path", ["h100/train.json", "h200/train.json", "h200/inference.json", "h200/ops.json"])
def test_what_real_gpus_did_is_possible(path):
    """Their FLOPs, bytes, rates and errors, counted again; nothing is faster than it can be."""
    content = json.loads((ROOT / "bench" / "results" / path).read_text())
    facts = content["machine_info"]["vitfast"]
    machine = plausible.check_machine({"train.json": content}, facts["device"], facts["commit"])
    files = {op: name for name, of in (plausible.PEERS | plausible.MODELS).items() for op in of}
    assert content["benchmarks"]
    for case in content["benchmarks"]:
        plausible.check_case(case, files[case["extra_info"]["op"]], machine)


# ---- damages: of the files as objects, of the list of members, or of the bytes; each with its reason


MODEL = "train/benchmarks/0"
INFO, STATS, OF_DOCTOR = f"{MODEL}/extra_info", f"{MODEL}/stats", "doctor/results/0"
FILES = {
    "no manifest": (lambda f: f.pop("manifest.json"), "has no manifest.json"),
    "another schema": (put("manifest/schema", 2), "has schema 2"),
    "a number as text": (put("manifest/started", "now"), "started must be of type int"),
    "a truth as a number": (put("manifest/exit_code", True), "exit_code must be of type int"),
    "one key more": (put("manifest/note", "trust me"), "other keys .*note"),
    "an option for git": (put("manifest/commit", "--output=/tmp/x"), "must be 40 hexadecimal digits"),
    "an unknown commit": (put("manifest/commit", "0" * 40), "commit 0+ is not in this repository"),
    "other kernels": (put("manifest/sources/kernels", "0" * 64), "its kernels/ is not that of commit"),
    "other operations": (put("manifest/sources/vitfast", "0" * 64), "its vitfast/ is not that of commit"),
    "other benchmarks": (put("manifest/sources/bench", "0" * 64), "its bench/ is not that of commit"),
    "a package of no commit": (
        lambda f: f["manifest.json"].update(commit=None, sources=dict(kernels="", vitfast="", bench="")),
        "no commit of this repository has the code",
    ),
    "hours": (put("manifest/finished", lambda t: t + 7200), "it took 7760 s"),
    "before its commit": (
        lambda f: f["manifest.json"].update(started=10**9, finished=10**9 + 500),
        "before its commit .* was made",
    ),
    "no file of times": (lambda f: f.pop("train.json"), "it lacks train.json"),
    "no clocks": (lambda f: f.pop("clocks.json"), "it lacks clocks.json"),
    "no check": (lambda f: f.pop("doctor.json"), "it lacks doctor.json"),
    "NaN": (text("train.json", '"error": 0.01', '"error": NaN'), "train.json is not valid JSON: NaN is no number"),
    "infinity": (text("doctor.json", '"error": ', '"error": 1e999, "x": '), "1e999 is no number"),
    "a key twice": (text("train.json", '"failed": []', '"failed": [], "failed": []'), "a key is there twice"),
    "half a file": (lambda f: f.update({"train.json": json.dumps(f["train.json"])[:-9].encode()}), "not valid JSON"),
    "not UTF-8": (lambda f: f.update({"train.json": b'{"\xff": 1}'}), "train.json is not valid JSON"),
    "nested without end": (lambda f: f.update({"train.json": b"[" * 100000}), "train.json is not valid JSON"),
    "a list": (lambda f: f.update({"train.json": b"[]"}), "train.json is not a JSON object"),
    "another object": (lambda f: f.update({"train.json": b"{}"}), "another form .* 'machine_info'"),
    "no stage of ours": (lambda f: f.update({"mine.json": f["train.json"]}), "mine.json is not a file of this stage"),
    "a rehearsal": (lambda f: named(f, "cpu"), "it was measured on 'cpu'"),
    "two machines": (put("attention/machine_info/vitfast/power.limit", "300.00 W"), "attention.json was .* another"),
    "another GPU in the manifest": (put("manifest/device", "NVIDIA B200"), "the manifest says 'NVIDIA B200'"),
    "a GPU that is a path": (lambda f: named(f, "NVIDIA ../.."), "no NVIDIA GPU"),
    "a GPU of no name": (lambda f: named(f, "NVIDIA +"), "no NVIDIA GPU"),
    "a tag among versions": (everywhere("ptxas", "<b>12.8"), "'ptxas' holds what is no version"),
    "a tag as a failure": (
        lambda f: f["train.json"]["failed"].append(dict(name="<b>", fullname="a::<b>", reason="no")),
        "'<b>' is not the name of a case",
    ),
    "a tag as an implementation": (
        put("train/benchmarks/0/extra_info/impl", "<b>"),
        "'<b>' is not the name of an impl",
    ),
    "an implementation of nobody": (
        put("train/benchmarks/0/extra_info/impl", "vitfast compile bf16 for free"),
        "'vitfast compile bf16 for free' is not the name of an implementation",
    ),
    "a check without a code": (put("steps_first/checks/more", "0"), "'more' has no exit code"),
    "a step with a tag": (put("steps_first/steps/0/state", "<b>"), "state is '<b>'"),
    "an old GPU": (everywhere("gpu", lambda old: old.replace("sm_90", "sm_75")), "sm_75 is older than sm_80"),
    "a GPU of the future": (everywhere("gpu", lambda old: old.replace("132", "999")), "no GPU is known"),
    "a GPU with more memory": (everywhere("gpu", lambda old: old.replace("140", "192")), "has 141 GiB, not 192"),
    "no driver": (everywhere("driver_version", "new"), "driver_version is 'new'"),
    "no timm": (everywhere("timm", "absent"), "timm is 'absent'"),
    "times of another commit": (everywhere("commit", "f00"), "machine_info has commit 'f00'"),
    "a copy faster than memory": (ceiling("copy", 6e12), "the ceiling copy, 6e.12, is not what"),
    "a GPU in use": (ceiling("copy", 5e11), "less than a quarter"),
    "products faster than the chip": (ceiling("bfloat16", 2e15), "the ceiling bfloat16, 2e.15, is not what"),
    "a ceiling below zero": (ceiling("float32", -1.0), "the ceiling float32"),
    "a better data sheet": (everywhere("datasheet_bf16_flops", 1e15), "the data sheet's FLOP/s"),
    "another stage": (put("steps_first/stage", "ops"), "of the stage 'ops'"),
    "a failed doctor": (put("steps_first/checks/vitfast doctor", 1), "vitfast doctor has not passed"),
    "no smoke test": (lost("steps_first/checks/smoke"), "smoke has not passed"),
    "failed tests": (put("steps_first/checks/first gpu tests", 1), "the gpu tests have failed"),
    "steps longer than the run": (put("steps_first/steps/3/seconds", 400), "its steps took 800 s"),
    "a wrong operation": (put(f"{OF_DOCTOR}/error", 0.5), "is wrong: error 5.0e-01"),
    "one that has not passed": (put(f"{OF_DOCTOR}/passed", False), "has not passed"),
    "an excuse for a wrong one": (
        lambda f: f["doctor.json"]["results"][0].update(error=0.5, torch_error=0.4),
        "which rounding does not make",
    ),
    "no error at all": (put(f"{OF_DOCTOR}/error", 0.0), "which rounding does not make"),
    "an operation left out": (lost(OF_DOCTOR), "doctor.json lacks \\w+ in \\w+"),
    "a check twice": (lambda f: f["doctor.json"]["results"].append(f["doctor.json"]["results"][0]), "there twice"),
    "an empty smoke test": (put("smoke/results", []), "smoke.json: all checks were not made"),
    "a state of its own": (put("steps_first/steps/3/state", "fine"), "state is 'fine'"),
    "checks not made": (put("doctor/not_examined", 3), "3 checks were not made"),
    "another GPU's doctor": (put("doctor/machine/gpu", "NVIDIA L4, sm_89, 22 GiB"), "is of another GPU: NVIDIA L4"),
    "another torch's doctor": (put("doctor/machine/torch", "2.9.0"), "doctor.json has torch 2.9.0"),
    "few samples": (put("clocks/samples", lambda old: old[:9]), "9 samples of 560 s: too few"),
    "heat": (throttled(0x40), "throttled \\(hardware thermal slowdown\\) in 26%"),
    "a ceiling too many": (ceiling("<b>", 1.0), "unknown ceilings: '<b>'"),
    "an impossible clock": (put("clocks/samples/5/clocks.sm", 2600.0), "2600.0 MHz, where the GPU has at most"),
    "an idle GPU": (idle, "busy in 0 of 90 samples"),
    "time that goes back": (put("clocks/samples/7/seconds", 1.0), "out of order"),
    "clocks without reasons": (lost("clocks/samples/7/reasons"), "clocks.json lacks reasons"),
    "another day": (put("train/datetime", "2020-01-01T00:00:00+00:00"), "train.json is of 2020"),
    "a median alone": (put(f"{STATS}/median", lambda t: 0.8 * t), "median is .* and by its times"),
    "times alone": (put(f"{STATS}/data", lambda old: [t / 2 for t in old]), "median is .* and by its times"),
    "few rounds": (put(f"{STATS}/data", lambda old: old[:3]), "has 3 times in 20 rounds"),
    "quartiles": (put(f"{STATS}/q1", 1e-9), "quartiles are out of order"),
    "a spread": (put(f"{STATS}/iqr", 1e-9), "iqr is .* and by its times"),
    "times as text": (put(f"{STATS}/data/0", "0.05"), "times that are no seconds"),
    "twice as fast as bytes allow": (faster("norm_and_patches", 0, 0.4), "are impossible: .* bytes take"),
    "twice as fast as FLOPs allow": (faster("blocks", 9, 0.3), "are impossible: .* FLOPs"),
    "faster than a matrix product": (faster("train", 0, 0.45), "train.* has 1.2\\d of the speed of a matrix product"),
    "a peer slowed down": (faster("train", 1, 9.0), "timm.* has 0.0\\d of the speed of a matrix product"),
    "times scaled": (scaled, "which no GPU's clock says: were the times scaled"),
    "a number that hides another": (put(f"{INFO}/median", 1e-3), "other keys than a benchmark writes: 'median'"),
    "a column of its own": (put(f"{STATS}/padded_share", 0.0), "other keys than a benchmark writes: 'padded_share'"),
    "benchmarks among the clocks": (
        lambda f: f["clocks.json"].update(f["train.json"]),
        "clocks.json has other keys than it should: 'bench",
    ),
    "a date that breaks the report": (put("steps_first/datetime", [1]), "steps_first.json has other keys"),
    "a check nobody made": (put("steps_first/checks/compute-sanitizer", 0), "does not make: compute-sanitizer"),
    "a step of negative time": (put("steps_first/steps/3/seconds", -400), "a step took -400 s"),
    "a doctor out of time": (put("steps_first/checks/vitfast doctor", 124), "doctor ran out of time: a second run"),
    "another version's doctor": (put("doctor/machine/vitfast", "0.0.1"), "is of vitfast 0.0.1, the manifest of 0.1.0"),
    "a peer's time hidden by another operation": (hides("attention"), "timm compile bf16.* is not the name of a case"),
    "a peer's time hidden by a newer file": (hides("accelerate"), "timm compile bf16. is there twice"),
    "a device that broke": (hides("train_peers"), "the device broke in a training step of ours"),
    "few samples by an interval of its own": (put("clocks/interval", 0), "90 samples of 560 s: too few"),
    "a limit below any": (put(f"{INFO}/error_limit", 0.012), "of at most 1.2e-02 is not what bfloat16 makes"),
    "one time too short": (one_time, "1.0 us are impossible"),
    "half of the FLOPs": (less_work("flops"), "flops is 15260319744, and by its shape 30520639488"),
    "half of the bytes": (less_work("bytes"), "bytes is 154927104, and by its shape 309854208"),
    "a better share": (put(f"{INFO}/percent_of_floor", 99.0), "percent_of_floor is 99, "),
    "more images": (put(f"{INFO}/images_per_second", 9000.0), "images_per_second is 9000, "),
    "a better MFU": (put(f"{INFO}/mfu_datasheet", 0.9), "mfu_datasheet is 0.9, "),
    "more FLOPs of a model": (put(f"{INFO}/model_flops", 10**14), "model_flops is 1e.14, "),
    "another batch": (put(f"{INFO}/batch", 512), "has batch 512"),
    "a number too many for a float": (put(f"{INFO}/tflops", 10**400), "another form .* OverflowError"),
    "memory that is not there": (put(f"{INFO}/peak_mib", 2e5), "does not fit into the GPU's 140 GiB"),
    "memory that is too little": (put(f"{INFO}/peak_mib", 40.0), "does not even hold weights"),
    "no peak": (put(f"{INFO}/peak_mib", None), "peak_mib must be of type float, got 'None'"),
    "another GPU's case": (put(f"{INFO}/device", "NVIDIA B200"), "is of NVIDIA B200"),
    "another shape": (put(f"{INFO}/shape", "B/16 224 B8"), "of the shape 'B/16 224 B8'"),
    "another name": (
        put(f"{MODEL}/fullname", "bench/x.py::y"),
        "is by its extra_info bench/bench_model.py::test_train",
    ),
    "ours as timm's": (put(f"{INFO}/impl", "timm compile bf16"), "is by its extra_info"),
    "an operation of another file": (put(f"{INFO}/op", "attention"), "is not in that file"),
    "a case twice": (lambda f: f["train.json"]["benchmarks"].append(f["train.json"]["benchmarks"][0]), "there twice"),
    "an error over its limit": (put(f"{INFO}/error", 0.05), "error 5.0e-02 of at most 4.0e-02"),
    "wrong after it was timed": (put(f"{INFO}/error_after", 0.5), "error_after 5.0e-01"),
    "a limit for everything": (put(f"{INFO}/error_limit", 9.0), "of at most 9.0e.00 is not what bfloat16 makes"),
    "an error of nothing": (put(f"{INFO}/error", 1e-9), "error 1.0e-09"),
    "steps left out": (put("steps_first/steps", []), "lacks the steps doctor, smoke, train"),
    "no version": (put("manifest/vitfast", "mine"), "vitfast is 'mine', which is no version"),
    "no timm at all": (without("train", "timm compile bf16"), "says nothing of test_train.* compile bf16"),
    "timm failed": (fails("train", "timm compile bf16"), "the headline is not there: .*timm compile bf16"),
    "a silent peer": (without("attention", "sdpa cudnn"), "says nothing of test_attention.*sdpa cudnn"),
    "no peer that ran": (fails("blocks", "eager", "compile"), "has a time, and all of its peers failed"),
    "a failure without a reason": (fails("blocks", "eager", reason=""), "without a reason"),
    "ours wrong": (fails("blocks", "vitfast", reason="harness.WrongResult: vitfast is wrong"), "is wrong: please open"),
}
MEMBERS = {
    "changed after hashing": (changed_after(b'"batch": 256', b'"batch": 257'), "train.json was changed after"),
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
