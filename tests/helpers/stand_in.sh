#!/usr/bin/env bash
# The $PYTHON of bench/gpu.sh in tests/bench/test_session.py: steps that are scripted.
#
# $SCRIPTED/calls gets a line for each step: its name, a tab, its arguments. $SCRIPTED/plan/NAME, where there is one, is
# what that step does, in bash. What decides which question comes next is the real thing, by the python $REAL.
set -u
case "$*" in
    bench/session.py*) exec "$REAL" "$@" ;;
    -c*is_available*)
        [ ! -f "$SCRIPTED/no_gpu" ] || exit 3
        [ ! -f "$SCRIPTED/no_triton" ] || { echo "ModuleNotFoundError: No module named 'triton'" >&2 && exit 1; }
        echo "NVIDIA Scripted, torch 2.11.0" && echo "7 GiB free"
        exit
        ;;
esac
log=$(readlink /proc/$$/fd/1)
json=${log%.log}.json name=$(basename "$log" .log)
printf '%s\t%s\n' "$name" "$*" >> "$SCRIPTED/calls"
case "$*" in
    *bench/rivals.py*)
        PYTHONPATH=bench "$REAL" -c '
import json, sys, questions
rivals = {name: dict(ms=2.0, host_ms=1.0, ready_s=1, peak_mib=1) for name in questions.QUESTIONS[sys.argv[1]].run.names}
cases = [dict(extra_info=dict(percent_of_floor=90))]
print(json.dumps(dict(rivals=rivals, benchmarks=cases, missing={})))' "$name" > "$json"
        ;;
    *--benchmark-json=*)
        more='"images_per_second": 2, "ratio": 2, "losses": [1, 2]}}'
        cases="{\"extra_info\": {\"impl\": \"vitfast\", $more, {\"extra_info\": {\"impl\": \"timm\", $more"
        echo "{\"benchmarks\": [$cases]}" > "$json"
        ;;
esac
echo "output of $name"
# shellcheck disable=SC1090
if [ -f "$SCRIPTED/plan/$name" ]; then . "$SCRIPTED/plan/$name"; fi
