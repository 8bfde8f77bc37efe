"""The command line: light at start, one line and exit status 2 for a user's mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from slime_ext.errors import ConfigError
from slime_ext.tools.commands import cli
from tests.tools.report.test_run_picture import slime_run

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "configs/modes/stale.yaml"
GONE = ": working directory: expected a folder that exists"  # torch finds no library there
HEAVY = ("torch", "numpy", "matplotlib", "jinja2", "bashkit", "transformers", "ray")  # half a second or more
PACKAGES = (*HEAVY, "pydantic", "rich", "yaml")
HELP = """
import contextlib, io, json, sys
from slime_ext.tools.commands import cli
imported = {}
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        cli.main(words)
    imported[" ".join(words)] = [name for name in json.loads(sys.argv[2]) if name in sys.modules]
print(json.dumps(imported))
"""


@pytest.mark.parametrize(
    ("words", "packages"),
    [([["--help"], ["--version"]], PACKAGES), ([[name, "--help"] for name in cli.COMMANDS], HEAVY)],
    ids=["slime-ext", "commands"],
)
def test_help_imports_nothing_heavy(words, packages):
    """A command parses its words before it imports what it works with."""
    code = [sys.executable, "-c", HELP, json.dumps(words), json.dumps(packages)]
    imported = json.loads(subprocess.run(code, capture_output=True, text=True, check=True).stdout)
    assert len(imported) == len(words) and not any(imported.values()), imported


def _command(monkeypatch, function):
    module = type(sys)("stand_in")
    module.main = function
    monkeypatch.setitem(sys.modules, "slime_ext.tools.commands.stand_in", module)
    monkeypatch.setitem(cli.COMMANDS, "stand_in", "for this test")


@pytest.mark.parametrize(("returned", "status"), [(None, 0), (0, 0), (3, 3)])
def test_a_command_gets_its_flags_and_gives_the_status(monkeypatch, returned, status):
    seen = []
    _command(monkeypatch, lambda argv: seen.append(argv) or returned)
    assert cli.main(["stand_in", "--flag", "1"]) == status
    assert seen == [["--flag", "1"]]


def test_a_users_mistake_is_one_line_on_stderr(monkeypatch, capsys):
    def fail(argv):
        raise ConfigError("--lr: expected a number, got 'x'")

    _command(monkeypatch, fail)
    assert cli.main(["stand_in"]) == 2
    assert capsys.readouterr() == ("", "slime-ext stand_in: --lr: expected a number, got 'x'\n")


def test_ctrl_c_is_130(monkeypatch):
    def interrupt(argv):
        raise KeyboardInterrupt

    _command(monkeypatch, interrupt)
    assert cli.main(["stand_in"]) == 130


def test_a_mistyped_command_names_the_nearest(capsys):
    assert cli.main(["trian"]) == 2
    assert "did you mean 'train'?" in capsys.readouterr().err


def _run(words, cwd=None, **env):
    code = f"import sys; from slime_ext.tools.commands import cli; sys.exit(cli.main({words!r}))"
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "", **env}
    return [sys.executable, "-c", code], {"env": environ, "cwd": cwd, "text": True}


@pytest.mark.parametrize("words", [["--help"], ["presets", "geo_rs"]], ids=str)
def test_a_pipe_that_nobody_reads_ends_the_command_without_a_word(words):
    command, how = _run(words)
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, **how, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_pipe_that_nobody_reads_ends_analyze_without_a_word(tmp_path):
    path = tmp_path / "run.jsonl"
    sample = {"tokens": [5, 6], "response_length": 1, "reward": 1.0, "log_probs": [-1.0]}
    path.write_text(json.dumps({"rollout_id": 0, "rollout_log_probs": [-1.0], **sample}) + "\n")
    command, how = _run(["analyze", str(path)])
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, **how, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_no_room_for_the_output_is_one_line():
    command = [sys.executable, "-m", "slime_ext", "presets"]
    with open("/dev/full", "w") as full:  # noqa: PTH123 (a device)
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (
        1,
        "slime-ext presets: standard output: expected room to write, got none: make room there\n",
    )


def test_a_name_that_the_output_has_no_letters_for_is_escaped(tmp_path):
    path = tmp_path / "日本.sh"  # for which torch is not imported
    path.write_text("python3 train.py")
    command, how = _run(["check", str(path)], PYTHONIOENCODING="ascii", COLUMNS="300")
    done = subprocess.run(command, capture_output=True, **how, check=False)
    assert (done.returncode, done.stderr) == (0, "") and r"\u65e5\u672c.sh" in done.stdout


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--help"], 0, ""),
        (["presets"], 2, GONE),
        (["check", str(CONFIG)], 2, GONE),
        (["rehearse", "run.sh"], 2, GONE),
    ],
    ids=str,
)
def test_no_command_runs_in_a_working_directory_that_is_gone(tmp_path, words, status, said):
    command, how = _run(words)
    gone = f"import os, sys; os.rmdir({str(tmp_path)!r}); os.execv(sys.executable, {command!r})"
    done = subprocess.run([sys.executable, "-c", gone], capture_output=True, **how | {"cwd": tmp_path})
    assert done.returncode == status and "Traceback" not in done.stderr and said in done.stderr


OWN_STEP = """from dataclasses import dataclass
from slime_ext.steps import Truncate

