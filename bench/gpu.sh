#!/usr/bin/env bash
# One stage of the checks and measurements on this machine's GPU, results in a folder (OUT: bench/results/local):
#
#     bench/gpu.sh first|ceilings|tests|ops|models|train|curves|tune|all [OUT] [OPTIONS...]
#
# first     the first ten minutes on a new GPU: an answer from the smallest check on, the headline early, what is left
#           in order of weight
# ceilings  copy, matrix products, cuBLAS at the GEMM shapes of a step, SDPA's backends, timm compiled in amp and bf16
# tests     vitfast doctor, pytest tests -m gpu on 8 workers at most, compute-sanitizer where there is one
# ops       every operation against its peers, on images of many sizes too; `-k max-autotune` for what there was no time for, `--shapes all` for more
# models    whole models; one call does not hold them all, so give a filter: -k "B/16 and 224 and train"; or
#           -k packed, training steps on images of many sizes
# train     end to end from JPEG files
# curves    losses of 1,000 steps of S/16, ours and timm's, three seeds; `--model B/16 --precision bf16` for others
# tune      searches faster tiles and adds the user's table to the archive as tiles.json; options: `vitfast tune`'s
# all       all but first and tune, the models one by one, as long as that takes
#
# OUT (from the repository's root on) holds two files, written anew after each step of a stage, and what earlier stages
# left in them stays: report.md, and results.tar.gz with NAME.log and NAME.json (pytest-benchmark's format and what
# bench/conftest.py adds) of each step and steps_STAGE.json. To commit results:
# tar -xzf OUT/results.tar.gz -C bench/results/<gpu>.
#
# Every stage but `all` ends within 555 seconds, whatever hangs (another number: VITFAST_SECONDS); bench/steps.sh says
# how. A case that fails is recorded as failed, one that would start too late as skipped, and the stage goes on; but
# `first` ends early when its smallest check fails (after a diagnosis, and timm's and SDPA's numbers), and after two
# steps in a row that broke the device. Exit code 0: all that ran succeeded; 1: something failed; 2: no stage of that
# name, no GPU, or an OUT that cannot be written; 130: interrupted.
#
# Needs bash 5, python3 (or $PYTHON) with torch, triton, timm, transformers, torchvision, pytest, pytest-xdist and
# pytest-benchmark; no network. Installs vitfast from this folder, or links vitfast/kernels where pip cannot.
# VITFAST_COMMIT: the commit, where the copy has no git. VITFAST_CACHE (else bench/cache/*.tar.xz): compiled kernels
# from `tests/codegen.py --cache`, for Triton's cache (bench/cache.py).
#
# tests/bench/test_stages.py, test_steps.py and test_stand_in.py run all this without a GPU. They cannot show what
# compiles or how fast anything is, whether cuDNN's or flash's backends of SDPA accept a case, whether CUDA graphs
# capture, what a hung GPU does to SIGKILL, memory, or whether the limits are right.
set -u
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
. bench/steps.sh
wanted=${1:-}
folder=${2:-bench/results/local}
shift $(($# < 2 ? $# : 2))

case "$wanted" in
    first | ceilings | tests | ops | models | train | curves | tune | all) ;;
    *)
        stages="first|ceilings|tests|ops|models|train|curves|tune|all"
        echo "bench/gpu.sh: no stage '$wanted'; usage: bench/gpu.sh $stages [OUT] [OPTIONS...]" >&2
        exit 2
        ;;
esac
probe=$(mktemp)
trap 'rm -f "$probe" "$probe.err"' EXIT
"$python" -c '
import pathlib, sys, torch
if not torch.cuda.is_available():
    sys.exit(3)
import triton
python = sys.version.split()[0]
print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, python {python}")
print(f"{torch.cuda.mem_get_info()[0] // 2**30} GiB free")
try:
    import vitfast.kernels
    found = pathlib.Path(vitfast.kernels.__file__).resolve().parents[1] == pathlib.Path.cwd()
except Exception as error:
    found = False
    print(f"vitfast cannot be imported yet: {type(error).__name__}: {error}")
print("vitfast is installed" if found else "vitfast is not installed")' > "$probe" 2> "$probe.err" &
running=$!
if await 90; then
    wait "$running"
    code=$?
    case $code in
        0) ;;
        3) echo "bench/gpu.sh: no NVIDIA GPU that the torch of $python can use" >&2 && exit 2 ;;
        *) echo "bench/gpu.sh: $python cannot use torch and triton: $(tail -n 1 "$probe.err")" >&2 && exit 2 ;;
    esac
