"""``slime_ext.host.log_rollout`` for ``--custom-rollout-log-function-path``: which weights sampled a rollout.

It runs in the rollout manager's process, which alone knows the samples' weight versions on every host. The
trainer's version when it trains on them is not known yet: ``staleness`` takes the versions to the trainer.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from slime_ext.errors import DataError
from slime_ext.host import contract, staleness
from slime_ext.host.versions import number_of, versions_of

PREFIX, STEP = "rollout/off_policy/", "rollout/step"
# Where hosts keep ``log`` and ``compute_rollout_step``: slime, slime up to v0.3.1, miles, miles-rl 0.0.2.
TRACKERS = (
    ("slime.observability.logging_utils", "slime.observability.metric_utils"),
    ("slime.utils.logging_utils", "slime.utils.metric_utils"),
    ("miles.utils.tracking_utils.tracking", "miles.utils.metric_utils"),
    ("miles.utils.tracking_utils", "miles.utils.metric_utils"),
)
log = logging.getLogger("slime_ext")


def log_rollout(
    rollout_id: int,
    args: Any,
    samples: Sequence[Any],
    rollout_extra_metrics: dict[str, Any] | None = None,
    rollout_time: float | None = None,
) -> bool:
    """Adds the weight versions to the metrics that the host is about to log, and leaves them for the trainer.

    Args:
        samples: the rollout's samples, under slime's field names; a list of groups is as good.
        rollout_extra_metrics: the host's dictionary, added to in place; where a rollout function gives none
            (slime's fully asynchronous one), the host's logger gets the values by themselves.

    Returns:
        False, so that the host's own log goes on.

    Raises:
        DataError: samples without log-probs, where a correction needs them.

    Source: the call is slime's, slime/observability/rollout_metrics.py, the same since v0.2.2.
    """
    samples = list(_flat(samples))
    _require_log_probs(args, samples)
    oldest = [min(_versions(sample.weight_versions), default=None) for sample in samples]
    staleness.publish(rollout_id, oldest)
    values = {PREFIX + name: value for name, value in spread(samples).items()}
    if rollout_extra_metrics is not None:
        rollout_extra_metrics.update(values)
    elif not getattr(args, "load_debug_rollout_data", None):  # with which the host logs nothing
        _hand_over(rollout_id, args, values)
    return False


def _require_log_probs(args: Any, samples: Sequence[Any]) -> None:
    """Hosts look at the first sample alone: without log-probs there they drop those of all others."""
    if not contract.calls_hook(args) or getattr(args, "custom_convert_samples_to_train_data_path", None):
        return
    lacking = [place for place, sample in enumerate(samples) if _lacks_log_probs(sample)]
    if lacking:
        raise DataError(
            f"rollout_log_probs: expected them in every sample of the rollout, got none in {len(lacking)} of "
            f"{len(samples)}, the first is {lacking[0]}: a custom generate function has to fill them in"
        )


def _hand_over(rollout_id: int, args: Any, values: dict[str, float]) -> None:
    for tracker, steps in TRACKERS:
        if tracker in sys.modules and steps in sys.modules:
            at = {STEP: sys.modules[steps].compute_rollout_step(args, rollout_id)}
            return sys.modules[tracker].log(args, values | at, step_key=STEP)
    told = ", ".join(f"{name.removeprefix(PREFIX)} {value:.4g}" for name, value in values.items())
    return log.info("rollout %d: weight versions: %s", rollout_id, told)


def spread(samples: Sequence[Any]) -> dict[str, float]:
    """How many weight versions sampled a rollout.

    A version that is not a number (an engine before its first push) is left out.

    Returns:
        ``versions`` that occur, ``mixed`` the share of samples with more than one version, ``no_log_probs``
        the share of samples that came without behavior log-probs.
    """
    known = [set(numbers) for sample in samples if (numbers := _versions(sample.weight_versions))]
    return {
        "versions": float(len(set().union(*known))),
        "mixed": _mean([len(numbers) > 1 for numbers in known]),
        "no_log_probs": _mean([_lacks_log_probs(sample) for sample in samples]),
    }


def _lacks_log_probs(sample: Any) -> bool:
    recorded = sample.rollout_log_probs  # a list, or an array of a custom generate function
    return sample.response_length > 0 and (recorded is None or len(recorded) == 0)


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
