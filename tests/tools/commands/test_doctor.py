"""``slime-ext doctor``: packages that lie on the path, and launches that can or cannot work with them."""

from __future__ import annotations

import importlib

import pytest

from slime_ext.tools.commands import cli, doctor, installed
from slime_ext.tools.commands.arguments import gathered
from slime_ext.tools.commands.installed import COMPONENTS, Component

SLIME_RUN = "python3 train_async.py --use-tis --custom-tis-function-path slime_ext.tis.{preset} {more}\n"
INIT = "--custom-megatron-init-path slime_ext.host.init"


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


@pytest.fixture
def machine(monkeypatch):
    """A machine that has everything, but for what is named."""

    def having(*, without=(), **parts):
        full = {name: Component("1.0", True) for name in [*COMPONENTS, "slime"]} | parts
        full |= {name: Component(note=f"install {name}") for name in without}
        monkeypatch.setattr(doctor, "COMPONENTS", {n: (lambda p=full[n]: p) for n in COMPONENTS})
        monkeypatch.setattr(installed, "slime", lambda folder=None: full["slime"])

    return having


def run(capsys, tmp_path, text):
    path = tmp_path / "run.sh"
    path.write_text(text)
    status = cli.main(["doctor", str(path)])
    return status, capsys.readouterr().out


def test_the_apex_of_pypi_is_told_apart(package):
    package("apex", "lib/__init__.py")
    found = installed.apex()
    assert not found.usable and "pip uninstall apex" in found.note


def test_nvidias_apex_needs_its_extensions(package):
    package("apex", "multi_tensor_apply/__init__.py")
    assert "without its extensions" in installed.apex().note
    for extension in ("amp_C", "fused_weight_gradient_mlp_cuda"):
        package(extension)
    assert installed.apex().usable


def test_no_apex_says_how_to_get_nvidias():
    found = installed.apex()
    assert (found.found, found.usable) == ("", False) and "github.com/NVIDIA/apex" in found.note


def test_megatron_core_alone_is_told_from_megatron_lm(monkeypatch):
    assert installed.megatron().note == "Megatron-LM"
    monkeypatch.setattr(installed, "_has", lambda name: name == "megatron.core")
    assert installed.megatron().note == installed.CORE_ALONE


def test_a_folder_that_is_no_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(installed, "_root", lambda module: tmp_path)
    found = installed.slime()
    assert not found.usable and "expected a checkout of slime" in found.note


def test_without_a_launch_nothing_is_required(capsys):
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("PyTorch", "Megatron", "NVIDIA apex", "SGLang", "slime"))


def test_a_launch_that_can_work(capsys, tmp_path, machine):
    machine()
    status, out = run(capsys, tmp_path, SLIME_RUN.format(preset="token_tis", more=""))
    assert status == 0 and "reweight(token) > truncate(high 2)" in out


@pytest.mark.parametrize(
    "part", ["CUDA", "Megatron", "Transformer Engine", "NVIDIA apex", "SGLang", "Ray", "slime"]
)
def test_slime_cannot_do_without(capsys, tmp_path, machine, part):
    machine(without=[part])
    status, out = run(capsys, tmp_path, SLIME_RUN.format(preset="token_tis", more=""))
    assert status == 1 and "missing" in out and f"install {part}" in out


@pytest.mark.parametrize(
    ("part", "more"),
    [
        ("Transformer Engine", "--transformer-impl local"),
        ("NVIDIA apex", "--no-gradient-accumulation-fusion"),
    ],
)
def test_a_flag_does_away_with_a_part(capsys, tmp_path, machine, part, more):
    machine(without=[part])
    assert run(capsys, tmp_path, SLIME_RUN.format(preset="token_tis", more=more))[0] == 0


def test_slime_needs_more_than_megatron_core(capsys, tmp_path, machine):
    machine(Megatron=Component("0.16.1", True, installed.CORE_ALONE))
    status, out = run(capsys, tmp_path, SLIME_RUN.format(preset="token_tis", more=""))
    assert status == 1 and "slime needs" in out


@pytest.mark.parametrize("preset", ["off_policy_is", "off_policy_is_function"])
@pytest.mark.parametrize(
    ("more", "note", "status", "said"),
    [
        ("", "", 1, "add --custom-megatron-init-path"),
        (INIT, "", 0, "passed by slime_ext.host.init"),
        ("", installed.PATCHED, 0, "passed by slime"),
        ("", installed.STOCK, 1, "add --custom-megatron-init-path"),
    ],
)
def test_how_the_target_gets_to_the_hook(capsys, tmp_path, machine, preset, more, note, status, said):
    machine(slime=Component("0.3.1", True, note))
    found, out = run(capsys, tmp_path, SLIME_RUN.format(preset=preset, more=more))
    assert found == status and said in out


def test_a_wrong_configuration_cannot_work(capsys, tmp_path, machine):
    machine()
    status, out = run(capsys, tmp_path, SLIME_RUN.format(preset="tokn_tis", more=""))
    assert status == 1 and "did you mean" in out


def test_a_script_that_starts_neither(tmp_path):
    (tmp_path / "run.sh").write_text("echo hello\n")
    assert doctor.needed(gathered(str(tmp_path / "run.sh"))) == {"Python", "PyTorch"}


def test_a_named_folder_without_slime_is_a_mistake(capsys, tmp_path):
    assert cli.main(["doctor", "--slime-dir", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"slime-ext: --slime-dir {tmp_path}: expected a checkout of slime")
