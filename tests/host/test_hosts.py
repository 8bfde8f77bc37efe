"""What a host's source says about it, on text like that of real releases."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from slime_ext.host import hosts

ACTOR = "slime.backends.megatron_utils.actor"
LOSS = "slime.backends.megatron_utils.loss"


@pytest.fixture
def slime(monkeypatch):
    """slime with the given texts for its modules."""

    def with_sources(**texts):
        by_module = {f"{hosts.SLIME.package}.{name}": text for name, text in texts.items()}
        monkeypatch.setattr(hosts.Host, "source", lambda self, module: by_module.get(module, ""))
        return hosts.SLIME

    return with_sources


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ('"cur_log_probs": log_probs_and_entropy["log_probs"],', True),
        ("'current_log_probs' : x,", True),
        ("cur_log_probs = log_probs", False),
        ("", False),
    ],
)
def test_whether_the_hook_call_carries_the_target(slime, text, passes):
    assert slime(loss=text).passes_target is passes


@pytest.mark.parametrize(
    ("call", "seen"), [("(self.args, rollout_id, rollout_data)", True), ("(self.args)", False)]
)
def test_whether_the_postprocess_sees_the_rollout(slime, call, seen):
    assert slime(actor=f"self.rollout_data_postprocess{call}").hands_out_data is seen


def test_whether_proximal_log_probs_may_be_skipped(slime):
    assert slime(actor="can_reuse_log_probs_in_loss = (").may_skip_proximal
    assert not slime(actor="").may_skip_proximal


def test_a_host_that_is_not_installed_has_neither_source_nor_version():
    assert hosts.SLIME.source("slime.backends.nowhere") == ""
    assert hosts.SLIME.version == "(a checkout)"


def test_the_source_of_a_module_is_read_without_importing_it():
    assert "class HostRun" in hosts.SLIME.source("slime_ext.tools.without_cuda.driver")


def test_the_loss_is_where_this_release_defines_it(monkeypatch):
    for defines in hosts.MILES.losses:
        texts = {defines: "def policy_loss_function(args"}
        monkeypatch.setattr(hosts.Host, "source", lambda self, module, texts=texts: texts.get(module, ""))
        assert hosts.MILES.loss == defines


def test_the_version_is_of_the_distribution_that_is_imported(monkeypatch, tmp_path):
    """Installed or linked to; a checkout that comes first on the path is not what is installed."""
    checkout, installed, linked = (tmp_path / name for name in ("checkout", "installed", "linked"))
    for folder in (checkout, installed, linked):
        (folder / "miles").mkdir(parents=True)
        (folder / "miles/__init__.py").touch()
    info = installed / "miles_rl-0.0.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: miles-rl\nVersion: 0.0.2\n")
    (info / "direct_url.json").write_text(
        json.dumps({"url": linked.as_uri(), "dir_info": {"editable": True}})
    )
    found = {}
    for folder in (checkout, installed, linked):
        with monkeypatch.context() as patch:
            patch.delitem(sys.modules, "miles", raising=False)
            patch.setattr(sys, "path", [str(folder), str(installed), *sys.path])
            found[folder.name] = hosts.MILES.version
    assert found == {"checkout": "(a checkout)", "installed": "0.0.2", "linked": "0.0.2"}


def test_the_command_line_is_that_of_rays_driver(monkeypatch):
    """An actor has another; and where a release of Ray keeps it elsewhere, this process's own will do."""
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(sys, "argv", ["worker.py"])
    assert hosts.command_line() == ["worker.py"]
    jobs = [
        {"JobID": "02", "Entrypoint": "other.py"},
        {"JobID": "01", "Entrypoint": "python train.py --use-tsi"},
    ]
    context = SimpleNamespace(get_job_id=lambda: "01")
    ray = SimpleNamespace(get_runtime_context=lambda: context, is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert hosts.command_line() == ["worker.py"]
    ray._private = SimpleNamespace(state=SimpleNamespace(jobs=lambda: jobs))
    assert hosts.command_line() == ["python", "train.py", "--use-tsi"]


def test_asking_for_the_command_line_starts_no_ray():
    pytest.importorskip("ray")
    code = "import ray; from slime_ext.host import hosts; print(hosts.command_line(), ray.is_initialized())"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert said.stdout.splitlines()[-1] == "['-c'] False"
