"""A user's own steps: loaded by dotted name and tried on small batches before anything runs.

A step that breaks the contract is refused in one line. It returns one weight or keep flag per unit, without
gradient or NaN; it reads no value of a tensor and writes to none; and it gives a response the same weights
whatever else is in the micro-batch, and however ranks split the response.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime_ext.core.correction import Correction, plan_step
from slime_ext.core.importing import load_named
from slime_ext.core.state import State, StatisticKey, Step, StepInputs, Tokens, tabulate
from slime_ext.core.steps import Reweight
from slime_ext.errors import ConfigError, SlimeExtError
from slime_ext.ops.segments import AllSum, Segments

EXACT = 1e-9  # relative; both sides are float64, sums of a dozen numbers differ by less than 1e-14
NEAR = 0.02  # of the other responses' log-ratios, those of the one that is nearly on-policy
WAITS = (
    "it waits for the device in every micro-batch: use torch.where, no .item(), .tolist(), .cpu(), `if` on a "
    "tensor or boolean index"
)
READS = {"advantages": "reads_advantages", "ages": "reads_ages"}  # field of StepInputs -> what declares it
RANKS = 2  # that a response is split over, each of which holds two shards of it


@dataclass(frozen=True)
class Sample:
    """One sampled response, lists of the same length: what a plain-Python definition reads.

    Args:
        mask: 1 where the behavior policy sampled the token, 0 at a tool's.
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
    """Responses of 7, 1, 5, 4 and 12 tokens: one is masked out, two have turns, one ratio is e^6; the last is
    nearly on-policy, with ratios within a few percent of 1 and its first exactly 1.

    Masked tokens hold NaN in every list.
    """
    generator = torch.Generator().manual_seed(seed)
    masks = [(1, 1, 0, 0, 1, 1, 1), (1,), (0, 0, 0, 0, 0), (1, 1, 1, 1), (1, 0, 1, 1, 1, 0) * 2]

    def numbers(mask: tuple[int, ...], mean: float, spread: float) -> tuple[float, ...]:
        drawn = torch.randn(len(mask), generator=generator, dtype=torch.float64).tolist()
        return tuple(mean + spread * x if bit else float("nan") for x, bit in zip(drawn, mask, strict=True))

    found: list[Sample] = []
    for mask in masks:
        proximal, noise, drift = (numbers(mask, *of) for of in ((-4, 0.5), (0, 0.6), (0, 0.1)))
        if len(found) == 3:
            noise = (-6.0, *noise[1:])
        if len(found) == 4:
            noise = (0.0, *(x * NEAR for x in noise[1:]))
        behavior, target = (tuple(x + y for x, y in zip(proximal, of, strict=True)) for of in (noise, drift))
        found.append(Sample(mask, proximal, behavior, target, numbers(mask, 0, 1)))
    return found


def packed(batch: Sequence[Sample], device: str = "cpu") -> Tokens:
    """Samples as a correction takes them: [T] float64, the target's log-probs with gradient."""

    def flat(name: str) -> Tensor:
        values = [x for sample in batch for x in getattr(sample, name)]
        return torch.tensor(values, dtype=torch.float64).to(device)

    segments = Segments.whole([len(sample.mask) for sample in batch], flat("mask"))
    ages = torch.arange(len(batch), dtype=torch.float64).to(device)
    target = flat("target").requires_grad_()
    return Tokens(segments, flat("proximal"), flat("behavior"), target, flat("advantages"), ages)


