# shellcheck shell=bash disable=SC2154
# Steps that cannot spoil each other or outlast a deadline, for bench/gpu.sh, which sources this file and sets $python.
#
# start_steps STAGE OUT        begins: results are collected in $work, a temporary folder, which gets what an archive in
#                              OUT holds
# step NAME MIN LIMIT COMMAND  runs the command in a process group of its own; sets $state and $code
# checks NAME                  tells the report the exit code of the last step under this name, unless it was skipped
# finish_steps                 prints the steps again and then the targets, and exits: 0 when all that ran succeeded,
#                              else 1
#
# A step gets LIMIT seconds, or what is left; with less than MIN seconds left it is skipped. (Both are of 555 seconds:
# where VITFAST_SECONDS gives another number they are in proportion.) Its output goes to $work/NAME.log. At its limit
# its process group gets SIGINT, on which pytest still prints its failures, and $grace seconds later SIGKILL. Whatever
# it started and left behind, even in a session of its own, is known by its environment (VITFAST_RUN) and killed. A
# process that not even SIGKILL ends, as one that waits for a hung driver, is given up. After each step OUT/report.md
# and OUT/results.tar.gz (logs, results, steps_STAGE.json) are written anew, whole or not at all.

seconds=${VITFAST_SECONDS:-555} # from the start of the script to its end
case $seconds in
    '' | *[!0-9]* | ?)
        echo "bench/gpu.sh: VITFAST_SECONDS must be a whole number of seconds, 10 at least, got '$seconds'" >&2
        exit 2
        ;;
esac
grace=$((seconds > 100 ? 5 : 1))
patience=$((seconds > 100 ? 5 : 1)) # with the report
begun=$EPOCHREALTIME
failed=0
rows=()
table=()
named_checks=()
skipped=()
unsuccessful=()
device_errors=0 # steps in a row that broke the device
running=""

elapsed() { # elapsed [SINCE]: tenths of seconds since the start, or since then
    local now=$EPOCHREALTIME since=${1:-$begun}
    echo $(((${now/[.,]/} - ${since/[.,]/}) / 100000))
}

# left [LIMIT]: whole seconds that a step can still take, at most LIMIT; the report and the targets come after it
left() {
    local rest=$((seconds - grace - 2 * (patience + 1) - 1 - $(elapsed) / 10)) most=$((${1:-555} * seconds / 555))
    echo $((rest < most ? rest : most))
}

start_steps() {
    stage=$1 out=$2
    work=$(mktemp -d)
    export VITFAST_RUN="${work##*/}"
    if ! mkdir -p "$out" 2> /dev/null || ! (: > "$out/.report.md") 2> /dev/null; then
        rm -rf "$work"
        echo "bench/gpu.sh: cannot write into $out" >&2
        exit 2
    fi
    trap 'kill_rest; leave' EXIT
    trap interrupted INT TERM HUP
    if [ -f "$out/results.tar.gz" ] && ! tar -xzf "$out/results.tar.gz" -C "$work"; then
        mv "$out/results.tar.gz" "$out/damaged.tar.gz"
        failed=1
    fi
    export VITFAST_CEILINGS="$work/.ceilings.json" # measured by the first process that needs them
    if [ "$stage" = first ]; then rm -f "$work/steps_first.json"; fi
}

leave() { # nothing of this run stays but OUT; what could not be archived is left where it is
    rm -f "$out/.results.tar.gz" "$out/.report.md" "$probe" "$probe.err"
    if [ -z "$unarchived" ]; then rm -rf "$work"; else echo "the results are left in $work"; fi
}
unarchived=""

interrupted() {
    trap '' INT TERM HUP
    failed=130
    if [ -n "$running" ]; then
        kill -INT -- "-$running" 2> /dev/null
        await "$grace" || kill -KILL -- "-$running" 2> /dev/null
        state=interrupted code=130
        record "$current" "$(elapsed "$started")" 0
    fi
    finish_steps
}

