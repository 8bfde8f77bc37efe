"""What the cluster decides is unknown, and the question that decides it is named; all else stays known."""

from __future__ import annotations

import pytest

from slime_ext.tools.scripts.read import read

# script (⏎ ends a line) -> flags that are unknown -> the reason for one of them
DECIDED = r"""
    python3 train.py --a 1 --b $(nvidia-smi -L | wc -l) -> --b -> $(wc -l)
    N=$(nvidia-smi -L | wc -l) ⏎ if [ "$N" -gt 0 ]; then A=1; else A=0; fi ⏎ python3 train.py --a $A --b 1 -> --a -> wc -l
    N=$(gpus) ⏎ (( N >= 64 )) && A=(--big) ⏎ python3 train.py ${A[@]} --b 1 -> --big -> gpus
    python3 train.py --n $(( $(gpus) * 2 )) --b 1 -> --n -> gpus
    [[ $(hostname) == node-7 ]] && A=(--seven) ⏎ python3 train.py ${A[@]} --b 1 -> --seven -> hostname
    case $(hostname) in ⏎   a*) A=1;; ⏎   *) A=2;; ⏎ esac ⏎ python3 train.py --a $A --b 1 -> --a -> hostname
    command -v nvidia-smi && A=(--smi) ⏎ python3 train.py ${A[@]} --b 1 -> --smi -> which nvidia-smi
    [[ -f "/data/x.json" ]] || A=(--made) ⏎ python3 train.py ${A[@]} --b 1 -> --made -> run.sh:1: [ -f /data/x.json ]
    N=1 ⏎ test -f x.json || A=(--made) ⏎ python3 train.py ${A[@]} --b 1 -> --made -> run.sh:2: [ -f $(pwd)/x.json ]
    if [ -d /data ]; then python3 train.py --a; else python3 train.py --c; fi -> --a --c -> [ -d /data ]
    if one; then if ! two; then A=(--deep); fi; fi ⏎ python3 train.py ${A[@]} --b 1 -> --deep ->
    read -r X < /data/size ⏎ python3 train.py --x $X --b 1 -> --x -> $(< /data/size)
    for h in $(cat /data/hosts); do A+=(--host $h); done ⏎ python3 train.py ${A[@]} --b 1 -> --host ->
    mapfile -t A < flags ⏎ python3 train.py --x 1 ${A[@]} --b 2 -> --x -> any flag can depend on it
    until [ $(count) -ge 4 ]; do sleep 1; done ⏎ python3 train.py --b 1 ->  ->
    python3 train.py --b 1 & ⏎ while true; do sleep 60; done ->  ->
    set -e ⏎ ray stop ⏎ pkill python ⏎ cd /root/slime ⏎ python3 train.py --b 1 ->  ->
    python3 train.py --x $RANDOM --b 1 -> --x ->
    ssh $HOST 'python3 train.py --x 1 --h $HOST' -> --h -> $HOST
    python3 train.py --a ${A:-1} --b "${B-}" --c $(echo "x y" | tr x z) ->  ->
    A=(x y) ⏎ python3 train.py --a "${A[@]/x/z}" --b 1 -> --a -> "${A[@]/x/z}"
"""  # noqa: E501


@pytest.mark.parametrize("line", DECIDED.strip().splitlines())
def test_what_the_cluster_decides_is_unknown_and_nothing_else(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("A", "B", "N", "HOST"):
        monkeypatch.delenv(name, raising=False)
    text, unknown, reason = (part.strip() for part in line.split("->"))
    (tmp_path / "run.sh").write_text(text.replace(" ⏎ ", "\n"))
    launch = read(str(tmp_path / "run.sh"))
    named = {flag.name for flag in launch.flags} | {name for gap in launch.gaps for name in gap.names or ()}
    assert {name for name in named if not launch.is_known(name)} == {*unknown.split()}
    assert reason in " ".join([*map(str, launch.flags), *map(str, launch.gaps)])
    assert launch.program == "train.py"


def test_of_a_script_that_asks_too_much_nothing_is_known(tmp_path):
    (tmp_path / "run.sh").write_text("for ((i = 0; i < 4000; i++)); do ask $i; done\npython3 train.py --b 1")
    launch = read(str(tmp_path / "run.sh"))
    assert not launch.is_known("--b") and "an answer among thousands is known only" in str(launch.gaps[0])


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
