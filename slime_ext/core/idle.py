"""Refuses steps that change nothing.

A bound that is far within the range of the batch surely acts. Every other step runs on the batch, on which
every sensible step acts. The batch has ratios of tokens from e^-88 to e^88, small and large products and
means over sequences, both signs of the advantage, and ages from 0 to 1000. A step acts if it changes a weight
or rejects a token of the batch, whatever the other steps reject. A correction costs a few milliseconds, once
per process, because the tensors are small, on the CPU, and results are remembered.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from slime_ext.core.losses import SURROGATES
from slime_ext.core.needs import Need
from slime_ext.core.prefix_steps import PREFIX_STEPS
from slime_ext.core.scoped import FORMS, Scoped
from slime_ext.core.state import Effect, State, Step, StepInputs, only_bounds
from slime_ext.core.statistics import StatisticKey, tabulate
from slime_ext.core.steps import STEPS, Clip, Normalize, Reject, Reweight, SecondMoment, Truncate, Veto
from slime_ext.core.terms import TERMS
from slime_ext.core.tokens import Unit
from slime_ext.errors import ConfigError, expect
from slime_ext.ops.segments import Segments, identity

if TYPE_CHECKING:
    from torch import Tensor

ONCE = (Normalize, SecondMoment)  # allowed once, because one of two undoes or implies the other
TABLES: tuple[Mapping[str, Any], ...] = (STEPS, PREFIX_STEPS, FORMS, SURROGATES, TERMS)
NAMES = {cls: name for table in TABLES for name, cls in table.items()}

SURE_CAP = 1e5  # a bound on ratios, far below the batch's e^FAR; its inverse is far above e^-FAR
# Statistic -> an upper bound far below the statistic's largest values on the batch, in nats; tv has no unit.
SURE_BOUNDS = {"k1": 5.0, "k2": 5.0, "k3": 5.0, "binary_kl": 1.0, "binary_kl_max": 1.0, "tv": 0.5}
SURE_WHEN = ("always", "negative_advantage", "positive_advantage", "outward")
FAR = 88.0  # nats, the largest log-ratio of a token: float32 holds bounds up to e^88.7
SIZES = (1e-4, 1e-3, 0.01, 0.1, 0.5, 1.0, 3.0, 12.0, FAR)  # nats, log-ratios
SURE = (1e-6, 0.05, 1.0, 5.0)  # nats, -log of a token's larger probability under the two policies
OLDEST, USUAL = 1000, 40  # weight versions, or optimizer steps
# Log-ratios of a sequence, to be multiplied by one of SIZES: all equal, one far token, one of the other sign,
# sum 0.
SHAPES = (
    (1, 1, 1, 1, 1, 1, 1, 1),
    (-1, -1, -1, -1, -1, -1, -1, -1),
    (0, 1, 0, 0, 0, 0, 0, 0),
    (0, -1, 0, 0, 0, 0, 0, 0),
    (1, 1, -1, 1, 0, 1, 1, 1),
    (-1, -1, 1, -1, 0, -1, -1, -1),
    (1, -1, 1, -1, 0, 0, 1, -1),
)
TURNS = (1, 1, 1, 1, 0, 1, 1, 1)  # response mask of these sequences, which makes two turns
LONG = 400  # tokens of a few more sequences, because some bounds on sums act only on long responses
TRIED = f"tried: ratios from e^-{FAR:g} to e^{FAR:g}, ages from 0 to {OLDEST}"


def name_of(part: Any) -> str:
    """Returns the name of a step, a surrogate or a term in a configuration.

    For a user's own class this is the name of the class.
    """
    return NAMES.get(type(part), type(part).__name__)


@functools.lru_cache(maxsize=1024)
def check_steps(
    steps: tuple[Step, ...], units: tuple[Unit, ...], statistics: tuple[StatisticKey, ...]
) -> None:
    """Raises ConfigError at the first step that changes nothing.

    Steps that passed are remembered.

    Args:
        units, statistics: ``Correction.units`` and ``Correction.statistics``.
    """
    for i, step in enumerate(steps):
        _check_place(steps, i, f"steps[{i}].{name_of(step)}")
    if not _surely_act(steps):
        with torch.no_grad(), torch.device("cpu"):  # also if the process's default device is a GPU
            _check_acts(steps, units, statistics)


def _surely_act(steps: Sequence[Step]) -> bool:
    """Whether each step is known to act without a run on the wild batch, so that nobody waits for torch.

    At every level, and for both signs of the advantage, the batch has ratios from e^-FAR to e^FAR. So its
    weights differ, and a bound far within that range acts, whatever the other steps reject.
    """
    is_weighted = any(type(step) is Reweight for step in steps[:1])
    others = steps[is_weighted:]
    bounds = [step for step in others if type(step) in (Truncate, Clip)]
    return len(bounds) <= is_weighted and all(map(_surely_acts, others))


def _surely_acts(step: Step) -> bool:
    """Whether a bound is far within the values that the wild batch has."""
    if type(step) is Truncate:
        return step.high <= SURE_CAP
    if type(step) is Clip:
        return step.low < step.high <= SURE_CAP  # between equal bounds, all weights would be 1
    if type(step) is Veto:
        return (step.low or 0) >= 1 / SURE_CAP or (step.high or math.inf) <= SURE_CAP
    if type(step) is Reject and step.when in SURE_WHEN and step.high is not None:
        return step.high <= SURE_BOUNDS.get(step.statistic, SURE_CAP)
    return False


def _check_place(steps: Sequence[Step], i: int, here: str) -> None:
    """Refuses a step that is idle, or makes another step idle, because of its place."""
    step, before = steps[i], steps[:i]
    for j, earlier in enumerate(before):
        if Effect.REWEIGHT in step.effects and Effect.REWEIGHT in earlier.effects:
            raise ConfigError(
                f"{here}: expected one step that sets weights, got a second after steps[{j}]: remove one, "
                "because the second would undo the first"
            )
        is_again = step == earlier or (isinstance(step, ONCE) and type(step) is type(earlier))
        if is_again and is_ours(step):
            raise ConfigError(
                f"{here}: expected one such step, got a second after steps[{j}]: remove one, because the "
                "second would never act"
            )
    reads_weights = only_bounds(step) or isinstance(step, Normalize)
    if reads_weights and not any(Effect.REWEIGHT in earlier.effects for earlier in before):
        raise ConfigError(
            f"{here}: expected a reweight step before it, got none: add one, because all weights are "
            "still 1 there"
        )
    zeroing = next((j for j, earlier in enumerate(before) if earlier.sets_zero), None)
    if zeroing is not None:
        what = f"write it before steps[{zeroing}], or remove its lower bound"
        wanted = "a step that leaves weights of 0 unchanged after one that sets them"
        expect(not step.raises_zero, here, wanted, "one that raises them", what)
    if getattr(step, "over", "response") == "kept":
        rejects = any(Effect.REJECT in earlier.effects for earlier in before)
        why = "every token is still kept there; remove over"
        expect(rejects, f"{here}.over", "a step that rejects before it", "none", why)


def _check_acts(steps: Sequence[Step], units: tuple[Unit, ...], statistics: tuple[StatisticKey, ...]) -> None:
    """Runs the steps on the wild batch and refuses built-in steps that change nothing."""
    inputs = replace(wild_batch(), units=units)
    inputs = replace(inputs, table=tabulate(statistics, inputs))
    state = inputs.start
    for i, step in enumerate(steps):
        if isinstance(step, Scoped):  # on other data, earlier steps may keep what they reject here
            step = replace(step, over="response")
        before = state._replace(step=i)
        try:
            if Need.WHOLE_STEP in step.needs:
                number = step.number_for_step([_tried_on(step, before, inputs)], identity)
                inputs = replace(inputs, plan={**inputs.plan, step: number})
            state = step(*_tried_on(step, before, inputs))
        except Exception:
            if is_ours(step):
                raise
            return  # a user's own step; check_step or its first call says what is wrong with it
        if not isinstance(state, State):
            return
        # After normalize, it depends on the mean weight of the data whether a bound acts.
        is_normalized = any(isinstance(earlier, Normalize) for earlier in steps[:i])
        if is_ours(step) and not (is_normalized and Effect.BOUND in step.effects):
            _check_effect(step, before, state, inputs, f"steps[{i}].{name_of(step)}")


def _tried_on(step: Step, state: State, inputs: StepInputs) -> tuple[State, StepInputs]:
    """Returns what a step is tried on.

    A user's own step gets a copy, because it may write to it.
    """
    if is_ours(step):
        return state, inputs
    return copy.deepcopy((state, inputs), {id(key): key for key in inputs.plan})  # the steps are not copied


def _check_effect(step: Step, before: State, after: State, inputs: StepInputs, here: str) -> None:
    weights = _of_response(inputs, after.unit, after.weights)
    changed = not torch.equal(weights, _of_response(inputs, before.unit, before.weights))
    records = after.step_records[len(before.step_records) :]
    rejected = any(
        not bool(_of_response(inputs, record.unit, record.flags).all())
        for record in records
        if record.kind == "kept"
    )
    if not changed and not rejected:
        only_rejects = step.effects == {Effect.REJECT}
        wanted, got = ("rejects a token", "rejects") if only_rejects else ("changes a weight", "changes")
        raise ConfigError(
            f"{here}: expected a step that {wanted}, got one that {got} none ({TRIED}): tighten its bounds, "
            "or remove it"
        )
    if changed and bool((weights == weights[0]).all()):
        raise ConfigError(
            f"{here}: expected weights that differ, got {float(weights[0]):g} for every token: widen its "
            "bounds, or remove the weights"
        )


def _of_response(inputs: StepInputs, unit: Unit, values: Tensor) -> Tensor:
    """Gives each response token the value of its unit, and leaves out all other tokens."""
    return inputs.segments.expand_to_tokens(unit, values)[inputs.segments.mask]


def is_ours(step: Step) -> bool:
    """Tells whether a step is built in, not a user's own."""
    return type(step).__module__.startswith("slime_ext.")


