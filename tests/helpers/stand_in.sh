#!/usr/bin/env bash
# The $PYTHON of bench/gpu.sh in tests/bench/test_gpu_script.py: steps that are scripted.
#
# $SCRIPTED/calls gets a line for each step: its name, a tab, its arguments. A benchmark's JSON gets the step's name.
# $SCRIPTED/plan/NAME, where there is one, is what that step does, in bash.
set -u
asked=$*
case "$asked" in
    -c*is_available*)
        [ ! -f "$SCRIPTED/no_gpu" ] || exit 3
        [ ! -f "$SCRIPTED/no_triton" ] || { echo "ModuleNotFoundError: No module named 'triton'" >&2 && exit 1; }
        echo "NVIDIA Scripted" && echo "7 GiB free" && cat "$SCRIPTED/installed"
        exit
        ;;
    *"-m vitfast kernels install"*) name=cache ;;
    *bench/report.py*) [ ! -f "$SCRIPTED/no_report" ] || exit 1 ;;&
    *bench/report.py*--targets) echo "TARGETS of" "$(cd "$3" && echo ./*.json)" && exit ;;
    *bench/report.py*) echo "report of" "$(cd "$3" && echo ./*)" && exit ;;
    *"-m pip"*) name=pip ;;
    *"-m vitfast doctor"*) name=$(basename "$(readlink /proc/$$/fd/1)" .json) ;;
    *"-m vitfast tune"*) name=tune ;;
    *"-k sanitizer"*) name=sanitizer ;;
    *"-m pytest tests"*) name=gpu_tests ;;
    *--benchmark-json=*)
        json=${asked##*--benchmark-json=}
        json=${json%% --*}
        name=$(basename "$json" .json)
        echo "{\"benchmarks\": [], \"case\": \"$name\"}" > "$json"
        ;;
    *) name=unexpected ;;
esac
printf '%s\t%s\n' "$name" "$*" >> "$SCRIPTED/calls"
case "$*" in *"vitfast doctor"*) echo '{"results": []}' ;; *) echo "output of $name" ;; esac
# shellcheck disable=SC1090
if [ -f "$SCRIPTED/plan/$name" ]; then . "$SCRIPTED/plan/$name"; fi
