"""What ``check`` is given beside a script: files of arguments, and values of another kind in them."""

from __future__ import annotations

from slime_ext.commands.arguments import forbid_misspelt
from slime_ext.launcher.arguments.parser import BY_DEST, BY_NAME
from tests.commands.test_commands import run, written


def test_a_path_that_is_none_is_refused(capsys, tmp_path):
    for value in (5, ["a.yaml"], {"a": 1}, True):
        path = written(tmp_path / "c.yaml", {"use_tis": True, "custom_config_path": value})
        status, out, err = run(capsys, "check", path)
        assert (status, out) == (1, "") and "--custom-config-path: expected a path, got" in err


def test_a_misspelt_name_in_the_file_of_arguments_is_refused(capsys, tmp_path):
    path = written(tmp_path / "c.yaml", {"slime_ext": {"preset": "geo_rs"}})
    for key, right in {"use_tiss": "use_tis", "custom_tis_functon_path": "custom_tis_function_path"}.items():
        status, _, err = run(capsys, "check", path, "--args", written(tmp_path / "a.yaml", {key: True}))
        assert status == 1 and f"a.yaml: expected {right}, got {key}" in err


def test_a_file_of_arguments_takes_both_spellings(capsys, tmp_path):
    mapping = {"numerator": "target", "steps": ["reweight", {"truncate": {"high": 2.0}}]}
    path = written(tmp_path / "c.yaml", {"use_tis": True, "slime_ext": mapping})
    for key in ("keep_old_actor", "keep-old-actor"):
        status, _, err = run(capsys, "check", path, "--args", written(tmp_path / "a.yaml", {key: True}))
        assert status == 1 and "expected proximal beside the host's surrogate with --keep-old-actor" in err


def test_no_argument_of_the_launcher_is_a_misspelling():
    for name in (*BY_DEST, *BY_NAME):
        forbid_misspelt("a.yaml", name)


def test_a_file_named_by_a_script_is_found_from_the_folders_above_it(capsys, tmp_path):
    (tmp_path / "scripts/low").mkdir(parents=True)
    written(tmp_path / "c.yaml", {"slime_ext": {"preset": "geo_rs"}})
    flags = "--use-tis --custom-tis-function-path slime_ext.tis.correct --custom-config-path c.yaml"
    path = written(tmp_path / "scripts/low/run.sh", f"python3 train.py {flags}")
    status, out, _ = run(capsys, "check", path)
    assert status == 0 and "veto(low 0.0001)" in out
