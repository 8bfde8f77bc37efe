"""How the environment of the real hosts is made where there is no Makefile."""

from __future__ import annotations

import sys
from pathlib import Path

from slime_ext.without_cuda import environment


def test_without_a_makefile_a_message_names_the_command_that_makes_it(monkeypatch, tmp_path):
    assert environment.how_to_make() == "run `make host`"
    monkeypatch.setattr(environment, "LISTS", tmp_path / "a/b")
    command = f"{sys.executable} -m slime_ext.without_cuda.environment .venv-host"
    assert environment.how_to_make() == f"run `{command}` ({environment.SIZE})"


def test_its_commands_are_those_of_the_makefile(tmp_path):
    """The same lists in the same order, and each is there."""
    made = [
        words[words.index("install") + 2 :] for words in environment.lines(tmp_path) if "install" in words
    ]
    lists = [[word for word in words if word.endswith(".txt")] for words in made]
    assert all(Path(word).is_file() for words in lists for word in words)
    names = [[Path(word).name for word in words] for words in lists]
    assert names == [
        [],
        ["requirements-sglang-cpu.txt", "requirements-host.txt"],
        ["requirements-sglang-cpu-nodeps.txt"],
        ["requirements-host-nodeps.txt"],
    ]


def test_it_stops_at_the_first_command_that_fails(tmp_path, monkeypatch, capsys):
    ok, bad = [sys.executable, "-c", ""], [sys.executable, "-c", "raise SystemExit(3)"]
    monkeypatch.setattr(environment, "lines", lambda folder, torch: iter([ok, bad, ["never"]]))
    assert environment.main([str(tmp_path)]) == 3 and "never" not in capsys.readouterr().out
    monkeypatch.setattr(environment, "lines", lambda folder, torch: iter([ok]))
    assert environment.main([str(tmp_path)]) == 0
    assert f"SLIME_EXT_HOST_PYTHON={tmp_path}/bin/python" in capsys.readouterr().out
