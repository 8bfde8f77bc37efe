"""What a correction of one's own returns is named in one line when it is wrong."""

from __future__ import annotations

import pytest
import torch

from slime_ext.errors import DataError
from slime_ext.testing.hooks import check_returned
from tests import oracle
from tests.test_tis import as_slime_calls

WRONG = {
    "None": (lambda c: None, "(pg_loss, loss_masks, metrics), got None"),
    "two": (lambda c: (c["pg_loss"], {}), "got a tuple of 2"),
    "shape": (lambda c: (c["pg_loss"][1:], c["loss_masks"], {}), "returned pg_loss: expected a tensor of"),
    "sum": (lambda c: (c["pg_loss"].sum(), c["loss_masks"], {}), "got one of shape []"),
    "detached": (lambda c: (c["pg_loss"].detach(), c["loss_masks"], {}), "expected a gradient"),
    "no masks": (lambda c: (c["pg_loss"], None, {}), "returned loss_masks: expected a list of {} tensors"),
    "few masks": (lambda c: (c["pg_loss"], c["loss_masks"][1:], {}), "expected a list of {} tensors, got"),
    "short mask": (
        lambda c: (c["pg_loss"], [m[1:] for m in c["loss_masks"]], {}),
        "returned loss_masks[0] (full response): expected",
    ),
    "no metrics": (lambda c: (c["pg_loss"], c["loss_masks"], None), "expected a mapping of names"),
    "number": (lambda c: (c["pg_loss"], c["loss_masks"], {"m": 0.5}), "returned metrics['m']: expected"),
    "scalar": (lambda c: (c["pg_loss"], c["loss_masks"], {"m": torch.ones(())}), "got one of shape []"),
    "taken": (lambda c: (c["pg_loss"], c["loss_masks"], {"tokens": c["pg_loss"]}), "expected no 'tokens'"),
}


def checked(answer):
    call = as_slime_calls(oracle.random_batch(0))
    call["pg_loss"] = call["pg_loss"].detach().requires_grad_()
    lengths = call["response_lengths"]
    return check_returned("mine.hook", answer(call), call["pg_loss"], lengths, frozenset({"tokens"})), lengths


@pytest.mark.parametrize("name", WRONG)
def test_what_the_hook_returns_is_looked_at(name):
    answer, expected = WRONG[name]
    with pytest.raises(DataError) as error:
        checked(answer)
    lengths = as_slime_calls(oracle.random_batch(0))["response_lengths"]
    assert expected.format(len(lengths)) in str(error.value) and "\n" not in str(error.value)


def test_what_fits_is_passed_on():
    (loss, masks, metrics), lengths = checked(
        lambda c: (2 * c["pg_loss"], tuple(c["loss_masks"]), {"m": c["pg_loss"].detach()})
    )
    assert loss.requires_grad and len(masks) == len(lengths) and set(metrics) == {"m"}
