"""What user functions hand back to the loss is named in one line when it is wrong."""

from __future__ import annotations

import pytest
import torch

from slime_ext.errors import DataError
from tests.launcher.megatron.test_loss import batch_and_logits, make, one_process

__all__ = ["one_process"]  # a fixture

WRONG = {
    "None": (lambda c: None, "(pg_loss, loss_masks, metrics), got None"),
    "two": (lambda c: (c["pg_loss"], {}), "got a tuple of 2"),
    "shape": (lambda c: (c["pg_loss"][1:], c["loss_masks"], {}), "returned pg_loss: expected a tensor of"),
    "sum": (lambda c: (c["pg_loss"].sum(), c["loss_masks"], {}), "got one of shape []"),
    "detached": (lambda c: (c["pg_loss"].detach(), c["loss_masks"], {}), "expected a gradient"),
    "no masks": (lambda c: (c["pg_loss"], None, {}), "returned loss_masks: expected a list of 8 tensors"),
    "few masks": (lambda c: (c["pg_loss"], c["loss_masks"][1:], {}), "got a list of 7"),
    "short mask": (
        lambda c: (c["pg_loss"], [m[1:] for m in c["loss_masks"]], {}),
        "returned loss_masks[0] (full response): expected",
    ),
    "no metrics": (lambda c: (c["pg_loss"], c["loss_masks"], None), "expected a mapping of names"),
    "number": (lambda c: (c["pg_loss"], c["loss_masks"], {"m": 0.5}), "returned metrics['m']: expected"),
    "scalar": (lambda c: (c["pg_loss"], c["loss_masks"], {"m": torch.ones(())}), "got one of shape []"),
    "taken": (lambda c: (c["pg_loss"], c["loss_masks"], {"tokens": c["pg_loss"]}), "got 'tokens'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_the_hook_returns_is_looked_at(name):
    answer, expected = WRONG[name]
    batch, logits = batch_and_logits()
    with pytest.raises(DataError) as error:
        make(hook=lambda **call: answer(call)).policy(batch, logits)
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_metrics_that_change_between_micro_batches_are_named():
    names = iter(["a", "b"])
    batch, logits = batch_and_logits()
    loss = make(hook=lambda **c: (c["pg_loss"], c["loss_masks"], {next(names): c["pg_loss"].detach()}))
    loss.policy(batch, logits)
    with pytest.raises(DataError, match="expected the metrics a in every micro-batch, got b"):
        loss.policy(batch, logits)
