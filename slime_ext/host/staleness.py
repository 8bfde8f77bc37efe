"""Finds the age of a sequence's weights, in weight versions and in optimizer steps.

The trainer counts its pushes of weights to the engines, and an engine writes the number of its push into
every answer. The answer stays in the rollout manager's process. There ``log_rollout``
(``slime_ext.host.log_rollout`` for ``--custom-rollout-log-function-path``) publishes the oldest version of
each sample, by its index, in the key-value store of Ray's cluster. The trainer looks its samples up there. If
the host's batches carry the versions (miles; a patched slime), those are used. The trainer's own version is
that of its latest push (``certify``).

With --update-weights-interval K the engines have the latest push, and the trainer is up to K rollouts ahead
of it. So at each push the trainer also records how many optimizer steps it has taken.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slime_ext.core.correction import Correction
from slime_ext.core.state import Tokens
from slime_ext.errors import ConfigError, DataError
from slime_ext.host import certify, contract, hosts
from slime_ext.host.contract import INIT_FLAG, LOG_FLAG, number_of, versions_of
from slime_ext.host.rollout_data import Batch, Samples
from slime_ext.host.session import session
from slime_ext.ops.segments import to_device

NAMESPACE = b"slime_ext"
VERSIONS, HEADS = "weight_versions", "heads"
WAITING = {VERSIONS: 16, HEADS: 4}  # the most rollouts whose data wait for the trainer
OF_ROLLOUT, ROLLOUT_STEP = "rollout/off_policy/", "rollout/step"
log = logging.getLogger("slime_ext")


def samples_of(batch: Batch, rollout_id: int | None = None) -> Samples:
    """Identifies a batch's samples, with the oldest version of each if known."""
    samples = Samples.of(batch)
    if (carried := batch.get("weight_versions")) is not None:
        return replace(samples, versions=[_oldest(names) for names in carried])
    data = None if rollout_id is None else fetch_for_trainer(VERSIONS, rollout_id)
    known: dict[str, int | None] = json.loads(data or b"{}")  # the same on every rank
    return replace(samples, versions=[known.get(str(index)) for index in samples.indices if known])


def with_ages(
    tokens: Tokens, loss_masks: Sequence[Tensor], correction: Correction, samples: Samples
) -> Tokens:
    """Adds the ages of the sequences to the tokens.

    An age in versions is the trainer's version minus that of the oldest weights that sampled the sequence. An
    age in steps is the number of optimizer steps since the trainer pushed those weights. Both are NaN for a
    sample without versions, and for a version above the trainer's, because such a rollout comes from another
    run. The age in steps is also NaN for weights that were pushed before this process started.

    Args:
        loss_masks: show which of ``samples`` the tokens belong to.

    Raises:
        ConfigError: the correction needs the ages and no sample's is known.
    """
    places = samples.places(loss_masks) if samples.versions else None
    versions = [samples.versions[place] for place in places or ()]
    current = certify.pushes().version
    if current is None or not versions:
        if correction.needs_ages:
            raise ConfigError(
                "max_staleness: expected weight versions from the trainer and the samples, got none from the "
                f"{'trainer' if current is None else 'samples'}: add {INIT_FLAG} and {LOG_FLAG}; a "
                "custom generate function has to keep Sample.index and Sample.weight_versions"
            )
        return tokens
    known = [None if v is None or v > current else v for v in versions]
    ages = [
        [math.nan, math.nan] if v is None else [current - v, certify.pushes().steps_since(v)] for v in known
    ]
    table = to_device(torch.tensor(ages, dtype=torch.float64), tokens.segments.mask.device)
    return replace(tokens, ages=table[:, 0], age_steps=table[:, 1])


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
        from slime_ext.host import rollout_heads

        rollout_heads.publish_if_centered(rollout_id, args, samples)
    values = {OF_ROLLOUT + name: value for name, value in version_metrics(samples).items()}
    if rollout_extra_metrics is not None:
        rollout_extra_metrics.update(values)
    elif not getattr(args, "load_debug_rollout_data", None):  # with that flag the host logs nothing
        _log(rollout_id, args, values)
    return False


def _log(rollout_id: int, args: Any, values: dict[str, float]) -> None:
    """Passes metrics to the host's ``log(args, metrics, step_key)``. Without one, it logs a line itself."""
    for module in hosts.definers("compute_rollout_step"):
        for tracker in hosts.definers("log", module.__name__.partition(".")[0]):
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
    oldest = {index: _oldest(versions) for index, versions in versions_by_index.items()}
    store_for_trainer(VERSIONS, rollout_id, json.dumps(oldest).encode())


def store_for_trainer(what: str, rollout_id: int, data: bytes) -> None:
    """Publishes data about a rollout to the trainers of the same Ray job.

    It keeps the data of the last ``WAITING`` rollouts.
    """
    key, data = _key(what, rollout_id), b"%d %b" % (rollout_id, data)
    if (kv := store()) is None:
        session.published[key] = data
    else:
        kv._internal_kv_put(key, data, namespace=NAMESPACE)


def fetch_for_trainer(what: str, rollout_id: int) -> bytes | None:
    """Reads what ``store_for_trainer`` published about a rollout. Returns None if that is nothing."""
    key, kv = _key(what, rollout_id), store()
    published = session.published.get(key) if kv is None else kv._internal_kv_get(key, namespace=NAMESPACE)
    owner, _, data = (published or b"").partition(b" ")
    return data if owner == b"%d" % rollout_id else None


def store() -> Any:
    """Returns the key-value store of this process's Ray cluster, or None outside of Ray."""
    kv = sys.modules.get("ray.experimental.internal_kv")
    return kv if kv is not None and kv._internal_kv_initialized() else None


def _key(what: str, rollout_id: int) -> bytes:
    job = sys.modules["ray"].get_runtime_context().get_job_id() if store() else ""
    return f"{what}:{job}:{rollout_id % WAITING[what]}".encode()


def _versions(sample: Any) -> list[int]:
    numbers = map(number_of, versions_of(sample.weight_versions))
    return [number for number in numbers if number is not None]


def _oldest(names: Any) -> int | None:
    """Finds the oldest of a sample's versions. Returns None unless every version is a number."""
    versions = [number for name in versions_of(names) if (number := number_of(name)) is not None]
    return None if len(versions) < len(versions_of(names)) else min(versions, default=None)


def flat(samples: Iterable[Any]) -> Iterable[Any]:
    for entry in samples:
        if isinstance(entry, list):
            yield from flat(entry)
        else:
            yield entry
