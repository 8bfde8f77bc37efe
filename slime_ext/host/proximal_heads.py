"""Reads the proximal policy's log-probs at the sampler's head, in the host's own log-prob pass.

``center`` on PPO's loss needs them. If a rollout is one optimizer step, they equal the target's. If it has
several steps, the host scores the rollout's samples before the first one:

    train_actor(self, rollout_id, rollout_data, ...)
        forward_only(get_log_probs_and_entropy, args, model, data_iterator, num_microbatches, store_prefix="")

A wrapper around ``forward_only`` reads the head's log-probs from the same logits, in the same pass. It skips
the passes of a reference or a teacher, which have another ``store_prefix``. It removes the log-probs from
what the host stores, because the host logs the mean of each column. A wrapper around ``train_actor`` knows
the rollout, and drops the log-probs when the rollout ends, because slime releases the device's memory then.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch

from slime_ext.errors import ConfigError, DataError
from slime_ext.host import heads, wrapping
from slime_ext.host.heads import SCORED, ScoredRollout
from slime_ext.host.ranks import Parallel, ranks
from slime_ext.host.rollout_data import Samples, column
from slime_ext.host.train_step import reporter_of
from slime_ext.hosts import running
from slime_ext.hosts.code import SCORE, TARGET

COLUMN = "slime_ext_proximal_heads"  # in the log-prob pass's results, until the pass returns
PARAMETERS = ("f", "args", "data_iterator", "num_microbatches", "store_prefix")


def install(host: running.Host) -> None:
    """Wraps the host's log-prob pass and its method that trains a rollout; idempotent."""
    for module in running.modules(host.name):  # a module that imported the function calls its own reference
        if isinstance(vars(module).get(SCORE), FunctionType):
            wrapping.wrap(module, SCORE, functools.partial(_gathering, host))
    for cls, name in running.trainers(host):
        wrapping.wrap(cls, name, _of_rollout)


def _of_rollout(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def train_actor(*positional: Any, **named: Any) -> Any:
        rollout_id = signature.bind(*positional, **named).arguments.get("rollout_id")
        # Either another host's method of this name, or a parent's method that a subclass's method has called.
        if rollout_id is None or SCORED.value is not None:
            return function(*positional, **named)
        SCORED.value = ScoredRollout(rollout_id)
        try:
            return function(*positional, **named)
        finally:
            SCORED.value = None

    return train_actor


def _gathering(host: running.Host, function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def forward_only(*positional: Any, **named: Any) -> Any:
        bound = signature.bind(*positional, **named)
        bound.apply_defaults()
        scored, call = SCORED.value, bound.arguments
        if scored is None or not _is_read(call) or not (here := ranks()).is_last_stage:
            return function(*positional, **named)
        iterator = (call["data_iterator"] or [None])[0]
        rollout = getattr(iterator, "rollout_data", None)
        if rollout is None:
            raise ConfigError(
                f"center: expected a data_iterator with the rollout's data (rollout_data), got "
                f"{type(iterator).__name__}: the proximal policy's log-probs at the head cannot be read; use "
                "one optimizer step per rollout (--num-steps-per-rollout 1)"
            )
        center = reporter_of(call["args"]).setup.correction.center
        assert center is not None  # ``_is_read`` has checked it
        rows = _rows_of(rollout, scored.rollout_id, center.top_k)
        call["f"] = _with_heads(call["f"], rollout, rows, host, here.context)
        columns = function(*bound.args, **bound.kwargs)
        values = columns.pop(COLUMN)
        indices = column(rollout.get("sample_indices"), len(values))
        scored.by_index = dict(zip(indices, values, strict=True))
        return columns

    return forward_only


def _is_read(call: Mapping[str, Any]) -> bool:
    """Tells whether ``center`` reads this pass.

    It does if the pass scores the actor's samples, and several steps train them.
    """
    args = call.get("args")
    if args is None or not reporter_of(args).setup.reads_proximal_head:
        return False
    if missing := [name for name in PARAMETERS if name not in call]:
        raise ConfigError(
            f"center: expected {SCORE}({', '.join(PARAMETERS)}), got none of {', '.join(missing)}: "
            "this release is not known; use one optimizer step per rollout (--num-steps-per-rollout 1)"
        )
    is_moved = len(call["num_microbatches"]) > 1 or bool(getattr(args, "keep_old_actor", False))
    name = getattr(inspect.unwrap(call["f"]), "__name__", "")
    return is_moved and name == TARGET and not call["store_prefix"]


def _rows_of(
    rollout: Mapping[str, Any], rollout_id: int, top_k: int
) -> Sequence[heads.Rows | heads.SupportRows]:
    """Finds the head or support of each sample of a rollout."""
    samples = Samples(indices=column(rollout.get("sample_indices"), len(rollout["tokens"])))
    return heads.of_step(rollout_id, samples, top_k)


def _with_heads(
    function: Callable[..., Any],
    rollout: Mapping[str, Any],
    rows: Sequence[heads.Rows | heads.SupportRows],
    host: running.Host,
    parallel: Parallel,
) -> Callable[..., Any]:
    """Wraps the host's function of logits to return log-probs at the head, too.

    It adds a column to the function's result, with a tensor per sample.
    """
    places = {id(tokens): place for place, tokens in enumerate(rollout["tokens"])}

    def get_log_probs_and_entropy(*positional: Any, **named: Any) -> Any:
        result = function(*positional, **named)
        known = [
            place for tokens in named["unconcat_tokens"] if (place := places.get(id(tokens))) is not None
        ]
        if len(known) != len(named["unconcat_tokens"]):
            raise DataError(
                "center: expected a log-prob pass over the rollout's own samples, got other samples, whose "
                "heads are not known: use one optimizer step per rollout (--num-steps-per-rollout 1)"
            )
        batch = {"loss_masks": [rollout["loss_masks"][place] for place in known]} | named
        with torch.no_grad():
            of_batch = [rows[place] for place in known]
            held, sizes = heads.gathered(of_batch, batch, positional[0], named, host, parallel)
        made = result[1] if isinstance(result, tuple) else result  # a bare dict up to v0.2.2 and in miles
        made[COLUMN] = list(torch.split(held.trainer.detach(), sizes))
        return result

    return get_log_probs_and_entropy
