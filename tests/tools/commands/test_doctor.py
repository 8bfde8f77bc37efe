"""``slime-ext doctor``: packages that lie on the path, and what it says is missing."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slime_ext.tools.commands import cli, doctor
from slime_ext.tools.commands.doctor import PARTS, Part


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Puts a package with some files first on the path."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(name, *files):
        for file in ("__init__.py", *files):
            path = tmp_path / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
        importlib.invalidate_caches()

    return make


def test_the_apex_of_pypi_is_told_apart(package):
    package("apex", "lib/__init__.py")
    found = doctor.apex()
    assert found.is_missing and "pip uninstall apex" in found.note


def test_nvidias_apex_needs_its_extensions(package):
    package("apex", "multi_tensor_apply/__init__.py")
    assert doctor.apex().is_missing and "without its extensions" in doctor.apex().note
    for extension in ("amp_C", "fused_weight_gradient_mlp_cuda"):
        package(extension)
    assert not doctor.apex().is_missing


def test_no_apex_says_how_to_get_nvidias_or_to_do_without():
    found = doctor.apex()
    assert (found.version, found.is_missing) == ("", True) and "github.com/NVIDIA/apex" in found.note
    assert found.note.endswith("or launch with --no-gradient-accumulation-fusion")


def test_megatron_core_alone_is_told_from_megatron_lm(monkeypatch):
    for modules, is_missing, said in (
        (("megatron.core", "megatron.training"), False, "Megatron-LM"),
        (("megatron.core",), True, "without megatron.training"),
        ((), True, "a checkout of Megatron-LM"),
    ):
        monkeypatch.setattr(doctor, "has", modules.__contains__)
        found = doctor.megatron()
        assert found.is_missing == is_missing and said in found.note


def test_a_checkout_of_a_host_has_the_version_of_its_setup(package, tmp_path):
    package("slime", "backends/__init__.py")
    assert doctor.host("slime", "THUDM/slime") == Part("a checkout", str(tmp_path))
    (tmp_path / "setup.py").write_text("setup(\n    name='slime',\n    version='0.3.1',\n)")
    assert doctor.host("slime", "THUDM/slime") == Part("0.3.1", str(tmp_path))


def test_a_folder_of_the_name_of_a_host_is_no_checkout(tmp_path, monkeypatch):
    for folder in ("empty/slime", "checkout/slime/backends"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "empty")
    assert doctor.host("slime", "THUDM/slime").note.startswith("put a checkout of github.com/THUDM/slime on")
    monkeypatch.syspath_prepend(tmp_path / "checkout")
    monkeypatch.syspath_prepend(tmp_path / "empty")  # Python joins both, as neither has an __init__.py
    assert doctor.host("slime", "THUDM/slime") == Part("a checkout", str(tmp_path / "checkout"))


def test_what_is_missing_is_said_last_and_one_host_is_enough():
    full = dict.fromkeys(PARTS, Part("1.0"))
    assert doctor.lines(full)[-1] == "missing for a launch: nothing"
    assert len(doctor.lines(full)) == len(PARTS) + 2
    lacks = {"CUDA": Part(note="PyTorch for CPU", is_missing=True), "slime": Part(), "Triton": Part()}
    assert doctor.lines(full | lacks)[-1] == "missing for a launch: CUDA"
    assert "CUDA                none (PyTorch for CPU)" in doctor.lines(full | lacks)
    assert doctor.lines(full | {"slime": Part(), "miles": Part()})[-1].endswith(": slime or miles")


def test_it_ends_well_whatever_is_missing(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in PARTS) and out.splitlines()[-1].startswith("missing for a launch: ")


@pytest.mark.parametrize("error", ["ImportError('no libcudart\\nor so')", "OSError('no libcudart')"])
def test_a_pytorch_that_cannot_be_imported_is_missing_with_the_reason(package, tmp_path, error):
    package("torch")
    (tmp_path / "torch" / "__init__.py").write_text(f"raise {error}")
    path = f"{tmp_path}{os.pathsep}{Path.cwd()}"
    made = subprocess.run(
        [sys.executable, "-m", "slime_ext", "doctor"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert (made.returncode, made.stderr) == (0, "")
    (row,) = (line for line in made.stdout.splitlines() if line.startswith("PyTorch "))
    assert re.search(r"[0-9]\S* \(cannot be imported: no libcudart\)$", row), row
    assert "missing for a launch: PyTorch, CUDA" in made.stdout and "(needs PyTorch)" in made.stdout


def test_a_script_is_for_check(capsys):
    assert cli.main(["doctor", "run.sh"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and "run slime-ext check run.sh for a launch" in err


def test_a_release_that_is_newer_than_the_one_that_was_run_is_a_warning(monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda name, unknown="": {"verl": "0.10.0"}.get(name, unknown))
    listed, *warnings = doctor.tested()
    assert listed.startswith("run against: slime v0.2.0") and "verl 0.9.1 0.8.0" in listed
    assert warnings == [
        "warning: verl 0.10.0 is newer than 0.9.1, which was run on 2026-11-28: run python -m tests.releases "
        "in a checkout, or install 0.9.1"
    ]
    monkeypatch.setattr(doctor, "installed", lambda name, unknown="": "0.9.1" if name == "verl" else unknown)
    assert len(doctor.tested()) == 1
