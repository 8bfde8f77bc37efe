"""Tests a user's own steps on small batches.

The tests run before training starts, and refuse a step that breaks the contract with one line. The contract:
a step returns one weight or keep flag per unit, without gradient or NaN. It reads no value of a tensor and
writes to no tensor. It gives a response the same weights whatever else is in the micro-batch, and however
ranks split the response.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime_ext.core.correction import Correction
from slime_ext.core.needs import Need
from slime_ext.core.state import (
    Effect,
    State,
    Step,
    StepInputs,
    check_declared,
    only_bounds,
    weight_ranges,
)
from slime_ext.core.statistics import tabulate
from slime_ext.core.steps import Reweight
from slime_ext.core.tokens import Tokens
from slime_ext.errors import ConfigError, DataError, SlimeExtError, expect
from slime_ext.ops.segments import AllSum, Segments, require_contiguous

EXACT = 1e-9  # relative; in float64, sums of a dozen numbers differ by less than 1e-14
FAR = 200.0  # nats; e^200 is beyond float32, and a product of a dozen of them beyond float64
NEAR = 0.02  # factor on the log-ratios of the last response, to make it nearly on-policy
WAITS = (
    "it would wait for the device in every micro-batch: use torch.where, not .item(), .tolist(), .cpu(), "
    "print, `if` on a tensor or a boolean index"
)
# Field of StepInputs -> the need that declares that a step reads it.
READS = {"advantages": Need.ADVANTAGES, "ages": Need.AGES, "age_steps": Need.AGE_STEPS}
RANKS = 2  # ranks that share a response; each holds two shards of it
# Prompt tokens per response token -> where in a real run this happens, for messages.
PROMPTS = {
    0: "where context parallelism splits a response",
    9: "where a rank holds no response token, as after a long prompt",
}


@dataclass(frozen=True)
class Sample:
    """One sampled response as lists of one length, for a definition in plain Python.

    Args:
        mask: 1 where the behavior policy sampled the token, 0 at a tool's tokens.
        proximal, behavior, target: log-probs, nats; anything at masked tokens.
        advantages: one per token; anything at masked tokens.
    """

    mask: tuple[int, ...]
    proximal: tuple[float, ...]
    behavior: tuple[float, ...]
    target: tuple[float, ...]
    advantages: tuple[float, ...]


Definition = Callable[[Sample], Sequence[float]]


def samples(seed: int = 0) -> list[Sample]:
    """Makes five responses, of 7, 1, 5, 4 and 12 tokens.

    One is completely masked, two have several turns, and one has a ratio of e^6. The last response is nearly
    on-policy: the ratio of its first token is exactly 1, and all others are within a few percent of 1. Masked
    tokens hold NaN in every list.
    """
    generator = torch.Generator().manual_seed(seed)
    masks = [(1, 1, 0, 0, 1, 1, 1), (1,), (0, 0, 0, 0, 0), (1, 1, 1, 1), (1, 0, 1, 1, 1, 0) * 2]

    def numbers(mask: tuple[int, ...], mean: float, spread: float) -> tuple[float, ...]:
        drawn = torch.randn(len(mask), generator=generator, dtype=torch.float64).tolist()
        return tuple(mean + spread * x if bit else float("nan") for x, bit in zip(drawn, mask, strict=True))

    batch: list[Sample] = []
    for mask in masks:
        proximal, noise, drift = (numbers(mask, *of) for of in ((-4, 0.5), (0, 0.6), (0, 0.1)))
        if len(batch) == 3:
            noise = (-6.0, *noise[1:])
        if len(batch) == 4:
            noise = (0.0, *(x * NEAR for x in noise[1:]))
        behavior, target = (tuple(x + y for x, y in zip(proximal, of, strict=True)) for of in (noise, drift))
        batch.append(Sample(mask, proximal, behavior, target, numbers(mask, 0, 1)))
    return batch


def packed(batch: Sequence[Sample], device: str = "cpu") -> Tokens:
    """Packs samples for a correction: [T] float64 each, the target's log-probs with gradient."""

    def flat(name: str) -> Tensor:
        values = [x for sample in batch for x in getattr(sample, name)]
        return torch.tensor(values, dtype=torch.float64).to(device)

    segments = Segments.whole([len(sample.mask) for sample in batch], flat("mask"))
    ages = torch.arange(len(batch), dtype=torch.float64).to(device)
    target = flat("target").requires_grad_()
    flats = flat("proximal"), flat("behavior"), target, flat("advantages")
    return Tokens(segments, *flats, ages=ages, age_steps=2 * ages)


