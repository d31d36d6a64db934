#!/usr/bin/env bash
# One stage of the checks and measurements on this machine's GPU, results in a folder (OUT: bench/results/local):
#
#     bench/gpu.sh first|ceilings|tests|ops|models|train|curves|tune|all [OUT] [--rehearse] [OPTIONS...]
#
# first     the first ten minutes on a new GPU: an answer from the smallest check on, the headline early, what is left
#           in order of weight
# ceilings  copy, matrix products, cuBLAS at the GEMM shapes of a step, SDPA's backends, timm compiled in amp and bf16
# tests     vitfast doctor, pytest tests -m gpu on 8 workers at most, compute-sanitizer where there is one
# ops       every operation against its peers, on images of many sizes too; `-k max-autotune` for what there was no
#           time for, `--shapes all` for more
# models    whole models; one call does not hold them all, so give a filter: -k "B/16 and 224 and train"; or
#           -k packed, training steps on images of many sizes
# train     end to end from JPEG files
# curves    losses of 1,000 steps of S/16, ours and timm's, three seeds; `--model B/16 --precision bf16` for others
# tune      searches faster tiles and adds the user's table to the archive as tiles.json; options: `vitfast tune`'s
# all       all but first and tune, the models one by one, as long as that takes
#
# --rehearse runs the stage without a GPU: every case by its name, in plain PyTorch on the CPU at a toy's sizes; doctor
# in Triton's interpreter, nothing compiled, no time of any meaning. Tests that need a GPU are skipped in it, and what
# captures graphs or reads the device's clock and memory does not run.
#
# OUT (from the repository's root on) holds two files, written anew after each step of a stage, and what earlier stages
# left in them stays: report.md, and results.tar.gz with NAME.log and NAME.json (pytest-benchmark's format and what
# bench/conftest.py adds) of each step and steps_STAGE.json. To commit results:
# tar -xzf OUT/results.tar.gz -C bench/results/<gpu>.
#
# Every stage but `all` ends within 555 seconds (another number: VITFAST_SECONDS), whatever hangs. A step, a process
# group of its own, gets its limit or what is left; with less than its least it is skipped (both are of 555 seconds, of
# others in proportion). At its limit it gets SIGINT, on which pytest still prints its failures, and soon SIGKILL;
# whatever it left behind, even in another session, is known by its environment (VITFAST_RUN) and killed; what not even
# SIGKILL ends, as it waits for a hung driver, is given up. A case that fails is recorded as failed, one that would start
# too late as skipped, and the stage goes on; but `first` ends early when its smallest check fails (after a diagnosis,
# and timm's and SDPA's numbers), and after two steps in a row that broke the device. Exit code 0: all that ran
# succeeded; 1: something failed; 2: no stage of that name, no GPU, or an OUT that cannot be written; 130: interrupted.
#
# Needs bash 5, python3 (or $PYTHON) with torch, triton, timm, transformers, torchvision, pytest, pytest-xdist and
# pytest-benchmark; no network. Installs vitfast from this folder, or links vitfast/kernels where pip cannot.
# VITFAST_COMMIT: the commit, where the copy has no git. VITFAST_CACHE (else bench/cache/*.tar.xz): compiled kernels
# from `tests/codegen.py --cache`, for Triton's cache (bench/cache.py).
set -u
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3}
wanted=${1:-} folder=${2:-bench/results/local}
shift $(($# < 2 ? $# : 2))
rehearse=() options=()
for option in "$@"; do if [ "$option" = --rehearse ]; then rehearse=(--rehearse); else options+=("$option"); fi; done
if ((${#rehearse[@]})); then export VITFAST_REHEARSE=1 CUDA_VISIBLE_DEVICES=""; else unset VITFAST_REHEARSE; fi
set -- "${options[@]}"

refuse() { echo "bench/gpu.sh: $*" >&2 && exit 2; }
stages="first|ceilings|tests|ops|models|train|curves|tune|all"
case "|$stages|" in
    *"|$wanted|"*) ;;
    *) refuse "no stage '$wanted'; usage: bench/gpu.sh $stages [OUT] [--rehearse] [OPTIONS...]" ;;
esac
seconds=${VITFAST_SECONDS:-555} # from the start of the script to its end
[[ $seconds =~ ^[0-9]{2,}$ ]] || refuse "VITFAST_SECONDS must be a whole number of seconds, 10 at least, got '$seconds'"
grace=$((seconds > 100 ? 5 : 1)) # between SIGINT and SIGKILL; and how long the report may take
begun=$EPOCHREALTIME failed=0 device_errors=0 running="" report_hangs="" unarchived=""
rows=() table=() named_checks=() skipped=() unsuccessful=()

elapsed() { # elapsed [SINCE]: tenths of seconds since the start, or since then
    local now=$EPOCHREALTIME since=${1:-$begun}
    echo $(((${now/[.,]/} - ${since/[.,]/}) / 100000))
}

left() { # left [LIMIT]: whole seconds that a step can still take; the report and the targets come after it
    local rest=$((seconds - 3 * grace - 3 - $(elapsed) / 10)) most=$((${1:-555} * seconds / 555))
    echo $((rest < most ? rest : most))
}

await() { # await SECONDS: whether the running process ends within them
    local since=$EPOCHREALTIME
    while kill -0 "$running" 2> /dev/null; do
        (($(elapsed "$since") < 10 * $1)) || return 1
        sleep "${VITFAST_GLANCE:-0.2}"
    done
}

kill_rest() { # ends what this run has started and is still there
    local path
    for path in $(timeout -k 1 3 grep -lsz "^VITFAST_RUN=$VITFAST_RUN\$" /proc/[0-9]*/environ); do
        kill -KILL "${path//[!0-9]/}" 2> /dev/null
    done
}

leave() { # nothing of this run stays but OUT; what could not be archived is left where it is
    rm -f "$folder/.results.tar.gz" "$folder/.report.md" "$probe" "$probe.err"
    if [ -z "$unarchived" ]; then rm -rf "$work"; else echo "the results are left in $work"; fi
}

interrupted() {
    trap '' INT TERM HUP
    failed=130
    if [ -n "$running" ]; then
        kill -INT -- "-$running" 2> /dev/null
        await "$grace" || kill -KILL -- "-$running" 2> /dev/null
        state=interrupted code=130
        record "$current" "$(elapsed "$started")" 0
    fi
    finish
}

begin() { # begin STAGE: results are collected in $work, which gets what an archive in OUT holds
    stage=$1 work=$(mktemp -d)
    export VITFAST_RUN="${work##*/}" VITFAST_CEILINGS="$work/.ceilings.json" # measured by the first that needs them
    if ! mkdir -p "$folder" 2> /dev/null || ! (: > "$folder/.report.md") 2> /dev/null; then
        rm -rf "$work"
        refuse "cannot write into $folder"
    fi
    trap 'kill_rest; leave' EXIT
    trap interrupted INT TERM HUP
    if [ -f "$folder/results.tar.gz" ] && ! tar -xzf "$folder/results.tar.gz" -C "$work"; then
        mv "$folder/results.tar.gz" "$folder/damaged.tar.gz"
        failed=1
    fi
}

# What breaks a process's context for good; not an error of one call, such as a lack of memory or a refused argument.
DEVICE_ERROR='illegal (memory access|instruction|address space)|misaligned address|invalid program counter'
DEVICE_ERROR+='|device-side assert|unspecified launch failure|launch timed out|hardware stack error|uncorrectable'
DEVICE_ERROR+='|does not answer any more'

step() { # step NAME LEAST LIMIT COMMAND...: runs it in a process group of its own; sets $state and $code
    local least=$(($2 * seconds / 555)) limit taken log="$work/$1.log"
    current=$1 started=$EPOCHREALTIME state=skipped code=null limit=$(left "$3")
    shift 3
    rm -f "$work/$current".{log,json} # of an earlier run into the same OUT
    if ((limit < least || limit < 1)); then record "$current" 0 "$limit" && return; fi
    echo "== $current: at most $limit s; $(left) s left"
    timeout -s INT -k "$grace" "$limit" "$@" > "$log" 2>&1 < /dev/null &
    running=$!
    if await $((limit + grace + 1)); then
        wait "$running"
        code=$? state=failed taken=$(elapsed "$started")
        if ((code == 0)) || { ((code == 5)) && [ "$stage" != first ]; }; then state=ok; fi # 5: -k left no case here
        if ((code == 124 || code == 137)) && ((taken >= 10 * limit)); then state="timed out"; fi # sooner: by others
    else
        kill -KILL -- "-$running" "$running" 2> /dev/null
        state=stuck code=137 taken=$(elapsed "$started")
    fi
    running=""
    kill_rest
    if (($(stat -c %s "$log") > 3000000)); then # its first and last million bytes
        { head -c 1000000 "$log" && printf '\n...\n' && tail -c 1000000 "$log"; } > "$log.short" && mv "$log.short" "$log"
    fi
    if [ "$state" = ok ]; then
        device_errors=0
    else
        ((failed)) || failed=1
        tail -n 25 "$log" | cut -c 1-300
        if grep -qE "$DEVICE_ERROR" "$log"; then device_errors=$((device_errors + 1)); else device_errors=0; fi
    fi
    record "$current" "$taken" "$limit"
}

record() { # record NAME TENTHS LIMIT: the step's row; everything so far goes to OUT
    local taken="$(($2 / 10)).$(($2 % 10))"
    rows+=("{\"name\": \"$1\", \"state\": \"$state\", \"code\": $code, \"seconds\": $taken, \"limit\": $3}")
    table+=("$(printf '%-12s %-18s %6s s of %4s s   exit code %s' "$state" "$1" "$taken" "$3" "$code")")
    case $state in
        ok) ;;
        skipped) skipped+=("{\"name\": \"step $1\", \"reason\": \"too few seconds were left: $3\"}") ;;
        *) unsuccessful+=("{\"name\": \"step $1\", \"reason\": \"$state after $taken s, exit code $code\"}") ;;
    esac
    echo "${table[-1]}"
    renew
}