def load_step(path: str, where: str) -> type[Step]:
    """The step class at ``package.module.Class``.

    Raises:
        ConfigError: it cannot be imported, or is no frozen dataclass that is a ``slime_ext.steps.Step``.
    """
    if torch.__spec__ is None:  # commands read names and rules without torch; a user's module wants it
        raise ModuleNotFoundError("torch", name="torch")
    found = load_named(path, f"{where} {path}", "class")
    if not (isinstance(found, type) and issubclass(found, Step)):
        raise ConfigError(
            f"{where} {path}: expected a class made from slime_ext.steps.Step, got {_kind(found)}"
        )
    parameters = getattr(found, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen or "__dataclass_fields__" not in vars(found):
        raise ConfigError(
            f"{where} {path}: expected @dataclass(frozen=True) above the class, got none: its fields are its "
            "configuration, and a plan is found by them"
        )
    return found


def check_step(step: Step, definition: Definition | None = None, *, where: str = "") -> None:
    """Tries a step on small batches; with a definition in plain Python its weights are compared, too.

    Args:
        definition: sample -> the weight of each token, 0 where it is rejected; masked tokens are not looked
            at. A step that bounds weights without setting them is compared after ``reweight``.
        where: what names the step, for messages.

    Raises:
        ConfigError: one line, the first thing that is wrong.

    >>> from slime_ext.core.steps import Truncate
    >>> import math
    >>> ratio = lambda s, i: math.exp(s.proximal[i] - s.behavior[i])
    >>> check_step(Truncate(2.0), lambda s: [min(ratio(s, i), 2) for i in range(len(s.mask))])
    >>> check_step(Truncate(2.0), lambda s: [min(ratio(s, i), 3) for i in range(len(s.mask))])
    Traceback (most recent call last):
    slime_ext.errors.ConfigError: Truncate, sample 3, token 0: expected 3 of the definition, got 2
    """
    where = where or type(step).__name__
    batch = samples()
    inputs, before = _before(step, where, packed(batch))
    state = _called(step, where, inputs, before)
    _check_state(step, where, state, inputs)
    _check_declared(step, where, before, state)
    _check_waits(step, where, batch)
    weights = _weights(inputs, state)
    if not step.is_coupled:
        _check_alone(step, where, batch, weights)
    _check_split(step, where, packed(batch), weights)
    if definition is not None:
        for batch in map(samples, range(3)):
            compare(where, batch, _run(step, where, packed(batch)), definition, EXACT)


def _run(step: Step, where: str, tokens: Tokens) -> Tensor:
    """[T] the weight that the step gives each token, 0 where it is rejected or masked."""
    inputs, before = _before(step, where, tokens)
    return _weights(inputs, _called(step, where, inputs, before))


def _before(step: Step, where: str, tokens: Tokens) -> tuple[StepInputs, State]:
    """What the step reads, and the state that it gets: after ``reweight`` where it only bounds weights."""
    first = (Reweight(),) if step.is_bound and not step.sets_weights else ()
    try:
        correction = Correction(steps=(*first, step))
        inputs = correction.read(tokens)
        inputs = replace(inputs, table=tabulate(correction.statistics, inputs))
        if step.is_coupled:
            numbers = plan_step(correction, [tokens], tokens.segments.all_sum).numbers
            inputs = replace(inputs, plan=numbers)
        return inputs, correction.run(inputs, first)
    except Exception as error:
        raise failed(where, error) from error


def _called(step: Step, where: str, inputs: StepInputs, before: State) -> State:
    given = [*_tensors(inputs), *inputs.table.values(), before.weights, *before.keep.values()]
    versions = [values._version for values in given]
    undeclared: dict[str, Any] = {name: None for name, flag in READS.items() if not getattr(step, flag)}
    try:
        state = step(replace(before, step=0), replace(inputs, **undeclared))
    except Exception as error:
        if undeclared and "NoneType" in str(error):
            flags = " or ".join(READS[name] for name in undeclared)
            fields = " or ".join(f"inputs.{name}" for name in undeclared)
            raise ConfigError(
                f"{where}: {flags}: expected True, got False: the step reads {fields}"
            ) from error
        raise failed(where, error) from error
    if versions != [values._version for values in given]:
        raise ConfigError(
            f"{where}: expected inputs that stay as they are, got one written to: use functions without a _ "
            "at the end, such as clamp for clamp_"
        )
    return state


def _tensors(thing: Any) -> Iterator[Tensor]:
    values = (getattr(thing, field.name) for field in dataclasses.fields(thing))
    return (value for value in values if isinstance(value, Tensor))


def failed(where: str, error: Exception, kind: str = "step") -> SlimeExtError:
    """What is wrong with a call that raised; our own errors say it themselves."""
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], StatisticKey):
        key = error.args[0]
        names = ", ".join(repr(part) for part in (key.unit, key.aggregate, key.name))
        return ConfigError(
            f"{where}: expected {tuple(key)} in its statistics, got none: statistics = statistics_of({names})"
        )
    if isinstance(error, SlimeExtError):
        return error
    reason = str(error).splitlines()[0] if str(error) else ""
    return ConfigError(f"{where}: expected a {kind} that runs, got {type(error).__name__}: {reason}")


