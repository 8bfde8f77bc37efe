"""What the commands share when they write."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_ext.errors import ConfigError
from slime_ext.folders import make_folder


def test_no_folder_is_made_at_the_root(tmp_path):
    with pytest.raises(ConfigError, match="got none at /no_such_folder_here: a variable that is not set"):
        make_folder(Path("/no_such_folder_here/a/b"))
    make_folder(tmp_path / "a/b")
    assert (tmp_path / "a/b").is_dir() and not Path("/no_such_folder_here").exists()
