"""What the cluster decides is unknown, and the question that decides it is named; all else stays known."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_ext.tools.launch import sandbox
from slime_ext.tools.launch.launch import READ
from slime_ext.tools.launch.read import read_script as read

pytestmark = pytest.mark.usefixtures("in_process")
# script (⏎ ends a line) -> flags that are unknown -> the reason for one of them
DECIDED = r"""
    python3 train.py --a 1 --b $(nvidia-smi -L | wc -l) -> --b -> $(wc -l)
    N=$(nvidia-smi -L | wc -l) ⏎ if [ "$N" -gt 0 ]; then A=1; else A=0; fi ⏎ python3 train.py --a $A --b 1 -> --a -> run.sh:2: [ "$N" -gt 0 ]
    N=$(gpus) ⏎ (( N >= 64 )) && A=(--big) ⏎ python3 train.py ${A[@]} --b 1 -> --big -> run.sh:2: (( N >= 64 ))
    N=$(gpus) ⏎ if (( N > 8 )); then A+=(--big); fi ⏎ python3 train.py ${A[@]} --b 1 -> --big -> run.sh:2: (( N > 8 ))
    python3 train.py --n $(( $(gpus) * 2 )) --b 1 -> --n -> $(( $(gpus) * 2 ))
    N=$(gpus) ⏎ M=$((N*8)) ⏎ let K=N+1 ⏎ python3 train.py --m $M --k $K --b 1 -> --m --k -> $((N*8))
    N=$(gpus) ⏎ M=$(printf %02d $N) ⏎ python3 train.py --m $M --l ${#N} --c ${N:0:1} --b 1 -> --m --l --c ->
    for i in $(seq 1 $(gpus)); do A+=(--gpu); done ⏎ python3 train.py ${A[@]} --b 1 -> --gpu -> for i in
    [[ $(hostname) == node-7 ]] && A=(--seven) ⏎ python3 train.py ${A[@]} --b 1 -> --seven -> [[ $(hostname) == node-7 ]]
    [[ $(hostname) == node-* ]] && ⏎   A+=(--seven) ⏎ python3 train.py ${A[@]} --b 1 -> --seven -> run.sh:1: [[ $(hostname) == node-* ]]
    case $(hostname) in ⏎   a*) A=1;; ⏎   *) A=2;; ⏎ esac ⏎ python3 train.py --a $A --b 1 -> --a -> run.sh:1: $(hostname) is known only
    command -v nvidia-smi && A=(--smi) ⏎ python3 train.py ${A[@]} --b 1 -> --smi -> run.sh:1: which nvidia-smi
    [[ -f "/data/x.json" ]] || A=(--made) ⏎ python3 train.py ${A[@]} --b 1 -> --made -> run.sh:1: [[ -f "/data/x.json" ]]
    N=1 ⏎ test -f x.json || A=(--made) ⏎ python3 train.py ${A[@]} --b 1 -> --made -> run.sh:2: test -f x.json
    if [ -d /data ]; then python3 train.py --a; else python3 train.py --c; fi -> --a --c -> [ -d /data ]
    if one; then if ! two; then A=(--deep); fi; fi ⏎ python3 train.py ${A[@]} --b 1 -> --deep -> run.sh:1: one
    smi && A+=(--big)  # not here ⏎ python3 train.py --a 1 ${A[@]} --b 1 -> --big -> run.sh:1: smi
    big() { A+=(--big); } ⏎ smi && big ⏎ python3 train.py --a 1 ${A[@]} --b 1 -> --big -> run.sh:2: smi
    F="--a 1" ⏎ if smi; then F="$F --big"; fi ⏎ python3 train.py $F --b 1 -> --big -> run.sh:2: smi
    A=(--x 1) ⏎ smi && A=(--y 2) ⏎ python3 train.py --b 1 ${A[@]} -> --x --y -> run.sh:2: smi
    A=(--x --y) ⏎ smi && A+=(--z 2) ⏎ python3 train.py ${A[@]} --b 1 -> --z -> run.sh:2: smi
    [ -f /x/.env ] && source /x/.env ⏎ python3 train.py --x ${X:-1} --b 1 -> --x ->
    if [ "$1" = a ]; then A=(--a); fi ⏎ smi || true ⏎ python3 train.py ${A[@]} --b 1 ->  ->
    smi && python3 train.py --b 1 ->  ->
    run() { python3 train.py "$@"; } ⏎ if smi; then run --b 1; else exit 1; fi ->  ->
    read -r X < /data/size ⏎ python3 train.py --x $X --b 1 -> --x -> $(< /data/size)
    N=$(gpus) ⏎ for ((i = 0; i < N; i++)); do A+=(--gpu); done ⏎ python3 train.py ${A[@]} --b 1 -> --gpu -> run.sh:2
    case $(hostname) in a*) A=1;; b*) A=2;; *) A=1;; esac ⏎ python3 train.py --a $A --b 1 -> --a -> run.sh:1: $(hostname)
    if one; then if [ -f /x ]; then A=2; fi; fi ⏎ python3 train.py --a ${A:-1} --b 1 -> --a -> run.sh:1
    while [ $(gpus) -lt 4 ]; do A=2; done ⏎ python3 train.py --a ${A:-1} --b 1 -> --a -> run.sh:1: [ $(gpus) -lt 4 ]
    N=$(gpus) ⏎ declare -i Q=N+1 ⏎ python3 train.py --q $Q --b 1 -> --q -> run.sh:3
    for h in $(cat /data/hosts); do A+=(--host $h); done ⏎ python3 train.py ${A[@]} --b 1 -> --host ->
    mapfile -t A < flags ⏎ python3 train.py --x 1 ${A[@]} --b 2 -> --x -> run.sh:1: $(< flags) is known
    until [ $(count) -ge 4 ]; do sleep 1; done ⏎ python3 train.py --b 1 ->  ->
    set -e ⏎ until [ "$(nodes | grep -c up)" -ge 4 ]; do echo wait; sleep 5; done ⏎ python3 train.py --b 1 ->  ->
    until [ "$(nodes)" = ready ]; do sleep 5; done ⏎ python3 train.py --b 1 ->  ->
    while ! curl x; do sleep 5; done ⏎ while pgrep ray; do sleep 1; done ⏎ python3 train.py --b 1 ->  ->
    python3 train.py --b 1 & ⏎ while true; do sleep 60; done ->  ->
    set -e ⏎ ray stop ⏎ pkill python ⏎ cd /root/slime ⏎ python3 train.py --b 1 ->  ->
    set -e ⏎ set +x ⏎ PS4= ⏎ source /none/env.sh ⏎ python3 train.py --x $X --b 1 -> --x ->
    X=$(gpus) ⏎ python3 train.py --b 1 ${X:+--big} -> --big -> is known only where the script runs
    [ -f /data/x ] || exit 1 ⏎ python3 train.py --b 1 ->  ->
    if pgrep sglang; then exit 1; fi ⏎ python3 train.py --b 1 ->  ->
    python3 train.py --x $RANDOM --b 1 -> --x ->
    ssh $HOST 'python3 train.py --x 1 --h $HOST' -> --h -> $HOST
    python3 train.py --a ${A:-1} --b "${B-}" --c $(echo "x y" | tr x z) ->  ->
    L="$(python3 /root/miles/miles/utils/external_utils/model_args_utils.py q)" || exit 1 ⏎ read -ra M <<< "$L" ⏎ python3 train.py --use-tis ${M[@]} --b 1 ->  -> model_args_utils.py q) is known
    source /none/scripts/models/x.sh ⏎ python3 train.py --use-tis ${M[@]} --b 1 ->  -> x.sh is not here
    read -ra M <<< "$(python3 other.py)" ⏎ python3 train.py --use-tis ${M[@]} --b 1 -> --use-tis -> other.py
    A=(x y) ⏎ python3 train.py --a "${A[@]/x/z}" --b 1 -> --a -> "${A[@]/x/z}"
    test "$(id -u)" -eq 0 && A=(--root) ⏎ python3 train.py ${A[@]} --b 1 -> --root -> test "$(id -u)" -eq 0 is known
    N=$(gpus) ⏎ for i in $(seq 2 $((N/8))); do A=(--more); done ⏎ python3 train.py ${A[@]} --b 1 -> --more -> for i in
    N=$(gpus) ⏎ case $((N/8)) in 1) A=(--one);; esac ⏎ python3 train.py ${A[@]} --b 1 -> --one -> run.sh:2: $((N/8))
    N=$(gpus); for i in $(seq $((N-1))); do A=(--more); done; python3 train.py ${A[@]} --b 1 -> --more -> run.sh:1: for
    if smi; then N=$(($(gpus)*2)); fi; python3 train.py --n $N --b 1 -> --n -> smi
    H=($(scontrol show hostnames)) ⏎ [ ${#H[@]} -gt 1 ] && A=(--many) ⏎ python3 train.py ${A[@]} --b 1 -> --many -> run.sh:2
    mapfile -t H < /hosts ⏎ (( ${#H[@]} > 1 )) && A=(--many) ⏎ python3 train.py ${A[@]} --b 1 -> --many -> run.sh:2
    IFS=, read -ra H <<< "$(hosts)" ⏎ python3 train.py --n ${#H[@]} --b 1 -> --n -> ${#H[@]}
    sbatch -N 4 --wrap "srun python3 train.py --x $(gpus) --b 1" -> --x -> $(gpus)
    sbatch -N 4 <<EOF ⏎ #!/bin/bash ⏎ #SBATCH --nodes=4 ⏎ srun python3 train.py --x $(gpus) --b 1 ⏎ EOF -> --x -> $(gpus)
    ssh -p 22 root@$HOST <<'EOF' ⏎ cd /root/slime ⏎ python3 train.py --b 1 ⏎ EOF ->  -> --b 1
    ssh $HOST bash -s <<EOF ⏎ python3 train.py --b 1 ⏎ EOF ->  -> --b 1
    docker exec -i slime bash <<EOF ⏎ python3 train.py --b 1 ⏎ EOF ->  -> --b 1
    tmux new-session -d -s rl "python3 train.py --b 1" ->  -> --b 1
    cat /data/args | xargs python3 train.py --b 1 -> --b -> $(cat /data/args) is known
    echo "--use-tis --c 1" | xargs python3 train.py --b 1 ->  -> --use-tis --c 1
    read -ra H <<< "a b" ⏎ python3 train.py --n ${#H[@]} --b 1 ->  ->
    mkdir /tmp/lock || A=(--held) ⏎ python3 train.py ${A[@]} --b 1 -> --held -> run.sh:1: mkdir /tmp/lock
    set -e ⏎ mkdir -p a/b && touch a/c ⏎ cd a/b ⏎ python3 train.py --b 1 > log ->  ->
    wait $! || A=(--late) ⏎ python3 train.py --n $(ulimit -n) ${A[@]} --b 1 -> --n --late -> run.sh:1: wait
    compgen -G "x/*.pt" && A=(--resume) ⏎ python3 train.py ${A[@]} --b 1 -> --resume -> run.sh:1: which "x/*.pt"
    set -e ⏎ pip install x ⏎ has() { ⏎   lspci | query ⏎ } ⏎ if has; then A=(--has); fi ⏎ python3 train.py ${A[@]} --b 1 -> --has -> run.sh:4: query
    set -e ⏎ pip install x ⏎ lock() { ⏎   mkdir /tmp/lock ⏎ } ⏎ lock || A=(--held) ⏎ python3 train.py ${A[@]} --b 1 -> --held -> run.sh:4: mkdir
    set +e ⏎ smi ⏎ S=$? ⏎ set -e ⏎ pip install x ⏎ [ $S = 0 ] && A=(--big) ⏎ python3 train.py ${A[@]} --b 1 -> --big -> run.sh:2: smi
    set -e ⏎ pip install x ⏎ while read -r l; do A=(--big); done < <(smi) ⏎ python3 train.py ${A[@]} --b 1 -> --big -> smi
    [ -t 0 ] && A=(--typed) ⏎ python3 train.py ${A[@]} --b 1 -> --typed -> run.sh:1: [ -t 0 ]
    [[ -t 1 ]] || A=(--log) ⏎ python3 train.py ${A[@]} --b 1 -> --log -> run.sh:1: [[ -t 1 ]]
    [ /a -nt /b ] && A=(--new) ⏎ python3 train.py ${A[@]} --b 1 -> --new -> run.sh:1: [ /a -nt /b ]
    [ -d "$D" ] && A=(--there) ⏎ python3 train.py ${A[@]} --b 1 -> --there -> run.sh:1: [ -d "$D" ]
    N=$(grep -c ^processor /proc/cpuinfo) ⏎ python3 train.py --n $N --h $(cat /etc/hostname) --b 1 -> --n --h -> cat /etc/hostname
    grep -q avx /proc/cpuinfo && A=(--avx) ⏎ python3 train.py ${A[@]} --b 1 -> --avx -> run.sh:1: grep -q avx
    grep -rq x conf && A=(--conf) ⏎ python3 train.py ${A[@]} --b 1 -> --conf -> run.sh:1: grep -rq x conf
    [ -f /etc/hosts ] && A=(--hosts) ⏎ python3 train.py ${A[@]} --b 1 -> --hosts -> run.sh:1: [ -f /etc/hosts ]
    N=$(gpus) ⏎ case "$N" in "") A=(--none);; esac ⏎ python3 train.py ${A[@]} --b 1 -> --none -> run.sh:2: "$N"
    N=$(gpus) ⏎ case "$N" in *) A=(--any);; esac ⏎ python3 train.py ${A[@]} --b 1 ->  ->
    printf -v D '%(%Y)T' -1 ⏎ python3 train.py --d $D --v ${BASH_VERSINFO[0]} --p $! --b 1 -> --d --v --p -> ${BASH_VERSINFO[0]}
    read -p "LR? " X ⏎ python3 train.py --x $X --b 1 -> --x -> what someone types
    read -r X Y ⏎ [ "$Y" = y ] && A=(--yes) ⏎ python3 train.py --x "$X" ${A[@]} --b 1 -> --x --yes -> run.sh:2: [ "$Y" = y ]
    read -p "sure? " -n 1 -r ⏎ [[ $REPLY =~ ^[Yy]$ ]] || exit 1 ⏎ python3 train.py --b 1 ->  ->
    read -t 5 X || X=1 ⏎ python3 train.py --x $X --b 1 -> --x -> what someone types
    while true; do ⏎   read -p "big? " X ⏎   case $X in [Yy]*) A=(--big); break;; [Nn]*) break;; esac ⏎ done ⏎ python3 train.py ${A[@]} --b 1 -> --big -> run.sh:3: $X
    select X in a b; do ⏎   [ -n "$X" ] && break ⏎ done ⏎ python3 train.py --x $X --b 1 -> --x -> --x $X
    select X in "${KINDS[@]}" ⏎ do ⏎   case $X in a) A=(--a);; *) A=(--c);; esac ⏎   break ⏎ done ⏎ python3 train.py ${A[@]} --b 1 -> --a --c -> $X
    echo "--x 1" | xargs python3 train.py --b 1 ⏎ read X < /data/y ->  ->
    F=(x/*.pt) ⏎ python3 train.py --n ${#F[@]} --f ${F[0]} --b 1 -> --n --f -> which files match x/*.pt
    for f in x/*.pt; do A+=(--one); done ⏎ python3 train.py ${A[@]} --b 1 -> --one -> run.sh:1: for f in x/*.pt
    shopt -s nullglob ⏎ F=(x/?.pt) ⏎ (( ${#F[@]} > 1 )) && A=(--many) ⏎ python3 train.py ${A[@]} --b 1 -> --many -> x/?.pt
    [ -d x ] || A=(--new) ⏎ L=(x/*.pt) ⏎ python3 train.py ${A[@]} --b 1 -> --new -> run.sh:1: [ -d x ]
    rm -rf /tmp/ray/* ⏎ pkill -f "sglang*" ⏎ A="a*b" ⏎ python3 train.py --a "$A" --b 1 ->  ->
    cd /data/x && A=(--there) ⏎ python3 train.py ${A[@]} --b 1 -> --there -> run.sh:1: cd /data/x
    cd /root/slime || exit 1 ⏎ python3 train.py --b 1 ->  ->
    source env.sh || A=(--none) ⏎ python3 train.py "${A[@]}" --b 1 -> --none -> run.sh:1: source env.sh
    while read -r l; do A+=(--host); done < hosts ⏎ python3 train.py ${A[@]} --b 1 -> --host -> what hosts says
    while read -r l; do A+=(--$l); done <<< "x y" ⏎ python3 train.py ${A[@]} --b 1 ->  ->
    declare -A M=([a]=1) ⏎ K=$(hostname) ⏎ python3 train.py --m ${M[$K]} --n "${M[$K]:-2}" --l ${M[a]} --b 1 -> --m --n -> run.sh:3: --m ${M[$K]}
    declare -A M=([a]=1 [b]=2) ⏎ K=a ⏎ M["$K"2]=3 ⏎ python3 train.py --m ${M[$K]} --n "${M[b]}" --l x${M["a2"]}y --b 1 ->  ->
    declare -A M=([a]=1) ⏎ M[$(hostname)]=2 ⏎ python3 train.py --m ${M[a]} --b 1 -> --m -> run.sh:3: --m ${M[a]}
    declare -A M=([a]=1) ⏎ [ -n "${M[$(hostname)]}" ] && A=(--mine) ⏎ python3 train.py ${A[@]} --b 1 -> --mine -> run.sh:2
    G=(4 8) ⏎ N=$(gpus) ⏎ i=1 ⏎ python3 train.py --g ${G[$((N-1))]} --h ${G[$i]} --j ${G[$N]} --b 1 -> --g --j -> ${G[$((N-1))]}
    read -r X Y <<< "$(gpus)" ⏎ H=($(hosts)) ⏎ python3 train.py --x $X --y $Y --h ${H[1]} --b 1 -> --x --y --h ->
    set -- $(gpus) ⏎ python3 train.py --x $1 --y $2 --n $# --b 1 -> --x --y --n ->
    (A=(--x 1)) ⏎ python3 train.py ${A[@]} --b 1 ->  ->
    main() { ⏎   [ -f /data/x ] && A=(--data) ⏎   python3 train.py ${A[@]} --b "2>&1" ⏎ } ⏎ main 2>&1 | tee log -> --data -> run.sh:2: [ -f /data/x ]
    { [ -f /data/x ] && A+=(--data); } &> log ⏎ { smi && A+=(--smi); } 2>/dev/null ⏎ python3 train.py ${A[@]} --b 1 -> --data --smi -> run.sh:1: [ -f /data/x ]
    read -r X ⏎ if echo "$X" | grep -q 8; then A=(--eight); fi ⏎ python3 train.py ${A[@]} --b 1 -> --eight ->
    { [[ -n $(smi) ]]; } && A=(--smi) ⏎ python3 train.py ${A[@]} --b 1 -> --smi -> run.sh:1: [[ -n $(smi) ]]
    set -e ⏎ N=$(gpus) ⏎ while read -r l; do A=(--one); done < <(gpus) ⏎ python3 train.py ${A[@]} --b 1 -> --one ->
    set -e ⏎ case a in a) [ -n "" ] && A=(--no);; esac ⏎ case x in y) false;; esac; python3 train.py ${A[@]} --b 1 ->  ->
    [ -f .env ] && export $(grep -v '^#' .env | xargs) ⏎ python3 train.py --x ${X:-1} --b 1 -> --x -> export
    for kv in $(smi); do export "$kv"; done ⏎ python3 train.py --x ${X:-1} --b 1 -> --x -> export $(smi)
    N=$(gpus) ⏎ eval "V_$N=1" ⏎ python3 train.py --x ${V_8:-1} --b 1 -> --x -> V_$(gpus)=1
    if [ "${RANK}" -eq 0 ]; then python3 train.py --b 1; fi ->  ->
    echo "--y" | xargs -I{} python3 train.py {} --b 1 ->  -> --y --b 1
    printf '%s\0' "--y" 2 | xargs -0 python3 train.py --b 1 ->  -> --b 1 --y 2
    parallel python3 train.py --x {} --b 1 ::: 1 2 ->  -> --x 2 --b 1
    cat /data/x | grep -q y && A=(--y) ⏎ grep a f|grep -q b || A+=(--b2) ⏎ python3 train.py ${A[@]} --b 1 -> --y --b2 -> run.sh:1: cat /data/x
    smi | tr a b | grep -q H100 && A=(--h) ⏎ python3 train.py ${A[@]} --b 1 -> --h -> run.sh:1: smi
    set -euo pipefail ⏎ X="$(echo "a:b" | tr ':' '\n' | grep -vE '^a|cat' | paste -sd: -)" ⏎ python3 train.py --x "$X" --b 1 ->  -> --x b --b 1
    set -e ⏎ if bash -c 'set -e; while read -r l; do :; done < /data/list'; then A=(--list); fi ⏎ python3 train.py ${A[@]} --b 1 -> --list -> what /data/list says
    X=$(echo $(smi) || echo "$SECONDS") ⏎ python3 train.py --x $X --b 1 -> --x ->
"""  # noqa: E501


@pytest.mark.parametrize("line", DECIDED.strip().splitlines())
def test_what_the_cluster_decides_is_unknown_and_nothing_else(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("A", "B", "N", "HOST"):
        monkeypatch.delenv(name, raising=False)
    text, unknown, reason = (part.strip() for part in line.split("->"))
    (tmp_path / "run.sh").write_text(text.replace(" ⏎ ", "\n"))
    launch = read(str(tmp_path / "run.sh"))
    named = {flag.name for flag in launch.flags}
    named |= {name for name, why in launch.unknown.items() if why != launch.others}
    reasons = [*launch.unknown.values(), launch.others]
    assert {name for name in named if not launch.is_known(name)} == {*unknown.split()}
    assert reason in " ".join([*map(str, launch.flags), *reasons])
    assert launch.program == "train.py"


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        ("source /none/scripts/models/x.sh\npython3 train.py --use-tis ${M[@]}", set()),
        ("read -ra M <<< $(python3 other.py)\npython3 train.py --lr 1 ${M[@]}", READ | {"--lr"}),
        ("read -ra M <<< $(python3 other.py)\npython3 train.py ${M[@]} --use-tis", READ - {"--use-tis"}),
    ],
)
def test_flags_that_rules_read_can_be_among_unknown_words_but_not_among_a_models_arguments(
    text, unknown, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(text)
    launch = read(str(tmp_path / "run.sh"))
    assert launch.unknown.keys() == unknown
    assert launch.others and not launch.is_known("--of-no-rule") and not launch.lacks("--of-no-rule")
    assert launch.lacks("--eps-clip") == ("--eps-clip" not in unknown)


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("python3 train.py --a 1", 3),  # as usual, with longer tokens, and with a launch that fails
        ("X=$(gpus)\npython3 train.py --a $X", 6),  # and if gpus fails, prints nothing, or prints three words
        ("mkdir -p /data && cp a /data || A=(--full)\nread -r X\npython3 train.py ${A[@]} --x $X", 8),
    ],
)
def test_a_run_that_would_get_the_same_answers_is_not_made_again(text, most, tmp_path, monkeypatch):
    made, new = [], sandbox.Sandbox._new
    monkeypatch.setattr(sandbox.Sandbox, "_new", lambda *args: made.append(1) or new(*args))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(text)
    launch, count = read(str(tmp_path / "run.sh")), len(made)
    monkeypatch.setattr(sandbox, "_answers", lambda *_: object())  # each run is made
    assert read(str(tmp_path / "run.sh")) == launch
    assert count <= most < len(made) - count


def test_a_script_that_was_read_leaves_no_open_file(tmp_path, monkeypatch):
    """A shell has three. The parser of conditions keeps its own, so the first reading does not count."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text('case $(hostname) in a*) A=1;; esac\nbash -c "python3 train.py --a $A"')
    counts = [read("run.sh") and len([*Path("/proc/self/fd").iterdir()]) for _ in range(3)]
    assert counts[1:] == counts[:1] * 2


JOB = '#!/bin/bash\n#SBATCH -N 2\npython3 train.py --b 1 --x ${X:-2} "$@"\n'


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        ("sbatch job.slurm", "--b 1 --x 2"),
        ("sbatch -N 2 --exclusive --time 1:00 ./job.slurm --y", "--b 1 --x 2 --y"),
        ("export X=3\nsbatch --export=ALL job.slurm --y 4", "--b 1 --x 3 --y 4"),
        ("srun -N 2 --container-image x ./job.slurm --y", "--b 1 --x 2 --y"),
        ("srun bash job.slurm --y", "--b 1 --x 2 --y"),
        ("docker run --gpus all slime bash -x job.slurm --y", "--b 1 --x 2 --y"),
        ("ray job submit -- bash job.slurm --y", "--b 1 --x 2 --y"),
        ("nohup bash job.slurm --y > log 2>&1 &", "--b 1 --x 2 --y"),
        ("bash job.slurm --y", "--b 1 --x 2 --y"),
        ("./job.slurm --y", "--b 1 --x 2 --y"),
        ("bash -lc 'bash job.slurm --y 2>&1 | tee log'", "--b 1 --x 2 --y"),
        ("ssh $HEAD bash job.slurm", "--b 1 --x 2"),
        ('tmux new-session -d -s rl "bash job.slurm --y"', "--b 1 --x 2 --y"),
    ],
)
def test_a_script_that_another_program_gets_is_followed(line, flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.slurm").write_text(JOB)
    assert flags_of(line, tmp_path, monkeypatch) == (flags, [])
    (tmp_path / "job.slurm").write_text(
        f"[ -f /data/x ] && D=--data\n{JOB.replace('train.py', 'train.py $D')}"
    )
    assert flags_of(line, tmp_path, monkeypatch)[1] == ["--data"]


@pytest.mark.parametrize(
    ("line", "flags", "unknown"),
    [
        ("cat > a.sh <<'EOF'\nX=3\npython3 train.py --x $X\nEOF\nsbatch a.sh", "--x 3", []),
        ("X=3\ncat > a.sh <<E\npython3 train.py --x $X --n $(n)\nE\nbash a.sh", "--x 3 --n $(n)", ["--n"]),
        ("export X=3\nsbatch --export=NONE --wrap 'python3 train.py --x ${X:-1}'", "--x 1", []),
        ("export X=3\ndocker run -e Y=4 i bash -c 'python3 train.py --x ${X:-1} --y $Y'", "--x 1 --y 4", []),
        ("export X=3\nssh h 'python3 train.py --x ${X:-1}'", "--x 1", []),
        ("export X=3\nsrun bash -c 'python3 train.py --x ${X:-1}'", "--x 3", []),
        ("sbatch none.sh && A=--held\npython3 train.py --x 1 $A", "--x 1 --held", ["--held"]),
    ],
)  # fmt: skip
def test_a_text_for_another_shell_is_read_with_its_variables(line, flags, unknown, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert flags_of(line, tmp_path, monkeypatch) == (flags, unknown)


def test_a_test_in_a_script_that_the_script_writes_leaves_all_flags_unknown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(
        "cat > a.sh <<'EOF'\n[ -f /x ] && A=--held\npython3 train.py $A\nEOF\nbash a.sh\n"
    )
    launch = read(str(tmp_path / "run.sh"))
    assert not launch.is_known("--held") and "-f /x" in launch.others


def flags_of(line, tmp_path, monkeypatch):
    """The flags of a script, and those of its flags that are unknown."""
    monkeypatch.delenv("X", raising=False)
    (tmp_path / "run.sh").write_text(line)
    launch = read(str(tmp_path / "run.sh"))
    assert not launch.others
    return " ".join(word for flag in launch.flags for word in (flag.name, *flag.values)), [*launch.unknown]


def test_a_script_starts_nothing_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "kept"
    kept.write_text("here")
    (tmp_path / "run.sh").write_text(
        f"rm -rf {tmp_path}\necho gone > {kept}\n/bin/rm {kept}\ntouch {tmp_path}/new\nmkdir {kept}s\n"
        f'kill -9 $$\npython3 -c \'open("{tmp_path}/ran", "w")\'\npython3 train.py --a 1'
    )
    assert read(str(tmp_path / "run.sh")).value("--a") == "1"
    assert (
        sorted(path.name for path in tmp_path.iterdir()) == ["kept", "run.sh"] and kept.read_text() == "here"
    )