@dataclass(frozen=True)
class Mine(Truncate):
    high: float = 2.0
"""


LOOKING = """
import json, sys
sys.path.remove('')
from slime_ext.tools.commands import cli
counts = []
for words in json.loads(sys.argv[1]):
    cli.main(words)
    counts.append(sys.path.count(sys.argv[2]))
print(json.dumps(counts))
"""


def test_python_looks_in_the_working_directory_for_a_step_that_a_configuration_names(tmp_path):
    (tmp_path / "mine.py").write_text(OWN_STEP)
    (tmp_path / "run.sh").write_text("python3 train.py")
    (tmp_path / "verl.yaml").write_text("rollout_is: token")
    for name, step in (("c", "reweight"), ("own", "mine.Mine")):
        (tmp_path / f"{name}.yaml").write_text(f"slime_ext: {{steps: [reweight, {step}]}}")
    commands = {  # how often the working directory is in the path afterwards
        ("presets",): 0,
        ("check", "run.sh"): 0,
        ("check", "c.yaml"): 0,
        ("convert", "--from", "verl", "verl.yaml"): 0,
        ("doctor",): 0,
        ("check", "own.yaml"): 1,
    }
    _, how = _run([], cwd=tmp_path)
    command = [sys.executable, "-c", LOOKING, json.dumps(list(commands)), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, **how, check=False)
    assert json.loads(done.stdout.splitlines()[-1]) == list(commands.values()), done.stderr
    assert "Traceback" not in done.stderr


def test_python_m_does_not_run_files_of_the_working_directory(tmp_path):
    for name in ("yaml", "pydantic", "rich", "errno", "signal", "resource"):
        (tmp_path / f"{name}.py").write_text(f"open('ran_{name}', 'w')")
    words = [sys.executable, "-m", "slime_ext", "check", str(CONFIG)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not list(tmp_path.glob("ran_*")), done.stderr


def test_a_package_that_is_not_installed_is_one_line():
    hidden = (
        "import sys; sys.modules[sys.argv[1]] = None; "
        "from slime_ext.tools.commands import cli; print(cli.main(sys.argv[2:]))"
    )
    line = 'expected the packages of {0}, got no {1}: pip install "{0}"'
    tools, train = line.format("slime-ext[tools]", "rich"), line.format("slime-ext[train]", "ray")
    missing = {
        ("pydantic", "analyze"): line.format("slime-ext[tools]", "pydantic"),
        ("torch", "check", "gone.yaml"): "expected the package torch, got none: pip install torch",
        ("yaml", "presets"): "expected the package PyYAML, got none: pip install PyYAML",
        ("rich", "presets"): tools,
        ("rich", "check", "gone.yaml"): tools,  # not 1, as for a configuration that is wrong
        ("ray", "train", "--help"): f"{train}, then python -m slime_ext_cpu.install",
        ("ray", "rehearse", "gone.sh"): f"{train}, then python -m slime_ext_cpu.install",
    }
    for words, said in missing.items():
        made = subprocess.run([sys.executable, "-c", hidden, *words], capture_output=True, text=True)
        assert (made.stdout, made.stderr) == ("2\n", f"slime-ext {words[1]}: {said}\n")


def test_doctor_needs_nothing_to_say_what_is_missing():
    hidden = (
        "import sys; sys.modules.update(dict.fromkeys(('yaml', 'rich', 'torch', 'jinja2'))); "
        "from slime_ext.tools.commands import cli; cli.main(['doctor'])"
    )
    made = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True)
    last = made.stdout.splitlines()[-1]
    assert made.stderr == "" and last.startswith("missing for a launch: ")
    assert all(name in last for name in ("PyTorch", "PyYAML"))


def test_it_is_a_module_too():
    done = subprocess.run([sys.executable, "-m", "slime_ext", "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, cli.usage() + "\n")


ENDING = """
import atexit, os, sys
from slime_ext.tools.commands import cli

