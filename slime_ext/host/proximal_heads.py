"""The proximal policy's log-probs at the sampler's head, from the host's own log-prob pass.

``center`` on PPO's loss reads them. Where a rollout is one optimizer step they are the target's. With more,
the host scores the rollout's samples before the first of them:

    train_actor(self, rollout_id, rollout_data, ...)
        forward_only(get_log_probs_and_entropy, args, model, data_iterator, num_microbatches, store_prefix="")

A wrapper around the second reads the head's log-probs off the same logits, in the same pass; those of a
reference or a teacher (another ``store_prefix``) it leaves alone. It takes them out of what the host stores,
because the host logs the mean of each column. The one around the first knows the rollout, and forgets them
when it ends: between rollouts slime takes the device's memory away.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from slime_ext.errors import ConfigError, DataError
from slime_ext.host import heads, hosts
from slime_ext.host.rollout_data import Samples, column
from slime_ext.host.session import session
from slime_ext.host.train_step import reporter_of

COLUMN = "slime_ext_proximal_heads"  # of what the log-prob pass stores, until it returns
PARAMETERS = ("f", "args", "data_iterator", "num_microbatches", "store_prefix")


@dataclass
class ScoredRollout:
    """A rollout that the host scores and trains: what the log-prob pass said of its heads, by sample index;
    None before it."""

    rollout_id: int
    by_index: dict[Any, Tensor] | None = None


def install(host: hosts.Host) -> None:
    """Wraps the host's log-prob pass, and what scores and trains a rollout; idempotent."""
    for module in hosts.modules(host.name):  # each that has it among its globals calls its own
        if isinstance(vars(module).get(hosts.SCORE), FunctionType):
            hosts.wrap(module, hosts.SCORE, _gathering)
    for cls in hosts.trainers():
        hosts.wrap(cls, hosts.TRAIN, _of_rollout)


def _of_rollout(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def train_actor(*given: Any, **named: Any) -> Any:
        rollout_id = signature.bind(*given, **named).arguments.get("rollout_id")
        # Another host's method of that name; or a subclass's, which calls its parent's.
        if rollout_id is None or session.scored is not None:
            return function(*given, **named)
        session.scored = ScoredRollout(rollout_id)
        try:
            return function(*given, **named)
        finally:
            session.scored = None

    return train_actor


def _gathering(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def forward_only(*given: Any, **named: Any) -> Any:
        bound = signature.bind(*given, **named)
        bound.apply_defaults()
        scored, call = session.scored, bound.arguments
        if scored is None or not _is_read(call) or not hosts.ranks().is_last_stage:
            return function(*given, **named)
        iterator = (call["data_iterator"] or [None])[0]
        rollout = getattr(iterator, "rollout_data", None)
        if rollout is None:
            raise ConfigError(
                f"center: expected a data_iterator with the rollout's data (rollout_data), got "
                f"{type(iterator).__name__}: the proximal policy's log-probs at the head are not known; use "
                "one optimizer step per rollout"
            )
        center = reporter_of(call["args"]).setup.correction.center
        assert center is not None  # as ``_is_read`` found
        call["f"] = _with_heads(call["f"], rollout, scored.rollout_id, center.top_k)
        found = function(*bound.args, **bound.kwargs)
        values = found.pop(COLUMN)
        indices = column(rollout.get("sample_indices"), len(values))
        scored.by_index = dict(zip(indices, values, strict=True))
        return found

    return forward_only


def _is_read(call: Mapping[str, Any]) -> bool:
    """Whether ``center`` reads what this pass says: the proximal policy's of the actor's samples, where they
    are trained in several steps."""
    args = call.get("args")
    if args is None or not reporter_of(args).setup.reads_proximal_head:
        return False
    if missing := [name for name in PARAMETERS if name not in call]:
        raise ConfigError(
            f"center: expected {hosts.SCORE}({', '.join(PARAMETERS)}), got none of {', '.join(missing)}: "
            "this release is not known; use one optimizer step per rollout"
        )
    is_moved = len(call["num_microbatches"]) > 1 or bool(getattr(args, "keep_old_actor", False))
    name = getattr(inspect.unwrap(call["f"]), "__name__", "")
    return is_moved and name == hosts.TARGET and not call["store_prefix"]


def _with_heads(
    function: Callable[..., Any], rollout: Mapping[str, Any], rollout_id: int, top_k: int
) -> Callable[..., Any]:
    """The host's function of a micro-batch's logits, with one more column: a tensor per sample."""
    samples = Samples(indices=column(rollout.get("sample_indices"), len(rollout["tokens"])))
    rows = heads.of_step(rollout_id, samples, top_k)
    places = {id(tokens): place for place, tokens in enumerate(rollout["tokens"])}

    def get_log_probs_and_entropy(*given: Any, **named: Any) -> Any:
        result = function(*given, **named)
        own = [place for tokens in named["unconcat_tokens"] if (place := places.get(id(tokens))) is not None]
        if len(own) != len(named["unconcat_tokens"]):
            raise DataError(
                "center: expected a log-prob pass over the rollout's own samples, got others: their heads "
                "are not known"
            )
        batch = {"loss_masks": [rollout["loss_masks"][place] for place in own]} | named
        with torch.no_grad():
            held, sizes = heads.gathered([rows[place] for place in own], batch, given[0], named)
        made = result[1] if isinstance(result, tuple) else result  # a bare dict up to v0.2.2 and in miles
        made[COLUMN] = list(torch.split(held.trainer.detach(), sizes))
        return result

    return get_log_probs_and_entropy