kill_rest() { # ends what this run has started and is still there
    local path pid
    for path in $(timeout -k 1 3 grep -lsz "^VITFAST_RUN=$VITFAST_RUN\$" /proc/[0-9]*/environ); do
        pid=${path//[!0-9]/}
        kill -KILL "$pid" 2> /dev/null
    done
}

await() { # await SECONDS: whether the running step ends within them
    local since=$EPOCHREALTIME
    while kill -0 "$running" 2> /dev/null; do
        (($(elapsed "$since") < 10 * $1)) || return 1
        sleep 0.2
    done
}

step() {
    local least=$(($2 * seconds / 555)) limit taken
    current=$1 started=$EPOCHREALTIME
    limit=$(left "$3")
    shift 3
    state=skipped code=null
    rm -f "$work/$current".{log,json} # of an earlier run into the same OUT
    if ((limit < least || limit < 1)); then
        record "$current" 0 "$limit"
        return
    fi
    echo "== $current: at most $limit s; $(left) s left"
    timeout -s INT -k "$grace" "$limit" "$@" > "$work/$current.log" 2>&1 < /dev/null &
    running=$!
    if await $((limit + grace + 1)); then
        wait "$running"
        code=$?
        taken=$(elapsed "$started")
        state=failed
        # 5: the user's -k left no case of this file.
        if ((code == 0)) || { ((code == 5)) && [ "$stage" != first ]; }; then state=ok; fi
        # Sooner: killed by somebody else.
        if ((code == 124 || code == 137)) && ((taken >= 10 * limit)); then state="timed out"; fi
    else
        kill -KILL -- "-$running" "$running" 2> /dev/null
        state=stuck code=137 taken=$(elapsed "$started")
    fi
    running=""
    kill_rest
    shorten "$work/$current.log"
    if [ "$state" = ok ]; then
        device_errors=0
    else
        ((failed)) || failed=1
        tail -n 25 "$work/$current.log" | cut -c 1-300
        if grep -qE "$DEVICE_ERROR" "$work/$current.log"; then
            device_errors=$((device_errors + 1))
        else
            device_errors=0
        fi
    fi
    record "$current" "$taken" "$limit"
}

# What breaks a process's context for good; not an error of one call, such as a lack of memory or a refused argument.
DEVICE_ERROR='illegal memory access|misaligned address|illegal instruction|illegal address space'
DEVICE_ERROR+='|invalid program counter'
DEVICE_ERROR+='|device-side assert|unspecified launch failure|launch timed out|hardware stack error|uncorrectable'
DEVICE_ERROR+='|does not answer any more'

shorten() { # shorten FILE: its first and last million bytes, where it has more than three
    if (($(stat -c %s "$1") > 3000000)); then
        { head -c 1000000 "$1" && printf '\n...\n' && tail -c 1000000 "$1"; } > "$1.short" && mv "$1.short" "$1"
    fi
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

checks() {
    if [ "$state" = skipped ]; then return; fi
    # pytest's exit code is 0 where every test was skipped, and 5 where none was chosen.
    local log="$work/$current.log"
    if ((code == 5)) ||
        { ((code == 0)) && grep -qE '[0-9]+ skipped' "$log" && ! grep -qE '[0-9]+ passed' "$log"; }; then
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
    timeout -k 1 "$patience" "$python" bench/report.py --folder "$work" "$@" 2> "$work/report.log" && return
    if [ $? -ge 124 ]; then report_hangs=yes; fi
    return 1
}
report_hangs=""

renew() { # OUT/report.md and OUT/results.tar.gz from what is there
    echo "{\"stage\": \"$stage\", \"seconds\": $seconds, \"steps\": [$(joined "${rows[@]}")]," \
        "\"checks\": {$(joined "${named_checks[@]}")}, \"skipped\": [$(joined "${skipped[@]}")]," \
        "\"failed\": [$(joined "${unsuccessful[@]}")]}" > "$work/steps_$stage.json"
    if report > "$work/.report.md"; then
        mv "$work/.report.md" "$work/report.md"
        rm "$work/report.log"
        cp "$work/report.md" "$out/.report.md" && mv "$out/.report.md" "$out/report.md"
    else
        echo "the report cannot be written: $(tail -n 1 "$work/report.log")"
        ((failed)) || failed=1
    fi
    if tar -czf "$out/.results.tar.gz" --exclude='./.*' -C "$work" . &&
        mv "$out/.results.tar.gz" "$out/results.tar.gz"; then
        unarchived=""
    else
        echo "the archive cannot be written"
        unarchived=yes
        ((failed)) || failed=1
    fi
}

finish_steps() {
    trap '' INT TERM HUP
    echo
    printf '%s\n' "${table[@]}"
    echo
    report --targets || cat "$work/report.md"
    exit "$failed"
}
