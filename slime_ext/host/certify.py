"""The pushes of this process's weights, and the certificate after each: whether the engines sample from the
weights that the trainer has.

A certificate costs no forward pass. The first rollout that the pushed weights sampled is scored by the
trainer anyway, with those same weights, before its first optimizer step: the distance over its tokens is
numerics alone, k3 in nats. Older responses (asynchronous training) say nothing of the push.

SGLang also reports a checksum of each tensor (``check_weights`` of slime's and miles' engine actors). Tensors
that keep theirs while the trainer steps have not arrived.

    slime_ext: certificate, weights 3: sound: k3 2.1e-06 nats over 5,120 tokens; 22 of 22 tensors changed
    slime_ext: certificate, weights 4: NOT sound: layer 1 did not change with the push: k3 0.013 nats ...
"""

from __future__ import annotations

import functools
import logging
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from slime_ext.core.metrics.names import PREFIX
from slime_ext.host import hosts
from slime_ext.host.session import session

TIMEOUT_S = 60.0  # for the engines' checksums
LIMIT = 1e-2  # nats: above it the policies differ much, whatever their numerics (docs/metrics.md)
TIMES = 10.0  # a distance this many times the first certificate's has grown,
FLOOR = 1e-6  # unless it is below this, nats, where it is rounding
LAYER = re.compile(r"\blayers?\.(\d+)\.")
STILL = re.compile(r"norm|bias")  # vectors of numbers near 1: bfloat16 rounds their small steps away
NAMED = 4  # places that a line names
log = logging.getLogger("slime_ext")


@dataclass(frozen=True)
class Arrival:
    """What the engines hold after a push, against what they held before."""

    summary: str  # how many tensors changed, or why that is not known
    still: tuple[str, ...] = ()  # tensors that kept their checksum while the trainer stepped
    fault: str = ""  # what went wrong with the push, as far as checksums show it


@dataclass
class PushRecord:
    """What is known of a run's pushes, in one process of the trainer."""

    version: int | None = None  # of the latest, by the host's own count; None where nothing counts
    steps: int = 0  # optimizer steps of this process so far
    steps_at: dict[int, int] = field(default_factory=dict)  # version -> the steps before it was pushed
    arrival: Arrival = field(default_factory=lambda: Arrival("no checksums: not asked"))
    is_due: bool = False  # a push has no certificate yet
    asked: Any = None  # what the engines will answer, on the rank that asked
    has_moved: bool = False  # the optimizer stepped since the push before
    first: float | None = None  # the distance of the first certificate, nats
    sums: dict[str, str] = field(default_factory=dict)  # tensor -> checksum after the latest push
    moved: set[str] = field(default_factory=set)  # tensors that a push has changed

    def pushed(self, version: int) -> None:
        """Takes note of a push, or of the weights that the process begins with."""
        self.version, self.steps_at[version] = version, self.steps

    def steps_since(self, version: int) -> float:
        """Optimizer steps that this trainer has taken since it pushed a version; NaN of another's."""
        before = self.steps_at.get(version)
        return math.nan if before is None else float(self.steps - before)

    def arrived(self, engines: Sequence[Mapping[str, str]]) -> Arrival:
        """What a push changed, from the checksums that each engine reports after it."""
        now, before = engines[0], self.sums
        tensors = [name for name in now if not STILL.search(name)]
        apart = [name for name in tensors if any(other.get(name) != now[name] for other in engines[1:])]
        fault = f"the engines differ from each other in {places(apart)}" if apart else ""
        stepped = self.has_moved and bool(before)
        self.sums, self.has_moved = dict(now), False
        if not stepped:
            return Arrival(f"{len(tensors)} tensors in the engine", fault=fault)
        still = tuple(name for name in tensors if now[name] == before.get(name))
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
        """Whether the latest push is sound, from the metrics of the first optimizer step after it, and the
        words for it; None where nobody can say."""
        arrival, k3 = self.arrival, scalars[PREFIX + "k3_kl"]
        text = f"k3 {k3:.2g} nats over {scalars[PREFIX + 'tokens']:,.0f} tokens"
        known = scalars.get(PREFIX + "staleness_known_fraction", 1.0)
        age = scalars.get(PREFIX + "staleness_max") if known == 1 else None
        if age != 0:
            older = "of unknown versions" if age is None else f"up to {age:.0f} pushes old"
            text = f"{text} {older}, which say nothing of this push; {arrival.summary}"
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


def pushes() -> PushRecord:
    """What is known of the pushes of this process."""
    if session.pushes is None:
        session.pushes = PushRecord()
    return session.pushes


def install() -> None:
    """Takes note of the object that pushes weights when this process's host makes it, and of every push of
    it; idempotent."""
    for cls in hosts.weight_updaters():
        hosts.wrap(cls, "__init__", _noting)


