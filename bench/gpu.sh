#!/usr/bin/env bash
# One stage of the checks and measurements on this machine's GPU, results in a folder (OUT: bench/results/local):
#
#     bench/gpu.sh first|decide|ops|models|tune|all [OUT] [--rehearse] [OPTIONS...]
#
# first     the first ten minutes on a new GPU: an answer from the smallest check on, the headline early
# decide    the questions of questions.py that are open on this kind of GPU, by worth per second, until the time is up:
#           what is compared runs in turns, and each answer is kept as it comes; `--only NAME` asks that one (again)
# ops       every operation against its peers; `-k max-autotune` for what there was no time for
# models    whole models; one call does not hold them all, so give a filter: -k "B/16 and 224 and train", -k packed
# tune      searches faster tiles and adds the user's table to the archive as tiles.json; options: `vitfast tune`'s
# all       decide until nothing is open, then ops and the models one by one, as long as that takes
#
# --rehearse runs the stage without a GPU: every case by its name, in plain PyTorch on the CPU at a toy's sizes; doctor
# in Triton's interpreter, nothing compiled, no time of any meaning. Tests that need a GPU are skipped in it.
#
# OUT (from the repository's root on) holds two files, written anew after each step of a stage, and what earlier stages
# left in them stays: report.md, and results.tar.gz with NAME.log and NAME.json of each step, steps_STAGE.json and
# answers/. To commit results: tar -xzf OUT/results.tar.gz -C bench/results/<gpu> --exclude '*.log'.
#
# Every stage but `all` ends within 555 seconds (another number: VITFAST_SECONDS), whatever hangs. A step, a process
# group of its own, gets its limit or what is left; with less than its least it is skipped (both are of 555 seconds, of
# others in proportion). At its limit it gets SIGINT, on which pytest still prints its failures, and soon SIGKILL;
# whatever it left behind, even in another session, is known by its environment (VITFAST_RUN) and killed; what not even
# SIGKILL ends, as it waits for a hung driver, is given up. A case that fails is recorded as failed, one that would start
# too late as skipped, and the stage goes on; but `first` ends early when its smallest check fails (after a diagnosis,
# and timm's and SDPA's numbers), and after two steps in a row that broke the device. Exit code 0: all that ran
# succeeded; 1: something failed; 2: no stage of that name, no GPU, or an OUT that cannot be used; 130: interrupted.
#
# Needs bash 5, python3 (or $PYTHON) with torch, triton, timm, transformers, torchvision, pytest, pytest-xdist and
# pytest-benchmark; no network. Installs vitfast from this folder, or links vitfast/kernels where pip cannot. `vitfast
# report-gpu` runs the stage `first` of an installed package, from a folder that holds bench/ alone.
# VITFAST_COMMIT: the commit, where the copy has no git. VITFAST_CACHE (else bench/cache/*.tar.xz): compiled kernels
# from `bench/archive.py`, for Triton's cache (`vitfast kernels install`).
set -u
cd "$(dirname "$0")/.." || exit 2
python=${PYTHON:-python3} stage=${1:-} folder=${2:-bench/results/local}
shift $(($# < 2 ? $# : 2))
rehearse=() options=()
for option in "$@"; do if [ "$option" = --rehearse ]; then rehearse=(--rehearse); else options+=("$option"); fi; done
if ((${#rehearse[@]})); then export VITFAST_REHEARSE=1 CUDA_VISIBLE_DEVICES=""; else unset VITFAST_REHEARSE; fi
set -- "${options[@]}"

refuse() { echo "bench/gpu.sh: $*" >&2 && exit 2; }
stages="first|decide|ops|models|tune|all"
[[ "|$stages|" == *"|$stage|"* && $stage ]] || refuse "no stage '$stage'; usage: bench/gpu.sh $stages [OUT] [--rehearse]"
seconds=${VITFAST_SECONDS:-555} # from the start of the script to its end
[[ $seconds =~ ^[0-9]{2,}$ ]] || refuse "VITFAST_SECONDS must be a whole number of seconds, 10 at least, got '$seconds'"
grace=$((seconds > 100 ? 5 : 1)) # between SIGINT and SIGKILL; and how long the report may take
failed=0 device_errors=0 running="" rows=() table=() checked=()
export VITFAST_COMMIT=${VITFAST_COMMIT:-$(git describe --always --dirty 2> /dev/null)} # or nothing
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 COLUMNS=160
# where vitfast/kernels is linked, scripts find it too; and each other, whatever Python takes for a safe path
export PYTHONPATH="$PWD:$PWD/bench${PYTHONPATH:+:$PYTHONPATH}"

if [ "$stage" = all ]; then
    each() { # what no stage can do without, and an interrupt, end them all
        bash bench/gpu.sh "$1" "$folder" "${rehearse[@]}" "${@:2}"
        local code=$?
        if ((code == 2 || code == 130)); then exit "$code"; fi
        if ((code)); then failed=1; fi
    }
    for _ in {1..9}; do # until nothing is asked any more, `prepare` alone runs
        each decide
        (($(tar -xzOf "$folder/results.tar.gz" ./steps_decide.json | grep -o '"name"' | wc -l) > 1)) || break
    done
    each ops
    for model in "B/16 and 224" "S/16" "L/16" "B/16 and 384" "H/14"; do
        for what in train inference; do each models -k "$model and $what"; done
    done
    for mix in NaViT DINO documents; do each models -k "packed and $mix"; done
    exit $failed
fi

# ---- steps

left() { # left [LIMIT]: whole seconds that a step can still take; the report and the targets come after it
    local rest=$((seconds - 5 * grace - 3 - SECONDS)) most=$((${1:-555} * seconds / 555))
    echo $((rest < most ? rest : most))
}

await() { # await SECONDS: whether the running process ends within them
    local end=$((SECONDS + $1))
    while kill -0 "$running" 2> /dev/null; do
        ((SECONDS < end)) || return 1
        sleep "${VITFAST_GLANCE:-0.2}"
    done
}

kill_rest() { # ends what this run has started and is still there
    local path
    for path in $(timeout -k 1 3 grep -lsz "^VITFAST_RUN=$VITFAST_RUN\$" /proc/[0-9]*/environ); do
        kill -KILL "${path//[!0-9]/}" 2> /dev/null
    done
}

limited() { # limited SECONDS LOG COMMAND...: runs it in a process group of its own; sets $state, $code and $taken
    local limit=$1 log=$2
    shift 2
    started=$SECONDS state=failed
    timeout -s INT -k "$grace" "$limit" "$@" > "$log" 2>&1 < /dev/null &
    running=$!
    if await $((limit + grace + 2)); then
        wait "$running"
        code=$? taken=$((SECONDS - started))
        if ((code == 0)); then state=ok; fi
        if ((code == 124 || code == 137)) && ((taken >= limit)); then state="timed out"; fi # sooner: by others
    else
        kill -KILL -- "-$running" "$running" 2> /dev/null
        state=stuck code=137 taken=$((SECONDS - started))
    fi
    running=""
}

# What breaks a process's context for good; not an error of one call, such as a lack of memory or a refused argument.
DEVICE_ERROR='illegal (memory access|instruction|address space)|misaligned address|invalid program counter'
DEVICE_ERROR+='|device-side assert|unspecified launch failure|launch timed out|hardware stack error|uncorrectable'
DEVICE_ERROR+='|does not answer any more'

step() { # step NAME LEAST LIMIT COMMAND...; $check: what the report calls its exit code, null where no test ran
    local least=$(($2 * seconds / 555)) limit log="$work/$1.log" found
    current=$1 state=skipped code=null taken=0 limit=$(left "$3")
    shift 3
    rm -f "$work/$current".{log,json} # of an earlier run into the same OUT
    if ((limit < least || limit < 1)); then record && return; fi
    echo "== $current: at most $limit s; $(left) s left"
    limited "$limit" "$log" "$@"
    kill_rest
    found=$code
    if ((code == 5)) && [ "$stage" != first ]; then state=ok; fi # pytest's 5: -k left no case here
    if ((code == 5)) || { ((code == 0)) && grep -qE '[0-9] skipped' "$log" && ! grep -qE '[0-9] passed' "$log"; }; then
        found=null
    fi
    if [ -n "${check:-}" ]; then checked+=("\"$check\": $found"); fi
    if [ "$state" = ok ]; then
        device_errors=0
    else
        failed=1
        tail -n 25 "$log" | cut -c 1-300
        if grep -qE "$DEVICE_ERROR" "$log"; then device_errors=$((device_errors + 1)); else device_errors=0; fi
    fi
    record
}

record() { # the current step's row; everything so far goes to OUT
    rows+=("{\"name\": \"$current\", \"state\": \"$state\", \"code\": $code, \"seconds\": $taken}")
    table+=("$(printf '%-12s %-18s %4s s   exit code %s' "$state" "$current" "$taken" "$code")")
    echo "${table[-1]}"
    renew
}

questions() { timeout -k 1 $((2 * grace)) "$python" bench/decide.py "$1" "$work" "${@:2}" --machine "$facts"; }

report() { timeout -k 1 "$grace" "$python" bench/report.py --folder "$work" "$@"; }

renew() { # OUT/report.md and OUT/results.tar.gz from what is there, whole or not at all
    local IFS=,
    echo "{\"stage\": \"$stage\", \"steps\": [${rows[*]}], \"checks\": {${checked[*]}}}" > "$work/$steps.json"
    if [ "$stage" = decide ] && [ "$current" != prepare ]; then questions answer || failed=1; fi
    if report > "$work/.report.md" 2> "$work/.report.log"; then
        cp "$work/.report.md" "$folder/.report.md" && mv "$folder/.report.md" "$folder/report.md"
    else
        failed=1
        echo "the report cannot be written: $(tail -n 1 "$work/.report.log")"
    fi
    tar -czf "$folder/.results.tar.gz" --exclude='./.*' -C "$work" . &&
        mv "$folder/.results.tar.gz" "$folder/results.tar.gz" && kept=yes && return
    failed=1 kept=""
    echo "the archive cannot be written"
}

finish() { # the steps again, and the targets; nothing of this run stays but OUT
    trap '' INT TERM HUP
    printf '\n%s\n' "$(printf '%s\n' "${table[@]}")" ""
    report "$([ "$stage" = decide ] && echo --answers || echo --targets)" || cat "$folder/report.md"
    exit "$failed"
}

interrupted() {
    trap '' INT TERM HUP
    if [ -n "$running" ]; then
        kill -INT -- "-$running" 2> /dev/null
        await "$grace" || kill -KILL -- "-$running" 2> /dev/null
        state=interrupted code=130 taken=$((SECONDS - started))
        record
    fi
    failed=130
    finish
}

leave() { # what could not be archived is left where it is
    kill_rest
    rm -f "$folder/.results.tar.gz" "$folder/.report.md"
    if [ -n "$kept" ]; then rm -rf "$work"; else echo "the results are left in $work"; fi
}

# ---- the machine

work=$(mktemp -d) kept=nothing
export VITFAST_RUN="${work##*/}" VITFAST_CEILINGS="$work/.ceilings.json" # measured by the first that needs them
trap leave EXIT
limited 90 "$work/.probe" "$python" -c '
import os, pathlib, sys, torch
gpu = torch.cuda.is_available()
if not gpu and not os.environ.get("VITFAST_REHEARSE"):
    sys.exit(3)
import triton
device = torch.cuda.get_device_name() if gpu else "a rehearsal on the CPU"
print(f"{device}, torch {torch.__version__}, triton {triton.__version__}, python {sys.version.split()[0]}")
print(f"{torch.cuda.mem_get_info()[0] // 2**30 if gpu else 0} GiB free")
import vitfast.kernels
if pathlib.Path(vitfast.kernels.__file__).resolve().parents[1] == pathlib.Path.cwd():
    print("vitfast is installed")'
facts=$(< "$work/.probe")
case $state$code in
    failed3) refuse "no NVIDIA GPU that the torch of $python can use (--rehearse does without)" ;;
    failed*) [[ $facts == *"GiB free"* ]] || refuse "$python cannot use torch and triton: ${facts##*$'\n'}" ;;
    timed* | stuck*) refuse "the GPU does not answer: torch has looked for it for 90 s" ;; # and cannot be ended
esac
mkdir -p "$folder" 2> /dev/null && : 2> /dev/null > "$folder/.report.md" || refuse "cannot write into $folder"
if [ -f "$folder/results.tar.gz" ]; then
    tar -xzf "$folder/results.tar.gz" -C "$work" 2> /dev/null ||
        refuse "cannot read $folder/results.tar.gz: move it away"
fi
trap interrupted INT TERM HUP
cpus=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # which are not about processes
[[ $facts =~ ([0-9]+)" GiB free" ]] && room=$((BASH_REMATCH[1] / 5)) # a worker of the gpu tests takes 5 GiB
workers=$((room < 1 ? 1 : room < 8 ? room : 8))
workers=$((cpus < workers ? cpus : workers))
archives=() # of compiled kernels; a rehearsal needs none
for file in ${VITFAST_CACHE:-bench/cache/*.tar.xz}; do
    if ((!${#rehearse[@]})) && { [ "${VITFAST_CACHE:-}" ] || [ -f "$file" ]; }; then archives+=("$file"); fi
done

# shellcheck disable=SC2329 # called in a process of its own
prepare() { # what vitfast needs here: itself, and kernels compiled elsewhere
    local file query=name,driver_version,memory.total,clocks.max.sm,power.limit,compute_mode
    echo "$facts"
    timeout 10 nvidia-smi --query-gpu=$query --format=csv
    echo "$cpus CPUs, commit ${VITFAST_COMMIT:-unknown}"
    if [ -d kernels ] && [[ $facts != *"vitfast is installed"* ]] &&
        ! timeout 40 "$python" -m pip install -q -e . --no-deps --no-build-isolation; then
        ln -sfn ../kernels vitfast/kernels && echo "pip cannot install here: linked vitfast/kernels"
    fi
    for file in "${archives[@]}"; do
        "$python" -m vitfast kernels install "$file" || return 1
    done
}

# ---- the stages

# bench NAME LEAST LIMIT CASE_LIMIT PYTEST ARGUMENTS...: no case takes longer than CASE_LIMIT or starts when the step is
# nearly over
bench() {
    local name=$1 least=$2 limit=$3 case_limit=$4
    shift 4
    step "$name" "$least" "$limit" "$python" -m pytest "$@" --benchmark-only -q -ra \
        --benchmark-columns=median,iqr,rounds --basetemp "$work/.pytest" \
        --benchmark-json="$work/$name.json" --case-limit "$case_limit" --ends $((EPOCHSECONDS + $(left "$limit")))
}

ops() { # ops NAME LEAST LIMIT CASE_LIMIT TESTS [PYTEST ARGUMENTS...]: tests of bench_ops.py, by their names after "test_"
    # shellcheck disable=SC2086
    bench "$1" "$2" "$3" "$4" $(printf 'bench/bench_ops.py::test_%s ' $5) "${@:6}"
}

models() { # models NAME LEAST LIMIT CASE_LIMIT FILTER: B/16 at 224 px
    bench "$1" "$2" "$3" "$4" bench/bench_model.py -k "B/16 and 224 and $5"
}

doctor() { # doctor NAME LIMIT OPTIONS...: its JSON in NAME.json, in as many processes as it has CPUs and memory for
    # shellcheck disable=SC2016
    step "$1" 20 "$2" bash -c 'file=$1; shift; exec "$@" > "$file"' _ "$work/$1.json" \
        "$python" -m vitfast doctor --json --untimed --debug --jobs 14 "${@:3}"
}

gpu_tests() { # gpu_tests NAME LEAST LIMIT PYTEST ARGUMENTS...
    step "$1" "$2" "$3" "$python" -m pytest "${@:4}" -m gpu -n "$workers" --dist load -q -ra --basetemp "$work/.pytest"
}

going() { if ((device_errors < 2)); then "$@"; fi; } # after two device errors in a row others would only repeat them

first() {
    local main="B/16 and 224 and B256" ours="" peers="compile and (vitfast or timm) and not (accelerate or backend)"
    local train="test_train and $peers" inference="test_inference and bf16 and $peers"
    check="smoke" doctor smoke 90 --dtype bfloat16 \
        --only layer_norm --only attention --only linear_gelu --only "patch_embed, uint8"
    if [ "$state" != ok ]; then
        CUDA_LAUNCH_BLOCKING=1 doctor diagnosis 150
        models train 60 220 110 "$train and not vitfast"
        ops attention 25 80 40 attention -k "$main and not vitfast"
        models inference 30 110 60 "$inference and not vitfast"
        echo "== the smallest check failed:"
        tail -c 6000 "$work/smoke.log"
        return
    fi
    check="vitfast doctor" doctor doctor 280 # 56 s on 16 CPUs, which compile: 200 s on 4
    device_errors=0 # of its workers, each a process of its own
    models train 60 230 110 "$train"
    if ((device_errors)); then # ours runs first, and nothing has run after it
        ours=" and not vitfast"
        echo "the device broke: timm's numbers from a new process, and no more of our whole models"
        models train_peers 60 130 110 "$train and not vitfast"
    elif grep -qs 'WrongResult: vitfast' "$work/train.log"; then
        ours=" and not vitfast"
        echo "a wrong result of ours: no more of our whole models, the operations will tell where it comes from"
    fi
    local few="$main and not max-autotune"
    going ops attention 25 80 40 attention -k "$main"
    going ops blocks 30 110 60 "attention_block mlp_block" -k "$few"
    going ops norm_and_patches 25 90 60 "add_layer_norm patch_embed_uint8 patch_embed_float" -k "$few"
    going models inference 30 110 60 "$inference$ours"
    ((device_errors < 2)) || echo "two steps in a row broke the device: stopping here"
}

decide() {
    ((${#rehearse[@]})) || timeout -k 1 "$(left 60)" "$python" bench/decide.py archive "$work" "${archives[@]}" --machine "$facts"
    local asked what name kind limit words
    while (($(left) > 2 * grace)); do # what `questions` may take
        asked=$(questions next --left $(($(left) * 555 / seconds)) "$@") || {
            failed=1 && echo "the next question cannot be found" && return
        }
        [ "$asked" ] || return
        mapfile -t words <<< "$asked"
        what=${words[0]} name=${words[1]} kind=${words[2]} limit=${words[3]} check=${words[4]}
        printf '\n== %s\n' "$what"
        words=("${words[@]:5}")
        case "$kind" in
            rivals)
                step "$name" 1 "$limit" "$python" bench/rivals.py "${words[@]}" --folder "$work" \
                    --ends $((EPOCHSECONDS + $(left "$limit")))
                ;;
            bench) bench "$name" 1 "$limit" "$limit" "${words[@]}" ;;
            tests) VITFAST_SANITIZER_SECONDS=$(($(left "$limit") - 5)) gpu_tests "$name" 1 "$limit" "${words[@]}" ;;
            doctor) doctor "$name" "$limit" "${words[@]}" ;;
        esac
        ((device_errors < 2)) || { echo "two steps in a row broke the device: stopping here" && return; }
    done
}

filter="" # of models, for names of files
if [ "$stage" = models ]; then
    filter=$(printf '%s' "$*" | sed -E 's/(^| )-k / /g; s/[^A-Za-z0-9]+/_/g; s/^_*/_/; s/_+$//')
fi
steps=steps_$stage$filter
step prepare 0 90 bash -c "$(declare -p facts cpus python archives); $(declare -f prepare); prepare"
case "$stage" in
    first) first ;;
    decide) decide "$@" ;;
    ops) # a process for each group: an illegal access in one kernel spoils that group alone
        ops ops_attention 20 80 100 "attention attention_separate" "$@"
        ops ops_attention_options 20 80 100 "attention_rotary attention_bias" "$@"
        ops ops_layer_norm 20 80 100 "layer_norm rms_norm add_layer_norm" "$@"
        ops ops_patch_embed 20 80 100 "patch_embed_uint8 patch_embed_float" "$@"
        ops ops_block 20 80 100 "attention_block mlp_block gated_mlp_block" "$@"
        ops ops_mlp 20 80 100 "linear_gelu mlp gated_mlp" "$@"
        ops ops_gemm 20 80 100 "gemm_qkv gemm_proj gemm_fc1 gemm_fc2" "$@"
        bench ops_packed 20 555 100 bench/bench_packed.py::test_attention_packed "$@"
        ;;
    models) bench "models$filter" 30 555 150 bench/bench_model.py bench/bench_packed.py::test_train_packed "$@" ;;
    tune) # a search measures a GPU: its rehearsal is its help
        export VITFAST_TILES="${VITFAST_TILES:-${XDG_CACHE_HOME:-$HOME/.cache}/vitfast/tiles.json}"
        step tune 30 555 "$python" -m vitfast tune --seconds $(($(left) - 10)) "$@" "${rehearse[@]/#--rehearse/--help}"
        if [ -f "$VITFAST_TILES" ]; then cp "$VITFAST_TILES" "$work/tiles.json" && renew; fi
        ;;
esac
finish
