"""torch's Adam with a state before its first step, so that a checkpoint can be loaded into it.

Stands for the Adam of Transformer Engine or apex, which every release of slime and miles trains with: it
counts steps per group of parameters. For torch's, Megatron-LM (core/optimizer/distrib_optimizer.py:664) reads
the count from the parameters' state, also before it loads (--load), when there is none yet.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.optim import Optimizer


def fill_before_loading(module: ModuleType) -> None:
    """Lets a distributed optimizer give its Adam a state before it says what it would load."""
    shard = module.DistributedOptimizer.sharded_state_dict

    def sharded_state_dict(self: object, *args: object, **options: object) -> object:
        if not module.HAVE_APEX_OR_TE:
            fill(self.optimizer)
        return shard(self, *args, **options)

    module.DistributedOptimizer.sharded_state_dict = sharded_state_dict


def fill(optimizer: Optimizer) -> None:
    """Gives parameters without a state that of zero steps."""
    import torch

    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(parameter.data)
                state["exp_avg_sq"] = torch.zeros_like(parameter.data)