def _noting(make: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        pushes().pushed(self.weight_version)
        # Of the object: hosts import classes that push in another way later, and these call their parents'.
        hosts.wrap(self, "update_weights", functools.partial(_certified, self))

    return __init__


def _certified(updater: Any, push: Callable[..., Any]) -> Callable[..., Any]:
    def update_weights(*args: Any, **kwargs: Any) -> Any:
        done = push(*args, **kwargs)
        engines = getattr(updater, "rollout_engines", None) or ()
        sees = not getattr(getattr(updater, "args", None), "lora_rank", 0)  # checksums leave adapters out
        after_push(updater.weight_version, engines if sees else ())
        return done

    return update_weights


def count_step() -> None:
    """Counts an optimizer step; on all ranks that train."""
    pushes().steps += 1


def note_step(optimizer: Any) -> None:
    """Takes note of an optimizer step; one with a learning rate of 0 moves nothing."""
    groups = getattr(optimizer, "param_groups", None)
    pushes().has_moved |= groups is None or any(group.get("lr", 1) for group in groups)


def after_push(version: int, engines: Sequence[Any]) -> None:
    """Asks the engines what they hold now; ``settle`` takes the answers, which by then are there."""
    record = pushes()
    record.pushed(version)
    record.is_due, record.asked = True, ()
    if not hosts.rank():  # every rank knows the engines
        try:
            record.asked = [engine.check_weights.remote("checksum") for engine in engines]
        except Exception as error:  # no run ends because nobody answers
            record.asked = error


def settle() -> None:
    """Takes the answers to a push that has no certificate yet; on all ranks of the trainer."""
    record = pushes()
    if record.asked is None:
        return
    found = [_arrival(record.asked)]
    if hosts.rank() is not None:
        try:
            torch.distributed.broadcast_object_list(found, src=0, group=_host_group())
        except (RuntimeError, ValueError):  # ranks of another group
            log.debug("not shared", exc_info=True)
            found = [Arrival("no checksums: the ranks have no group in common")]
    record.arrival, record.asked = found[0], None


def _arrival(asked: Any) -> Arrival:
    try:
        if isinstance(asked, Exception):
            raise asked
        replies = sys.modules["ray"].get(asked, timeout=TIMEOUT_S) if asked else ()
        found = [_checksums(reply) for reply in replies if reply is not None]
    except Exception as error:  # Ray's and the engine's: a release without checksums, a dead engine
        log.debug("no checksums", exc_info=True)
        return Arrival(f"no checksums: the engine answers with {type(error).__name__}")
    if not found or not found[0]:
        return Arrival("no checksums: this engine reports none")
    return pushes().arrived(found)


def _checksums(reply: Mapping[str, Any]) -> dict[str, str]:
    """Tensor -> its checksums on all ranks of one engine, without those of a draft model."""
    found: dict[str, str] = {}
    for rank in reply.get("ranks") or ():
        for name, checksum in rank["checksums"].items():
            if not name.startswith("draft"):
                found[name] = f"{found.get(name, '')}{checksum} "
    return found


def _host_group() -> Any:
    """The host's group of all its trainer's ranks on the CPU, on which it waits in every push."""
    host = hosts.current()
    get = hosts.function_of(host.name, "get_gloo_group") if host else None
    return get() if get else None


def of_step(scalars: Mapping[str, float], step_id: int, *, is_first: bool) -> dict[str, float]:
    """The certificate, due with the first optimizer step after a push: its line is printed on the first rank,
    its metrics are the same on all; {} where none is due.

    Args:
        scalars: of the step, over all ranks.
    """
    record = pushes()
    was_due, record.is_due = record.is_due, False
    if not was_due or step_id or PREFIX + "k3_kl" not in scalars:
        return {}
    is_sound, words = record.judged(scalars)
    if is_first:
        verdict = {True: "sound", False: "NOT sound", None: "not known"}[is_sound]
        print(f"slime_ext: certificate, weights {record.version}: {verdict}: {words}", flush=True)
    found = {} if is_sound is None else {"certified": float(is_sound)}
    if scalars.get(PREFIX + "staleness_max") == 0:
        found["certified_k3_kl"] = scalars[PREFIX + "k3_kl"]
    return {PREFIX + name: value for name, value in found.items()}


def places(names: Iterable[str]) -> str:
    """Tensors by layer, where they have one.

    >>> places(["model.layers.1.mlp.weight", "model.layers.1.self_attn.weight", "lm_head.weight"])
    'layer 1, lm_head.weight'
    """
    found = dict.fromkeys(f"layer {m[1]}" if (m := LAYER.search(name)) else name for name in names)
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return ", ".join(list(found)[:NAMED]) + more