def check_step(step: Step, definition: Definition | None = None, *, where: str = "") -> None:
    """Tries a step on small batches, and compares its weights with a definition.

    Args:
        definition: a function in plain Python. It returns the weight of each token of a sample, 0 where the
            token is rejected; masked tokens are ignored. A step that only bounds weights runs after
            ``reweight``. None: no comparison.
        where: the name of the step in messages.

    Raises:
        ConfigError: says the first fault in one line.

    >>> from slime_ext.core.steps import Truncate
    >>> import math
    >>> ratio = lambda s, i: math.exp(s.proximal[i] - s.behavior[i])
    >>> check_step(Truncate(2.0), lambda s: [min(ratio(s, i), 2) for i in range(len(s.mask))])
    >>> check_step(Truncate(2.0), lambda s: [min(ratio(s, i), 3) for i in range(len(s.mask))])
    Traceback (most recent call last):
    slime_ext.errors.ConfigError: Truncate, sample 3, token 0: expected 3 by the definition, got 2
    """
    _check_is_step(step)
    where = where or type(step).__name__
    check_declared(step, where)
    try:
        hash(step)
    except TypeError as error:
        got, what = str(error), "they identify the step; use a tuple for a list"
        raise ConfigError(f"{where}: expected fields that can be hashed, got {got}: {what}") from None
    batch = samples()
    tokens = packed(batch)
    inputs, before = _before(step, where, tokens)
    state = _called(step, where, inputs, before)
    _check_state(step, where, state, inputs)
    _check_effects(step, where, before, state)
    _check_range(step, where, batch)
    _check_zero(step, where, inputs, before)
    _check_waits(step, where, batch)
    weights = _weights(inputs, state)
    if Need.WHOLE_STEP not in step.needs:
        age = torch.arange(len(batch), dtype=torch.float64)
        alone = [
            replace(packed([s]), ages=age[i : i + 1], age_steps=2 * age[i : i + 1])
            for i, s in enumerate(batch)
        ]
        apart = torch.cat([_run(step, where, part) for part in alone])
        what = "take sums per unit, or add Need.WHOLE_STEP to needs and define number_for_step"
        _check_same(inputs, weights, apart, where, "whatever shares the micro-batch", what)
    what = "take sums with inputs.total, inputs.aggregate or inputs.prefix"
    for prompt, when in PROMPTS.items():
        on_two_ranks = _run_split(step, where, tokens, prompt)
        _check_same(inputs, weights, on_two_ranks, where, when, what)
    if definition is not None:
        for batch in map(samples, range(3)):
            compare(where, batch, _run(step, where, packed(batch)), definition, EXACT)


def _check_is_step(candidate: object) -> None:
    """Raises ConfigError for a function, a class or anything else that is not a step."""
    wanted = "an instance of a class derived from slime_ext.steps.Step"
    if isinstance(candidate, type):
        expect(False, "check_step", wanted, _kind(candidate), f"write {candidate.__name__}(...)")
    expect(isinstance(candidate, Step), "check_step", wanted, _kind(candidate), "use check_hook for a hook")


def _run(step: Step, where: str, tokens: Tokens) -> Tensor:
    """Computes the weight of each token, [T]; 0 where it is rejected or masked."""
    inputs, before = _before(step, where, tokens)
    return _weights(inputs, _called(step, where, inputs, before))


def _before(step: Step, where: str, tokens: Tokens) -> tuple[StepInputs, State]:
    """Prepares the step's inputs, and the state before it."""
    first = _first(step)
    try:
        correction = Correction(steps=(*first, step))
        inputs = correction.read(tokens)
        inputs = replace(inputs, table=tabulate(correction.statistics, inputs))
        before = correction.run(inputs, first)
        if Need.WHOLE_STEP in step.needs:
            versions = _versions(inputs, before)
            number = step.number_for_step([(before, inputs)], tokens.segments.all_sum)
            _check_unwritten(where, versions, _versions(inputs, before))
            inputs = replace(inputs, plan={step: number})
        return inputs, before
    except Exception as error:
        raise failed(where, error) from error


def _first(step: Step) -> tuple[Step, ...]:
    """Returns the steps before a step that is tried: ``reweight`` if it only bounds weights."""
    return (Reweight(),) if only_bounds(step) else ()