def _check_state(step: Step, where: str, state: Any, inputs: StepInputs) -> None:
    if not isinstance(state, State):
        raise ConfigError(
            f"{where}: expected a State, got {_kind(state)}: return state.reweight(unit, ratio), "
            "state.bound(weights) or state.reject(unit, inside)"
        )
    segments = inputs.segments
    sizes = {"token": segments.size, "turn": segments.turn_bound, "sequence": segments.count}
    given = {"weights": (state.unit, state.weights)} | {
        f"keep['{unit}']": (unit, flags) for unit, flags in state.keep.items()
    }
    for name, (unit, values) in given.items():
        if unit not in sizes:
            raise ConfigError(f"{where}: {name}: expected unit token, turn or sequence, got '{unit}'")
        if values.shape != (sizes[unit],):
            raise ConfigError(
                f"{where}: {name}: expected shape [{sizes[unit]}], one per {unit}, got {list(values.shape)}"
            )
        if values.requires_grad:
            raise ConfigError(
                f"{where}: {name}: expected no gradient, got one: a weight is detached, only the loss is "
                "differentiated; add .detach()"
            )
        if (name != "weights") != (values.dtype is torch.bool):
            wanted = "numbers" if name == "weights" else "bool"
            raise ConfigError(f"{where}: {name}: expected {wanted}, got {values.dtype}")
    _check_values(step, where, inputs, state)


def _check_declared(step: Step, where: str, before: State, state: State) -> None:
    """What the call did to weights and flags against what the class says of it, by which the steps behind it
    are judged."""
    effects = {effect.kind for effect in state.step_effects[len(before.step_effects) :]}
    changed = state.weights is not before.weights and not (step.is_coupled or "clipped" in effects)
    if changed and not (step.sets_weights or step.is_bound):
        raise ConfigError(
            f"{where}: sets_weights: expected True beside state.reweight, got False: the steps behind it "
            "would not know of its weights"
        )
    for kind, name, call in (("clipped", "is_bound", "bound"), ("rejected", "rejects", "reject")):
        if kind in effects and not getattr(step, name):
            raise ConfigError(f"{where}: {name}: expected True beside state.{call}, got False")


def _check_values(step: Step, where: str, inputs: StepInputs, state: State) -> None:
    found = _weights(inputs, state)
    if found.isnan().any():
        raise ConfigError(
            f"{where}: weights: expected numbers, got NaN at {_place(inputs, found.isnan())}: log-ratios may "
            "be 0 or below, and masked tokens may hold NaN: select with torch.where, never multiply by a mask"
        )
    if step.is_bound and found.isinf().any():
        raise ConfigError(
            f"{where}: weights: expected finite ones after a step with is_bound, got inf at "
            f"{_place(inputs, found.isinf())}"
        )


def _weights(inputs: StepInputs, state: State) -> Tensor:
    """[T] the weight of each token, 0 where it is rejected or masked."""
    return torch.where(inputs.kept(state), inputs.segments.expand_to_tokens(state.unit, state.weights), 0)


def _place(inputs: StepInputs, flags: Tensor) -> str:
    token = int(flags.nonzero()[0])
    return f"sample {int(inputs.segments.ids[token])}, token {int(inputs.segments.within[token])}"


def _check_waits(step: Step, where: str, batch: Sequence[Sample]) -> None:
    """Tensors on PyTorch's meta device have no values: what reads one would wait for a GPU."""
    tokens = packed(batch, device="meta")
    correction = Correction(steps=(step,)) if not step.is_bound else Correction(steps=(Reweight(), step))
    try:
        inputs = correction.read(tokens)
        number = torch.ones((), dtype=torch.float64, device="meta")
        inputs = replace(inputs, table=tabulate(correction.statistics, inputs), plan={step: number})
        correction.run(inputs, correction.steps)
    except Exception as error:
        raise waits(where, error) from error