@functools.cache
def wild_batch() -> StepInputs:
    """Makes the sequences that steps are tried on, in float64 on the CPU."""
    short = itertools.product(SHAPES, SIZES, SURE, (1.0, -1.0))
    long = itertools.product(((1,) * LONG, (-1,) * LONG), (0.1, 12.0), SURE[:1], (1.0, -1.0))
    cases = [*short, *long]
    lengths = [len(shape) for shape, *_ in cases]
    masks = (TURNS if n == len(TURNS) else (1,) * n for n in lengths)
    mask = torch.tensor([*itertools.chain.from_iterable(masks)]) > 0
    log_ratios = [sign * size for shape, size, _, _ in cases for sign in shape]
    log_ratio = torch.tensor(log_ratios, dtype=torch.float64)
    sure, advantages = (
        torch.tensor([case[place] for case in cases], dtype=torch.float64).repeat_interleave(
            torch.tensor(lengths)
        )
        for place in (2, 3)
    )
    behavior = -sure - log_ratio.clamp(min=0)
    ages = torch.tensor([i % (USUAL + 1) for i in range(len(cases) - 1)] + [OLDEST], dtype=torch.float64)
    return StepInputs(
        Segments.whole(lengths, mask),
        torch.where(mask, log_ratio, 0),
        mask,
        behavior + log_ratio,
        behavior,
        advantages=advantages,
        ages=ages,
        age_steps=ages,
    )