def _called(step: Step, where: str, inputs: StepInputs, before: State) -> State:
    undeclared = {name: need for name, need in READS.items() if need not in step.needs}
    hidden: Any = dict.fromkeys(undeclared)
    step_inputs = replace(inputs, **hidden)
    versions = _versions(step_inputs, before)
    calls = _Calls()
    watched = _watched(before, calls)
    try:
        state = step(watched, step_inputs)
    except ConfigError as error:  # raised by the inputs, which do not know the step
        raise ConfigError(f"{where}: {error}") from error
    except Exception as error:
        if undeclared and "NoneType" in str(error):
            wanted, fields = " or ".join(map(str, undeclared.values())), " or inputs.".join(undeclared)
            got = f"none of them: add the one for what the step reads, inputs.{fields}"
            raise ConfigError(f"{where}: needs: expected {wanted}, got {got}") from error
        raise failed(where, error) from error
    _check_unwritten(where, versions, _versions(step_inputs, before))
    for name in calls.lost(state):
        got = f"a result of state.{name} that is lost"
        why = f"a state never changes; write state = state.{name}(...)"
        expect(False, where, "every new state in what the step returns", got, why)
    sets = "reweight" in calls.leading_to(state)
    _expect_said(where, Effect.REWEIGHT, Effect.REWEIGHT in step.effects or not sets)
    return state


@dataclass
class _Calls:
    """What a step's call made of the state that it got."""

    # id of a new state -> the method that made it, the new state, kept alive for its id, and the old one
    made: dict[int, tuple[str, State, State]] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)

    def note(self, name: str, before: State, after: State) -> State:
        self.made[id(after)] = name, after, before
        return after

    def lost(self, returned: object) -> list[str]:
        """Lists the methods whose result the step neither returned nor read."""
        lost = (
            name
            for name, after, _ in self.made.values()
            if after is not returned and id(after) not in self.read
        )
        return [name for name in lost if name != "_replace"]

    def leading_to(self, returned: object) -> Iterator[str]:
        """Lists the methods that made a state, the last one first."""
        while id(returned) in self.made:
            name, _, returned = self.made[id(returned)]
            yield name


def _watched(state: State, calls: _Calls) -> State:
    """Wraps a state for a step's call, to note what the step makes of it."""
    names = frozenset((*State._fields, "_replace"))  # with _replace a method takes over all other fields

    class Watched(State):
        def __getattribute__(self, name: str) -> Any:
            if name in names:
                calls.read.add(id(self))
            return super().__getattribute__(name)

        def _replace(self, **kwargs: Any) -> Any:
            return calls.note("_replace", self, super()._replace(**kwargs))

        def reweight(self, *args: Any, **kwargs: Any) -> State:
            return calls.note("reweight", self, super().reweight(*args, **kwargs))

        def bound(self, *args: Any, **kwargs: Any) -> State:
            return calls.note("bound", self, super().bound(*args, **kwargs))

        def reject(self, *args: Any, **kwargs: Any) -> State:
            return calls.note("reject", self, super().reject(*args, **kwargs))

    return Watched(*state._replace(step=0))


def _versions(inputs: StepInputs, state: State) -> list[int]:
    """Counts how often each tensor that a step may read has been written to."""
    read = [*_members(inputs), *_members(inputs.segments), *inputs.table.values(), *inputs.plan.values()]
    for each in (state, inputs.start):
        read += [*each, *each.keep.values()]
    return [values._version for values in read if isinstance(values, Tensor)]


def _members(thing: Any) -> list[Any]:
    """Lists the fields and cached properties of a dataclass, computing those that were not read yet."""
    fields = [each.name for each in dataclasses.fields(thing)]
    classes = type(thing).__mro__
    cached = [n for cls in classes for n, value in vars(cls).items() if isinstance(value, cached_property)]
    return [getattr(thing, name) for name in fields + cached]


def _check_unwritten(where: str, before: Sequence[int], after: Sequence[int]) -> None:
    why = "write clamp, not clamp_, and give all_sum a clone, because both write to their input"
    expect(before == after, where, "inputs that stay as they are", "one that was written to", why)