else # one that waits for a hung driver cannot be ended
    kill -KILL "$running" 2> /dev/null
    echo "bench/gpu.sh: the GPU does not answer: torch has looked for it for 90 s" >&2
    exit 2
fi
running=""
facts=$(< "$probe")
cpus=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # which are not about processes
workers=$((cpus < 8 ? cpus : 8))
if [[ $facts =~ ([0-9]+)" GiB free" ]]; then # a worker of the gpu tests takes 5 GiB
    room=$((BASH_REMATCH[1] / 5))
    workers=$((room < 1 ? 1 : room < workers ? room : workers))
fi
jobs=$((cpus < 14 ? cpus : 14))
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 COLUMNS=160

# bench NAME MIN LIMIT CASE_LIMIT PYTEST ARGUMENTS...: no case takes longer than CASE_LIMIT or starts when the step is
# nearly over
bench() {
    local name=$1 least=$2 limit=$3 case_limit=$4
    shift 4
    step "$name" "$least" "$limit" "$python" -m pytest "$@" --benchmark-only -q -ra \
        --benchmark-columns=median,iqr,rounds \
        --benchmark-json="$work/$name.json" --case-limit "$case_limit" --ends $((EPOCHSECONDS + $(left "$limit")))
}

# doctor NAME LIMIT OPTIONS...: vitfast doctor, its JSON in NAME.json, in as many processes as it has memory for
doctor() {
    local name=$1 limit=$2
    shift 2
    # shellcheck disable=SC2016
    step "$name" 20 "$limit" bash -c 'file=$1; shift; exec "$@" > "$file"' _ "$work/$name.json" \
        "$python" -m vitfast doctor --json --untimed --debug --jobs "$jobs" "$@"
}

