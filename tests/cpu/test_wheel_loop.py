"""The order of what the wheel's loop asks of its actors, with actors that write down what they are asked."""

from __future__ import annotations

import asyncio
import importlib
import sys
from argparse import Namespace
from types import ModuleType

import pytest

from slime_ext_cpu.stand_ins import hosts

MILES = {
    "miles.ray.placement_group": (
        "create_placement_groups",
        "create_rollout_manager",
        "create_training_models",
    ),
    "miles.utils.logging_utils": ("configure_logger",),
    "miles.utils.misc": ("should_run_periodic_action",),
    "miles.utils.tracking_utils": ("finish_tracking", "init_tracking"),
}


class Actor:
    """Answers every call, remote or not, and writes it down."""

    def __init__(self, name, asked):
        self.name, self.asked = name, asked

    def __getattr__(self, method):
        async def call(*args, **options):
            self.asked.append(f"{method}{'' if not hosts.is_unrounded() else ' unrounded'}")

        call.remote = call
        return call


@pytest.fixture
def loop(monkeypatch, tmp_path):
    """The loop over three rollouts that are all evaluated, and what it asked."""
    asked = []
    for module, names in MILES.items():
        made = ModuleType(module)
        for name in names:
            setattr(made, name, lambda *args, **options: None)
        monkeypatch.setitem(sys.modules, module, made)
    sys.modules.pop("slime_ext_cpu.wheel_loop", None)
    wheel_loop = importlib.import_module("slime_ext_cpu.wheel_loop")
    monkeypatch.delitem(sys.modules, "slime_ext_cpu.wheel_loop")
    monkeypatch.setenv(hosts.UNROUNDED, str(tmp_path / "unrounded"))
    actor, manager = Actor("actor", asked), Actor("manager", asked)

    async def models(args, groups, of):
        return actor, None

    monkeypatch.setattr(wheel_loop, "create_rollout_manager", lambda args, group: (manager, None))
    monkeypatch.setattr(wheel_loop, "create_training_models", models)
    monkeypatch.setattr(wheel_loop, "create_placement_groups", lambda args: {"rollout": None})
    monkeypatch.setattr(wheel_loop, "should_run_periodic_action", lambda rollout, every, *rest: every == 1)
    args = Namespace(
        **dict.fromkeys(
            ("check_weight_update_equal", "skip_eval_before_train", "use_critic", "colocate"), False
        ),
        **{"num_rollout": 2, "start_rollout_id": 0, "eval_interval": 1, "save_interval": 9},
        rollout_global_dataset=False,
        update_weights_interval=1,
    )

    def run(name="train"):
        asyncio.run(getattr(wheel_loop, name)(args))
        return asked

    return run


ROLLOUT = ["generate", "train", "clear_memory", "update_weights", "eval"]
BOTH = ["update_weights unrounded", "eval unrounded", "update_weights"]


def test_an_evaluation_is_of_the_weights_that_were_pushed(loop, monkeypatch):
    monkeypatch.delenv(hosts.SCORE, raising=False)
    assert loop() == ["update_weights", "eval", *ROLLOUT, *ROLLOUT, "dispose"]


def test_both_scores_leave_the_engine_with_rounded_weights_before_the_next_rollout(loop, monkeypatch):
    monkeypatch.setenv(hosts.SCORE, "both")
    each = [*ROLLOUT, *BOTH]
    assert loop() == ["update_weights", "eval", *BOTH, *each, *each, "dispose"]
