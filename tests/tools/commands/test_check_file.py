"""Which file of --custom-config-path a script's launch reads, and what it holds then."""

from __future__ import annotations

import pytest

from tests.tools.commands.in_process import run, written

pytestmark = pytest.mark.usefixtures("in_process")
TC = "--custom-tis-function-path slime_ext.tis.correct"
TRAIN = (
    f"python3 train.py --custom-megatron-init-path slime_ext.host.init --use-tis {TC} --custom-config-path"
)
CAPS = {"cfg.yaml": 2, "sub/cfg.yaml": 7, "sub/only.yaml": 8, "sub/deep/cfg.yaml": 9}


def ok(cap):
    return f"slime_ext: {{steps: [reweight, {{truncate: {{high: {cap}}}}}]}}\n"


@pytest.fixture
def check(capsys, tmp_path, monkeypatch):
    """Checks a script beside the files of CAPS. ⏎ ends a line; TRAIN is a launch without its file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "10000")
    monkeypatch.delenv("FAR", raising=False)
    (tmp_path / "sub/deep").mkdir(parents=True)
    written(tmp_path / "env.sh", "N=1\n")
    for name, cap in CAPS.items():
        written(tmp_path / name, ok(cap))

    def checked(text):
        text = (
            text.replace(" ⏎ ", "\n")
            .replace("TRAIN", TRAIN)
            .replace("HERE", str(tmp_path))
            .replace("NAME", tmp_path.name)
        )
        status, out, err = run(capsys, "check", written(tmp_path / "run.sh", text))
        assert status == bool(err) and err.count("\n") == status and "Traceback" not in err
        return err or out

    return checked


FOLDERS = {  # a script -> the cap of the file that its launch reads
    "TRAIN cfg.yaml": 2,
    "cd sub ⏎ TRAIN cfg.yaml": 7,
    "cd sub ⏎ TRAIN only.yaml": 8,
    "cd ./sub/deep/ && TRAIN cfg.yaml": 9,
    "(cd sub && TRAIN cfg.yaml)": 7,
    "(cd sub); TRAIN cfg.yaml": 2,
    "cd sub; cd deep; TRAIN cfg.yaml": 9,
    "cd sub; cd ..; TRAIN cfg.yaml": 2,
    "cd sub; cd -; TRAIN cfg.yaml": 2,
    "pushd sub ⏎ TRAIN cfg.yaml": 7,
    "pushd sub ⏎ popd ⏎ TRAIN cfg.yaml": 2,
    "cd $PWD/sub ⏎ TRAIN cfg.yaml": 7,
    'cd "$(dirname "$0")/sub" ⏎ TRAIN cfg.yaml': 7,
    "cd HERE/sub ⏎ TRAIN cfg.yaml": 7,
    "srun bash -c 'cd sub; TRAIN cfg.yaml'": 7,
    "srun bash -c 'cd sub && cd deep && TRAIN cfg.yaml'": 9,
    "cd sub ⏎ srun bash -c 'TRAIN cfg.yaml'": 7,
    "srun --chdir sub TRAIN cfg.yaml": 7,
    "srun --chdir=sub/deep bash -c 'TRAIN cfg.yaml'": 9,
    "ray job submit --working-dir sub -- TRAIN cfg.yaml": 7,
    "ray job submit --working-dir=sub/deep -- TRAIN cfg.yaml": 9,
    "cd sub ⏎ ray job submit --working-dir deep -- TRAIN cfg.yaml": 9,
    "ray job submit --working-dir . -- TRAIN cfg.yaml": 2,
    "ray job submit --working-dir sub -- bash -c 'TRAIN cfg.yaml'": 7,
    """ray job submit --runtime-env-json '{"working_dir": "sub"}' -- TRAIN cfg.yaml""": 7,
    "ray job submit --runtime-env-json '{}' -- TRAIN cfg.yaml": 2,
    "cd $FAR ⏎ TRAIN HERE/sub/cfg.yaml": 7,
    "cd sub ⏎ TRAIN HERE/cfg.yaml": 2,
    "cd sub ⏎ TRAIN ../cfg.yaml": 2,
    "cd .. ⏎ TRAIN NAME/sub/cfg.yaml": 7,
    "cd ../NAME/sub ⏎ TRAIN cfg.yaml": 7,
    "cd ../.. ⏎ cd - ⏎ TRAIN cfg.yaml": 2,
}


@pytest.mark.parametrize("text", FOLDERS)
def test_a_relative_path_starts_where_the_program_runs(check, text):
    said = check(text)
    assert f"truncate(high {FOLDERS[text]})" in said and said.endswith("ok\n"), said


DOUBTED = {  # a script -> what is said of the folder
    "cd $FAR ⏎ TRAIN cfg.yaml": "cfg.yaml is read in HERE, and $FAR is known only where the script runs",
    'cd "$(git rev-parse --show-toplevel)" ⏎ TRAIN cfg.yaml': "and $(git rev-parse --show-toplevel) is known",
    "source env.sh ⏎ cd $FAR ⏎ TRAIN cfg.yaml": "cfg.yaml is read in HERE, and $FAR is known only where",
    "ray job submit --working-dir s3://a/b.zip -- TRAIN cfg.yaml": "and s3://a/b.zip is known only where the",
    "ray job submit --working-dir $FAR/x -- TRAIN cfg.yaml": "and $FAR/x is known only where",
}


@pytest.mark.parametrize("text", DOUBTED)
def test_a_folder_that_only_the_cluster_knows_is_said(check, text, tmp_path):
    said = check(text)
    assert DOUBTED[text].replace("HERE", str(tmp_path)) in said and "truncate(high 2)" in said, said
    assert said.endswith("some things are unknown here, so not everything was checked\n")


def test_a_file_that_is_not_in_the_folder_is_named_with_it(check, tmp_path):
    assert f"got no none.yaml in {tmp_path}/sub: " in check("cd sub ⏎ TRAIN none.yaml")


def test_a_folder_above_is_read_if_it_belongs_to_the_repository(check, tmp_path, monkeypatch, capsys):
    assert f"got no none.yaml in {tmp_path}/..: " in check("cd .. ⏎ TRAIN none.yaml")
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    script = written(
        tmp_path / "sub/run.sh", f"cd ..\nsource env.sh\n{TRAIN} cfg.yaml --n-samples-per-prompt $N\n"
    )
    status, out, err = run(capsys, "check", script)
    assert (status, err) == (0, "") and "truncate(high 2)" in out


def test_a_folder_or_a_device_is_no_file(check, tmp_path):
    assert f"--custom-config-path: expected a file, got a folder at {tmp_path}/sub: name" in check(
        "TRAIN sub"
    )
    assert f"expected a file, got a folder at {tmp_path}: name a YAML file" in check("TRAIN .")
    assert "expected a file, got a device, a pipe or a socket at /dev/null: name" in check("TRAIN /dev/null")


def test_an_unknown_folder_without_the_file_is_said(check):
    said = check("cd $FAR ⏎ TRAIN none.yaml")
    assert "expected a working directory that the script itself names, got $FAR: run" in said


def test_an_array_that_is_not_closed_is_named(check):
    said = check("A=(--x 1) ⏎ RL=(--a b  # not ) ⏎ TRAIN cfg.yaml")
    assert "run.sh:2: expected ) at the end of the array RL, got the end of the script: add it" in said
    assert "expected a launch of slime or miles, got none" in check("A=(--x 1  # one ) ⏎ ) ⏎ echo x")


def test_an_empty_name_of_a_file_is_said(capsys):
    status, out, err = run(capsys, "check", "")
    assert (status, out) == (1, "") and "expected a launch script or a YAML file, got an empty name: " in err


@pytest.mark.parametrize(
    ("function", "keys", "is_noted"),
    [
        ("icepop", "steps: [reweight]", True),
        ("icepop", "mask_scope: all", False),
        ("icepop", "preset: icepop, steps: [reweight]", True),
        ("correct", "steps: [reweight]", False),
    ],
)
def test_steps_of_the_file_beside_a_named_correction_are_noted(check, tmp_path, function, keys, is_noted):
    written(tmp_path / "cfg.yaml", f"slime_ext: {{{keys}}}")
    said = check("TRAIN cfg.yaml".replace("TRAIN", TRAIN.replace(".correct", f".{function}")))
    note = "note slime_ext.steps of the file replaces the steps of icepop, which --custom-tis-function-path"
    assert (note in " ".join(said.split())) == is_noted and said.endswith("ok\n"), said