# shellcheck disable=SC2329 # called in a process of its own
prepare() { # what vitfast needs here: itself, and kernels compiled elsewhere
    local cache=${VITFAST_CACHE:-} file
    echo "$facts"
    local query=name,driver_version,memory.total,clocks.max.sm,power.limit,compute_mode
    timeout 10 nvidia-smi --query-gpu=$query --format=csv
    echo "$cpus CPUs, commit ${VITFAST_COMMIT:-$(git describe --always --dirty 2> /dev/null || echo unknown)}"
    if [ "${facts##*$'\n'}" != "vitfast is installed" ]; then
        if timeout 40 "$python" -m pip install -q -e . --no-deps --no-build-isolation; then
            echo "installed vitfast"
        else
            ln -sfn ../kernels vitfast/kernels && echo "pip cannot install here: linked vitfast/kernels"
        fi
    fi
    for file in ${cache:-bench/cache/*.tar.xz}; do
        if [ -n "$cache" ] || [ -f "$file" ]; then "$python" bench/cache.py "$file" || return 1; fi
    done
}

prepared() { # prepare, as a step
    export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" # where vitfast/kernels is linked, scripts find it too
    step prepare 0 90 bash -c "$(declare -p facts cpus python); $(declare -f prepare); prepare"
}

broken() { # whether two steps in a row ended with a device error: what follows would only repeat them
    ((device_errors >= 2)) || return 1
    echo "two steps in a row broke the device: stopping here"
}

first() {
    local main="B/16 and 224" ours="" train="test_train and compile and (vitfast or timm) and not accelerate"
    local inference="test_inference and compile and bf16 and (vitfast or timm) and not accelerate"
    # Of an earlier run into the same OUT:
    rm -f "$work"/{smoke,diagnosis,doctor,train,train_peers,attention,attention_separate,blocks}.{log,json}
    rm -f "$work"/{norm_and_patches,accelerate,inference,gpu_tests}.{log,json}
    prepared
    doctor smoke 90 --only layer_norm --only attention --only linear_gelu --only "patch_embed, uint8" \
        --dtype bfloat16
    checks "smoke"
    if [ "$state" != ok ]; then
        export CUDA_LAUNCH_BLOCKING=1
        doctor diagnosis 150
        unset CUDA_LAUNCH_BLOCKING
        bench train 60 220 110 bench/bench_model.py -k "$main and $train and not vitfast"
        bench attention 25 80 40 bench/bench_attention.py -k "$main and B256 and not separate and not vitfast"
        bench inference 30 110 60 bench/bench_model.py -k "$main and $inference and not vitfast"
        echo "== the smallest check failed:"
        tail -c 6000 "$work/smoke.log"
        return
    fi
    doctor doctor 100
    checks "vitfast doctor"
    device_errors=0 # of its workers, each a process of its own
    bench train 60 230 110 bench/bench_model.py -k "$main and $train"
    if ((device_errors)); then # ours runs first, and nothing has run after it
        ours=" and not vitfast"
        echo "the device broke: timm's numbers from a new process, and no more of our whole models"
        bench train_peers 60 130 110 bench/bench_model.py -k "$main and $train and not vitfast"
    elif grep -qs 'WrongResult: vitfast' "$work/train.log"; then
        ours=" and not vitfast"
        echo "a wrong result of ours: no more of our whole models, the operations will tell where it comes from"
    fi
    broken && return
    bench attention 25 80 40 bench/bench_attention.py -k "$main and B256 and not separate"
    broken && return
    bench blocks 30 110 60 bench/bench_block.py -k "$main and B256 and not max-autotune and not gated"
    broken && return
    bench norm_and_patches 25 90 60 bench/bench_layer_norm.py bench/bench_patch_embed.py \
        -k "$main and B256 and not max-autotune and (test_add_layer_norm or test_patch_embed)"
    broken && return
    if [ -z "$ours" ]; then
        bench accelerate 30 110 90 bench/bench_model.py -k "$main and test_train and accelerate and compile"
    fi
    broken && return
    bench inference 30 110 60 bench/bench_model.py -k "$main and $inference$ours"
    broken && return
    step gpu_tests 30 200 "$python" -m pytest tests/kernels/test_gpu.py -m gpu -n "$workers" --dist load -q -ra \
        -k "same_bits or training_follows or (every_shape and bfloat16 and 224 and (B/16 or H/14))"
    checks "first gpu tests"
    bench attention_separate 25 60 40 bench/bench_attention.py -k "$main and B256 and separate"
}

if [ "$wanted" = all ]; then
    failed=0
    for part in ceilings tests ops train curves; do bash bench/gpu.sh $part "$folder" || failed=1; done
    for model in "B/16 and 224" "S/16" "L/16" "B/16 and 384" "H/14"; do
        for what in train inference; do bash bench/gpu.sh models "$folder" -k "$model and $what" || failed=1; done
    done
    for mix in NaViT DINO documents; do bash bench/gpu.sh models "$folder" -k "packed and $mix" || failed=1; done
    exit $failed
fi
filter="" # of models, for names of files
if [ "$wanted" = models ]; then
    filter=$(printf '%s' "$*" | sed -E 's/(^| )-k / /g; s/[^A-Za-z0-9]+/_/g; s/^_*/_/; s/_+$//')
fi
start_steps "$wanted$filter" "$folder"
if [ "$wanted" != first ]; then prepared; fi
case "$wanted" in
    first) first ;;
    ceilings)
        timm="timm and compile and not accelerate and (B/16 or S/16) and 224 and train"
        bench ceilings 30 555 100 bench/bench_ceilings.py bench/bench_attention.py bench/bench_model.py \
            -k "ceilings or (sdpa and not backward) or ($timm)" "$@"
        ;;
    tests)
        doctor doctor 120
        checks "vitfast doctor"
        step gpu_tests 30 330 "$python" -m pytest tests -m gpu -n "$workers" --dist load -q -ra -k 'not sanitizer' "$@"
        checks "gpu tests"
        step sanitizer 150 555 env VITFAST_SANITIZER_SECONDS=$(($(left) - 50)) \
            "$python" -m pytest tests/kernels/test_gpu.py -m gpu -n 2 -q -ra -k sanitizer
        checks "compute-sanitizer"
        ;;
    ops) # a process for each file: an illegal access in one kernel spoils that file alone
        files=7
        for op in attention attention_options layer_norm patch_embed block mlp packed; do
            bench "ops_$op" 20 $(($(left) * 555 / seconds / files)) 100 "bench/bench_$op.py" "$@"
            files=$((files - 1))
        done
        ;;
    models) bench "models$filter" 30 555 150 bench/bench_model.py bench/bench_packed_model.py "$@" ;;
    train) bench train_from_files 30 555 200 bench/bench_train.py "$@" ;;
    curves) step curves 30 555 "$python" bench/curves.py "$work" "$@" ;;
    tune)
        export VITFAST_TILES="${VITFAST_TILES:-${XDG_CACHE_HOME:-$HOME/.cache}/vitfast/tiles.json}"
        step tune 30 555 "$python" -m vitfast tune --seconds $(($(left) - 10)) "$@"
        if [ -f "$VITFAST_TILES" ]; then cp "$VITFAST_TILES" "$work/tiles.json" && renew; fi
        ;;
esac
finish_steps
