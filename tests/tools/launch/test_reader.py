"""A script is read in a process of its own, which ends whatever the script does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slime_ext.errors import ConfigError
from slime_ext.tools.commands import cli
from slime_ext.tools.launch import read
from slime_ext.tools.launch.questions import Script

ROOT = Path(__file__).parents[3]
SLOW = "\n".join(f"A+=(--x{i})" for i in range(19_000)) + "\npython3 train.py --b 1\n"  # half a minute
PATIENCE_S = 60.0


@pytest.fixture
def script(tmp_path):
    def write(text, name="run.sh"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def one_line(capsys, path):
    assert cli.main(["check", path]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and len(err) < 500
    return err


def test_a_reader_that_takes_too_long_is_ended(script, monkeypatch, capsys):
    monkeypatch.setattr(read, "LIMIT_S", 1.5)
    assert "expected a script that is read within 1.5 s, got a longer one" in one_line(capsys, script(SLOW))
    assert not readers_of(os.getpid())


def readers_of(parent):
    """The processes that read scripts for this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_child = f"PPid:\t{parent}\n" in (folder / "status").read_text()
            if is_child and "launch import reader" in (folder / "cmdline").read_text():
                found.append(folder)
        except OSError:
            continue
    return found


def test_an_interrupt_ends_the_command_and_its_reader(script):
    words = [sys.executable, "-m", "slime_ext", "check", script(SLOW)]
    command = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE)
    readers = until(lambda: readers_of(command.pid))
    command.send_signal(signal.SIGINT)
    assert command.wait(PATIENCE_S) == 130 and command.stderr.read() == b""
    command.stderr.close()
    assert readers and until(lambda: not any(folder.exists() for folder in readers))


def until(is_so):
    """What a condition gives when it holds, or when patience ends."""
    end = time.monotonic() + PATIENCE_S
    while not (found := is_so()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


CRASHES = {
    'x=\'eval "$x"\'; eval "$x"': "got signal 11 from its reader",
    "f() { f; }; f": "expected a script that ends, got none",
    "# x\n" * 200_000 + "python3 train.py": "got more words and operators than the sandbox can read",
    ": 1\n" * 30_000 + "python3 train.py": "expected a script that ends, got none: resource limit exceeded",
    "$(" * 150 + "echo hi" + ")" * 150: "that bash can read, got syntax error",
    "X=\ue000\npython3 train.py": "run.sh:1: expected a script without private characters, got U+E000",
    "Y=1\nX='\ue001'\npython3 train.py": "run.sh:2: expected a script without private characters, got U+E001",
    "python3 -m x a=null a.b=1": "expected a launch of slime or miles, got none",
    "python3 -m verl.trainer.main_ppo algorithm.rollout_correction=null "
    "algorithm.rollout_correction.rollout_is=token": "expected a launch of slime or miles, got none",
}


@pytest.mark.parametrize("text", CRASHES, ids=lambda text: text[:20])
def test_what_the_sandbox_cannot_read_is_one_line(script, capsys, text):
    assert CRASHES[text] in one_line(capsys, script(text))


def test_private_letters_of_a_sourced_file_are_named_there(script, capsys):
    script("A=(--x '\ue002')", "models.sh")
    path = script('source "$(dirname "$0")/models.sh"\npython3 train.py "${A[@]}"')
    assert "models.sh:1: expected a script without private characters" in one_line(capsys, path)


@pytest.mark.parametrize(("before", "behind"), [("", ""), ("", "="), ("--", ""), ("read ", "")])
def test_a_long_word_is_read_in_time(script, before, behind):
    """Quadratic expressions took minutes."""
    word = f"{before}{'x' * 100_000}{behind}"
    path = script(f"A=({word})\npython3 train.py --a {word} ${{A[@]}} --b 1")
    assert read.read_script(path).value("--b") == "1"


def test_what_is_no_file_is_not_read(script, tmp_path, capsys):
    (tmp_path / "loop.sh").symlink_to("loop.sh")
    os.mkfifo(tmp_path / "pipe.sh")
    os.mkfifo(tmp_path / "pipe.yaml")
    for path, got in {
        "/dev/zero": "expected a file, got a device",
        f"{tmp_path}/loop.sh": "expected a readable file, got Too many levels of symbolic links",
        f"{tmp_path}/pipe.sh": "expected a file, got a device, a pipe or a socket",
        f"{tmp_path}/pipe.yaml": "expected a file, got a device, a pipe or a socket",
        str(tmp_path): "expected a readable file, got Is a directory",
    }.items():
        assert got in one_line(capsys, path)


def test_a_pipe_into_a_command_is_a_file():
    code = "from slime_ext.config.files import read_yaml; print(read_yaml('/dev/stdin'))"
    said = subprocess.run(
        [sys.executable, "-c", code], input="a: 1", text=True, capture_output=True, cwd=ROOT
    )
    assert said.stdout == "{'a': 1}\n"


def test_files_of_the_working_directory_do_not_run_in_the_reader(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("yaml", "bashkit", "pickle", "resource", "shlex"):
        script(f"open('ran_{name}', 'w')", f"{name}.py")
    assert read.read_script(script("python3 train.py --b 1")).value("--b") == "1"
    assert not list(tmp_path.glob("ran_*"))


def test_an_error_of_the_reader_is_an_error_here(script):
    with pytest.raises(ConfigError, match="lacks the backslash"):
        read.read_script(script("python3 train.py \\\n  --a 1\n  --b 2"))


def test_comments_in_arrays_cost_no_time():
    """A script of miles without a launch has 40 comments in its arrays; reading it took 40 s."""
    text = "A=(\n" + "   --flag 1  # a comment of some length, with words\n" * 40 + ")\nB=(--x 1)\n(exit 1)\n"
    script, begin = Script("run.sh", text), time.process_time()
    assert script.open_array is None and time.process_time() - begin < 1
    opened = Script("run.sh", text.replace(")\nB", "\nB"))
    assert opened.open_array is None  # because (exit 1) is not part of an array
    assert Script("run.sh", "A=(\n" + "   --flag 1  # it's one (of two\n" * 40).open_array[1] == "A"
