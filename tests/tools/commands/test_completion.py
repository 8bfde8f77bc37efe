"""``completion``: what bash offers after TAB."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from slime_ext import presets
from slime_ext.tools.commands import cli
from slime_ext.tools.convert import CONVERTED

pytest.importorskip("shtab")


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "slime-ext.bash"
    with pytest.MonkeyPatch.context() as patch, path.open("w") as file:
        patch.setattr("sys.stdout", file)
        assert cli.main(["completion", "bash"]) == 0
    return path


def offered(script, words):
    """What bash offers for the last word."""
    quoted = " ".join(f"'{word}'" for word in words)
    code = (
        f"source {script}; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; "
        "_shtab_slime_ext; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    done = subprocess.run([shutil.which("bash"), "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["slime-ext", ""], list(cli.COMMANDS)),
        (["slime-ext", "che"], ["check"]),
        (["slime-ext", "check", "--ig"], ["--ignore"]),
        (["slime-ext", "presets", "token_"], [n for n in presets.NAMES if n.startswith("token_")]),
        (["slime-ext", "presets", "--for", ""], ["async", "moe", "long", "int4"]),
        (["slime-ext", "convert", "--from", ""], list(CONVERTED)),
    ],
    ids=lambda value: " ".join(value) if value[0] == "slime-ext" else "",
)
def test_bash_offers_commands_flags_and_names(script, words, names):
    assert offered(script, words) >= set(names)


def test_a_shell_that_is_not_known_is_one_line(capsys):
    assert cli.main(["completion", "fish"]) == 2
    assert "expected a known shell, got 'fish' (known: bash, zsh, tcsh)" in capsys.readouterr().err
