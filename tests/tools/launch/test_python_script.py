"""A launch script in Python that submits no job."""

from __future__ import annotations

import pytest

from slime_ext.errors import ConfigError
from slime_ext.tools.launch import python_script


@pytest.fixture
def script(tmp_path):
    """A place for a script in a checkout."""
    for folder in ("miles/utils/external_utils", "scripts"):
        (tmp_path / folder).mkdir(parents=True)
    return tmp_path / "scripts/run.py"


@pytest.mark.parametrize(
    ("text", "limit_s", "line"),
    [
        ("import time; time.sleep(60)", 0.5, r" within 0\.5 s, got none"),
        ("1 / 0", 60, "got none: ZeroDivisionError: division by zero"),
        ("pass", 60, "got none: it ran no command with `ray job submit`: start it yourself, "),
        ("import os; os.system('rm -r /')", 60, "got none: PermissionError: the script itself would run"),
    ],
)
def test_a_script_that_submits_nothing_is_one_line(script, monkeypatch, text, limit_s, line):
    script.write_text(text)
    monkeypatch.setattr(python_script, "LIMIT_S", limit_s)
    with pytest.raises(ConfigError, match=rf"run\.py: expected a job that is submitted.*{line}"):
        python_script.command_of(str(script), [])
