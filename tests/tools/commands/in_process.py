"""Commands in process, and wrong flags that are refused before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from slime_ext.tools.commands import cli


def run(capsys, *words):
    status = cli.main([str(word) for word in words])
    out, err = capsys.readouterr()
    return status, out, err


def written(path, text):
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    return path


MISTAKES = [
    ["--hlep"],
    ["--fail-on", "temprature"],
    ["--config", "nope.yaml"],
    ["--rollouts", "x"],
]


@pytest.mark.parametrize(
    "words",
    [
        ["analyze", "--help"],
        ["analyze", ".", *MISTAKES[0]],
        *(pytest.param(["analyze", ".", *words], marks=pytest.mark.slow) for words in MISTAKES[1:]),
    ],
)
def test_a_wrong_flag_is_said_before_torch_is_imported(words):
    code = (
        "import contextlib, sys; from slime_ext.tools.commands import cli\n"
        f"with contextlib.suppress(SystemExit): cli.main({[str(w) for w in words]!r})\n"
        "print([n for n in sys.modules if n.split('.')[0] == 'torch' or n == 'slime_ext.config.load'])"
    )
    root = Path(__file__).parents[3]
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert out.stdout.splitlines()[-1] == "[]"
