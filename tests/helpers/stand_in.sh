#!/usr/bin/env bash
# The $PYTHON of bench/gpu.sh in tests/bench/test_gpu_script.py: steps that are scripted.
#
# $SCRIPTED/calls gets a line for each step: its name, a tab, its arguments. A benchmark's JSON gets the step's name.
# $SCRIPTED/plan/NAME, where there is one, is what that step does, in bash. What decides which question comes next is the
# real thing, by the python $REAL.
set -u
asked=$*
case "$asked" in
    -c*is_available*)
        [ ! -f "$SCRIPTED/no_gpu" ] || exit 3
        [ ! -f "$SCRIPTED/no_triton" ] || { echo "ModuleNotFoundError: No module named 'triton'" >&2 && exit 1; }
        echo "NVIDIA Scripted, torch 2.11.0" && echo "7 GiB free" && cat "$SCRIPTED/installed"
        exit
        ;;
    *bench/decide.py\ archive*) echo "ARCHIVES ${*:4}" && exit ;;
    *bench/decide.py*) exec "$REAL" "$@" ;;
    *"-m vitfast kernels install"*) name=cache ;;
    *bench/report.py*) [ ! -f "$SCRIPTED/no_report" ] || exit 1 ;;&
    *bench/report.py*--targets) echo "TARGETS of" "$(cd "$3" && echo ./*.json)" && exit ;;
    *bench/report.py*--answers) echo "ANSWERS" "$(cd "$3/answers" && echo ./*.json)" && exit ;;
    *bench/report.py*) echo "report of" "$(cd "$3" && echo ./*)" && exit ;;
    *"-m pip"*) name=pip ;;
    *"-m vitfast doctor"*) name=$(basename "$(readlink /proc/$$/fd/1)" .json) ;;
    *"-m vitfast tune"*) name=tune ;;
    *bench/rivals.py*)
        name=$2 json=$4/$2.json
        PYTHONPATH=bench "$REAL" -c '
import json, sys, questions
rivals = {name: dict(ms=2.0, ready_s=1, peak_mib=1) for name in questions.QUESTIONS[sys.argv[1]].run.names}
cases = [dict(extra_info=dict(percent_of_floor=90, tflops=700))]
print(json.dumps(dict(rivals=rivals, benchmarks=cases, missing={})))' "$name" > "$json"
        ;;
    *"-m pytest tests"*) name=$(basename "$(readlink /proc/$$/fd/1)" .log) ;;
    *--benchmark-json=*)
        json=${asked##*--benchmark-json=}
        json=${json%% --*}
        name=$(basename "$json" .json)
        more='"images_per_second": 2, "ratio": 2, "losses": [1, 2]}}'
        cases="{\"extra_info\": {\"impl\": \"vitfast\", $more, {\"extra_info\": {\"impl\": \"timm\", $more"
        echo "{\"benchmarks\": [$cases], \"case\": \"$name\"}" > "$json"
        ;;
    *) name=unexpected ;;
esac
printf '%s\t%s\n' "$name" "$*" >> "$SCRIPTED/calls"
case "$*" in *"vitfast doctor"*) echo '{"results": []}' ;; *) echo "output of $name" ;; esac
# shellcheck disable=SC1090
if [ -f "$SCRIPTED/plan/$name" ]; then . "$SCRIPTED/plan/$name"; fi