def failed(where: str, error: Exception, kind: str = "step") -> SlimeExtError:
    """Makes the error for a call that raised. Our own errors keep their message."""
    if isinstance(error, DataError) and kind == "step":  # raised by all_sum, which does not know the step
        return DataError(f"{where}: {error}")
    if isinstance(error, SlimeExtError):
        return error
    reason = str(error).splitlines()[0] if str(error) else ""
    return ConfigError(f"{where}: expected a {kind} that runs, got {type(error).__name__}: {reason}")


def _check_state(step: Step, where: str, state: Any, inputs: StepInputs) -> None:
    why = "return state.reweight(unit, ratio), state.bound(weights) or state.reject(unit, inside)"
    expect(isinstance(state, State), where, "a State", _kind(state), why)
    segments = inputs.segments
    sizes = {"token": segments.size, "turn": segments.turn_bound, "sequence": segments.count}
    _check_tensor(f"{where}: weights", state.unit, state.weights, sizes, is_bool=False)
    for unit, flags in state.keep.items():
        _check_tensor(f"{where}: keep['{unit}']", unit, flags, sizes, is_bool=True)
    _check_weights(where, inputs, _weights(inputs, state))


def _check_weights(where: str, inputs: StepInputs, weights: Tensor, when: str = "") -> None:
    """Raises ConfigError at the first weight that is NaN or below 0."""
    where, nan, negative = f"{where}: weights", weights.isnan(), weights < 0
    why = "log-ratios may be <= 0 and masked tokens NaN: select with torch.where, never multiply by a mask"
    why = "infinity over infinity is NaN: compute with logs, or clamp first" if when else why
    expect(not nan.any(), where, "numbers", f"NaN at {_place(inputs, nan)}{when}", why)
    got, why = _got(inputs, weights, negative), "add .clamp(min=0), because a token cannot count less than 0"
    expect(not negative.any(), where, "numbers >= 0", f"{got}{when}", why)


def _check_range(step: Step, where: str, batch: Sequence[Sample]) -> None:
    """Tries a step on ratios that float32 cannot hold.

    The weights must stay numbers, and at most the bound that the class declares.
    """
    for name, when in (("behavior", f"above e^{FAR:g}"), ("proximal", f"below e^-{FAR:g}")):
        lower = [replace(s, **{name: tuple(x - FAR for x in getattr(s, name))}) for s in batch]
        inputs, before = _before(step, where, packed(lower))
        weights, when = _weights(inputs, _called(step, where, inputs, before)), f", where ratios are {when}"
        _check_weights(where, inputs, weights, when)
        try:
            highest = weight_ranges((*_first(step), step))[-1].high
        except Exception as error:
            raise failed(where, error) from error
        over = weights > highest * (1 + EXACT)
        wanted, got = f"at most {highest:g}", f"{_got(inputs, weights, over)}{when}"
        neither = f"neither {Effect.BOUND} nor {Effect.REWEIGHT}"
        says = Effect.BOUND if Effect.BOUND in step.effects else neither
        why = f"effects has {says}; cap the weights, or define weight_range"
        expect(not over.any(), f"{where}: weights", wanted, got, why)


def _check_zero(step: Step, where: str, inputs: StepInputs, before: State) -> None:
    """Raises ConfigError if a bound moves weights from or to 0 and the class does not declare it."""
    if not only_bounds(step):
        return
    zero = torch.zeros_like(before.weights)
    zeroed = before._replace(weights=zero, log_ratio=torch.full_like(zero, -torch.inf))
    weights = _weights(inputs, _called(step, where, inputs, zeroed))
    raised = weights > 0
    got = f"False, and {_got(inputs, weights, raised)} for a weight of 0"
    why = "add raises_zero = True, because zero_outside must not come before such a step"
    expect(step.raises_zero or not raised.any(), f"{where}: raises_zero", "True", got, why)
    one = before._replace(weights=zero + 1, log_ratio=zero)  # no bound of weights moves 1 to 0
    weights = _weights(inputs, _called(step, where, inputs, one))
    lowered = (weights == 0) & (_weights(inputs, one) > 0)
    got = f"False, and {_got(inputs, weights, lowered)} for a weight of 1"
    why = "add sets_zero = True, because no lower bound must come after such a step"
    expect(step.sets_zero or not lowered.any(), f"{where}: sets_zero", "True", got, why)


