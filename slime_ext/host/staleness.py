"""How many weight versions old the weights are that sampled a sequence.

slime counts the pushes of the trainer's weights to the engines, and an engine says with every answer which
push it runs. The hook gets the latter where patch 0002 lets it through. The former is a number that the host
keeps in the object which pushes; ``install`` takes note of that object when the host makes it.

Without the patch the samples' versions stay in the rollout manager's process. ``publish`` leaves how many
samples each of them has in the key-value store of Ray's cluster, where ``of_rollout`` finds them in the
trainer's processes: ages of a whole rollout, for its metrics.
"""

from __future__ import annotations

import functools
import json
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slime_ext.errors import ConfigError
from slime_ext.host import contract, hosts
from slime_ext.host.contract import HookCall
from slime_ext.host.functions import flag_of
from slime_ext.host.versions import number_of, versions_of
from slime_ext.ops.segments import to_device
from slime_ext.state import Tokens

MARK = "_noted_by_slime_ext"
PATCH = "apply patch 0002 (slime-ext patch apply DIR), which lets the rollout's weight versions through"
LOG = "custom_rollout_log_function_path"

NAMESPACE = b"slime_ext"
KEPT = 16  # rollouts that may wait for the trainer

_published: dict[str, list[tuple[int | None, int]]] = {}
_pusher: weakref.ref[Any] | None = None
_version: int | None = None


def install() -> None:
    """Takes note of the object that pushes weights when this process's host makes it; again is once."""
    host = hosts.current()
    module = sys.modules.get(host.actor) if host else None
    for name, cls in list(vars(module).items()) if module else ():
        if isinstance(cls, type) and name.startswith("UpdateWeight") and not hasattr(cls.__init__, MARK):
            cls.__init__ = _noting(cls.__init__)


def set_trainer_version(version: int | None) -> None:
    """Sets the trainer's weight version, from a caller that knows it; None: the host's pushing object
    knows."""
    global _version
    _version = version


def current() -> int | None:
    """The trainer's weight version, that of the last push; None where nothing says it."""
    if _version is not None:
        return _version
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
    ages = torch.tensor([_age(spans, now) for spans in call.weight_versions], dtype=torch.float64)
    return to_device(ages, call.pg_loss.device)


def with_ages(tokens: Tokens, call: HookCall, *, required: bool) -> Tokens:
    """The tokens with their sequences' ages.

    Raises:
        ConfigError: they are ``required`` and nobody knows them.
    """
    ages = ages_of(call)
    if required:
        require(call, ages)
    return replace(tokens, ages=ages)


def publish(rollout_id: int, oldest: Sequence[int | None]) -> None:
    """Leaves a rollout's weight versions for the trainer's processes of the same Ray job; else does nothing.

    Args:
        oldest: per sample the oldest version that sampled a part of it; None where it is not known.
    """
    store = _store()
    if store is None:
        return
    _published[str(rollout_id)] = list(Counter(oldest).items())
    for key in list(_published)[:-KEPT]:
        del _published[key]
    store._internal_kv_put(_key(), json.dumps(_published).encode(), namespace=NAMESPACE)


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


def require(call: HookCall, ages: Tensor | None) -> None:
    """Stops where a correction bounds ages that nobody knows.

    Raises:
        ConfigError: with what to do about it.
    """
    if call.weight_versions is None:
        raise ConfigError(f"max_staleness: expected weight_versions in the hook call, got none: {PATCH}")
    if ages is None:
        raise ConfigError(
            "max_staleness: expected the trainer's weight version, got none: --custom-megatron-init-path "
            "slime_ext.host.init takes note of it"
        )


def require_host(host: hosts.Host | None, who: str = "max_staleness", remedy: str = PATCH) -> None:
    """The same at start-up, from the host's source.

    Args:
        who: what needs the ages.

    Raises:
        ConfigError: this host drops the versions on their way to the hook.
    """
    if host is not None and "weight_versions" not in host.source(host.loss):
        raise ConfigError(
            f"{who}: expected a {host.name} that hands weight_versions to the hook, got one that "
            f"does not: {remedy}"
        )


def require_guard(args: Any, host: hosts.Host | None, who: str) -> None:
    """The same for a guard, for which the ages of a whole rollout are enough."""
    if getattr(args, LOG, None) != contract.OURS[LOG]:
        require_host(host, who, f"add {flag_of(LOG)} {contract.OURS[LOG]}")


def _age(spans: Any, now: int) -> float:
    versions = [number_of(version) for version in versions_of(spans)]
    if not versions or None in versions:
        return float("nan")
    age = now - min(versions)
    return float(age) if age >= 0 else float("nan")


def _store() -> Any:
    """The key-value store of the Ray cluster that this process belongs to; None where it belongs to none."""
    store = sys.modules.get("ray.experimental.internal_kv")
    return store if store is not None and store._internal_kv_initialized() else None


def _key() -> bytes:
    return f"weight_versions:{sys.modules['ray'].get_runtime_context().get_job_id()}".encode()


def _noting(make: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        global _pusher
        make(self, *args, **kwargs)
        _pusher = weakref.ref(self)

    setattr(__init__, MARK, make)
    return __init__
