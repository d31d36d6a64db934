#!/usr/bin/env bash
# One stage of the checks and measurements on this machine's GPU, results in a folder:
#
#     bench/gpu.sh ceilings|tests|ops|models|train|curves|tune|all [OUT] [PYTEST OPTIONS...]      (OUT: bench/results/local)
#
# ceilings  copy, matrix products, cuBLAS at the GEMM shapes of a step, SDPA's backends, timm compiled in amp and pure bf16: run it first
# tests     vitfast doctor, pytest tests -m gpu, and a small selection under compute-sanitizer where that is on PATH; exit codes in checks.json
# ops       every operation against its peers; `-k max-autotune` for what there was no time for, `--shapes all` for more shapes
# models    whole models; one call does not hold them all, so give a filter: -k "B/16 and 224 and train", -k "S/16 and inference"
# train     end to end from JPEG files
# curves    losses of 1,000 steps of S/16, ours and timm's, three seeds; `--model B/16 --precision bf16` for others
# tune      searches faster tiles for B/16 (or `--model L/16 --only attention`), and copies the user's table to OUT/tiles.json
# all       all but tune, the models one by one, as long as that takes; every other call ends within 9 minutes
#
# OUT (from the repository's root on) gets NAME.json (pytest-benchmark's format and what bench/conftest.py adds to it), NAME.log with the
# tables, and report.md over all of them. A case that fails is recorded as failed, one that would start too late as skipped, and the
# stage goes on. Exit code 1: something failed; 2: no stage of that name, or no GPU.
# Needs python3 (or $PYTHON) with torch, triton, timm, transformers, torchvision, pytest and pytest-benchmark. Installs nothing but vitfast
# itself, and uses no network. Set VITFAST_COMMIT where the copy has no git.
set -u
cd "$(dirname "$0")/.."
stage=${1:-}
out=${2:-bench/results/local}
shift $(($# < 2 ? $# : 2))
python=${PYTHON:-python3}
begun=$(date +%s)
failed=0

case "$stage" in
    ceilings | tests | ops | models | train | curves | tune | all) ;;
    *) echo "bench/gpu.sh: no stage '$stage'; usage: bench/gpu.sh ceilings|tests|ops|models|train|curves|tune|all [OUT] [PYTEST OPTIONS...]" >&2 && exit 2 ;;
esac
if ! "$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2> /dev/null; then
    echo "bench/gpu.sh: no NVIDIA GPU that the torch of $python can use" >&2
    exit 2
fi
mkdir -p "$out"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
"$python" -c 'import pathlib, vitfast.kernels as k; raise SystemExit(pathlib.Path(k.__file__).parent.parent != pathlib.Path.cwd())' 2> /dev/null \
    || "$python" -m pip install -q -e . --no-deps --no-build-isolation || exit 2

logged() { # logged NAME SECONDS COMMAND...: at most that long, everything into OUT/NAME.log, the end of it shown
    local name=$1 seconds=$2
    shift 2
    timeout -k 10 "$seconds" "$@" > "$out/$name.log" 2>&1
    code=$?
    case $code in 0 | 5) ;; *) failed=1 ;; esac # 5: pytest's -k left no case of this file
    tail -n 40 "$out/$name.log"
}

left() { # left LIMIT: seconds of the stage in which a case that may take LIMIT can still start
    echo $((begun + 500 - $1 - $(date +%s)))
}

bench() { # bench NAME LIMIT BUDGET PYTEST ARGUMENTS...: no case takes longer than LIMIT or starts after BUDGET seconds
    local name=$1 limit=$2 budget=$3
    shift 3
    logged "$name" $((budget + limit + 20)) "$python" -m pytest "$@" --benchmark-only -q --benchmark-columns=median,iqr,rounds \
        --benchmark-json="$out/$name.json" --case-limit "$limit" --budget "$budget"
}

case "$stage" in
    ceilings)
        bench ceilings 100 "$(left 100)" bench/bench_ceilings.py bench/bench_attention.py bench/bench_model.py \
            -k 'ceilings or (sdpa and not backward) or (timm and compile and not accelerate and (B/16 or S/16) and 224 and train)' "$@"
        ;;
    tests)
        logged doctor 100 "$python" -m vitfast doctor
        codes="\"vitfast doctor\": $code"
        logged tests 290 "$python" -m pytest tests -m gpu -q -ra -k 'not sanitizer' "$@"
        codes+=", \"gpu tests\": $code"
        if command -v compute-sanitizer > /dev/null; then
            logged sanitizer 110 "$python" -m pytest tests/test_gpu.py -q -ra -k sanitizer
            codes+=", \"compute-sanitizer\": $code"
        fi
        echo "{\"checks\": {$codes}}" > "$out/checks.json"
        ;;
    ops) # a process for each file: an illegal access in one kernel spoils that file alone
        files=5
        for op in attention layer_norm patch_embed block mlp; do
            bench "ops_$op" 100 $(($(left 100) / files)) "bench/bench_$op.py" "$@"
            files=$((files - 1))
        done
        ;;
    models)
        filter=$(printf '%s' "$*" | sed -E 's/(^| )-k / /g; s/[^A-Za-z0-9]+/_/g; s/^_*/_/; s/_+$//')
        bench "models$filter" 150 "$(left 150)" bench/bench_model.py "$@"
        ;;
    train) bench train 200 "$(left 200)" bench/bench_train.py "$@" ;;
    curves) logged curves "$(left 0)" "$python" bench/curves.py "$out" "$@" ;;
    tune)
        # An operation at a time, so that one that takes too long does not take the time of the others.
        parts=(gelu weight_grad residual attention layer_norm patch_embed input_grad)
        (($#)) && parts=("")
        for i in "${!parts[@]}"; do
            logged "tune${parts[i]:+_${parts[i]}}" $(($(left 0) / (${#parts[@]} - i))) "$python" -m vitfast.tune ${parts[i]:+--only "${parts[i]}"} "$@"
        done
        cp "$("$python" -c 'from vitfast.kernels.tiles import user_table_path; print(user_table_path())')" "$out/tiles.json" || failed=1
        ;;
    all)
        for part in ceilings tests ops train curves; do bench/gpu.sh $part "$out" || failed=1; done
        for model in "B/16 and 224" "S/16" "L/16" "B/16 and 384" "H/14"; do
            for what in train inference; do bench/gpu.sh models "$out" -k "$model and $what" || failed=1; done
        done
        ;;
esac
"$python" bench/report.py --folder "$out" > "$out/report.md" || failed=1
exit $failed
