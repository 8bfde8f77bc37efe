"""``slime-ext bench`` as a user meets it: what is refused, and what another Python is asked."""

from __future__ import annotations

import shlex
import sys
from types import SimpleNamespace

import pytest

from slime_ext import cli
from slime_ext.analysis import fidelity
from slime_ext.analysis.speed import request

WRONG = {
    "speed --workloads az": "expected letters out of abcde, got 'az'",
    "speed --configs ''": "expected letters out of TS, got ''",
    "speed --repeat 0": "expected an integer of 1 or more, got '0'",
    "speed --slime-dir nowhere": "--slime-dir: expected a checkout of slime, got nowhere",
    "speed --others nowhere": "--others: expected a Python, got nowhere",
    "scale --repeat -1": "expected an integer of 1 or more, got '-1'",
    "scale --most 1e6": "expected an integer of 100000 or more, got '1e6'",
    "scale --tokens 4095": "expected an integer of 4096 or more, got '4095'",
    "fidelity token_ti": "did you mean 'token_tis'?",
    "speeed": "invalid choice: 'speeed'",
}


def refused(words, capsys):
    """What is printed for a mistake, on the last line."""
    try:
        status = cli.main(["bench", *words])
    except SystemExit as left:
        status = left.code
    assert status == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("words", "text"), WRONG.items())
def test_a_mistake_is_one_line(capsys, words, text):
    assert text in refused(shlex.split(words), capsys)


def test_another_python_must_have_what_is_measured(capsys, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho torch rich\n")
    python.chmod(0o755)
    assert "without torch, rich: install" in refused(["speed", "--others", str(python)], capsys)


@pytest.mark.parametrize("flag", [["--others", sys.executable], [f"--others={sys.executable}"]])
def test_another_python_is_asked_without_the_flag_that_names_it(monkeypatch, flag):
    started = []

    def start(words, **_):
        started.append(words)
        return SimpleNamespace(returncode=3, stdout="")

    monkeypatch.setattr(request, "subprocess", SimpleNamespace(run=start))
    assert cli.main(["bench", "speed", "--configs", "T", *flag, "--repeat", "1"]) == 3
    ((python, *words),) = started
    assert python == sys.executable
    assert words[-6:] == ["bench", "speed", "--configs", "T", "--repeat", "1"]


def test_fidelity_prints_a_row_for_each_preset(capsys):
    assert cli.main(["bench", "fidelity", "token_tis", "seq_is"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("token_tis", "seq_is", *fidelity.MISMATCHES))
