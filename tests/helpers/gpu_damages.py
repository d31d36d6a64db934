"""Damages and forgeries of a good archive of `vitfast report-gpu`; each is a function that changes its files.

A careful forger makes anew what follows from what was changed (gpu_archive.recount).
"""

import copy
import json
from collections.abc import Callable

from gpu_archive import clocked, member, recount


def reach(files: dict, path: str) -> tuple[object, str | int]:
    """What holds the last key of "file/key/0/key", and that key."""
    name, *keys = (int(key) if key.isdecimal() else key for key in path.split("/"))
    at = files[f"{name}.json"]
    for key in keys[:-1]:
        at = at[key]
    return at, keys[-1]


def put(path: str, value: object) -> Callable[[dict], None]:
    """Sets what lies at the path, or changes it by a function."""

    def change(files: dict) -> None:
        at, key = reach(files, path)
        at[key] = value(at[key]) if callable(value) else value

    return change


def lost(path: str) -> Callable[[dict], None]:
    def change(files: dict) -> None:
        at, key = reach(files, path)
        del at[key]

    return change


def everywhere(key: str, value: object) -> Callable[[dict], None]:
    """Changes a fact of the machine in every file."""

    def change(files: dict) -> None:
        for file in files.values():
            if "machine_info" in file:
                facts = file["machine_info"]["vitfast"]
                facts[key] = value(facts[key]) if callable(value) else value

    return change


def ceiling(key: str, value: float) -> Callable[[dict], None]:
    return everywhere("ceilings", lambda old: old | {key: value})


def named(files: dict, device: str) -> None:
    everywhere("device", device)(files)
    files["manifest.json"]["device"] = device


def faster(name: str, number: int, factor: float) -> Callable[[dict], None]:
    """A careful forger: every time is shorter, and all that follows from it is right."""

    def change(files: dict) -> None:
        forged = files[f"{name}.json"]["benchmarks"][number]
        forged["stats"]["data"] = clocked(forged, factor)
        recount(forged)

    return change


def scaled(files: dict) -> None:
    """Every training step of ours is shorter, by no clock but by a multiplication."""
    for forged in files["train.json"]["benchmarks"]:
        if forged["extra_info"]["impl"].startswith("vitfast"):
            forged["stats"]["data"] = [0.9 * t for t in forged["stats"]["data"]]
            recount(forged)


def one_time(files: dict) -> None:
    forged = files["attention.json"]["benchmarks"][0]
    forged["stats"]["data"][3] = 1e-6
    forged["stats"]["data"] = clocked(forged)
    recount(forged)


def less_work(key: str) -> Callable[[dict], None]:
    """Half of the FLOPs or bytes, and the rates that follow."""

    def change(files: dict) -> None:
        forged = files["attention.json"]["benchmarks"][0]
        forged["extra_info"][key] //= 2
        recount(forged)

    return change


def without(name: str, impl: str) -> Callable[[dict], None]:
    def change(files: dict) -> None:
        file = files[f"{name}.json"]
        file["benchmarks"] = [c for c in file["benchmarks"] if c["extra_info"]["impl"] != impl]

    return change


def fails(name: str, *impls: str, reason: str = "RuntimeError: no kernel") -> Callable[[dict], None]:
    """These are listed as failed."""

    def change(files: dict) -> None:
        file = files[f"{name}.json"]
        for c in [c for c in file["benchmarks"] if c["extra_info"]["impl"] in impls]:
            file["benchmarks"].remove(c)
            file["failed"].append(dict(name=c["name"], fullname=c["fullname"], reason=reason))

    return change


def hides(name: str) -> Callable[[dict], None]:
    """Another file says that timm's training step failed, which a table would believe, as it is newer."""

    def change(files: dict) -> None:
        case = files["train.json"]["benchmarks"][1]
        failure = dict(name=case["name"], fullname=case["fullname"], reason="RuntimeError: no kernel")
        file = files.setdefault(f"{name}.json", dict(copy.deepcopy(files["train.json"]), benchmarks=[]))
        file["failed"].append(failure)

    return change


def text(name: str, old: str, new: str) -> Callable[[dict], None]:
    """Changes a file's text, before it is hashed."""

    def change(files: dict) -> None:
        whole = json.dumps(files[name])
        assert old in whole
        files[name] = whole.replace(old, new, 1).encode()

    return change


def throttled(bits: int) -> Callable[[dict], None]:
    def change(files: dict) -> None:
        for sample in files["clocks.json"]["samples"][::4]:
            sample["reasons"] |= bits

    return change


def idle(files: dict) -> None:
    for sample in files["clocks.json"]["samples"]:
        sample["utilization.gpu"] = 0.0


def more(**facts) -> Callable[[list], list]:
    return lambda of: [*of, member(**facts)]


def changed_after(old: bytes, new: bytes) -> Callable[[list], list]:
    """Changes train.json, whose hash stays."""

    def change(of: list) -> list:
        return [member(i.name, c.replace(old, new)) if i.name == "train.json" else (i, c) for i, c in of]

    return change
