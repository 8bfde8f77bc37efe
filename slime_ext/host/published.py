"""Passes data about a rollout from the rollout manager's process to the trainers of the same Ray job.

The data lie in the key-value store of Ray's cluster. Without Ray both are one process, and its memory serves.
"""

from __future__ import annotations

import sys
from typing import Any

from slime_ext.host.memory import Memory

NAMESPACE = b"slime_ext"
VERSIONS, HEADS = "weight_versions", "heads"
WAITING = {VERSIONS: 16, HEADS: 4}  # the most rollouts whose data wait for the trainer
# The data that the rollout publishes for the trainer, if there is no Ray.
PUBLISHED: Memory[dict[bytes, bytes]] = Memory(dict)


def store_for_trainer(what: str, rollout_id: int, data: bytes) -> None:
    """Publishes data about a rollout to the trainers of the same Ray job.

    It keeps the data of the last ``WAITING`` rollouts.
    """
    key, data = _key(what, rollout_id), b"%d %b" % (rollout_id, data)
    if (kv := store()) is None:
        PUBLISHED.value[key] = data
    else:
        kv._internal_kv_put(key, data, namespace=NAMESPACE)


def fetch_for_trainer(what: str, rollout_id: int) -> bytes | None:
    """Reads what ``store_for_trainer`` published about a rollout. Returns None if that is nothing."""
    key, kv = _key(what, rollout_id), store()
    published = PUBLISHED.value.get(key) if kv is None else kv._internal_kv_get(key, namespace=NAMESPACE)
    owner, _, data = (published or b"").partition(b" ")
    return data if owner == b"%d" % rollout_id else None


def store() -> Any:
    """Returns the key-value store of this process's Ray cluster, or None outside of Ray."""
    kv = sys.modules.get("ray.experimental.internal_kv")
    return kv if kv is not None and kv._internal_kv_initialized() else None


def _key(what: str, rollout_id: int) -> bytes:
    job = sys.modules["ray"].get_runtime_context().get_job_id() if store() else ""
    return f"{what}:{job}:{rollout_id % WAITING[what]}".encode()
