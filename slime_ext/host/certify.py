"""Certifies each push of weights: whether the engines sample from the trainer's weights.

A certificate costs no forward pass. The trainer scores the first rollout after a push anyway, before its
first optimizer step, with the same weights that sampled it. So the k3 over those tokens, in nats, measures
numerics alone. Older responses (asynchronous training) say nothing about the push.

SGLang also reports a checksum of each tensor (``check_weights`` of the host's engines). If a tensor keeps its
checksum although the trainer stepped, the push did not reach it.

    slime_ext: certificate, weights 3: sound: k3 2.1e-06 nats over 5,120 tokens; 22 of 22 tensors changed
    slime_ext: certificate, weights 4: NOT sound: layer 1 did not change with the push: k3 0.013 nats ...
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import torch

from slime_ext.core.metrics.names import PREFIX
from slime_ext.host import wrapping
from slime_ext.host.current import current_host
from slime_ext.host.memory import Memory
from slime_ext.host.ranks import global_rank
from slime_ext.hosts import running

TIMEOUT_S = 60.0  # for the engines' checksums
LIMIT = 1e-2  # nats; numerics alone do not explain a larger k3 (docs/metrics.md)
TIMES = 10.0  # a k3 of more than this many times the first certificate's is a fault,
FLOOR = 1e-6  # unless it is below this, in nats, because then it is rounding
LAYER = re.compile(r"\blayers?\.(\d+)\.")
STILL = re.compile(r"norm|bias")  # not compared, because bfloat16 rounds small steps near 1 away
NAMED = 4  # places that a line lists before it says "and N more"
log = logging.getLogger("slime_ext")


@dataclass(frozen=True)
class Arrival:
    """Holds what the engines' checksums say about a push."""

    summary: str  # how many tensors changed, or why that is not known
    still: tuple[str, ...] = ()  # tensors that kept their checksum although the trainer stepped
    fault: str = ""  # what is wrong with the push; empty if the checksums show no fault


@dataclass
class PushRecord:
    """Remembers the pushes of a run, in one process of the trainer."""

    version: int | None = None  # of the latest push, as the host counts; None if the host does not count
    steps: int = 0  # optimizer steps of this process so far
    steps_at: dict[int, int] = field(default_factory=dict)  # version -> ``steps`` when it was pushed
    arrival: Arrival = field(default_factory=lambda: Arrival("no checksums: not asked"))
    is_due: bool = False  # the latest push has no certificate yet
    asked: Any = None  # the engines' pending answers, on the rank that asked
    has_moved: bool = False  # the optimizer has stepped since the previous push
    first: float | None = None  # k3 of the first certificate, nats
    sums: dict[str, str] = field(default_factory=dict)  # tensor -> checksum after the latest push
    moved: set[str] = field(default_factory=set)  # tensors that a push has changed

    def pushed(self, version: int) -> None:
        """Records a push, or the weights that the process starts with."""
        self.version, self.steps_at[version] = version, self.steps

    def steps_since(self, version: int) -> float:
        """Counts the optimizer steps since this trainer pushed a version; NaN if it never did."""
        before = self.steps_at.get(version)
        return math.nan if before is None else float(self.steps - before)

    def arrived(self, engines: Sequence[Mapping[str, str]]) -> Arrival:
        """Finds what a push changed, from the checksums that each engine reports after it."""
        checksums, previous = engines[0], self.sums
        tensors = [name for name in checksums if not STILL.search(name)]
        apart = [name for name in tensors if any(other.get(name) != checksums[name] for other in engines[1:])]
        fault = f"the engines differ from each other in {places(apart)}" if apart else ""
        stepped = self.has_moved and bool(previous)
        self.sums, self.has_moved = dict(checksums), False
        if not stepped:
            return Arrival(f"{len(tensors)} tensors in the engine", fault=fault)
        still = tuple(name for name in tensors if checksums[name] == previous.get(name))
        lost = [name for name in still if name in self.moved]
        self.moved.update(set(tensors) - set(still))
        summary = f"{len(tensors) - len(still)} of {len(tensors)} tensors changed with the push"
        if len(still) == len(tensors):
            return Arrival(summary, still, fault or "no tensor of the engine changed with the push")
        summary += f", not {places(still)}" if still else ""
        return Arrival(
            summary, still, fault or (f"{places(lost)} did not change with the push" if lost else "")
        )

    def judged(self, scalars: Mapping[str, float]) -> tuple[bool | None, str]:
        """Judges the latest push by the metrics of the first optimizer step after it.

        Returns:
            Whether the push is sound (None if the metrics cannot tell), and the text of the certificate.
        """
        arrival, k3 = self.arrival, scalars[PREFIX + "k3_kl"]
        text = f"k3 {k3:.2g} nats over {scalars[PREFIX + 'tokens']:,.0f} tokens"
        known = scalars.get(PREFIX + "staleness_known_fraction", 1.0)
        age = scalars.get(PREFIX + "staleness_max") if known == 1 else None
        if age != 0:
            older = "of unknown versions" if age is None else f"up to {age:.0f} pushes old"
            text = f"{text} {older}, which say nothing about this push; {arrival.summary}"
            return (False, f"{arrival.fault}: {text}") if arrival.fault else (None, text)
        text += "" if self.first is None else f", {self.first:.2g} at first"
        cause = arrival.fault
        if not k3 <= LIMIT or (self.first is not None and k3 > max(TIMES * self.first, FLOOR)):
            parted = "engine and trainer differ: other weights, another temperature, or other numerics"
            still = f"{places(arrival.still)} did not change with the push" if arrival.still else parted
            cause = cause or still
        if cause:
            return False, f"{cause}: {text}; {arrival.summary}"
        self.first = k3 if self.first is None else self.first
        return True, f"{text}; {arrival.summary}"


