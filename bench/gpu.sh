#!/usr/bin/env bash
# One stage of the checks and measurements on this machine's GPU, results in a folder:
#
#     bench/gpu.sh tests|ops|models|all [OUT]          (OUT: bench/results/local)
#
# Needs python3 with torch, triton, timm, pytest and pytest-benchmark; installs nothing but vitfast itself, and no network is used.
# A failing case is recorded as failed; the stage goes on and ends with exit code 1.
set -u
cd "$(dirname "$0")/.."
stage=${1:?usage: bench/gpu.sh tests|ops|models|all [OUT]}
out=${2:-bench/results/local}
mkdir -p "$out"
python3 -c 'import torch; raise SystemExit(0 if torch.cuda.is_available() else "bench/gpu.sh needs an NVIDIA GPU that torch can use")' || exit 2
python3 -m pip install -q -e . --no-deps --no-build-isolation || exit 2
failed=0

tests() {
    python3 -m vitfast doctor --json > "$out/doctor.json" || failed=1
    python3 -m pytest tests -m gpu -q -ra 2>&1 | tee "$out/tests.log" | tail -n 40
    [ "${PIPESTATUS[0]}" -eq 0 ] || failed=1
}

bench() {  # bench NAME FILE...
    local name=$1
    shift
    timeout 520 python3 -m pytest "$@" --benchmark-only -q --benchmark-json="$out/$name.json" --benchmark-columns=median,iqr 2>&1 | tee "$out/$name.log" | tail -n 60
    [ "${PIPESTATUS[0]}" -eq 0 ] || failed=1
}

case "$stage" in
    tests) tests ;;
    ops) bench ops bench/bench_layer_norm.py bench/bench_attention.py bench/bench_mlp.py bench/bench_block.py bench/bench_patch_embed.py ;;
    models) bench models bench/bench_model.py ;;
    all) "$0" tests "$out" || failed=1; "$0" ops "$out" || failed=1; "$0" models "$out" || failed=1 ;;
    *) echo "unknown stage $stage" >&2; exit 2 ;;
esac
exit $failed
