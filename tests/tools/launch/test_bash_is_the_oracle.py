"""Every word that the reader knows is the word that bash gives to train.py; others are said to be unknown."""

from __future__ import annotations

import contextlib
import os
from functools import cache
from pathlib import Path

import pytest

from slime_ext.errors import ConfigError
from slime_ext.tools.launch.read import request_of
from slime_ext.tools.launch.script_run import ScriptRun, followed, written
from slime_ext.tools.launch.trace import TOKEN, UNKNOWN
from tests.tools.launch import bash
from tests.tools.launch.own_scripts import GIVEN_WORDS, SCRIPTS

HOSTS = Path(os.environ.get("HOSTS", "absent"))
OWN_UNKNOWNS = ("lists", "texts", "slices", "references")  # of them the last two what bashkit cannot read


def difference(script: Path, given=(), environment=None, *, lenient: bool = False) -> str:
    """What is read otherwise than bash reads it; empty where nothing is. Unknown words may be any."""
    theirs = bash.launches(script, given, environment, lenient=lenient)
    try:
        script_run = followed(request_of(str(script), given, environment=environment or {}))
    except ConfigError as error:
        return "" if "that bash can read" in str(error) and not theirs else str(error)
    around = script_run.around
    if script_run.started is None:
        return "" if not theirs or around.evaluated or around.needs else f"no launch, bash: {theirs}"
    words = script_run.started.words
    is_sure = not (around.needs or around.unasked or around.waits or around.asked())
    if not theirs:
        return f"{words}, bash: no launch" if is_sure else ""
    if around.needs or any("is read instead" in note for note in around.notes):  # which bash does not
        return ""
    if is_sure and not script_run.unknown:
        return "" if fits(script_run, words, theirs[-1]) else f"{words}, bash: {theirs[-1]}"
    return _of_flags(script_run, theirs[-1])


def _of_flags(script_run: ScriptRun, theirs: list[str]) -> str:
    """As ``difference``, of flags that do not depend on the machine."""
    launch = script_run.launch("run.sh")
    flags, _ = written(theirs, script_run.around, script_run.around.where)
    bash_has = {flag.name: flag.values for flag in flags}
    names = bash_has.keys() | {flag.name for flag in launch.flags}
    ours = {flag.name: flag.values for flag in launch.flags}
    wrong = [n for n in names if launch.is_known(n) and ours.get(n) != bash_has.get(n)]
    return "".join(f"{name}: {ours.get(name)}, bash: {bash_has.get(name)}; " for name in wrong)


def fits(script_run: ScriptRun, words: tuple[str, ...], theirs: list[str]) -> bool:
    """Whether words, of which some are unknown, can be the ones that bash has."""

    @cache
    def from_here(i: int, j: int) -> bool:
        if i == len(words):
            return j == len(theirs)
        if TOKEN.fullmatch(words[i]):
            can_be_flags = not all(unknown.is_word for unknown in script_run.around.meant(words[i]))
            most = len(theirs) if can_be_flags else j + 1
            return any(from_here(i + 1, end) for end in range(j, min(most, len(theirs)) + 1))
        is_known = UNKNOWN.search(words[i]) is None
        return j < len(theirs) and (not is_known or theirs[j] == words[i]) and from_here(i + 1, j + 1)

    return from_here(0, 0)


@pytest.fixture
def home(tmp_path, monkeypatch):
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return {"HOME": str(tmp_path)}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_read_as_bash_reads_it(name, home, tmp_path):
    (tmp_path / "run.sh").write_text(SCRIPTS[name])
    assert difference(tmp_path / "run.sh", GIVEN_WORDS, home) == ""


def test_nearly_everything_of_them_is_known(home, tmp_path):
    """So that saying unknown of everything would not do."""
    unknown = []
    for name, text in SCRIPTS.items():
        if any(own in name for own in OWN_UNKNOWNS):
            continue
        (tmp_path / "run.sh").write_text(text)
        with contextlib.suppress(ConfigError):
            script_run = followed(request_of(str(tmp_path / "run.sh"), GIVEN_WORDS, environment=home))
        launch = script_run.launch("run.sh")
        if launch.unknown or launch.others or not all(launch.is_known(flag.name) for flag in launch.flags):
            unknown.append(name)
    assert not unknown