class Kept:
    def __del__(self, write=os.write):
        write(1, b", taken apart")

sys.kept = Kept()
atexit.register(print, "at exit", end="")
cli.ELSEWHERE.update(dict.fromkeys(sys.argv[2:], "slime_ext.tools.commands.presets"))
del sys.argv[2:]
cli.run()
"""


@pytest.mark.parametrize(
    ("words", "status", "end"),
    [
        (["presets"], 0, "at exit"),
        (["presetz"], 2, "at exit"),
        (["presets", "presets"], 0, "at exit, taken apart"),  # as a command of the host's environment
    ],
    ids=str,
)
def test_a_command_of_the_tools_ends_without_finalisation_and_loses_nothing(words, status, end):
    _, how = _run([])
    done = subprocess.run([sys.executable, "-c", ENDING, *words], capture_output=True, **how, check=False)
    assert done.returncode == status and done.stdout.endswith(end), done
    assert ("token_tis" in done.stdout) is (status == 0)


def test_a_command_whose_output_is_closed_ends_without_a_word():
    command = [sys.executable, "-m", "slime_ext", "presets"]
    done = subprocess.run(command, preexec_fn=lambda: os.close(1), stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


def test_bench_says_where_it_went(capsys):
    assert cli.main(["bench", "fidelity"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and "run python -m benchmarks.fidelity" in err


def test_the_picture_is_written_where_it_is_asked_for(tmp_path, capsys):
    run = slime_run(tmp_path / "run")
    assert cli.main(["report", str(run), "--out", str(tmp_path / "new/a.png")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "new/a.png")
    assert (tmp_path / "new/a.png").read_bytes().startswith(b"\x89PNG")


def test_a_mistake_of_report_is_one_line(tmp_path, capsys):
    run = slime_run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    for words, said in (
        ([str(tmp_path / "gone")], "expected the folder of a run, got none"),
        ([str(run), "--out", "picture.txt"], "--out: expected a name that ends in .png, .pdf, .svg"),
        ([str(run), "--out", str(tmp_path / "file/x.png")], "expected a folder to write to, got a file"),
        ([str(run), "--out", "/nowhere_at_all/x.png"], "expected a folder below a folder that exists"),
        ([str(run), "--labels", "a", "b"], "--labels: expected one name per folder (1), got 2"),
    ):
        assert cli.main(["report", *words]) == 2, words
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1, error


def test_a_run_that_may_not_be_written_to_needs_a_place_for_the_picture(tmp_path, capsys, monkeypatch):
    run = slime_run(tmp_path / "run")
    monkeypatch.setattr("os.access", lambda path, *_: Path(path) != run)  # root may write everywhere
    assert cli.main(["report", str(run)]) == 2
    assert "user may not write to: type --out FILE\n" in capsys.readouterr().err
    assert cli.main(["report", str(run), "--out", str(tmp_path / "a.png")]) == 0


def test_help_prints_what_the_flag_prints(capsys):
    for words in ([], ["convert"]):
        said = []
        for line in (["help", *words], [*words, "--help"]):
            with suppress(SystemExit):
                cli.main(line)
            said.append(capsys.readouterr().out)
        assert said[0] == said[1] != ""
    assert cli.main(["help", "chekc"]) == 2 and "did you mean 'check'" in capsys.readouterr().err
