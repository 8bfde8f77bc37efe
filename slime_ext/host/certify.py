"""The certificate after every weight push: whether the engines sample from the weights that the trainer has.

It costs no forward pass. The first rollout that the pushed weights sampled is scored by the trainer anyway,
with those same weights, before its first optimizer step: the distance over its tokens is numerics alone, k3
in nats. Where the responses are older than the push (asynchronous training), nothing at hand has been sampled
by it, and the distance says nothing of it.

What arrived is asked of the engines: SGLang reports a checksum of each tensor (``check_weights`` of slime's
and miles' engine actors; SGLang's /weights_checker, action ``checksum``). Tensors that keep
theirs while the trainer steps have not arrived; checksums of an earlier push are an earlier copy.

    slime_ext: certificate, weights 3: sound: k3 2.1e-06 nats over 5,120 tokens; 22 of 22 tensors changed
    slime_ext: certificate, weights 4: NOT sound: layer 1 did not change with the push: k3 0.013 nats ...
"""

from __future__ import annotations

import logging
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from slime_ext.core.metrics.names import PREFIX
from slime_ext.host import hosts

TIMEOUT_S = 60.0  # for the engines' checksums
LIMIT = 1e-2  # nats: above it the policies differ much, whatever their numerics (docs/metrics.md)
TIMES = 10.0  # a distance this many times the first certificate's has grown,
FLOOR = 1e-6  # unless it is below this, nats, where it is rounding
BIASED, SURE = 0.01, 10.0  # the mean ratio is this far from 1, and by this many standard errors
LAYER = re.compile(r"\blayers?\.(\d+)\.")
STILL = re.compile(r"norm|bias")  # vectors of numbers near 1: bfloat16 rounds their small steps away
NAMED = 4  # places that a line names
log = logging.getLogger("slime_ext")


@dataclass(frozen=True)
class Arrival:
    """What the engines hold after a push, against what they held before."""

    total: int = 0  # tensors that a step of the optimizer moves
    still: tuple[str, ...] = ()  # those of them whose checksum is as before
    again: int | None = None  # the earlier push whose checksums all of them have
    lost: tuple[str, ...] = ()  # those of ``still`` that an earlier push has changed; all if nothing changed
    apart: tuple[str, ...] = ()  # tensors that differ between engines
    stepped: bool = False  # whether the optimizer stepped since the push before
    why: str = ""  # the reason if nothing of this is known

    def fault(self) -> str:
        """What went wrong with the push, as far as checksums show it; empty for nothing."""
        if self.apart:
            return f"the engines differ from each other in {places(self.apart)}"
        if self.again is not None:
            return f"the engine holds the weights of push {self.again} again"
        if self.lost and len(self.lost) == self.total:
            return "no tensor of the engine changed with the push"
        return f"{places(self.lost)} did not change with the push" if self.lost else ""

    def summary(self) -> str:
        """How many of the engine's tensors changed with the push, or why that is not known."""
        if self.why:
            return f"no checksums: {self.why}"
        if not self.stepped:
            return f"{self.total} tensors in the engine"
        left = f", not {places(self.still)}" if 0 < len(self.still) < self.total else ""
        return f"{self.total - len(self.still)} of {self.total} tensors changed with the push{left}"


