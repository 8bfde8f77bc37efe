"""What ``check`` is given beside a script: files of arguments, and values of another kind in them."""

from __future__ import annotations

import pytest

from slime_ext.commands.arguments import forbid_misspelt
from slime_ext.launcher.arguments.parser import BY_DEST, BY_NAME
from tests.commands.test_commands import run, written


@pytest.mark.parametrize("value", [5, ["a.yaml"], {"a": 1}, True])
def test_a_path_that_is_none_is_refused(capsys, tmp_path, value):
    path = written(tmp_path / "c.yaml", {"use_tis": True, "custom_config_path": value})
    status, out, err = run(capsys, "check", path)
    assert (status, out) == (1, "") and "--custom-config-path: expected a path, got" in err


@pytest.mark.parametrize(
    ("key", "right"), [("use_tiss", "use_tis"), ("custom_tis_functon_path", "custom_tis_function_path")]
)
def test_a_misspelt_name_in_the_file_of_arguments_is_refused(capsys, tmp_path, key, right):
    path = written(tmp_path / "c.yaml", {"slime_ext": {"preset": "geo_rs"}})
    status, _, err = run(capsys, "check", path, "--args", written(tmp_path / "a.yaml", {key: True}))
    assert status == 1 and f"a.yaml: expected {right}, got {key}" in err


@pytest.mark.parametrize("key", ["keep_old_actor", "keep-old-actor"])
def test_a_file_of_arguments_takes_both_spellings(capsys, tmp_path, key):
    mapping = {"numerator": "target", "steps": ["reweight", {"truncate": {"high": 2.0}}]}
    path = written(tmp_path / "c.yaml", {"use_tis": True, "slime_ext": mapping})
    status, _, err = run(capsys, "check", path, "--args", written(tmp_path / "a.yaml", {key: True}))
    assert status == 1 and "expected proximal beside the host's surrogate with --keep-old-actor" in err


@pytest.mark.parametrize("name", [*BY_DEST, *BY_NAME])
def test_every_argument_of_the_launcher_is_no_misspelling(name):
    forbid_misspelt("a.yaml", name)