checks() { # checks NAME: tells the report the exit code of the last step under this name, unless it was skipped
    local log="$work/$current.log"
    if [ "$state" = skipped ]; then return; fi
    # pytest's exit code is 0 where every test was skipped, and 5 where none was chosen.
    if ((code == 5)) || { ((code == 0)) && grep -qE '[0-9]+ skipped' "$log" && ! grep -qE '[0-9]+ passed' "$log"; }; then
        skipped+=("{\"name\": \"$1\", \"reason\": \"no test ran\"}")
    else
        named_checks+=("\"$1\": $code")
    fi
    renew
}

joined() { # joined ELEMENTS...: with commas between them
    local text
    if (($#)); then printf -v text ', %s' "$@" && echo "${text#, }"; fi
}

report() { # report OPTIONS...: bench/report.py over everything so far; one that hangs once is not tried again
    if [ -n "$report_hangs" ]; then return 1; fi
    timeout -k 1 "$grace" "$python" bench/report.py --folder "$work" "$@" 2> "$work/report.log" && return
    if [ $? -ge 124 ]; then report_hangs=yes; fi
    return 1
}

renew() { # OUT/report.md and OUT/results.tar.gz from what is there, whole or not at all
    echo "{\"stage\": \"$stage\", \"seconds\": $seconds, \"steps\": [$(joined "${rows[@]}")]," \
        "\"checks\": {$(joined "${named_checks[@]}")}, \"skipped\": [$(joined "${skipped[@]}")]," \
        "\"failed\": [$(joined "${unsuccessful[@]}")]}" > "$work/steps_$stage.json"
    if report > "$work/.report.md"; then
        mv "$work/.report.md" "$work/report.md" && rm "$work/report.log"
        cp "$work/report.md" "$folder/.report.md" && mv "$folder/.report.md" "$folder/report.md"
    else
        echo "the report cannot be written: $(tail -n 1 "$work/report.log")"
        ((failed)) || failed=1
    fi
    unarchived=""
    if ! tar -czf "$folder/.results.tar.gz" --exclude='./.*' -C "$work" . ||
        ! mv "$folder/.results.tar.gz" "$folder/results.tar.gz"; then
        echo "the archive cannot be written"
        unarchived=yes
        ((failed)) || failed=1
    fi
}

finish() { # the steps again, and the targets
    trap '' INT TERM HUP
    printf '\n%s\n' "$(printf '%s\n' "${table[@]}")" ""
    report --targets || cat "$work/report.md"
    exit "$failed"
}

# ---- the machine

probe=$(mktemp)
trap 'rm -f "$probe" "$probe.err"' EXIT
"$python" -c '
import os, pathlib, sys, torch
gpu = torch.cuda.is_available()
if not gpu and not os.environ.get("VITFAST_REHEARSE"):
    sys.exit(3)
import triton
python = sys.version.split()[0]
device = torch.cuda.get_device_name() if gpu else "a rehearsal on the CPU"
print(f"{device}, torch {torch.__version__}, triton {triton.__version__}, python {python}")
print(f"{torch.cuda.mem_get_info()[0] // 2**30 if gpu else 0} GiB free")
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
    case $? in
        0) ;;
        3) refuse "no NVIDIA GPU that the torch of $python can use (--rehearse does without)" ;;
        *) refuse "$python cannot use torch and triton: $(tail -n 1 "$probe.err")" ;;
    esac
