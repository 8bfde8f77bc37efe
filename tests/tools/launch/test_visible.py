"""What a script sees: scripts below its own folder and the working directory, variables that are given."""

from __future__ import annotations

import os

import pytest

from slime_ext.tools.launch.read import read_script

pytestmark = pytest.mark.usefixtures("in_process")
SETS = "A=(--seen 1)"


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A checkout with a script in a folder of it, a working directory, and what lies outside both."""
    for folder in ("own/.git", "own/scripts/models", "here/configs", "outside"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")

    def launch(text, **options):
        path = tmp_path / "own/scripts/run.sh"
        path.write_text(text.replace("{}", str(tmp_path)))
        return read_script(str(path), **options)

    return tmp_path, launch


@pytest.mark.parametrize(
    ("name", "said", "is_seen"),
    [
        ("own/scripts/models/a.sh", '"$(dirname "$0")/models/a.sh"', True),
        ("own/common.sh", '"$(dirname "$0")/../common.sh"', True),
        ("own/common", "{}/own/common", False),
        ("here/a.sh", "{}/here/a.sh", True),
        ("here/configs/a.sh", "configs/a.sh", True),
        ("outside/a.sh", "{}/outside/a.sh", False),
        ("outside/a.sh", '"$(dirname "$0")/../../outside/a.sh"', False),
        ("own/.env.sh", "{}/own/.env.sh", False),
        ("own/.git/a.sh", "{}/own/.git/a.sh", False),
        ("own/a.txt", "{}/own/a.txt", False),
    ],
)
def test_a_sourced_file_is_read_where_a_script_may_look(folders, name, said, is_seen):
    root, launch = folders
    (root / name).write_text(SETS)
    found = launch(f"source {said}\npython3 train.py --b 1 ${{A[@]}}")
    assert (found.value("--seen") == "1") == is_seen
    assert bool(found.others) != is_seen  # any flag can be among those that are not seen


def test_a_link_leads_nowhere_else_and_a_pipe_is_not_opened(folders):
    root, launch = folders
    (root / "outside/a.sh").write_text(SETS)
    (root / "own/link.sh").symlink_to(root / "outside/a.sh")
    (root / "own/loop.sh").symlink_to("loop.sh")
    (root / "own/inside.sh").symlink_to("scripts/models/b.sh")
    (root / "own/scripts/models/b.sh").write_text(SETS)
    os.mkfifo(root / "own/pipe.sh")
    for name in ("link", "loop", "pipe"):
        found = launch(
            f"source {{}}/own/{name}.sh\nX=$(<{{}}/own/{name}.sh)\npython3 train.py --b $X ${{A[@]}}"
        )
        assert found.others and not found.is_known("--b") and found.flag("--seen") is None
    assert launch("source {}/own/inside.sh\npython3 train.py ${A[@]}").value("--seen") == "1"


@pytest.mark.parametrize(
    "command",
    ["cat {}", "head -1 {}", "grep -h . {}", "sed s/x/y/ {}", "jq . {}", "wc -l {}", "sort < {}", "awk 1 {}"],
)
@pytest.mark.parametrize("name", ["here/size", "outside/size", "own/.git/config"])
def test_what_another_file_holds_is_not_known(folders, command, name):
    root, launch = folders
    (root / name).write_text("7\n")
    text = f"X=$({command.replace('{}', str(root / name))})\npython3 train.py --x $X --y $(<{root / name})"
    found = launch(f"{text} --z z")
    assert not found.is_known("--x") and not found.is_known("--y") and found.is_known("--z")


def test_that_a_file_is_there_is_known_where_a_script_may_look(folders):
    root, launch = folders
    (root / "here/data.json").write_text("{}")
    (root / "outside/data.json").write_text("{}")
    text = (
        "[ -f {}/PLACE/data.json ] && A=(--found)\n[ -d {}/PLACE ] && A+=(--folder)\npython3 train.py ${A[@]}"
    )
    assert {f.name for f in launch(text.replace("PLACE", "here")).flags} == {"--found", "--folder"}
    assert not launch(text.replace("PLACE", "here")).unknown
    outside = launch(text.replace("PLACE", "outside"))
    assert not outside.is_known("--found") and not outside.is_known("--folder")


def test_a_variable_is_not_known_unless_it_is_given(folders, monkeypatch):
    _, launch = folders
    monkeypatch.setenv("SET", "5")
    monkeypatch.delenv("ABSENT", raising=False)
    text = 'python3 train.py --a $SET --b ${SET:-1} --c ${ABSENT:-1} --d "$HOME/x" --e 1'
    text += " ${SET:+--f} ${ABSENT:+--g}"
    found = launch(text)
    assert {f.name for f in found.flags if found.is_known(f.name)} == {"--c", "--e"}
    assert not found.is_known("--f") and found.lacks("--g")
    assert str(found.flag("--a")) == "--a $SET" and str(found.flag("--d")) == "--d $HOME/x"
    given = launch(text, environment=["SET"])
    assert given.value("--a") == given.value("--b") == "5" and not given.is_known("--d")
    assert str(given.flag("--a")) == "--a $SET"  # what is shown of it
    assert "5" not in str(given.flag("--b"))


def test_neither_the_machine_nor_the_sandbox_answers_for_a_variable_of_bash(folders):
    _, launch = folders
    words = "$RANDOM $SECONDS $UID $$ $PPID $HOSTNAME $USER $SHELL $PATH ${OSTYPE} $EPOCHSECONDS".split()
    found = launch("python3 train.py " + " ".join(f"--x{i} {word}" for i, word in enumerate(words)))
    assert not [flag for flag in map(str, found.flags) if found.is_known(flag.split()[0])]
    assert launch("X=$UID$$; python3 train.py --a $((UID + 1)) --b ${X} --c 1").value("--c") == "1"


def test_the_root_of_the_disk_is_no_working_directory_to_look_in(folders, monkeypatch):
    root, launch = folders
    (root / "outside/a.sh").write_text(SETS)
    monkeypatch.chdir("/")
    assert launch("source {}/outside/a.sh\npython3 train.py ${A[@]}").flag("--seen") is None