def _check_tensor(where: str, unit: str, values: Tensor, sizes: Mapping[str, int], *, is_bool: bool) -> None:
    """Raises ConfigError unless there is one number or flag per unit, without a gradient."""
    expect(unit in sizes, where, "unit token, turn or sequence", f"'{unit}'", "use one of these")
    shape = f"shape [{sizes[unit]}], one per {unit}"
    expect(values.shape == (sizes[unit],), where, shape, list(values.shape), "give each unit its own")
    why = "add .detach(), because only the loss is differentiated"
    expect(not values.requires_grad, where, "no gradient", "one", why)
    wanted, why = ("bool", "compare, as in x <= 2") if is_bool else ("numbers", "add .to(inputs.ratio.dtype)")
    expect(is_bool == (values.dtype is torch.bool), where, wanted, values.dtype, why)


def _check_effects(step: Step, where: str, before: State, state: State) -> None:
    """Raises ConfigError if the call did something that the class does not declare."""
    kinds = {record.kind for record in state.step_records[len(before.step_records) :]}
    is_coupled = Need.WHOLE_STEP in step.needs
    # New weights without a call of ``reweight`` or ``bound`` count as bounded, if the class says so.
    sets = state.weights is not before.weights and "clipped" not in kinds and not is_coupled
    is_said = not step.effects.isdisjoint({Effect.REWEIGHT, Effect.BOUND})
    _expect_said(where, Effect.REWEIGHT, is_said or not sets)
    _expect_said(where, Effect.BOUND, "clipped" not in kinds or Effect.BOUND in step.effects)
    _expect_said(where, Effect.REJECT, "kept" not in kinds or Effect.REJECT in step.effects)


def _expect_said(where: str, effect: Effect, ok: bool) -> None:
    """Raises ConfigError about an effect that the class does not declare, unless ``ok``."""
    why = "add it to effects, because later steps are checked against it"
    expect(ok, f"{where}: effects", f"{effect} beside state.{effect.value}", "none", why)


def _weights(inputs: StepInputs, state: State) -> Tensor:
    """Returns the weight of each token, [T]; 0 where it is rejected or masked."""
    return torch.where(inputs.kept(state), inputs.segments.expand_to_tokens(state.unit, state.weights), 0)


def _got(inputs: StepInputs, weights: Tensor, flags: Tensor) -> str:
    """Describes the first weight that is flagged, and its place."""
    return f"{float(weights[int(flags.int().argmax())]):g} at {_place(inputs, flags)}"


def _place(inputs: StepInputs, flags: Tensor) -> str:
    """Says where the first flag is; without flags, where the first token is."""
    token = int(flags.int().argmax())
    return f"sample {int(inputs.segments.ids[token])}, token {int(inputs.segments.within[token])}"


def _check_same(
    inputs: StepInputs, weights: Tensor, others: Tensor, where: str, when: str, what: str
) -> None:
    differs = ~torch.isclose(others, weights, rtol=EXACT, atol=0)
    got = f"different ones for {_place(inputs, differs)}"
    expect(not differs.any(), where, f"the same weights {when}", got, what)


def _check_waits(step: Step, where: str, batch: Sequence[Sample]) -> None:
    """Runs the step on PyTorch's meta device, where tensors have no values.

    Code that reads a value there raises; on a GPU it would wait.
    """
    tokens = packed(batch, device="meta")
    correction = Correction(steps=(*_first(step), step))
    try:
        inputs = correction.read(tokens)
        number = torch.ones((), dtype=torch.float64, device="meta")
        inputs = replace(inputs, table=tabulate(correction.statistics, inputs), plan={step: number})
        with without_printing():
            correction.run(inputs, correction.steps)
    except Exception as error:
        raise waits(where, error) from error


@contextmanager
def without_printing() -> Iterator[None]:
    """Raises RuntimeError where a tensor is printed.

    Printing waits for a GPU, but raises nothing on the meta device.
    """

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (Tensor.__repr__, Tensor.__format__):
                raise RuntimeError("a tensor is printed or turned into text")
            return func(*args, **(kwargs or {}))

    with Mode():
        yield


