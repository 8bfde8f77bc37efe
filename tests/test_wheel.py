"""What a wheel holds: the package, and the files that commands look for beside it. `make wheel` runs one."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from slime_ext.config import files as yaml_files

ROOT = Path(__file__).parents[1]
BESIDE = ("configs", "patches")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of this checkout."""
    out = str(tmp_path_factory.mktemp("wheel"))
    words = ["egg_info", "--egg-base", out, "build", "--build-base", out, "bdist_wheel", "-b", f"{out}/b"]
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", *words, "-d", out]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (found,) = Path(out).glob("*.whl")
    return zipfile.ZipFile(found)


@pytest.fixture(scope="module")
def names(wheel):
    return wheel.namelist()


def files(*rooms):
    found = (path for room in rooms for path in (ROOT / room).rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in found if "__pycache__" not in path.parts}


def test_every_file_of_the_package_is_in_the_wheel(names):
    assert files("slime_ext") == {name for name in names if name.startswith("slime_ext/")}


def test_what_commands_look_for_beside_the_package_is_in_the_wheel(names):
    beside = {name.partition("/share/slime-ext/")[2] for name in names if "/share/slime-ext/" in name}
    assert files(*BESIDE) == beside


def test_a_file_that_comes_with_it_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert yaml_files.read_yaml("configs/modes/stale.yaml")["use_tis"] is True
    (tmp_path / "configs/modes").mkdir(parents=True)
    (tmp_path / "configs/modes/stale.yaml").write_text("lr: 1\n")
    assert yaml_files.read_yaml("configs/modes/stale.yaml") == {"lr": 1}  # one's own comes first
    monkeypatch.setattr(yaml_files, "ROOTS", (tmp_path / "none", ROOT))  # as installed: beside no checkout
    assert yaml_files.shipped("configs/modes/bypass.yaml") == str(ROOT / "configs/modes/bypass.yaml")
    assert yaml_files.shipped("configs/absent.yaml") == "configs/absent.yaml"


def test_every_requirement_is_a_range_and_locked(wheel, names):
    """In extras some are bare: sglang, miles-rl and torch decide between them, and the lock."""
    (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    required = r"^Requires-Dist: ([\w.-]+)(?:\[\w+\])?([^;\n]*)(.*)$"
    lines = re.findall(required, wheel.read(metadata).decode(), re.M)
    always = {name: bounds for name, bounds, of in lines if "extra" not in of}
    wanted = {name: bounds for name, bounds, of in lines if '"te"' not in of}  # which needs CUDA
    locked = dict(re.findall(r"^([\w.-]+)==(.*)$", (ROOT / "requirements.lock").read_text(), re.M))
    lower = {canonicalize_name(name): version for name, version in locked.items()}
    assert len(always) >= 8 and all(always.values())
    for name, bounds in wanted.items():
        assert SpecifierSet(bounds).contains(lower[canonicalize_name(name)]), name
