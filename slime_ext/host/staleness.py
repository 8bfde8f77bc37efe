"""How many weight versions old the weights are that sampled a sequence.

slime counts the pushes of the trainer's weights to the engines, and an engine says with every answer which
push it runs. A patched host (docs/patches.md) passes the latter to the hook. The former is a number of the
object that pushes; ``install`` takes note of that object when the host makes it.

Without the patch the samples' versions stay in the rollout manager's process. There ``log_rollout``
(``slime_ext.host.log_rollout`` for ``--custom-rollout-log-function-path``) logs them and leaves how many
samples each has in the key-value store of Ray's cluster, where ``of_rollout`` finds them in the trainer's
processes: ages of a whole rollout, for its metrics.
"""

from __future__ import annotations

import json
import logging
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slime_ext.core.state import Tokens
from slime_ext.errors import ConfigError, DataError
from slime_ext.host import contract, hosts
from slime_ext.host.contract import HookCall, number_of, versions_of
from slime_ext.ops.segments import to_device

PATCH = "apply the patch of your release (docs/patches.md): it passes the rollout's weight versions on"
LOG = "custom_rollout_log_function_path"
NAMESPACE = b"slime_ext"
WAITING = 16  # rollouts that may wait for the trainer
PREFIX, STEP = "rollout/off_policy/", "rollout/step"
# Where hosts keep ``log`` and ``compute_rollout_step``: slime, slime up to v0.3.1, miles, miles-rl 0.0.2.
TRACKERS = (
    ("slime.observability.logging_utils", "slime.observability.metric_utils"),
    ("slime.utils.logging_utils", "slime.utils.metric_utils"),
    ("miles.utils.tracking_utils.tracking", "miles.utils.metric_utils"),
    ("miles.utils.tracking_utils", "miles.utils.metric_utils"),
)
log = logging.getLogger("slime_ext")

_published: dict[str, list[tuple[int | None, int]]] = {}
_pusher: weakref.ref[Any] | None = None


def install() -> None:
    """Takes note of the object that pushes weights when this process's host makes it; again is once."""
    host = hosts.current()
    module = sys.modules.get(host.actor) if host else None
    for name, cls in list(vars(module).items()) if module else ():
        if isinstance(cls, type) and name.startswith("UpdateWeight"):
            hosts.wrap(cls, "__init__", _noting)