@dataclass
class Certificates:
    """What is known of a run's pushes, in one process of the trainer."""

    version: int | None = None
    arrival: Arrival | None = None
    is_due: bool = False  # a push has no certificate yet
    asked: Any = None  # what the engines will answer, on the rank that asked
    has_moved: bool = False  # the optimizer stepped since the push before
    first: float | None = None  # the distance of the first certificate, nats
    sums: dict[str, str] = field(default_factory=dict)  # tensor -> checksum after the latest push
    moved: set[str] = field(default_factory=set)  # tensors that a push has changed
    seen: dict[int, int] = field(default_factory=dict)  # hash of all checksums -> its push
    cost: float = 0.0  # seconds
    since: float = field(default_factory=time.monotonic)

    def arrived(self, version: int | None, engines: Sequence[Mapping[str, str]]) -> Arrival:
        """What a push changed, from the checksums that each engine reports after it."""
        now = engines[0]
        tensors = [name for name in now if not STILL.search(name)]
        apart = tuple(name for name in tensors if any(other.get(name) != now[name] for other in engines[1:]))
        still = tuple(name for name in tensors if now[name] == self.sums.get(name))
        stepped = self.has_moved and bool(self.sums)
        earlier = self.seen.setdefault(_hash_of(now), version or 0)
        nothing = len(still) == len(tensors)
        lost = still if nothing else tuple(name for name in still if name in self.moved)
        again = earlier if earlier != (version or 0) and not nothing else None
        if stepped:
            self.moved.update(set(tensors) - set(still))
        self.sums, self.has_moved = dict(now), False
        return Arrival(len(tensors), still, again, lost if stepped else (), apart, stepped)

    def judged(self, scalars: Mapping[str, float]) -> tuple[bool | None, str]:
        """Whether the latest push is sound, from the metrics of the first optimizer step after it, and the
        words for it; None where nobody can say."""
        arrival = self.arrival or Arrival(why="not asked")
        k3, tokens = scalars[PREFIX + "k3_kl"], int(scalars[PREFIX + "tokens"])
        is_known = scalars.get(PREFIX + "staleness_known_fraction", 1.0) == 1.0
        age = scalars.get(PREFIX + "staleness_max") if is_known else None
        distance = f"k3 {k3:.2g} nats over {tokens:,} tokens"
        fault = arrival.fault()
        if age != 0:
            older = "of unknown versions" if age is None else f"up to {age:.0f} pushes old"
            text = f"{distance} {older}, which say nothing of this push"
            return (False, f"{fault}: {text}") if fault else (None, f"{text}; {arrival.summary()}")
        grown = self.first is not None and k3 > max(TIMES * self.first, FLOOR)
        if fault or grown or not k3 <= LIMIT:
            cause = fault or self._cause(scalars, arrival, grown)
            return False, f"{cause}: {distance}{self._compared()}; {arrival.summary()}"
        words = f"{distance}{self._compared()}; {arrival.summary()}"
        self.first = k3 if self.first is None else self.first
        return True, words

    def _cause(self, scalars: Mapping[str, float], arrival: Arrival, grown: bool) -> str:
        """The first cause that is plain, for a distance that is too large."""
        if arrival.still and arrival.stepped:
            return f"{places(arrival.still)} did not change with the push"
        if _is_biased(scalars):
            return (
                "the engine's log-probs are not of the policy that sampled (mean ratio "
                f"{scalars[PREFIX + 'ratio_mean']:.3f}): temperature, top-p or top-k"
            )
        if grown:
            return "what the engine samples from has parted from the trainer"
        return "engine and trainer differ from the first push on: other weights, or other numerics"

    def _compared(self) -> str:
        return "" if self.first is None else f", {self.first:.2g} at first"

    def share(self) -> str:
        """The seconds that certificates cost since the last one, as a share of the time; starts anew."""
        now = time.monotonic()
        text = f"{self.cost:.3f} s, {self.cost / max(now - self.since, 1e-9):.2%} of the time"
        self.cost, self.since = 0.0, now
        return text


_run = Certificates()


def reset() -> None:
    """As in a new process; for tests."""
    global _run
    _run = Certificates()


def install() -> None:
    """Asks for checksums whenever this process's host has pushed its weights; idempotent."""
    for cls in hosts.weight_updaters():
        hosts.wrap(cls, "update_weights", _certified)


def note_step(optimizer: Any) -> None:
    """Takes note of an optimizer step; one with a learning rate of 0 moves nothing."""
    groups = getattr(optimizer, "param_groups", None)
    _run.has_moved |= groups is None or any(group.get("lr", 1) for group in groups)


