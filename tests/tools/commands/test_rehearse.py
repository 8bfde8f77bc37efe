"""`slime-ext rehearse`: what it refuses of its own words before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_ext.errors import ConfigError
from slime_ext.tools.commands import rehearse

ROOT = Path(__file__).parents[3]


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A launch whose script writes a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rehearse.run, "prepare", lambda *given: pytest.fail("went on"))
    text = (ROOT / "examples/rehearse_tiny.sh").read_text()
    text = text.replace("${HERE}/../configs/modes/decoupled.yaml", "c.yaml").replace("${HERE}/..", str(ROOT))
    path = tmp_path / "run.sh"
    path.write_text(f"cat {ROOT}/configs/modes/decoupled.yaml > c.yaml\n{text}")
    return path


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("run.sh", "run.sh: expected a folder to write to, got a file"),
        ("run.sh/x", "run.sh/x: expected a folder to write to, got Not a directory"),
        ("x" * 300, "expected a folder to write to, got File name too long"),
        ("/no_such_root/x", "/no_such_root/x: expected a folder below one that exists"),
    ],
    ids=lambda text: text[:20],
)
def test_a_folder_that_cannot_be_made_is_one_line(script, out, said):
    with pytest.raises(ConfigError) as error:
        rehearse.main([str(script), "--host", "miles", "--out", out])
    assert said in str(error.value)
    assert list(script.parent.iterdir()) == [script] and not Path("/no_such_root").exists()


def test_an_empty_host_is_not_the_wheel(script):
    with pytest.raises(ConfigError, match="'miles' or a checkout of slime or miles, got none"):
        rehearse.main([str(script), "--host", ""])


@pytest.mark.parametrize("timeout", ["0", "-1", "nan", "x"])
def test_a_timeout_is_a_positive_number(script, timeout, capsys):
    with pytest.raises(SystemExit):
        rehearse.main([str(script), "--host", "miles", f"--timeout={timeout}"])
    assert f"--timeout: expected a positive number of seconds, got {timeout}" in capsys.readouterr().err