def _noting(make: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        global _pusher
        make(self, *args, **kwargs)
        _pusher = weakref.ref(self)

    return __init__


def current() -> int | None:
    """The trainer's weight version, that of the last push; None where nothing says it."""
    version = getattr(_pusher() if _pusher else None, "weight_version", None)
    return version if isinstance(version, int) else None


def ages_of(call: HookCall) -> Tensor | None:
    """[S] float64: the trainer's version less that of the oldest weights that sampled the sequence.

    NaN for a sample without versions, and for one of weights that this trainer has not pushed yet: a replayed
    rollout is of another run. None where no sample can have an age.
    """
    now = current()
    if call.weight_versions is None or now is None:
        return None
    ages = torch.tensor([_age(names, now) for names in call.weight_versions], dtype=torch.float64)
    return to_device(ages, call.pg_loss.device)


def _age(names: Any, now: int) -> float:
    versions = [number_of(version) for version in versions_of(names)]
    if not versions or None in versions or min(versions) > now:
        return float("nan")
    return float(now - min(versions))


def with_ages(tokens: Tokens, call: HookCall, *, required: bool) -> Tokens:
    """The tokens with their sequences' ages.

    Raises:
        ConfigError: they are ``required`` and not known.
    """
    ages = ages_of(call)
    if required and call.weight_versions is None:
        raise ConfigError(f"max_staleness: expected weight_versions in the hook call, got none: {PATCH}")
    if required and ages is None:
        raise ConfigError(
            "max_staleness: expected the trainer's weight version, got none: --custom-megatron-init-path "
            "slime_ext.host.init takes note of it"
        )
    return replace(tokens, ages=ages)


def require_host(host: hosts.Host | None, who: str = "max_staleness", remedy: str = PATCH) -> None:
    """Stops, at start-up, ``who`` needs the ages of a host that drops the versions on their way to the hook.

    Raises:
        ConfigError: by the host's source it does.
    """
    if host is not None and "weight_versions" not in host.source(host.loss):
        raise ConfigError(
            f"{who}: expected a {host.name} that hands weight_versions to the hook, got one that "
            f"does not: {remedy}"
        )


def of_rollout(rollout_id: int | None) -> dict[str, float]:
    """Mean and largest age of a rollout's samples, and the fraction whose age is known; {} where none is."""
    store, now = _store(), current()
    text = store._internal_kv_get(_key(), namespace=NAMESPACE) if store and now is not None else None
    counts = json.loads(text or "{}").get(str(rollout_id), [])
    known = [(now - version, count) for version, count in counts if version is not None and version <= now]
    if not known:
        return {}
    total = sum(count for _, count in known)
    return {
        "staleness_mean": sum(age * count for age, count in known) / total,
        "staleness_max": float(max(age for age, _ in known)),
        "staleness_known_fraction": total / sum(count for _, count in counts),
    }


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
    _publish(rollout_id, [min(_versions(sample), default=None) for sample in samples])
    values = {PREFIX + name: value for name, value in version_metrics(samples).items()}
    if rollout_extra_metrics is not None:
        rollout_extra_metrics.update(values)
    elif not getattr(args, "load_debug_rollout_data", None):  # with which the host logs nothing
        _log(rollout_id, args, values)
    return False


def version_metrics(samples: Sequence[Any]) -> dict[str, float]:
    """How many weight versions sampled a rollout.

    A version that is not a number (an engine before its first push) is left out.

    Returns:
        ``versions`` that occur, ``mixed`` the share of samples with more than one version, ``no_log_probs``
        the share of samples that came without behavior log-probs.
    """
    known = [found for sample in samples if (found := set(_versions(sample)))]
    return {
        "versions": float(len(set().union(*known))),
        "mixed": sum(len(found) > 1 for found in known) / max(len(known), 1),
        "no_log_probs": sum(map(_lacks_log_probs, samples)) / max(len(samples), 1),
    }


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


def _publish(rollout_id: int, oldest: Sequence[int | None]) -> None:
    """Leaves the oldest version of each of a rollout's samples for the trainer's processes of the same Ray
    job; else does nothing."""
    store = _store()
    if store is None:
        return
    _published[str(rollout_id)] = list(Counter(oldest).items())
    for key in list(_published)[:-WAITING]:
        del _published[key]
    store._internal_kv_put(_key(), json.dumps(_published).encode(), namespace=NAMESPACE)


def _store() -> Any:
    """The key-value store of the Ray cluster that this process belongs to; None where it belongs to none."""
    store = sys.modules.get("ray.experimental.internal_kv")
    return store if store is not None and store._internal_kv_initialized() else None


def _key() -> bytes:
    return f"weight_versions:{sys.modules['ray'].get_runtime_context().get_job_id()}".encode()


def _log(rollout_id: int, args: Any, values: dict[str, float]) -> None:
    for tracker, steps in TRACKERS:
        if tracker in sys.modules and steps in sys.modules:
            step = {STEP: sys.modules[steps].compute_rollout_step(args, rollout_id)}
            sys.modules[tracker].log(args, values | step, step_key=STEP)
            return
    listed = ", ".join(f"{name.removeprefix(PREFIX)} {value:.4g}" for name, value in values.items())
    log.info("rollout %d: weight versions: %s", rollout_id, listed)


def _lacks_log_probs(sample: Any) -> bool:
    recorded = sample.rollout_log_probs  # a list, or an array of a custom generate function
    return sample.response_length > 0 and (recorded is None or len(recorded) == 0)


def _versions(sample: Any) -> list[int]:
    found = map(number_of, versions_of(sample.weight_versions))
    return [number for number in found if number is not None]


def _flat(samples: Iterable[Any]) -> Iterable[Any]:
    for entry in samples:
        if isinstance(entry, list):
            yield from _flat(entry)
        else:
            yield entry
