"""Python time of every launcher, this tree against another commit, in rounds of one run.

    python bench/launch_path.py --against 827d16a

Launchers run on small CPU tensors with their launches recorded: what a launcher does until a kernel would be launched
(tiles looked up, outputs allocated, arguments put together). What Triton's own `kernel[grid]` does comes on top. Prints
microseconds of processor time a call, the median over the rounds of each round's best, and the ratio; what calls
libraries alone is left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Run in a process of its own with one of the two trees first on its path.
CHILD = """
import json, sys, time
import torch
from vitfast.kernels.launch import record, recording
from vitfast.verify.launchers import Draw, Sizes, launchers

torch.set_num_threads(1)
sizes = Sizes(batch=2, tokens=197, width=128, heads=2, hidden=256, image=32, patch=16)
dtype, found, calls = torch.float16, {}, 200
draw = Draw(dtype, torch.device("cpu"))
names = json.loads(sys.argv[1])
for name, launcher in launchers(sizes).items():
    if names and name not in names:
        continue
    inputs = launcher.make(draw)
    count = len(record(lambda: launcher.call(*inputs)))
    if not count:
        continue
    best = float("inf")
    for _ in range(5):
        with recording() as seen:
            begun = time.process_time()
            for _ in range(calls):
                launcher.call(*inputs)
            best = min(best, time.process_time() - begun)
    found[name] = [1e6 * best / calls, count]
print(json.dumps(found))
"""


def measure(tree: Path, names: list[str]) -> dict[str, list]:
    """Launcher -> [microseconds, launches] of one process."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(tree)}
    command = [sys.executable, "-c", CHILD, json.dumps(names)]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"launch_path: {tree} fails:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def checked_out(revision: str, folder: Path) -> Path:
    """That commit's kernels and package in `folder`, laid out so that they import as they are."""
    archive = subprocess.run(["git", "archive", revision, "kernels", "vitfast"], cwd=ROOT, capture_output=True)
    if archive.returncode:
        raise SystemExit(f"launch_path: --against {revision}: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
    (folder / "kernels").rename(folder / "vitfast" / "kernels")
    return folder


def laid_out(folder: Path) -> Path:
    """This tree as `checked_out` lays out another, with what is not committed."""
    (folder / "vitfast").mkdir()
    for path in (ROOT / "vitfast").iterdir():
        if path.name != "kernels":
            (folder / "vitfast" / path.name).symlink_to(path)
    (folder / "vitfast" / "kernels").symlink_to(ROOT / "kernels")
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default="HEAD", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[], help="launchers, by name")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as before, tempfile.TemporaryDirectory() as after:
        trees = dict(before=checked_out(args.against, Path(before)), after=laid_out(Path(after)))
        rounds = [{name: measure(tree, args.only) for name, tree in trees.items()} for _ in range(args.rounds)]
    names = [name for name in rounds[0]["after"] if name in rounds[0]["before"]]
    if unknown := [name for name in args.only if name not in names]:
        raise SystemExit(f"launch_path: --only: no kernels are launched in both trees by {str(unknown)[1:-1]}")
    print(f"{'us a call, against ' + args.against:44}{'launches':>10}{'before':>9}{'after':>9}{'ratio':>8}")
    ratios = []
    for name in names:
        old, new = (statistics.median(r[tree][name][0] for r in rounds) for tree in ("before", "after"))
        ratios.append(new / old)
        print(f"{name:44}{rounds[0]['after'][name][1]:>10}{old:>9.1f}{new:>9.1f}{new / old:>8.2f}")
    print(f"{'geometric mean':44}{'':>28}{statistics.geometric_mean(ratios):>8.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
