"""Defines ``slime_ext.host.log_rollout`` for ``--custom-rollout-log-function-path``.

It runs in the rollout manager's process, once per rollout, before the trainer gets the samples. It publishes
what the trainer needs and the host does not pass on: the weight versions of the samples, and their heads if
no ``generate`` of ours ran.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from slime_ext.errors import DataError
from slime_ext.host import rollout_heads
from slime_ext.host.published import VERSIONS, store_for_trainer
from slime_ext.host.rollout_data import flat, oldest_of
from slime_ext.hosts import contract, running
from slime_ext.hosts.contract import number_of, versions_of

OF_ROLLOUT, ROLLOUT_STEP = "rollout/off_policy/", "rollout/step"
log = logging.getLogger("slime_ext")


def log_rollout(
    rollout_id: int,
    args: Any,
    samples: Sequence[Any],
    rollout_extra_metrics: dict[str, Any] | None = None,
    rollout_time: float | None = None,
) -> bool:
    """Publishes a rollout's weight versions for the trainer, and adds them to the host's metrics.

    Args:
        samples: the rollout's samples, with slime's field names, as a list or as a list of groups.
        rollout_extra_metrics: the host's dictionary, which gets the values. None, as from slime's fully
            asynchronous rollout function: the host's logger gets the values in a separate call.

    Returns:
        False, so that the host also writes its own log.

    Raises:
        DataError: samples have no log-probs, and the launch calls a hook, which needs them.

    Source: slime makes the call in slime/observability/rollout_metrics.py, the same since v0.2.2.
    """
    samples = list(flat(samples))
    _require_log_probs(args, samples)
    _publish(rollout_id, samples)
    if getattr(args, "load_debug_rollout_data", None):  # no generate runs, which else publishes the heads
        rollout_heads.publish_if_centered(rollout_id, args, samples)
    values = {OF_ROLLOUT + name: value for name, value in version_metrics(samples).items()}
    if rollout_extra_metrics is not None:
        rollout_extra_metrics.update(values)
    elif not getattr(args, "load_debug_rollout_data", None):  # with that flag the host logs nothing
        _log(rollout_id, args, values)
    return False


def _log(rollout_id: int, args: Any, values: dict[str, float]) -> None:
    """Passes metrics to the host's ``log(args, metrics, step_key)``. Without one, it logs a line itself."""
    for module in running.definers("compute_rollout_step", running.loaded()):
        for tracker in running.definers("log", running.modules(module.__name__.partition(".")[0])):
            step = {ROLLOUT_STEP: module.compute_rollout_step(args, rollout_id)}
            tracker.log(args, values | step, step_key=ROLLOUT_STEP)
            return
    listed = ", ".join(f"{name.removeprefix(OF_ROLLOUT)} {value:.4g}" for name, value in values.items())
    log.info("rollout %d: weight versions: %s", rollout_id, listed)


def version_metrics(samples: Sequence[Any]) -> dict[str, float]:
    """Counts the weight versions that sampled a rollout.

    A version that is not a number is skipped; an engine has such a version before its first push.

    Returns:
        ``versions``: the number of different versions. ``mixed``: the share of samples with more than one,
        among those with any. ``no_log_probs``: the share of samples without behavior log-probs.
    """
    known = [versions for sample in samples if (versions := set(_versions(sample)))]
    return {
        "versions": float(len(set().union(*known))),
        "mixed": sum(len(versions) > 1 for versions in known) / max(len(known), 1),
        "no_log_probs": sum(map(_lacks_log_probs, samples)) / max(len(samples), 1),
    }


def _versions(sample: Any) -> list[int]:
    numbers = map(number_of, versions_of(sample.weight_versions))
    return [number for number in numbers if number is not None]


def _lacks_log_probs(sample: Any) -> bool:
    recorded = sample.rollout_log_probs  # a list, or an array from a custom generate function
    return sample.response_length > 0 and (recorded is None or len(recorded) == 0)


def _require_log_probs(args: Any, samples: Sequence[Any]) -> None:
    """Raises DataError if a sample lacks the log-probs that a hook needs.

    Hosts check the first sample only, and drop all log-probs if it has none.
    """
    if not contract.calls_hook(args) or getattr(args, "custom_convert_samples_to_train_data_path", None):
        return
    lacking = [place for place, sample in enumerate(samples) if _lacks_log_probs(sample)]
    if lacking:
        raise DataError(
            f"rollout_log_probs: expected them in every sample of the rollout, got none in {len(lacking)} of "
            f"{len(samples)} samples, such as number {lacking[0]}: fill Sample.rollout_log_probs in your "
            "generate function"
        )


def _publish(rollout_id: int, samples: Sequence[Any]) -> None:
    """Publishes each sample's oldest version to the trainers of the same Ray job."""
    versions_by_index: dict[str, list[Any]] = defaultdict(list)
    for sample in samples:
        versions_by_index[str(getattr(sample, "index", None))] += versions_of(sample.weight_versions)
    oldest = {index: oldest_of(versions) for index, versions in versions_by_index.items()}
    store_for_trainer(VERSIONS, rollout_id, json.dumps(oldest).encode())
