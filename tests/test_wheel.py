"""What a wheel holds: the packages, and the files that commands look for beside it. `make wheel` runs one."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from slime_ext.config import files as yaml_files
from slime_ext.tools.commands import cli

pytestmark = pytest.mark.xdist_group("wheel")  # one worker builds it
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


@pytest.fixture(scope="module")
def metadata(wheel, names):
    (path,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    return wheel.read(path).decode()


def files(*rooms):
    found = (path for room in rooms for path in (ROOT / room).rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in found if "__pycache__" not in path.parts}


def test_every_file_of_the_packages_is_in_the_wheel(names):
    ours = {name for name in names if name.startswith(("slime_ext/", "slime_ext_cpu/"))}
    assert files("slime_ext", "slime_ext_cpu") == ours


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


def test_every_requirement_is_a_range_and_locked(metadata):
    """In extras some are bare: sglang, miles-rl and torch decide between them, and the lock."""
    required = r"^Requires-Dist: ([\w.-]+)(?:\[\w+\])?([^;\n]*)(.*)$"
    lines = re.findall(required, metadata, re.M)
    always = {name: bounds for name, bounds, of in lines if "extra" not in of}
    wanted = {name: bounds for name, bounds, of in lines if '"te"' not in of}  # which needs CUDA
    locked = dict(re.findall(r"^([\w.-]+)==(.*)$", (ROOT / "requirements.lock").read_text(), re.M))
    lower = {canonicalize_name(name): version for name, version in locked.items()}
    assert set(always) == {"torch", "PyYAML"} and all(always.values())
    for name, bounds in wanted.items():
        assert SpecifierSet(bounds).contains(lower[canonicalize_name(name)]), name


def requirements(metadata, of):
    """The modules of an extra; of "" those that pip always installs."""
    lines = re.findall(r"^Requires-Dist: (.+)$", metadata, re.M)
    wanted = [requirement for requirement in map(Requirement, lines) if active(requirement, of)]
    return {requirement.name for requirement in wanted}


def active(requirement, extra):
    if extra and "extra" not in str(requirement.marker):
        return False
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def with_their_requirements(names):
    """Distributions, and what pip installs for them."""
    found, queue = set(), list(names)
    while queue:
        name = canonicalize_name(queue.pop())
        if name not in found:
            found.add(name)
            try:
                lines = importlib.metadata.requires(name) or ()
            except importlib.metadata.PackageNotFoundError:  # for another system or an older Python
                continue
            queue += [each.name for each in map(Requirement, lines) if active(each, "")]
    return found


def modules_of_others(names):
    """The modules of this environment that a wheel with these requirements alone would not bring."""
    wanted, by_module = with_their_requirements(names), importlib.metadata.packages_distributions()
    return {module for module, of in by_module.items() if not wanted & set(map(canonicalize_name, of))}


REFUSING = """
import runpy, sys
FOLDER, PROGRAM, *REFUSED = sys.argv[1:]
class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.path[:0] = [FOLDER]
sys.meta_path.insert(0, Refusing())
import slime_ext
assert slime_ext.__file__.startswith(FOLDER), slime_ext.__file__
runpy.run_path(PROGRAM, run_name="__main__")
"""


def test_the_wheel_alone_serves_a_training_process(wheel, metadata, tmp_path):
    """`make wheel` installs it into an empty environment; here other packages are there, and refused."""
    wheel.extractall(tmp_path)
    refused = modules_of_others(requirements(metadata, "")) - {"slime_ext", "slime_ext_cpu"}
    assert {"numpy", "rich", "matplotlib", "ray", "pydantic"} <= refused and not {
        "torch",
        "sympy",
        "yaml",
    } & refused
    command = [sys.executable, "-I", "-c", REFUSING, str(tmp_path), str(ROOT / "tests/alone.py"), *refused]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("the wheel alone")


def test_the_commands_ask_for_the_modules_of_their_extra(metadata):
    extras = {of: set(map(canonicalize_name, requirements(metadata, of))) for of in ("tools", "train")}
    assert set(cli.MODULES["tools"]) == extras["tools"] <= extras["train"]
    assert extras["tools"] < set(cli.MODULES["train"]) <= extras["train"]


IN_PLACE = """
import site, sys
site.addsitedir(sys.argv[1])
from slime_ext import __version__
import slime_ext_cpu
"""


def test_an_editable_install_is_found_from_the_folder_above_the_clone(tmp_path):
    """The clone's folder has the package's name, and Python takes it for a package without ``__init__``."""
    clone, there = tmp_path / "slime_ext", tmp_path / "site"
    clone.mkdir()
    for name in ("slime_ext", "slime_ext_cpu", "configs", "patches"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    build = f"from setuptools import build_meta; build_meta.build_editable({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-W", "ignore", "-c", build], cwd=clone, check=True, capture_output=True)
    (made,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(made).extractall(there)
    command = [sys.executable, "-S", "-c", IN_PLACE, str(there)]
    environment = {"PATH": os.environ["PATH"]}  # without a PYTHONPATH
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