def after_push(version: int | None, engines: Sequence[Any]) -> None:
    """Asks the engines what they hold now; ``settle`` takes the answers, which by then are there."""
    if version is not None and version == _run.version:
        return  # a class that calls its parent's
    began = time.monotonic()
    _run.version, _run.is_due, _run.asked = version, True, None
    if _asks():
        try:
            _run.asked = [engine.check_weights.remote("checksum") for engine in engines]
        except Exception as error:  # no run ends because nobody answers
            _run.asked = error
    _run.cost += time.monotonic() - began


def settle() -> None:
    """Takes the answers to a push that has no certificate yet; on all ranks of the trainer."""
    if not _run.is_due:
        return
    began, found = time.monotonic(), [Arrival(why="not asked")]
    if _asks():
        found = [_arrival(_run.version, _run.asked)]
    if not _is_alone():
        _share(found)
    _run.arrival, _run.asked = found[0], None
    _run.cost += time.monotonic() - began


def _arrival(version: int | None, asked: Any) -> Arrival:
    try:
        if isinstance(asked, Exception):
            raise asked
        replies = sys.modules["ray"].get(asked, timeout=TIMEOUT_S)
        found = [_checksums(reply) for reply in replies if reply is not None]
    except Exception as error:  # Ray's and the engine's: a release without checksums, a dead engine
        log.debug("no checksums", exc_info=True)
        return Arrival(why=f"the engine answers with {type(error).__name__}")
    return _run.arrived(version, found) if found and found[0] else Arrival(why="this engine reports none")


def _share(found: list[Arrival]) -> None:
    """The first rank's answer on all ranks, or none on any."""
    try:
        torch.distributed.broadcast_object_list(found, src=0, group=_host_group())
    except (RuntimeError, ValueError):  # ranks of another group
        log.debug("not shared", exc_info=True)
        found[0] = Arrival(why="the ranks have no group in common")


def _is_alone() -> bool:
    dist = torch.distributed
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


def _asks() -> bool:
    """Whether this rank asks for all: every rank knows the engines, one request is enough."""
    return _is_alone() or torch.distributed.get_rank() == 0


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
    if not _run.is_due:
        return {}
    _run.is_due = False
    if step_id or PREFIX + "k3_kl" not in scalars:
        return {}
    began = time.monotonic()
    is_sound, words = _run.judged(scalars)
    _run.cost += time.monotonic() - began
    if is_first:
        verdict = {True: "sound", False: "NOT sound", None: "not known"}[is_sound]
        print(
            f"slime_ext: certificate, weights {_run.version}: {verdict}: {words} ({_run.share()})", flush=True
        )
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


def _is_biased(scalars: Mapping[str, float]) -> bool:
    """Whether the mean ratio is surely not 1, which it is in expectation over what the behavior policy
    sampled."""
    bias = scalars[PREFIX + "ratio_mean"] - 1
    variance = max(scalars[PREFIX + "chi2_token"] - 2 * bias - bias * bias, 0.0)
    return abs(bias) > BIASED and abs(bias) > SURE * math.sqrt(variance / scalars[PREFIX + "tokens"])


def _certified(function: Callable[..., Any]) -> Callable[..., Any]:
    def update_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = function(self, *args, **kwargs)
        engines = getattr(self, "rollout_engines", None) or ()
        sees = not getattr(getattr(self, "args", None), "lora_rank", 0)  # checksums leave adapters out
        after_push(getattr(self, "weight_version", None), engines if sees else ())
        return done

    return update_weights


def _checksums(reply: Mapping[str, Any]) -> dict[str, str]:
    """Tensor -> its checksums on all ranks of one engine, without those of a draft model."""
    found: dict[str, str] = {}
    for rank in reply.get("ranks") or ():
        for name, checksum in rank["checksums"].items():
            if not name.startswith("draft"):
                found[name] = f"{found.get(name, '')}{checksum} "
    return found


def _hash_of(sums: Mapping[str, str]) -> int:
    return hash(tuple(sorted((name, sum_) for name, sum_ in sums.items() if not STILL.search(name))))
