"""`slime-ext rehearse`: what it refuses of its own words before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime_ext.errors import ConfigError
from slime_ext.tools.commands import cli
from slime_ext.tools.commands.output import console
from slime_ext_cpu import driver, rehearse
from slime_ext_cpu.rehearsal import checks, evidence, main, run
from tests.cpu.rehearsal.launches import launch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def script(tmp_path, monkeypatch, in_process):
    """A launch whose script writes a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "prepare", lambda *given: pytest.fail("went on"))
    text = (ROOT / "examples/rehearse_tiny.sh").read_text()
    text = text.replace("${HERE}/../configs/modes/decoupled.yaml", "c.yaml").replace("${HERE}/..", str(ROOT))
    path = tmp_path / "run.sh"
    config = (ROOT / "configs/modes/decoupled.yaml").read_text()
    path.write_text(f"cat > c.yaml <<'EOF'\n{config}EOF\n{text}")
    return path


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("run.sh", "run.sh: expected a folder to write to, got a file"),
        ("run.sh/x", "run.sh/x: expected a folder to write to, got Not a directory"),
        ("x" * 300, "expected a folder to write to, got File name too long"),
        ("/no_such_root/x", "/no_such_root/x: expected a folder below a folder that exists"),
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


OF_A_PAGE = [("script", checks.OK), ("parsed", checks.OK), ("guards", checks.NOT_ASKED)]


@pytest.mark.parametrize(
    ("states", "run_status", "status"),
    [
        (OF_A_PAGE, 0, 0),
        ([*OF_A_PAGE, ("rewards", checks.WRONG)], 0, 1),
        ([("script", checks.WRONG), *OF_A_PAGE], 0, 1),
        (OF_A_PAGE, 1, 1),
        (OF_A_PAGE, -9, 1),
        ([*OF_A_PAGE, ("rewards", checks.WRONG)], driver.TIMED_OUT, 1),
    ],
)
def test_a_wrong_line_or_a_failed_run_is_status_1(tmp_path, monkeypatch, capsys, states, run_status, status):
    lines = [checks.PageLine(name, state, "text") for name, state in states]
    monkeypatch.setattr(checks, "lines", lambda launch, seen: lines)
    seen = evidence.Evidence(status=run_status, seconds=1.0, log=tmp_path / "log")
    assert main._report(launch(), {}, seen, tmp_path, console()) == status
    out, page = capsys.readouterr().out, json.loads((tmp_path / "page.json").read_text())
    assert all(f"{name} {state} text" in " ".join(out.split()) for name, state in states)
    assert [(line["name"], line["state"]) for line in page["lines"]] == states
    assert page["status"] == run_status


def test_the_status_of_the_command_is_that_of_its_page(script, monkeypatch, tmp_path):
    monkeypatch.setattr(run, "prepare", lambda *given: ([], {}))
    monkeypatch.setattr(main, "_status", lambda ran: 0)
    monkeypatch.setattr(driver.HostRun, "check", lambda ran: None)
    monkeypatch.setattr(
        evidence, "gather", lambda out, status, seconds: evidence.Evidence(status, seconds, out)
    )
    for state, status in ((checks.WRONG, 1), (checks.OK, 0)):
        monkeypatch.setattr(checks, "lines", lambda *given, s=state: [checks.PageLine("script", s)])
        assert (
            cli.main(["rehearse", str(script), "--host", "miles", "--out", str(tmp_path / state)]) == status
        )
