"""Defines two steps and a hook of your own. docs/your_own_correction.md explains them.

python examples/own/corrections.py    # compares them with their definitions in plain Python
"""

import math
from dataclasses import dataclass

import torch

from slime_ext import Correction, correct
from slime_ext.steps import Effect, Need, Step
from slime_ext.testing import check_hook, check_step


@dataclass(frozen=True)
class Tempered(Step):
    """Sets the weights to ratio_t ** power: 0 is no correction, 1 is importance sampling."""

    power: float = 0.5

    effects = frozenset({Effect.REWEIGHT})

    def __call__(self, state, inputs):
        return state.reweight("token", (self.power * inputs.log_ratio).exp())


def tempered(sample, power=0.5):
    """Defines the weights of ``Tempered`` over one response, in floats, for the comparison."""
    return [math.exp(power * (p - b)) for p, b in zip(sample.proximal, sample.behavior, strict=True)]


@dataclass(frozen=True)
class Centered(Step):
    """Sets the weights to ratio_t / geometric mean of the optimizer step's ratios."""

    needs = frozenset({Need.WHOLE_STEP})
    effects = frozenset({Effect.REWEIGHT})

    def number_for_step(self, batches, all_sum):
        """Computes the mean log-ratio of the optimizer step: [] float64."""
        shares = []
        for _, inputs in batches:
            log_ratio = torch.where(inputs.usable, inputs.log_ratio, 0).double()
            shares.append(torch.stack([log_ratio.sum(), inputs.usable.sum().double()]))
        total, count = all_sum(sum(shares)).unbind()
        return total / count.clamp(min=1)

    def __call__(self, state, inputs):
        return state.reweight("token", (inputs.log_ratio - inputs.plan[self]).exp())


def half_tis(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
    """Multiplies the loss by min(sqrt(proximal / behavior), 2), for --custom-tis-function-path."""
    log_ratio = torch.cat(list(train_log_probs)) - torch.cat(list(rollout_log_probs))
    mask = torch.cat(list(loss_masks)) != 0
    weight = torch.where(mask, 0.5 * log_ratio, 0).exp().clamp(max=2).detach()
    return pg_loss * weight, loss_masks, {"half_tis/weight": weight}


if __name__ == "__main__":
    check_step(Tempered(power=0.5), tempered)
    check_step(Centered())
    behavior, proximal = torch.zeros(2), torch.tensor([0.0, math.log(4)])  # ratios 1 and 4, geometric mean 2
    weighted, _, _ = correct(torch.ones(2), behavior, proximal, [1, 1], Correction(steps=(Centered(),)))
    torch.testing.assert_close(weighted, torch.tensor([0.5, 2.0]))
    check_hook(half_tis, lambda sample: [min(w, 2) for w in tempered(sample)])
    print("all agree with their definitions")
