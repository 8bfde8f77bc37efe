"""A host is found by what its modules define, in every layout; what does not fit is refused in one line."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from slime_ext.errors import ConfigError
from slime_ext.host import startup, wrapping
from slime_ext.host.current import current_host
from slime_ext.hosts import running
from slime_ext.hosts.code import LOSS, STEP
from tests.host import trees


@pytest.fixture(autouse=True)
def _no_other_host(monkeypatch):
    for name in {m.__name__ for f in (LOSS, STEP) for m in running.definers(f, running.loaded())}:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("layout", trees.LAYOUTS)
def test_the_doors_are_found_in_every_layout(layout, tmp_path, monkeypatch):
    made = trees.made(tmp_path, monkeypatch, layout)
    host = startup.host_that_trains()
    assert (host.loss, host.step, host.name) == (made.loss, made.step, made.package)
    assert not wrapping.is_wrapped(host)


def test_a_users_own_policy_loss_is_not_the_hosts(tmp_path, monkeypatch):
    mine = ModuleType("a_users_own")
    exec(trees.TARGET + trees.LOSS, vars(mine))
    monkeypatch.setitem(sys.modules, mine.__name__, mine)
    made = trees.made(tmp_path, monkeypatch)
    assert running.current().loss is made.loss


def test_the_host_is_searched_again_only_if_it_is_gone(tmp_path, monkeypatch):
    searches, search = [], running.current
    monkeypatch.setattr(running, "current", lambda: searches.append(1) or search())
    assert current_host() is None
    first = trees.made(tmp_path / "a", monkeypatch)
    assert [current_host().loss for _ in range(2)] == [first.loss] * 2 and len(searches) == 2
    second = trees.made(tmp_path / "b", monkeypatch)
    assert current_host().loss is second.loss is not first.loss
    monkeypatch.delattr(second.step, STEP)
    assert current_host() == running.Host(second.loss, None)


def test_outside_of_a_host_there_is_none():
    assert startup.host_that_trains() is None


def test_a_trainer_without_megatron_has_no_step(tmp_path, monkeypatch):
    made = trees.made(tmp_path, monkeypatch, "miles main", step="")
    assert startup.host_that_trains() == running.Host(made.loss, None)


FITS_NOT = {
    "loss": (
        {"loss": f"{trees.TARGET}\ndef policy_loss_function(batch, logits): pass\n"},
        r"loss: expected policy_loss_function\(args, batch, .*, got \(batch, logits\): this release",
    ),
    "target": (
        {"loss": trees.LOSS, "step": ""},
        r"loss: expected get_log_probs_and_entropy\(logits, \.\.\.\), got none: this release is not",
    ),
    "step": (
        {"step": "def train_one_step(model, data): pass\n"},
        r"model: expected train_one_step\(args, rollout_id, .*, got \(model, data\): this release is not",
    ),
}


@pytest.mark.parametrize("name", FITS_NOT)
def test_what_does_not_fit_is_named_with_its_place(name, tmp_path, monkeypatch):
    texts, line = FITS_NOT[name]
    trees.made(tmp_path, monkeypatch, **texts)
    with pytest.raises(ConfigError, match=line):
        startup.host_that_trains()


def test_a_trainer_that_fits_no_door_is_told_what_was_looked_for_and_where(monkeypatch):
    monkeypatch.setattr(startup, "parallel_state", lambda: object())
    line = r"expected a host with policy_loss_function\(args, .*, got none among the \d+ modules"
    with pytest.raises(ConfigError, match=line):
        startup.host_that_trains()


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ('"cur_log_probs": log_probs_and_entropy["log_probs"],', True),
        ("'current_log_probs' : x,", True),
        ("cur_log_probs = log_probs", False),
    ],
)
def test_whether_the_hook_call_carries_the_target(text, passes, tmp_path, monkeypatch):
    trees.made(tmp_path, monkeypatch, loss=f"{trees.TARGET}{trees.LOSS}\n'''{text}'''\n")
    assert running.current().passes("cur_log_probs") is passes


def test_what_the_trainer_gets_is_read_off_the_hosts_text(tmp_path, monkeypatch):
    trees.made(tmp_path, monkeypatch)
    host = running.current()
    assert not host.may_skip_proximal and not host.carries_versions
    room = tmp_path / "slime/backends/megatron_utils"
    (room / "__init__.py").write_text("can_reuse_log_probs_in_loss = True\n")
    (tmp_path / "slime/manager.py").write_text('train_data["weight_versions"] = []\n')
    assert host.may_skip_proximal and host.carries_versions


def test_wrapping_is_idempotent_and_can_be_undone(tmp_path, monkeypatch):
    made = trees.made(tmp_path, monkeypatch)
    own = made.loss.policy_loss_function
    for _ in range(2):
        wrapping.wrap(made.loss, LOSS, lambda function: lambda *args: function(*args))
    assert wrapping.is_wrapped(running.current())
    assert getattr(made.loss.policy_loss_function, wrapping.MARK) is own
    wrapping.unwrap(made.loss, LOSS)
    assert made.loss.policy_loss_function is own


def test_what_pushes_weights_is_a_class_that_counts_its_pushes(tmp_path, monkeypatch):
    text = trees.STEP.format(loss=trees.LAYOUTS["slime"][0]) + (
        "class Pusher:\n    def __init__(self):\n        self.weight_version = 0\n"
        "    def update_weights(self): pass\n"
        "class Actor:\n    def __init__(self): pass\n    def update_weights(self): pass\n"
    )
    made = trees.made(tmp_path, monkeypatch, step=text)
    for _ in range(2):
        assert list(running.weight_updaters(running.current())) == [made.step.Pusher]
        wrapping.wrap(made.step.Pusher, "__init__", lambda function: lambda self: function(self))


def test_the_command_line_is_that_of_rays_driver(monkeypatch):
    """An actor has another; and where a release of Ray keeps it elsewhere, this process's own will do."""
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(sys, "argv", ["worker.py"])
    assert running.command_line() == ["worker.py"]
    jobs = [
        {"JobID": "02", "Entrypoint": "other.py"},
        {"JobID": "01", "Entrypoint": "python train.py --use-tsi"},
    ]
    context = SimpleNamespace(get_job_id=lambda: "01")
    ray = SimpleNamespace(get_runtime_context=lambda: context, is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert running.command_line() == ["worker.py"]
    ray._private = SimpleNamespace(state=SimpleNamespace(jobs=lambda: jobs))
    assert running.command_line() == ["python", "train.py", "--use-tsi"]


def test_asking_for_the_command_line_starts_no_ray():
    pytest.importorskip("ray")
    code = (
        "import ray; from slime_ext.hosts import running as r; print(r.command_line(), ray.is_initialized())"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert said.stdout.splitlines()[-1] == "['-c'] False"
