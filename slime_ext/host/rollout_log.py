"""``slime_ext.host.log_rollout`` for ``--custom-rollout-log-function-path``: how stale a rollout is.

It runs in the process that holds the samples, which alone knows the weight versions on every host.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from slime_ext.host.versions import number_of, versions_of

PREFIX, STEP = "rollout/off_policy/", "rollout/step"
# Where hosts keep ``log`` and ``compute_rollout_step``: slime, slime up to v0.3.1, miles.
TRACKERS = (
    ("slime.observability.logging_utils", "slime.observability.metric_utils"),
    ("slime.utils.logging_utils", "slime.utils.metric_utils"),
    ("miles.utils.tracking_utils.tracking", "miles.utils.metric_utils"),
)
log = logging.getLogger("slime_ext")


def log_rollout(
    rollout_id: int,
    args: Any,
    samples: Sequence[Any],
    rollout_extra_metrics: dict[str, Any] | None = None,
    rollout_time: float | None = None,
) -> bool:
    """Adds the spread of weight versions to the metrics that the host is about to log.

    Args:
        samples: the rollout's samples, under slime's field names; a list of groups is as good.
        rollout_extra_metrics: the host's dictionary, added to in place; where a rollout function gives none
            (slime's fully asynchronous one), the host's logger gets the values by themselves.

    Returns:
        False, so that the host's own log goes on.

    Source: the call is slime's, slime/observability/rollout_metrics.py, the same since v0.2.2.
    """
    values = {PREFIX + name: value for name, value in spread(list(_flat(samples))).items()}
    if rollout_extra_metrics is not None:
        rollout_extra_metrics.update(values)
    elif not getattr(args, "load_debug_rollout_data", None):  # with which the host logs nothing
        _hand_over(rollout_id, args, values)
    return False


def _hand_over(rollout_id: int, args: Any, values: dict[str, float]) -> None:
    for tracker, steps in TRACKERS:
        if tracker in sys.modules and steps in sys.modules:
            at = {STEP: sys.modules[steps].compute_rollout_step(args, rollout_id)}
            return sys.modules[tracker].log(args, values | at, step_key=STEP)
    told = ", ".join(f"{name.removeprefix(PREFIX)} {value:.4g}" for name, value in values.items())
    return log.info("rollout %d: weight versions: %s", rollout_id, told)


def spread(samples: Sequence[Any]) -> dict[str, float]:
    """How many pushes of weights lie between a rollout's samples.

    The lag of a sample is the newest version of the rollout less the oldest that sampled a part of it. Where
    a host keeps versions by token each token has its own lag, else that of its sample. A version that is not
    a number (an engine before its first push) is left out.

    Returns:
        ``versions`` that occur, ``lag_mean`` and ``lag_max`` over samples, ``lag_tokens`` the mean over
        response tokens, ``mixed`` the share of samples with more than one version, ``no_log_probs`` the share
        of samples that came without behavior log-probs.
    """
    known = [set(numbers) for sample in samples if (numbers := _versions(sample.weight_versions))]
    every = set().union(*known)
    newest = max(every, default=0)
    lags = [newest - min(numbers) for numbers in known]
    by_token = chain.from_iterable(_token_lags(sample, newest) for sample in samples)
    return {
        "versions": float(len(every)),
        "lag_mean": _mean(lags),
        "lag_max": float(max(lags, default=0)),
        "lag_tokens": _mean(list(by_token)),
        "mixed": _mean([len(numbers) > 1 for numbers in known]),
        "no_log_probs": _mean([_lacks_log_probs(sample) for sample in samples]),
    }


def _lacks_log_probs(sample: Any) -> bool:
    recorded = sample.rollout_log_probs  # a list, or an array of a custom generate function
    return sample.response_length > 0 and (recorded is None or len(recorded) == 0)


def _token_lags(sample: Any, newest: int) -> list[int]:
    by_token = _versions(getattr(sample, "token_weight_versions", ()))
    if by_token:
        return [newest - number for number in by_token]
    numbers = _versions(sample.weight_versions)
    return [newest - min(numbers)] * sample.response_length if numbers else []


def _versions(names: Any) -> list[int]:
    return [number for name in versions_of(names) if (number := number_of(name)) is not None]


def _flat(samples: Iterable[Any]) -> Iterable[Any]:
    for entry in samples:
        if isinstance(entry, list):
            yield from _flat(entry)
        else:
            yield entry


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