# Each launch says its line. ⏎ ends a line.
AFTER_FAILURES = r"""
    python3 train.py --at 1 || ⏎ python3 train.py --at 2
    python3 train.py --at 1 && ⏎ python3 train.py --at 2
    python3 train.py --at 1 ⏎ python3 train.py --at 2
    if python3 train.py --at 1; then ⏎ python3 train.py --at 2 ⏎ else ⏎ python3 train.py --at 4 ⏎ fi
    if ! python3 train.py --at 1; then ⏎ python3 train.py --at 2 ⏎ fi
    python3 train.py --at 1 ⏎ [ $? -eq 0 ] || ⏎ python3 train.py --at 3
    set -e ⏎ python3 train.py --at 2 || { ⏎ pip install x; sleep 5 ⏎ python3 train.py --at 4 ⏎ }
    set -e ⏎ python3 train.py --at 2 ⏎ python3 train.py --at 3
    python3 train.py --at 1 || exit 1 ⏎ python3 train.py --at 2
    python3 train.py --at 1 || true ⏎ python3 train.py --at 2
    python3 train.py --at 1 || ⏎ python3 train.py --at 2 || ⏎ python3 train.py --at 3
    ! python3 train.py --at 1 && ⏎ python3 train.py --at 2
    until python3 train.py --at 1; do ⏎ python3 train.py --at 2; sleep 5 ⏎ done
    while ! python3 train.py --at 1; do sleep 5; done ⏎ python3 train.py --at 2
    N=0 ⏎ until python3 train.py --at 2; do N=$((N+1)); done ⏎ [ $N -eq 0 ] || ⏎ python3 train.py --at 4
    for i in 1e-6 2e-6; do ⏎ python3 train.py --at 2 --lr $i && break ⏎ done
    run() { ⏎ python3 train.py --at 2 ⏎ } ⏎ run || ⏎ python3 train.py --at 5
    ray job submit -- python3 train.py --at 1 || ⏎ ray job submit -- nohup python3 train.py --at 2
    python3 train.py --at 1 | tee log || ⏎ python3 train.py --at 2
    set -o pipefail ⏎ python3 train.py --at 2 | tee log || ⏎ python3 train.py --at 3
    python3 train.py --at 1 || ⏎ python3 train.py --at 1
    bash -c 'python3 train.py --at 1' || ⏎ python3 train.py --at 2
    nohup python3 train.py --at 1 || ⏎ nohup python3 train.py --at 2 ⏎ nohup python3 train.py --at 3
""".strip().splitlines()


@pytest.mark.parametrize("line", AFTER_FAILURES)
def test_a_launch_that_bash_starts_only_after_a_failure_is_named_and_not_read(line, home, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(line.strip().replace(" ⏎ ", "\n"))
    usual, failed = (bash.launches(script, (), home, failures=n) for n in (0, 9))
    script_run = followed(request_of(str(script), environment=home))
    assert list(script_run.started.words) == usual[-1] and not script_run.unknown
    others = dict.fromkeys(words[1] for words in failed if words not in usual)
    says = "the script starts another launch here if one fails; it is not read"
    assert [note for note in script_run.notes if says in note] == [f"run.sh:{at}: {says}" for at in others]


@pytest.mark.skipif(not HOSTS.is_dir(), reason="HOSTS names no folder of hosts")
@pytest.mark.slow
def test_every_script_of_the_hosts_is_read_as_bash_reads_it(home, monkeypatch):
    known_texts, wrong = set(), {}
    environment = {**home, "BASE_FOLDER": "/root", "BASE_DIR": "/root", "MASTER_ADDR": "127.0.0.1"}
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    for script in sorted(HOSTS.glob("*/**/*.sh")):
        text = script.read_text()
        if ("train.py" not in text and "train_async.py" not in text) or text in known_texts:
            continue
        known_texts.add(text)
        try:
            if found := difference(script, (), environment, lenient=True):
                wrong[str(script)] = found
        except ConfigError as error:
            wrong[str(script)] = str(error)
    assert not wrong and len(known_texts) > 100