PUSHES = Memory(PushRecord)


def pushes() -> PushRecord:
    """Returns this process's record of its pushes."""
    return PUSHES.value


def install() -> None:
    """Wraps the host's classes that push weights, so that every push is recorded; idempotent."""
    for cls in running.weight_updaters(current_host()):
        wrapping.wrap(cls, "__init__", _noting)


def _noting(make: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        # slime sets this number right afterwards: a trainer that --release-train makes goes on counting.
        start = getattr(_args_of(self), "update_weight_start_version", None)
        pushes().pushed(self.weight_version if start is None else start)
        # The method of the object is wrapped, not that of the class, because a subclass that the host imports
        # later calls its parent's method.
        wrapping.wrap(self, "update_weights", functools.partial(_certified, self))

    return __init__


def _certified(updater: Any, push: Callable[..., Any]) -> Callable[..., Any]:
    def update_weights(*args: Any, **kwargs: Any) -> Any:
        before = updater.weight_version
        done = push(*args, **kwargs)
        if updater.weight_version != before:  # later miles' protocols can skip a push
            after_push(updater.weight_version, _engines(updater) if _can_compare(_args_of(updater)) else ())
        return done

    return update_weights


def _engines(updater: Any) -> Sequence[Any]:
    """Returns the engines that an updater pushes to. Later miles keeps them in the updater's protocol."""
    return getattr(getattr(updater, "protocol", updater), "rollout_engines", None) or ()


def _args_of(updater: Any) -> Any:
    return getattr(updater, "args", None)


def _can_compare(args: Any) -> bool:
    """Tells whether the engines' checksums after a push are those of the pushed weights.

    Checksums do not cover adapters. A full push by disk writes files, which the engines load later.
    """
    transport, mode = (getattr(args, f"update_weight_{name}", None) for name in ("transport", "mode"))
    return not getattr(args, "lora_rank", 0) and (transport, mode) != ("disk", "full")


def count_step() -> None:
    """Counts an optimizer step. Every rank that trains calls it."""
    pushes().steps += 1


def note_step(optimizer: Any) -> None:
    """Records that the optimizer moved the weights. With a learning rate of 0 it does not."""
    groups = getattr(optimizer, "param_groups", None)
    pushes().has_moved |= groups is None or any(group.get("lr", 1) for group in groups)


def after_push(version: int, engines: Sequence[Any]) -> None:
    """Asks the engines for their checksums. ``settle`` takes the answers later, when they have arrived."""
    record = pushes()
    record.pushed(version)
    record.is_due, record.asked = True, ()
    if not global_rank():  # every rank knows the engines, and one of them asks
        try:
            record.asked = [_ask(engine.check_weights) for engine in engines]
        except Exception as error:  # a missing answer must not end the run
            record.asked = error


def _ask(check_weights: Any) -> Any:
    """Asks an engine for its checksums, without waiting: a Ray actor, or a client of later miles."""
    if hasattr(check_weights, "remote"):
        return check_weights.remote("checksum")
    # The client keeps a connection per event loop, so the question goes into the loop that the host keeps.
    host = current_host()
    loop = running.find_function(host.name, "get_async_loop") if host else None
    if loop is None:
        raise LookupError("no event loop of the host")
    return asyncio.run_coroutine_threadsafe(check_weights("checksum"), loop().loop)


def settle() -> None:
    """Takes the engines' answers and shares them with all ranks. Every rank of the trainer calls it."""
    record = pushes()
    if record.asked is None:
        return
    shared = [_arrival(record.asked)]
    if global_rank() is not None:
        try:
            torch.distributed.broadcast_object_list(shared, src=0, group=_host_group())
        except (RuntimeError, ValueError):  # the group does not hold these ranks
            log.debug("not shared", exc_info=True)
            shared = [Arrival("no checksums: the trainer's ranks share no process group")]
    record.arrival, record.asked = shared[0], None


def _arrival(asked: Any) -> Arrival:
    try:
        if isinstance(asked, Exception):
            raise asked
        if not asked:
            return Arrival("no checksums: not asked")
        checksums = [_checksums(reply) for reply in _replies(asked) if reply is not None]
    except Exception as error:  # from Ray or the engine: a release without checksums, a dead engine
        log.debug("no checksums", exc_info=True)
        return Arrival(f"no checksums: asking the engines failed with {type(error).__name__}")
    if not checksums or not checksums[0]:
        return Arrival("no checksums: this engine reports none")
    return pushes().arrived(checksums)


def _replies(asked: Sequence[Any]) -> Sequence[Any]:
    """Waits for the engines' answers, which come from Ray or from an event loop.

    Raises:
        TimeoutError: an engine has not answered within ``TIMEOUT_S``.
    """
    if not isinstance(asked[0], futures.Future):
        replies: Sequence[Any] = sys.modules["ray"].get(asked, timeout=TIMEOUT_S)
        return replies
    futures.wait(asked, TIMEOUT_S)
    return [answer.result(0) for answer in asked]


def _checksums(reply: Mapping[str, Any]) -> dict[str, str]:
    """Joins each tensor's checksums over the ranks of one engine, without a draft model's."""
    joined: dict[str, str] = {}
    for rank in reply.get("ranks") or ():
        for name, checksum in rank["checksums"].items():
            if not name.startswith("draft"):
                joined[name] = f"{joined.get(name, '')}{checksum} "
    return joined


def _host_group() -> Any:
    """Returns the CPU group of all the trainer's ranks. The host waits on it in every push."""
    host = current_host()
    get = running.find_function(host.name, "get_gloo_group") if host else None
    return get() if get else None


def of_step(scalars: Mapping[str, float], step_id: int, *, is_first: bool) -> dict[str, float]:
    """Issues the certificate that is due at the first optimizer step after a push.

    Args:
        scalars: metrics of the step, reduced over all ranks.
        is_first: whether this rank prints the line.

    Returns:
        The certificate's metrics, the same on all ranks; {} if no certificate is due.
    """
    record = pushes()
    was_due, record.is_due = record.is_due, False
    if not was_due or step_id or PREFIX + "k3_kl" not in scalars:
        return {}
    is_sound, words = record.judged(scalars)
    if is_first:
        verdict = {True: "sound", False: "NOT sound", None: "not known"}[is_sound]
        print(f"slime_ext: certificate, weights {record.version}: {verdict}: {words}", flush=True)
    certificate = {} if is_sound is None else {"certified": float(is_sound)}
    if scalars.get(PREFIX + "staleness_max") == 0:
        certificate["certified_k3_kl"] = scalars[PREFIX + "k3_kl"]
    return {PREFIX + name: value for name, value in certificate.items()}


def places(names: Iterable[str]) -> str:
    """Names the layers of tensors, and a tensor itself if it is in no layer.

    >>> places(["model.layers.1.mlp.weight", "model.layers.1.self_attn.weight", "lm_head.weight"])
    'layer 1, lm_head.weight'
    """
    layers = dict.fromkeys(f"layer {m[1]}" if (m := LAYER.search(name)) else name for name in names)
    more = f" and {len(layers) - NAMED} more" if len(layers) > NAMED else ""
    return ", ".join(list(layers)[:NAMED]) + more
