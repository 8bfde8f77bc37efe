"""The steps of a correction as straight-line code about one token: written once, for Triton, C++ and numpy.

A line sets ``w`` (weight), ``keep``, ``clipped`` and ``acted`` of the token, or of its sequence ``kept`` and
what the tokens begin with: ``all_w``, ``all_clipped``, ``all_acted``. What depends on the sequence alone is
written apart, as ``ahead``: loops over its tokens need it once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from slime_ext.correction import Correction
from slime_ext.coupled import Normalize, SecondMoment
from slime_ext.facts import Step, needs_of
from slime_ext.ops.statistics import Need, Over
from slime_ext.steps import Clip, Reject, Reweight, Taper, Truncate, Veto

Line = tuple[str, str]  # a name and the expression that it is set to
SOUND = Need("sum", "sequence", "sound")
WIDE = ("binary_kl", "binary_kl_max")  # float64 per token
BOTH = ("tv", *WIDE)


class Language(Protocol):
    """What the languages write differently."""

    def call(self, name: str, *arguments: str) -> str:
        """A function that all have."""

    def no(self, flag: str) -> str:
        """The opposite of a flag."""

    def narrow(self, value: str) -> str:
        """A float64 of the sequence in the dtype of the log-ratios."""

    def at(self, array: str, index: str | int) -> str:
        """An element."""

    def number(self, value: float, *, wide: bool = False) -> str:
        """A constant, to be compared with float64 if ``wide``."""


@dataclass
class Writer:
    """Writes one correction in one language."""

    correction: Correction
    needs: tuple[Need, ...]
    language: Language
    ahead: list[Line] = field(default_factory=list)
    acting: dict[int, list[str]] = field(default_factory=dict)  # step -> flags of the tokens on which it acts
    # (step, flag of the sequences on which it acts, whether on those where it is not set)
    acting_ahead: list[tuple[int, str, bool]] = field(default_factory=list)
    shared: bool = True  # whether all tokens of a sequence have one weight, as far as it is written

    def __post_init__(self) -> None:
        self.slot = {need: f"s{i}" for i, need in enumerate(self.needs)}
        self.coupled = [step for step in self.correction.steps if step.is_coupled]
        self._names = 0

    def value(self, name: str) -> str:
        """The per-token quantity of a statistic, 0 at masked tokens."""
        call, number = self.language.call, self.language.number
        if name in BOTH:
            return call("where", "finite", f"{name}(num, beh)", number(0.0))
        plain = {"ratio": "l", "k1": "(-l)", "k2": "k2(l)", "k3": "k3(l)", "advantage": "adv"}
        if name in plain:
            return plain[name]
        one, none = number(1.0), number(0.0)
        trusted = call("where", "finite", one, "INF") if name == "sound" else one
        return call("where", "mask", trusted, none)

    def summand(self, need: Need) -> str:
        """What a statistic adds up."""
        name = need.name
        if isinstance(name, Over):
            limit = self.language.number(name.limit, wide=name.name in WIDE)
            return f"over({self.value(name.name)}, {limit})"
        return self.value(name)

    def lines(self) -> list[Line]:
        """What happens to a token, step by step; fills ``ahead`` and ``acting``."""
        if any(step.unit == "sequence" for step in self.correction.steps):
            lines = [*self._drop("sequence", 0, f"{self.slot[SOUND]} < INF")]
        else:
            lines = []
        for i, step in enumerate(self.correction.steps, 1):
            lines += WRITERS[type(step)](self, step, i)
        return lines

    def _new(self, kind: str) -> str:
        self._names += 1
        return f"{kind}{self._names}"

    def _once(self, kind: str, expression: str) -> str:
        """The name of something that all tokens of a sequence share."""
        name = self._new(kind)
        self.ahead.append((name, expression))
        return name

    def _total(self, unit: str, aggregate: str, name: str) -> str:
        if unit == "token":
            return f"({self.value(name)})"
        slots = [self.slot[need] for need in needs_of(unit, aggregate, name)]
        if len(slots) == 1:
            return slots[0]
        return f"({slots[0]} / {self.language.call('maximum', slots[1], '1.0')})"

    def _ratio(self, step: Reweight | Taper) -> str:
        ratio = self.language.call("exp", self._total(step.unit, step._aggregate, "ratio"))
        return ratio if step.unit == "token" else self._once("ratio", self.language.narrow(ratio))

    def _act(self, name: str, where: str, yes: int, no: int) -> Line:
        return name, f"{name} | {self.language.call('where', where, str(yes), str(no))}"

    def _token_acts(self, i: int, flag: str) -> None:
        self.acting.setdefault(i, []).append(flag)

    def _drop(self, unit: str, i: int, inside: str) -> Iterator[Line]:
        if unit == "token":
            name = self._new("inside")
            self._token_acts(i, self.language.no(name))
            yield from ((name, inside), ("keep", f"keep & {name}"), self._act("acted", name, 0, 1 << i))
        else:
            name = self._once("inside", inside)
            self.ahead += [("kept", f"kept & {name}"), self._act("all_acted", name, 0, 1 << i)]
            self.acting_ahead.append((i, name, True))

    @property
    def _weight(self) -> str:
        return "all_w" if self.shared else "w"

    def _bound(self, i: int, bounded: str) -> Iterator[Line]:
        new, changed, of = self._new("bounded"), self._new("changed"), "all_" if self.shared else ""
        lines = [(new, bounded), (changed, f"{new} != {of}w"), (f"{of}w", new)]
        lines += [(f"{of}clipped", f"{of}clipped | {changed}"), self._act(f"{of}acted", changed, 1 << i, 0)]
        if self.shared:
            self.ahead += lines
            self.acting_ahead.append((i, changed, False))
        else:
            self._token_acts(i, changed)
            yield from lines

    def _between(self, low: float, high: float) -> str:
        call, number = self.language.call, self.language.number
        return call("minimum", call("maximum", self._weight, number(low)), number(high))

    def reweight(self, step: Reweight | Taper, i: int) -> Iterator[Line]:
        ratio = self._ratio(step)
        if self.shared and step.unit != "token":
            self.ahead += [("all_w", ratio), ("all_clipped", "never")]
        else:
            self.shared = False
            yield "w", self.language.call("where", "here", ratio, self.language.number(1.0))
            yield "clipped", "nowhere"

    def taper(self, step: Taper, i: int) -> Iterator[Line]:
        yield from self.reweight(step, i)
        self.shared = False
        negative = self._between(step.negative_low, step.negative_high)
        positive = self._between(step.positive_low, step.positive_high)
        sign = f"adv < {self.language.number(0.0)}"
        yield from self._bound(i, self.language.call("where", sign, negative, positive))

    def truncate(self, step: Truncate, i: int) -> Iterator[Line]:
        high = self.language.number(step.high)
        yield from self._bound(i, self.language.call("minimum", self._weight, high))

    def clip(self, step: Clip, i: int) -> Iterator[Line]:
        yield from self._bound(i, self._between(step.low, step.high))

    def reject(self, step: Reject, i: int) -> Iterator[Line]:
        if step.max_staleness is not None:
            stale = f"{self.language.at('ages', 'owner')} > {step.max_staleness}"
            yield from self._drop("sequence", i, self.language.no(stale))
        if step._reads_ratio:
            inside = self._inside(step)
            limited = "" if step.when == "always" else f" | {self.language.no(self._applies(step))}"
            yield from self._drop(step.unit, i, inside + limited)

    def _inside(self, step: Reject) -> str:
        if step._over:
            return f"({self.slot[step._over]} == 0.0)"
        wide = step.unit != "token" or step.statistic in WIDE
        value = self._total(step.unit, step.aggregate, step.statistic)
        if step.unit != "token" and step.aggregate == "mean":
            value = self._once("mean", value)
        low, high = (self.language.number(limit, wide=wide) for limit in step._limits)
        above, below = f"({value} >= {low})", f"({value} <= {high})"
        if math.isinf(step._limits[0]):
            return below  # false for NaN, too
        return above if math.isinf(step._limits[1]) else f"({above} & {below})"

    def _applies(self, step: Reject) -> str:
        none = self.language.number(0.0, wide=step.unit != "token")
        advantage = self._total(step.unit, "sum", "advantage")
        if step.when == "negative_advantage":
            return f"{advantage} < {none}"
        return f"{advantage} * {self._total(step.unit, 'sum', 'ratio')} > {none}"

    def veto(self, step: Veto, i: int) -> Iterator[Line]:
        for need in step.needs:
            yield from self._drop("sequence", i, f"{self.slot[need]} == 0.0")

    def second_moment(self, step: SecondMoment, i: int) -> Iterator[Line]:
        limit = self.language.at("numbers", self.coupled.index(step))
        yield from self._drop("token", i, f"squares(l) <= {limit}")

    def normalize(self, step: Normalize, i: int) -> Iterator[Line]:
        mean = self.language.at("numbers", self.coupled.index(step))
        line = self._weight, f"parts({self._weight}, {mean})"
        if self.shared:
            self.ahead.append(line)
        else:
            yield line


WRITERS = {
    Reweight: Writer.reweight,
    Taper: Writer.taper,
    Truncate: Writer.truncate,
    Clip: Writer.clip,
    Reject: Writer.reject,
    Veto: Writer.veto,
    SecondMoment: Writer.second_moment,
    Normalize: Writer.normalize,
}


def has_writer(step: Step) -> bool:
    """Whether a step can be written at all."""
    return type(step) in WRITERS


def literal(value: float) -> str:
    """A number as all languages read it."""
    if math.isinf(value):
        return "INF" if value > 0 else "-INF"
    return repr(float(value))