def waits(where: str, error: Exception) -> ConfigError:
    """Makes the error for a call that raised on the meta device."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    at = f" at `{frames[-1].line}` ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    reason = f"{type(error).__name__} ({str(error).splitlines()[0].split('. ')[0][:80]})"
    return ConfigError(f"{where}: expected operations that read no value, got {reason}{at}: {WAITS}")


def _run_split(step: Step, where: str, whole: Tokens, prompt: int) -> Tensor:
    """Computes the step's weights where ranks share each response: [T].

    Args:
        prompt: as in ``split``.
    """
    ranks = [split(whole, rank, prompt) for rank in range(RANKS)]

    def on(rank: int, all_sum: AllSum) -> Tensor:
        return _run(
            step, where, replace(ranks[rank], segments=replace(ranks[rank].segments, all_sum=all_sum))
        )

    parts = torch.cat(on_ranks(on, where))
    places = torch.cat([tokens.segments.positions for tokens in ranks])
    return torch.empty_like(parts).index_copy(0, places, parts)


def split(tokens: Tokens, rank: int, prompt: int = 0) -> Tokens:
    """Cuts out the tokens that one of ``RANKS`` ranks holds.

    Each sequence has four shards. One rank holds the first and the last, the other the two in the middle.

    Args:
        prompt: tokens of the prompt for each token of its response. From 9 on, the last shard, which belongs
            to the first rank, holds the whole response.
    """
    whole, last = tokens.segments, 2 * RANKS - 1
    chunks = [-(-length * (1 + prompt) // (last + 1)) for length in whole.lengths]

    def begin(number: int, length: int, chunk: int) -> int:
        return min(max(number * chunk - prompt * length, 0), length)

    shards = tuple(
        (i, begin(number, length, chunk), begin(number + 1, length, chunk), number)
        for i, (length, chunk) in enumerate(zip(whole.lengths, chunks, strict=True))
        for number in (rank, last - rank)
    )
    segments = Segments(whole.lengths, shards, whole.full_mask, last + 1)
    names = ("proximal", "behavior", "target", "advantages")
    held = {name: getattr(tokens, name).index_select(0, segments.positions) for name in names}
    return replace(tokens, segments=segments, **held)


class _Asked(BaseException):
    """Says that a rank waits for the sum of these values.

    It is a BaseException, so that no ``except Exception`` in a step catches it.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values


def on_ranks(function: Callable[[int, AllSum], Any], where: str, ranks: int = RANKS) -> list[Any]:
    """Runs a function of rank and ``all_sum`` on each of several ranks.

    The ranks run one after the other. When all of them have asked for a sum, they start again with its value.
    """
    sums: list[Tensor] = []

    def until_asked(rank: int) -> Any:
        known = iter(sums)

        def all_sum(values: Tensor) -> Tensor:
            require_contiguous(values)
            if (summed := next(known, None)) is None:
                raise _Asked(values)
            return values.copy_(summed)  # in place, like an all-reduce

        try:
            return function(rank, all_sum)
        except _Asked as asked:
            return asked

    while True:
        ended = [until_asked(rank) for rank in range(ranks)]
        asked = [each.values for each in ended if isinstance(each, _Asked)]
        if not asked:
            return ended
        agree = len(asked) == ranks and len({values.shape for values in asked}) == 1
        why = "which sums a step takes must not depend on what a rank holds"
        expect(agree, where, "the same sums on every rank", "different ones", why)
        sums.append(torch.stack(asked).sum(0))


def compare(
    where: str, batch: Sequence[Sample], weights: Tensor, definition: Definition, tolerance: float
) -> None:
    """Raises ConfigError at the first response token whose weight differs from the definition."""
    parts = torch.split(weights, [len(sample.mask) for sample in batch])
    for i, (sample, part) in enumerate(zip(batch, parts, strict=True)):
        for t, (got, wanted) in enumerate(
            zip(part.tolist(), _defined(where, definition, sample), strict=True)
        ):
            if sample.mask[t] and not abs(got - wanted) <= tolerance * max(1.0, abs(wanted)):
                raise ConfigError(
                    f"{where}, sample {i}, token {t}: expected {wanted:g} by the definition, got {got:g}"
                )


def _defined(where: str, definition: Definition, sample: Sample) -> list[float]:
    """Evaluates the definition: one number per token.

    >>> _defined("step", lambda sample: None, samples()[1])
    Traceback (most recent call last):
    slime_ext.errors.ConfigError: step, definition: expected 1 numbers, got None: return one per token
    """
    values = definition(sample)
    got, wanted = str(len(values)) if isinstance(values, Sequence) else _kind(values), str(len(sample.mask))
    expect(got == wanted, f"{where}, definition", f"{wanted} numbers", got, "return one per token")
    return list(values)


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None" if value is None else f"a {type(value).__name__}"
