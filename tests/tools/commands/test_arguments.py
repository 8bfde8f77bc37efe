"""What ``check`` is given beside a script."""

from __future__ import annotations

from tests.tools.commands.test_commands import run, written


def test_a_path_that_is_none_is_refused(capsys, tmp_path):
    for value in (5, ["a.yaml"], {"a": 1}, True):
        path = written(tmp_path / "c.yaml", {"use_tis": True, "custom_config_path": value})
        status, out, err = run(capsys, "check", path)
        assert (status, out) == (1, "") and "--custom-config-path: expected a path, got" in err


def test_arguments_come_from_a_script_alone(capsys, tmp_path):
    path = written(tmp_path / "c.yaml", {"slime_ext": {"preset": "geo_rs"}})
    status, _, err = run(capsys, "check", path, "--args", path)
    assert status == 1 and "--args: expected a launch script, got" in err


def test_a_file_named_by_a_script_is_the_one_where_the_script_runs(capsys, tmp_path, monkeypatch):
    """The folder of its ``cd``, else the host's checkout, else this command's; beside the script is none."""
    for folder in ("scripts/low", "slime", "other"):
        (tmp_path / folder).mkdir(parents=True)
    written(tmp_path / "scripts/low/c.yaml", {"slime_ext": {"preset": "token_tis"}})
    written(tmp_path / "other/c.yaml", {"slime_ext": {"preset": "geo_rs"}})
    flags = "--use-tis --custom-tis-function-path slime_ext.tis.correct --custom-config-path c.yaml"
    path = written(tmp_path / "scripts/low/run.sh", f"python3 train.py {flags}")
    status, _, err = run(capsys, "check", path)
    assert status == 1 and "expected a file where the script runs, got no c.yaml in" in err
    monkeypatch.chdir(tmp_path / "other")
    assert "veto(low 0.0001)" in run(capsys, "check", path)[1]
    written(tmp_path / "train.py", "")  # the checkout that the script lies in
    status, _, err = run(capsys, "check", path)
    assert status == 1 and f"got no c.yaml in {tmp_path}:" in err
    written(path, f"cd {tmp_path}/other\npython3 train.py {flags}")
    assert "veto(low 0.0001)" in run(capsys, "check", path)[1]


def test_a_file_that_lies_beside_our_package_alone_is_none_of_the_script(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = "--use-tis --custom-tis-function-path slime_ext.tis.correct"
    text = f"python3 train.py {flags} --custom-config-path configs/modes/stale.yaml"
    status, out, err = run(capsys, "check", written(tmp_path / "run.sh", text))
    assert (status, out) == (1, "") and f"got no configs/modes/stale.yaml in {tmp_path}" in err
