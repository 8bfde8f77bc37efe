"""``slime-ext doctor``: packages that lie on the path, and launches that can or cannot work with them."""

from __future__ import annotations

import importlib

import pytest

from slime_ext.tools.commands import cli, doctor, installed
from slime_ext.tools.commands.arguments import gathered
from slime_ext.tools.commands.installed import COMPONENTS, Component

SLIME_RUN = "python3 train_async.py --use-tis --custom-tis-function-path slime_ext.tis."
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


TOKEN = "token_tis "
NO_HOOK = "--custom-megatron-init-path: expected slime_ext.host.init beside slime_ext.tis.off_policy_is"
LAUNCHES = [  # preset and flags, what the machine is without, status, what is said
    (TOKEN, (), 0, "reweight(token) > truncate(high 2)"),
    *((TOKEN, (part,), 1, f"missing  install {part}") for part in (
        "CUDA", "Megatron", "Transformer Engine", "NVIDIA apex", "SGLang", "Ray", "slime")),
    (TOKEN + "--transformer-impl local", ("Transformer Engine",), 0, "ok"),
    (TOKEN + "--no-gradient-accumulation-fusion", ("NVIDIA apex",), 0, "ok"),
    ("tokn_tis", (), 1, "did you mean"),
    *((f"{preset} {INIT}", (), 0, f"{preset}: target / behavior")
      for preset in ("off_policy_is", "off_policy_is_function")),
    *((preset, (), 1, NO_HOOK) for preset in ("off_policy_is", "off_policy_is_function")),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "without", "status", "said"), LAUNCHES)
def test_whether_a_launch_can_work(capsys, tmp_path, machine, flags, without, status, said):
    machine(without=without)
    found, out = run(capsys, tmp_path, SLIME_RUN + flags)
    assert found == status and said in out


@pytest.mark.parametrize(
    ("parts", "status", "said"),
    [
        ({"Megatron": Component("0.16.1", True, installed.CORE_ALONE)}, 1, "slime needs"),
    ],
)
def test_what_is_there_decides_it(capsys, tmp_path, machine, parts, status, said):
    machine(**parts)
    found, out = run(capsys, tmp_path, SLIME_RUN + "token_tis")
    assert found == status and said in out


def test_what_is_known_only_where_the_script_runs_is_not_ok_until_a_flag_behind_says_it(
    capsys, tmp_path, machine
):
    machine()
    script = tmp_path / "run.sh"
    script.write_text(SLIME_RUN + 'token_tis --eps-clip $(cat eps.txt) "$@"\n')
    for own, state in (((), "-"), (("--", "--eps-clip", "0.2"), "ok")):
        cli.main(["doctor", str(script), *own])
        rows = capsys.readouterr().out
        (first,) = [line for line in rows.splitlines() if line.startswith("correction")]
        assert f"  {state}  " in first and ("eps-clip" in rows) == (state == "-")


def test_a_script_that_starts_neither(tmp_path):
    (tmp_path / "run.sh").write_text("echo hello\n")
    assert doctor.needed(gathered(str(tmp_path / "run.sh"))) == {"Python", "PyTorch"}


def test_a_named_folder_without_slime_is_a_mistake(capsys, tmp_path):
    assert cli.main(["doctor", "--slime-dir", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"slime-ext: --slime-dir {tmp_path}: expected a checkout of slime")