else # one that waits for a hung driver cannot be ended
    kill -KILL "$running" 2> /dev/null
    refuse "the GPU does not answer: torch has looked for it for 90 s"
fi
running="" facts=$(< "$probe")
cpus=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # which are not about processes
workers=$((cpus < 8 ? cpus : 8)) jobs=$((cpus < 14 ? cpus : 14))
if [[ $facts =~ ([0-9]+)" GiB free" ]]; then # a worker of the gpu tests takes 5 GiB
    room=$((BASH_REMATCH[1] / 5))
    workers=$((room < 1 ? 1 : room < workers ? room : workers))
fi
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 COLUMNS=160

# shellcheck disable=SC2329 # called in a process of its own
prepare() { # what vitfast needs here: itself, and kernels compiled elsewhere
    local cache=${VITFAST_CACHE:-} file query=name,driver_version,memory.total,clocks.max.sm,power.limit,compute_mode
    echo "$facts"
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

# ---- the stages

# bench NAME LEAST LIMIT CASE_LIMIT PYTEST ARGUMENTS...: no case takes longer than CASE_LIMIT or starts when the step is
# nearly over
bench() {
    local name=$1 least=$2 limit=$3 case_limit=$4
    shift 4
    step "$name" "$least" "$limit" "$python" -m pytest "$@" --benchmark-only -q -ra \
        --benchmark-columns=median,iqr,rounds \
        --benchmark-json="$work/$name.json" --case-limit "$case_limit" --ends $((EPOCHSECONDS + $(left "$limit")))
}

ops() { # ops NAME LEAST LIMIT CASE_LIMIT TESTS [PYTEST ARGUMENTS...]: tests of bench_ops.py, by their names after "test_"
    local files=() test
    for test in $5; do files+=("bench/bench_ops.py::test_$test"); done
    bench "$1" "$2" "$3" "$4" "${files[@]}" "${@:6}"
}

doctor() { # doctor NAME LIMIT OPTIONS...: its JSON in NAME.json, in as many processes as it has memory for
    local name=$1 limit=$2
    shift 2
    # shellcheck disable=SC2016
    step "$name" 20 "$limit" bash -c 'file=$1; shift; exec "$@" > "$file"' _ "$work/$name.json" \
        "$python" -m vitfast doctor --json --untimed --debug --jobs "$jobs" "$@"
}

prepared() { # prepare, as a step
    export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" # where vitfast/kernels is linked, scripts find it too
    step prepare 0 90 bash -c "$(declare -p facts cpus python); $(declare -f prepare); prepare"
}

going() { # whether the run goes on: after two steps in a row with a device error what follows would only repeat them
    ((device_errors < 2)) && return
    echo "two steps in a row broke the device: stopping here"
    return 1
}

first() {
    local main="B/16 and 224" ours="" train="test_train and compile and (vitfast or timm) and not accelerate"
    local inference="test_inference and compile and bf16 and (vitfast or timm) and not accelerate"
    # Of an earlier run into the same OUT:
    rm -f "$work"/{smoke,diagnosis,doctor,train,train_peers,attention,attention_separate,blocks}.{log,json}
    rm -f "$work"/{norm_and_patches,accelerate,inference,gpu_tests}.{log,json} "$work/steps_first.json"
    prepared
    doctor smoke 90 --only layer_norm --only attention --only linear_gelu --only "patch_embed, uint8" --dtype bfloat16
    checks "smoke"
    if [ "$state" != ok ]; then
        CUDA_LAUNCH_BLOCKING=1 doctor diagnosis 150
        bench train 60 220 110 bench/bench_model.py -k "$main and $train and not vitfast"
        ops attention 25 80 40 attention -k "$main and B256 and not vitfast"
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
    local quick="$main and B256 and not max-autotune"
    going || return
    ops attention 25 80 40 attention -k "$main and B256"
    going || return
    ops blocks 30 110 60 "attention_block mlp_block" -k "$quick"
    going || return
    ops norm_and_patches 25 90 60 "add_layer_norm patch_embed_uint8 patch_embed_float" -k "$quick"
    going || return
    if [ -z "$ours" ]; then
        bench accelerate 30 110 90 bench/bench_model.py -k "$main and test_train and accelerate and compile"
    fi
    going || return
    bench inference 30 110 60 bench/bench_model.py -k "$main and $inference$ours"
    going || return
    step gpu_tests 30 200 "$python" -m pytest tests/kernels/test_gpu.py -m gpu -n "$workers" --dist load -q -ra \
        -k "same_bits or training_follows or (every_shape and bfloat16 and 224 and (B/16 or H/14))"
    checks "first gpu tests"
    ops attention_separate 25 60 40 attention_separate -k "$main and B256"
}

every_operation() { # a process for each group: an illegal access in one kernel spoils that group alone
    local groups="attention:attention,attention_separate attention_options:attention_rotary,attention_bias"
    groups+=" layer_norm:layer_norm,rms_norm,add_layer_norm patch_embed:patch_embed_uint8,patch_embed_float"
    groups+=" block:attention_block,mlp_block,gated_mlp_block mlp:linear_gelu,mlp,gated_mlp,linear_gelu_gelu_tanh"
    local group rest=7
    for group in $groups; do
        ops "ops_${group%%:*}" 20 $(($(left) * 555 / seconds / rest)) 100 "$(tr , ' ' <<< "${group#*:}")" "$@"
        rest=$((rest - 1))
    done
    bench ops_packed 20 555 100 bench/bench_packed.py::test_attention_packed "$@"
}

if [ "$wanted" = all ]; then
    each() { bash bench/gpu.sh "$1" "$folder" "${rehearse[@]}" "${@:2}" || failed=1; }
    for part in ceilings tests ops train curves; do each $part; done
    for model in "B/16 and 224" "S/16" "L/16" "B/16 and 384" "H/14"; do
        for what in train inference; do each models -k "$model and $what"; done
    done
    for mix in NaViT DINO documents; do each models -k "packed and $mix"; done
    exit $failed
fi
filter="" # of models, for names of files
if [ "$wanted" = models ]; then
    filter=$(printf '%s' "$*" | sed -E 's/(^| )-k / /g; s/[^A-Za-z0-9]+/_/g; s/^_*/_/; s/_+$//')
fi
begin "$wanted$filter"
if [ "$wanted" != first ]; then prepared; fi
case "$wanted" in
    first) first ;;
    ceilings)
        timm="timm and compile and not accelerate and (B/16 or S/16) and 224 and train"
        bench ceilings 30 555 100 bench/bench_ceilings.py bench/bench_ops.py::test_attention bench/bench_model.py \
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
    ops) every_operation "$@" ;;
    models) bench "models$filter" 30 555 150 bench/bench_model.py bench/bench_packed.py::test_train_packed "$@" ;;
    train) bench train_from_files 30 555 200 bench/bench_train.py "$@" ;;
    curves)
        if ((${#rehearse[@]})); then set -- --model Nano/8 --image 16 --batch 4 --steps 3 --seeds 1 "$@"; fi
        step curves 30 555 "$python" bench/curves.py "$work" "$@"
        ;;
    tune) # a search measures a GPU: its rehearsal is its help
        export VITFAST_TILES="${VITFAST_TILES:-${XDG_CACHE_HOME:-$HOME/.cache}/vitfast/tiles.json}"
        step tune 30 555 "$python" -m vitfast tune --seconds $(($(left) - 10)) "$@" "${rehearse[@]/#--rehearse/--help}"
        if [ -f "$VITFAST_TILES" ]; then cp "$VITFAST_TILES" "$work/tiles.json" && renew; fi
        ;;
esac
finish
