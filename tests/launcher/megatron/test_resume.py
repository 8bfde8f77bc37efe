"""A checkpoint holds all that training depends on: two steps, save, load and two more equal four steps."""

from __future__ import annotations

import pytest
import torch
from megatron.core.utils import unwrap_model

from slime_ext.launcher.megatron import parallel
from slime_ext.launcher.megatron.model import build_model
from slime_ext.launcher.megatron.optimizer import build_optimizer
from slime_ext.launcher.megatron.step import Trainer
from slime_ext.launcher.megatron.weights import gather_hf_state
from slime_ext.launcher.output import checkpoint
from tests.launcher.distributed import run_ranks
from tests.launcher.megatron import tiny_model as tiny
from tests.launcher.megatron.tiny_rollout import arguments, rollout

pytestmark = pytest.mark.slow
SCHEDULE = {"lr_decay_style": "linear", "lr_decay_iters": 6, "lr_warmup_iters": 1}


def trainer_of(layout):
    """A trainer with the oracle's weights, in groups that exist."""
    args = arguments(layout, **SCHEDULE)
    chunks = build_model(args, tiny.tiny_config(), tiny.hf_state(tiny.hf_model()).__getitem__)
    return Trainer(args, chunks, build_optimizer(args, chunks))


def step(trainer, index):
    for cut in trainer.cut(rollout(seed=index)):
        trainer.train_step(cut, {}, index)


def train_four(layout, directory, forget=()):
    """Weights after four steps; with a directory, a fresh trainer takes over from a checkpoint after two."""
    rank, sizes = torch.distributed.get_rank(), {"ranks": tiny.LAYOUTS[layout][0]}
    parallel.initialize(arguments(layout))
    trainer = trainer_of(layout)
    for index in range(4):
        if index == 2 and directory:
            state = {
                "model": unwrap_model(trainer.chunks[0]).state_dict(),
                "optimizer": trainer.optimizer.state_dict(),
            }
            checkpoint.save(directory, 2, rank, state, sizes=sizes, barrier=torch.distributed.barrier)
            trainer = trainer_of(layout)
            loaded = checkpoint.load(directory, 2, rank)
            if "model" not in forget:
                unwrap_model(trainer.chunks[0]).load_state_dict(loaded["model"])
            if "optimizer" not in forget:
                trainer.optimizer.load_state_dict(loaded["optimizer"])
        step(trainer, index)
    return gather_hf_state(trainer.chunks, tiny.tiny_config())


@pytest.mark.parametrize("layout", ["one", "tp2", "pp2"])
def test_a_resumed_run_is_the_same_run(tmp_path, layout):
    ranks = tiny.LAYOUTS[layout][0]
    straight = run_ranks(train_four, ranks, layout, None)[0]
    resumed = run_ranks(train_four, ranks, layout, tmp_path)[0]
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_control_each_part_of_the_checkpoint_matters(tmp_path, part):
    straight = run_ranks(train_four, 1, "one", None)[0]
    resumed = run_ranks(train_four, 1, "one", tmp_path, (part,))[0]
    assert not all(torch.equal(straight[name], resumed[name]) for name in straight)