def waits(where: str, error: Exception) -> ConfigError:
    """What is wrong with a call that raised on PyTorch's meta device, with the line of the user's code."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    at = f" at `{frames[-1].line}` ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    reason = f"{type(error).__name__} ({str(error).splitlines()[0].split('. ')[0][:80]})"
    return ConfigError(f"{where}: expected operations that read no value, got {reason}{at}: {WAITS}")


def _check_alone(step: Step, where: str, batch: Sequence[Sample], together: Tensor) -> None:
    parts = torch.split(together, [len(sample.mask) for sample in batch])
    for i, (sample, part) in enumerate(zip(batch, parts, strict=True)):
        alone = _run(step, where, replace(packed([sample]), ages=torch.tensor([float(i)])))
        if not torch.allclose(alone, part, rtol=EXACT, atol=0):
            raise ConfigError(
                f"{where}: expected the same weights whatever shares the micro-batch, got others for sample "
                f"{i} alone: take sums per unit (statistics), or set is_coupled and number_for_step"
            )


def _check_split(step: Step, where: str, whole: Tokens, together: Tensor) -> None:
    """Context parallelism: the ranks that hold parts of a response agree on its weights."""
    ranks = [split(whole, rank) for rank in range(RANKS)]

    def on(rank: int, all_sum: AllSum) -> Tensor:
        tokens = replace(ranks[rank], segments=replace(ranks[rank].segments, all_sum=all_sum))
        return _run(step, where, tokens)

    found = torch.empty_like(together)
    for tokens, part in zip(ranks, on_ranks(on, where), strict=True):
        found[tokens.segments.positions] = part
    if not torch.allclose(found, together, rtol=EXACT, atol=0):
        token = int((found - together).abs().argmax())
        sample, place = int(whole.segments.ids[token]), int(whole.segments.within[token])
        raise ConfigError(
            f"{where}: expected the same weights where context parallelism splits a response, got others for "
            f"sample {sample}, token {place}: take sums with inputs.total, inputs.aggregate or inputs.prefix"
        )


def split(tokens: Tokens, rank: int) -> Tokens:
    """What one of ``RANKS`` ranks holds of whole responses: of four shards the first and last, or the two in
    the middle."""
    whole, last = tokens.segments, 2 * RANKS - 1
    chunks = [-(-length // (last + 1)) for length in whole.lengths]
    shards = tuple(
        (i, min(number * chunk, length), min((number + 1) * chunk, length), number)
        for i, (length, chunk) in enumerate(zip(whole.lengths, chunks, strict=True))
        for number in (rank, last - rank)
    )
    segments = Segments(whole.lengths, shards, whole.full_mask, last + 1)
    names = ("proximal", "behavior", "target", "advantages")
    held = {name: getattr(tokens, name).index_select(0, segments.positions) for name in names}
    return replace(tokens, segments=segments, **held)


class _Asked(BaseException):
    """A rank waits for the sum of these values; no ``except Exception`` of a step's may catch it."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


def on_ranks(function: Callable[[int, AllSum], Any], where: str) -> list[Any]:
    """What a function of rank and ``all_sum`` returns on each of ``RANKS`` ranks, which are run in turn: from
    the start again for each sum that all of them ask for."""
    sums: list[Tensor] = []

    def until_asked(rank: int) -> Any:
        known = iter(sums)

        def all_sum(values: Tensor) -> Tensor:
            if (summed := next(known, None)) is None:
                raise _Asked(values)
            return summed.clone()

        try:
            return function(rank, all_sum)
        except _Asked as asked:
            return asked

    while True:
        ended = [until_asked(rank) for rank in range(RANKS)]
        asked = [each.values for each in ended if isinstance(each, _Asked)]
        if not asked:
            return ended
        if len(asked) < RANKS or len({values.shape for values in asked}) > 1:
            raise ConfigError(
                f"{where}: expected the same sums on every rank, got others: which sums a step takes must "
                "not depend on what a rank holds"
            )
        sums.append(torch.stack(asked).sum(0))


def compare(
    where: str, batch: Sequence[Sample], found: Tensor, definition: Definition, tolerance: float
) -> None:
    """Raises ConfigError at the first response token whose weight is not the definition's."""
    parts = torch.split(found, [len(sample.mask) for sample in batch])
    for i, (sample, part) in enumerate(zip(batch, parts, strict=True)):
        for t, (got, wanted) in enumerate(
            zip(part.tolist(), _defined(where, definition, sample), strict=True)
        ):
            if sample.mask[t] and not abs(got - wanted) <= tolerance * max(1.0, abs(wanted)):
                raise ConfigError(
                    f"{where}, sample {i}, token {t}: expected {wanted:g} of the definition, got {got:g}"
                )


def _defined(where: str, definition: Definition, sample: Sample) -> list[float]:
    """What the definition gives, one number per token.

    >>> _defined("step", lambda sample: None, samples()[1])
    Traceback (most recent call last):
    slime_ext.errors.ConfigError: step, definition: expected 1 numbers, one per token, got None
    """
    values = definition(sample)
    got = f"{len(values)}" if isinstance(values, Sequence) else _kind(values)
    if got != str(len(sample.mask)):
        raise ConfigError(
            f"{where}, definition: expected {len(sample.mask)} numbers, one per token, got {got}"
        )
    return list(values)


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None" if value is None else f"a {type(value).__name__}"
