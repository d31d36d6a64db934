#!/usr/bin/env bash
# The questions of questions.py on this machine's GPU, results in a folder (OUT: bench/results/local):
#
#     bench/gpu.sh decide [OUT] [--rehearse] [--only NAME]...
#
# Those that are open on this kind of GPU are asked by worth per second, until the time is up: what is compared runs in
# turns, and each answer is kept as it comes. `--only NAME` asks that one (again). Every benchmark beside its peers, as
# long as that takes, is `pytest bench/ --benchmark-only --benchmark-json=OUT/benchmarks.json`.
#
# --rehearse runs without a GPU: every case by its name, in plain PyTorch on the CPU at a toy's sizes, no time of any
# meaning. Tests that need a GPU are skipped in it.
#
# OUT (from the repository's root on) holds NAME.log and NAME.json of each step, steps_decide.json, answers/ and
# report.md, written anew after each step. What was there before stays. To commit results, copy the JSON files and
# answers/ to bench/results/<gpu>.
#
# It ends within 555 seconds (another number: VITFAST_SECONDS, with limits in proportion), whatever hangs. A step, a
# process group of its own, gets its limit or what is left. At its limit it gets SIGINT, on which pytest still prints its
# failures, and soon SIGKILL; whatever it left behind, even in another session, is known by its environment (VITFAST_RUN)
# and killed. What fails is recorded as failed, and the next step follows; two in a row that broke the device end the run.
# Exit code 0: all that ran succeeded; 1: something failed; 2: no such stage, no GPU, or an OUT that cannot be used; 130:
# interrupted.
#
# Needs python3 (or $PYTHON) with torch, triton, timm, transformers, torchvision, pytest, pytest-xdist and
# pytest-benchmark; no network. `vitfast report-gpu` runs `decide` of an installed package too.
# VITFAST_COMMIT: the commit, where the copy has no git. VITFAST_CACHE (else bench/cache/*.tar.xz): compiled kernels
# from `bench/archive.py`, for Triton's cache (`vitfast kernels install`).
set -u
cd "$(dirname "$0")/.." || exit 2
export PYTHON=${PYTHON:-python3}
VITFAST_COMMIT=${VITFAST_COMMIT:-$(git describe --always --dirty 2> /dev/null)} # or nothing
export VITFAST_COMMIT HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 COLUMNS=160
# scripts find each other and vitfast, whatever Python takes for a safe path
export PYTHONPATH="$PWD:$PWD/bench${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" bench/session.py "$@"
