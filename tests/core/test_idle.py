"""What a correction refuses, in Python as in YAML: wrong words and numbers, and steps that change nothing."""

from __future__ import annotations

import itertools
import math
import re
import typing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml

from slime_ext import load_config, presets
from slime_ext.config.load import KNOWN_STEPS
from slime_ext.core import idle
from slime_ext.core.centering import Center
from slime_ext.core.correction import Correction
from slime_ext.core.losses import SURROGATES, PpoClip, Reinforce
from slime_ext.core.needs import Need
from slime_ext.core.prefix_steps import PrefixBudget, PrefixReject, PrefixReweight
from slime_ext.core.scoped import ScopedReject, ScopedReweight, ZeroOutside
from slime_ext.core.state import Effect
from slime_ext.core.statistics import statistics_of
from slime_ext.core.steps import (
    Clip,
    MinPrefixReweight,
    Normalize,
    Reject,
    Reweight,
    SecondMoment,
    SignedClip,
    Statistic,
    Truncate,
    Veto,
)
from slime_ext.core.terms import TERMS, ReverseK3, SquaredLogRatio
from slime_ext.errors import ConfigError
from slime_ext.steps import State, Step, StepInputs

WRONG = Path(__file__).parents[1] / "config/golden/wrong_configurations.txt"
PARTS = {
    "numerator",
    "surrogate",
    "steps",
    "terms",
    "center",
    "mask_scope",
    "denominator",
    "group",
    "on_nonfinite",
}


def by_hand(mapping):
    """The correction of native keys, made in Python without the loader."""

    def part(table, entry):
        ((name, fields),) = entry.items() if isinstance(entry, dict) else ((entry, None),)
        return table[name](**(fields or {}))

    fields = dict(mapping)
    for key, table in {"steps": KNOWN_STEPS, "terms": TERMS}.items():
        if isinstance(fields.get(key), list):
            fields[key] = tuple(part(table, entry) for entry in fields[key])
    if "surrogate" in fields:
        fields["surrogate"] = part(SURROGATES, fields["surrogate"])
    if "center" in fields:
        fields["center"] = Center(**fields["center"])
    return Correction(**fields)


def refused():
    """The mappings that YAML refuses and Python can say."""
    for block in WRONG.read_text().strip().split("\n\n"):
        mapping = yaml.safe_load(block.splitlines()[0])
        if isinstance(mapping, dict) and mapping.keys() <= PARTS:
            yield pytest.param(mapping, block.splitlines()[1].strip(), id=block.splitlines()[0])


@pytest.mark.parametrize(("mapping", "line"), list(refused()))
def test_what_yaml_refuses_python_refuses_for_the_same_reason(mapping, line):
    """Python itself refuses unknown names and fields."""
    with pytest.raises((ConfigError, TypeError, KeyError, ValueError)) as caught:
        by_hand(mapping)
    if isinstance(caught.value, ConfigError):
        ours, theirs = (
            re.sub(r"slime_ext\.|steps\[\d\]\.|surrogate\.|terms\[\d\]\.", "", said).partition(": ")[0]
            for said in (str(caught.value), line)
        )
        assert ours == theirs


def test_most_of_them_are_refused_by_us():
    """Not by Python's own errors, which would hide that nothing looks."""
    ours = 0
    for case in (cases := [*refused()]):
        try:
            by_hand(case.values[0])
        except ConfigError:
            ours += 1
        except (TypeError, KeyError, ValueError):
            pass
    assert ours > 100 and ours > 0.75 * len(cases)


HALF = ("token", "ratio", "mean", 0.5, 2.0)
FIELDS = {
    "numerator: expected 'proximal' or 'target', got 'old'": {"numerator": "old"},
    "mask_scope: expected 'policy' or 'all', got 'al'; did you mean 'all'?": {"mask_scope": "al"},
    "on_nonfinite: expected 'reject' or 'raise', got 'drop'": {"on_nonfinite": "drop"},
    "denominator: expected 'host' or 'kept', got True": {"denominator": True},
    "group: expected 'ignore', 'rebaseline' or 'atomic', got None": {"group": None},
    "steps: expected a tuple of steps, got [Reweight(level='token')]": {"steps": [Reweight()]},
    "steps[1]: expected a Step, got 'truncate'": {"steps": (Reweight(), "truncate")},
    "surrogate: expected one of HostLoss, Reinforce, ": {"surrogate": "reinforce"},
    "terms: expected a tuple of terms, got SquaredLogRatio": {"terms": SquaredLogRatio()},
    "terms[1]: expected each term once, got a second": {"terms": (ReverseK3(), ReverseK3(2.0))},
    "center: expected Center or None, got 128": {
        "center": 128,
        "surrogate": Reinforce(),
        "numerator": "target",
    },
}
WRONG_PARTS = {  # what the part's own constructor refuses
    "reweight.level: expected 'token', 'turn', 'sequence' or 'geometric', got 'seq'": lambda: Reweight("seq"),
    "reweight.level: expected 'token', ": lambda: ScopedReweight("seq", clamp=20.0),
    "prefix_reweight.aggregate: expected 'sum' or 'mean', got 'max'": lambda: PrefixReweight("max"),
    "normalize.level: expected 'token' or 'sequence', got 'turn'": lambda: Normalize("turn"),
    "truncate.high: expected a finite number, got inf": lambda: Truncate(math.inf),
    "truncate.high: expected a number, got True": lambda: Truncate(True),
    "truncate.high: expected a number, got '2'": lambda: Truncate("2"),
    "truncate.high: expected 0, or a number of size 1.18e-38 to 3.4e+38 (float32), got 1e+40": (
        lambda: Truncate(1e40)
    ),
    "clip.low: expected a number, got [0.5]": lambda: Clip([0.5], 2.0),
    "signed_clip.negative_low: expected a number, got '0'": lambda: SignedClip(negative_low="0"),
    "reject.max_staleness: expected a whole number, got 1.5": lambda: Reject(max_staleness=1.5),
    "reject.when: expected 'always', ": lambda: Reject(*HALF, when="outwards"),
    "reject.clamp: expected a number, got '1'": lambda: ScopedReject(*HALF, clamp="1"),
    "veto.low: expected a number, got '1e-4'": lambda: Veto("1e-4"),
    "second_moment.threshold: expected a number, got None": lambda: SecondMoment(None),
    "zero_outside.low: expected a number, got '0.5'": lambda: ZeroOutside(low="0.5"),
    "ppo_clip.anchor: expected 'proximal' or 'behavior', got 'rollout'": lambda: PpoClip("rollout"),
    "squared_log_ratio.coefficient: expected a finite number, got inf": lambda: SquaredLogRatio(math.inf),
    "center.top_k: expected a whole number, got 2.5": lambda: Center(2.5),
}


@pytest.mark.parametrize(("line", "fields"), FIELDS.items(), ids=list(FIELDS))
def test_a_wrong_word_or_number_is_named_with_its_field(line, fields):
    with pytest.raises(ConfigError) as caught:
        Correction(**fields)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("line", "make"), WRONG_PARTS.items(), ids=list(WRONG_PARTS))
def test_a_part_refuses_a_wrong_word_or_number(line, make):
    with pytest.raises(ConfigError) as caught:
        make()
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


NO_WEIGHT, NO_TOKEN = "expected a step that changes a weight", "expected a step that rejects a token"
IDLE = [
    ((Truncate(2.0), Reweight("token")), "steps[0].truncate: expected a reweight step before it, got none"),
    ((Clip(), MinPrefixReweight()), "steps[0].clip: expected a reweight step before it, got none"),
    (
        (Reweight(), Truncate(2.0), Reweight("sequence")),
        "steps[2].reweight: expected one step that sets weights",
    ),
    ((Reweight(), Truncate(2.0), Truncate(2.0)), "steps[2].truncate: expected one such step"),
    ((Reject(*HALF), Veto(1e-4), Reject(*HALF)), "steps[2].reject: expected one such step"),
    ((SecondMoment(0.1), SecondMoment(0.2)), "steps[1].second_moment: expected one such step"),
    (
        (Reweight(), Truncate(2.0), Normalize(), Normalize("sequence")),
        "steps[3].normalize: expected one such step",
    ),
    ((Reweight(), Truncate(2.0), Truncate(3.0)), f"steps[2].truncate: {NO_WEIGHT}"),
    ((Reweight(), Truncate(3e38)), f"steps[1].truncate: {NO_WEIGHT}"),
    ((Reweight(), Clip(0.0, 3e38)), f"steps[1].clip: {NO_WEIGHT}"),
    ((SignedClip(negative_low=1.0),), f"steps[0].signed_clip: {NO_WEIGHT}"),
    ((ScopedReweight("token", clamp=0.5), Truncate(2.0)), f"steps[1].truncate: {NO_WEIGHT}"),
    ((Reweight(), Clip(1.0, 1.0)), "steps[1].clip: expected weights that differ, got 1 for every token"),
    ((Reweight(), Truncate(1.0), Clip(1.0, 2.0)), "steps[2].clip: expected weights that differ"),
    (
        (ScopedReweight("sequence", over="kept"),),
        "steps[0].reweight.over: expected a step that rejects before it",
    ),
    (
        (Reweight(), ZeroOutside(), Truncate(3.0), Clip(0.5, 2.0)),
        "steps[3].clip: expected a step that leaves weights of 0 unchanged after one that sets them, got "
        "one that raises them: write it before steps[1], or remove its lower bound",
    ),
    ((Normalize(),), "steps[0].normalize: expected a reweight step before it, got none: add one"),
    ((Reject(*HALF), Normalize("sequence")), "steps[1].normalize: expected a reweight step before it, got"),
    ((Reject("token", "tv", high=1.0),), f"steps[0].reject: {NO_TOKEN}"),
    ((Reject("sequence", "binary_kl", "mean", high=13.9),), f"steps[0].reject: {NO_TOKEN}"),
    ((Reject("token", "k3", low=0.0),), f"steps[0].reject: {NO_TOKEN}"),
    ((Reject("token", "k1", high=88.0),), f"steps[0].reject: {NO_TOKEN}"),
    ((ScopedReject("sequence", "k2", high=300.0, clamp=20.0),), f"steps[0].reject: {NO_TOKEN}"),
    ((Reject("token", high=2.0, when="outward_negative"),), f"steps[0].reject: {NO_TOKEN}"),
    ((Reject(max_staleness=1000),), f"steps[0].reject: {NO_TOKEN}"),
    ((Veto(high=3e38),), f"steps[0].veto: {NO_TOKEN}"),
    ((PrefixReject("tv", "mean", high=1.0),), f"steps[0].prefix_reject: {NO_TOKEN}"),
    ((PrefixBudget("tv", high=1.0, budget=1.0),), f"steps[0].prefix_budget: {NO_TOKEN}"),
]
ACTING = [
    (Reweight(), Truncate(1e38)),
    (Reweight("sequence"), Truncate(1e30)),
    (Reweight("turn"), Clip(1e-5, 1e5), Truncate(3.0)),
    (Reweight("geometric"), ZeroOutside("sequence", "mean", 1e-5, 1e5), Normalize()),
    (Reweight("sequence"), Clip(0.5, 2.0), ZeroOutside(), Clip(0.0, 1.5)),
    (Reweight(), Truncate(2.0), Reject(*HALF)),  # the rejection leaves no weight that the cap changes
    (
        Reject("sequence", "k2", "max", high=0.5),
        Reject("sequence", "k3", "mean", high=0.01),
        Veto(1e-4, 100.0),
    ),
    (Reject("token", "tv", high=0.99), Reject("token", "binary_kl_max", high=13.0)),
    (Reject("turn", "k1", "sum", low=-1e3, high=1e3),),
    (Reject("sequence", "k1", "max", high=0.05, when="outward_positive"),),
    (Reject("token", high=2.0, when="outward_positive"), Reject("token", low=0.5, when="outward_negative")),
    (Reject(max_staleness=0),),
    (Reject(max_staleness=999),),
    (Veto(low=1e-37), Veto(high=1e38)),
    (
        SecondMoment(1e-12),
        PrefixReject(high=math.exp(0.05), growth="sqrt"),
        PrefixBudget("tv", 0.2, 0.0, 1.0),
    ),
    (Reject(*HALF), ScopedReweight("sequence", over="kept"), Truncate(2.0)),
    (Reweight(), SecondMoment(0.04), ScopedReject("sequence", "k2", "mean", high=0.3, over="kept")),
    (Reweight(), Truncate(2.0), Normalize(), Truncate(100.0)),
    (SecondMoment(1e-6), ScopedReweight("sequence", over="kept"), Truncate(2.0)),
    (*(Veto(0.5 * 0.9**i) for i in range(40)),),
]


@pytest.mark.parametrize(("steps", "line"), IDLE, ids=[line for _, line in IDLE])
def test_a_step_that_changes_nothing_is_refused(steps, line):
    with pytest.raises(ConfigError) as caught:
        Correction(steps=steps)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)
    if NO_TOKEN in line or NO_WEIGHT in line:
        assert str(caught.value).endswith(
            "none (tried: ratios from e^-88 to e^88, ages from 0 to 1000): tighten its bounds, or remove it"
        )


@pytest.mark.parametrize("steps", ACTING, ids=str)
def test_a_step_that_acts_is_taken(steps):
    assert Correction(steps=steps).steps == steps


def test_every_preset_and_its_keys_are_taken():
    for name in presets.PRESETS:
        assert load_config({"preset": name}) == presets.get(name)


def test_the_wild_batch_is_what_the_message_says():
    """The message names its reach."""
    batch = idle.wild_batch()
    response = batch.segments.mask
    reach = batch.log_ratio[response]
    assert (float(reach.min()), float(reach.max())) == (-88, 88)
    assert sorted(set(batch.ages.tolist())) == [*range(41), 1000]
    assert set(batch.advantages.tolist()) == {1.0, -1.0}
    assert batch.behavior.max() <= 0 and batch.numerator.max() <= 0
    torch.testing.assert_close(torch.where(response, batch.numerator - batch.behavior, 0), batch.log_ratio)


def test_steps_are_tried_on_the_cpu_whatever_the_default_device_is():
    idle.wild_batch.cache_clear()
    idle.check_steps.cache_clear()
    with torch.device("meta"):
        Correction(steps=(Reweight("sequence"), Truncate(3.0), Reject("turn", "k3", "max", high=0.5)))
    assert idle.wild_batch().log_ratio.device.type == "cpu"


@dataclass(frozen=True)
class Late(Step):
    """A user's own: drops what comes after a place that the batch does not reach."""

    effects = frozenset({Effect.REJECT})

    def __call__(self, state: State, inputs: StepInputs) -> State:
        return state.reject("token", inputs.segments.within < 10**6)


@dataclass(frozen=True)
class Broken(Step):
    effects = frozenset({Effect.REJECT})

    def __call__(self, state: State, inputs: StepInputs) -> State:
        raise LookupError("no")


@dataclass(frozen=True)
class Halved(Step):
    effects = frozenset({Effect.BOUND})

    def __call__(self, state: State, inputs: StepInputs) -> State:
        return state.bound(state.weights.clamp(max=0.5))


@dataclass(frozen=True)
class Raised(Step):
    effects = frozenset({Effect.BOUND})
    raises_zero = True

    def __call__(self, state: State, inputs: StepInputs) -> State:
        return state.bound(state.weights.clamp(0.1, 2.0))


@dataclass(frozen=True)
class Zeroed(Step):
    effects = frozenset({Effect.BOUND})
    sets_zero = True

    def __call__(self, state: State, inputs: StepInputs) -> State:
        return state.bound(torch.where(inputs.log_ratio.abs() < 0.5, state.weights, 0))


@dataclass(frozen=True)
class Listed(Step):
    values: list

    def __call__(self, state: State, inputs: StepInputs) -> State:
        return state


def test_a_users_own_step_may_wait_for_what_the_batch_lacks():
    assert Correction(steps=(Late(), Late(), Reweight(), Halved(), Halved())).steps
    assert Correction(steps=(Broken(), Veto(high=3e38))).steps  # what is behind it was not tried
    with pytest.raises(ConfigError, match=r"steps\[1\].veto: expected a step that rejects a token"):
        Correction(steps=(Late(), Veto(high=3e38)))
    with pytest.raises(ConfigError, match=r"steps\[0\].Halved: expected a reweight step before it, got none"):
        Correction(steps=(Halved(), Reweight()))
    with pytest.raises(
        ConfigError, match=r"steps\[0\].Listed: expected fields that can be hashed, got unhash"
    ):
        Correction(steps=(Listed([1]),))


def test_a_users_step_that_raises_weights_of_0_is_refused_after_zero_outside():
    assert Correction(steps=(Reweight(), Raised(), ZeroOutside())).steps
    assert Correction(steps=(Reweight(), ZeroOutside(), Halved())).steps
    with pytest.raises(ConfigError) as caught:
        Correction(steps=(Reweight(), ZeroOutside(), Raised()))
    assert str(caught.value) == (
        "steps[2].Raised: expected a step that leaves weights of 0 unchanged after one that sets them, got "
        "one that raises them: write it before steps[1], or remove its lower bound"
    )
    with pytest.raises(
        ConfigError, match=r"steps\[2\].clip: expected a step that leaves weights of 0 unchanged"
    ):
        Correction(steps=(Reweight(), Zeroed(), Clip(0.5, 2.0)))


def writes(call, **more):
    """A user's own step that writes to what it reads."""
    more = {"effects": frozenset({Effect.REJECT}), "__call__": call} | more
    return dataclass(frozen=True)(type("Writes", (Step,), more))()


def rejects_none(state, inputs):
    return state.reject("token", inputs.log_ratio < torch.inf)


WRITING = {
    "log-ratios": writes(lambda self, s, i: rejects_none(s, i) if i.log_ratio.zero_() is not None else s),
    "ratios": writes(lambda self, s, i: s.reject("token", i.ratio.fill_(1) > 0)),
    "the mask": writes(lambda self, s, i: s.reject("token", ~i.segments.mask.zero_())),
    "flags": writes(lambda self, s, i: s.reject("token", ~i.finite.logical_not_())),
    "flags of the state": writes(lambda self, s, i: s.reject("token", ~s.keep["token"].zero_())),
    "weights": writes(
        lambda self, s, i: s.bound(s.weights.zero_().add(2.0)), effects=frozenset({Effect.BOUND})
    ),
    "statistics": writes(
        lambda self, s, i: s.reject("sequence", i.total("sequence", "sum", "ratio").zero_() < 1),
        statistics=(*statistics_of("sequence", "sum", "ratio"), *statistics_of("sequence", "sum", "count")),
    ),
    "what its number reads": writes(
        lambda self, s, i: rejects_none(s, i),
        needs=frozenset({Need.WHOLE_STEP}),
        number_for_step=lambda self, batches, all_sum: all_sum(batches[0][1].log_ratio.zero_()).sum(),
    ),
}


@pytest.mark.parametrize("name", WRITING)
def test_a_step_that_writes_in_place_leaves_other_steps_their_batch(name):
    """Those behind it in the list, and those of every later correction."""
    before = idle.wild_batch.__wrapped__()
    own = WRITING[name]
    first = (Reweight(),) if own.effects == {Effect.BOUND} else ()
    behind = (Reject("sequence", high=20.0), Veto(low=0.01))
    assert Correction(steps=(*first, own, *behind)).steps
    after = idle.wild_batch()
    for field in ("log_ratio", "finite", "numerator", "behavior", "advantages", "ages", "ratio"):
        assert torch.equal(getattr(after, field), getattr(before, field)), field
    assert torch.equal(after.segments.mask, before.segments.mask)
    idle.check_steps.cache_clear()
    assert Correction(steps=(Reweight(), Truncate(5.0), Reject("sequence", high=3.0))).steps


@dataclass(frozen=True)
class Floored(Truncate):
    """A user's subclass with a field of its own, which only the user can check."""

    floor: float = -math.inf


def test_a_subclass_of_a_step_may_add_fields_and_keeps_the_checks_of_the_step():
    assert Floored(2.0).floor == -math.inf
    with pytest.raises(ConfigError, match=r"truncate\.high: expected a number, got '2'"):
        Floored("2")


def acts(steps):
    """Whether no step is refused when all are tried on the wild batch."""
    correction = Correction(steps=steps)
    with torch.no_grad():
        idle._check_acts(steps, correction.units, correction.statistics)  # raises if one is
    return True


FARTHEST = dict.fromkeys(typing.get_args(Statistic), idle.SURE_CAP) | idle.SURE_BOUNDS


@pytest.mark.parametrize("level", ["token", "turn", "sequence", "geometric"])
@pytest.mark.parametrize(
    "bound", [None, Truncate(1.0), Truncate(idle.SURE_CAP), Clip(1, idle.SURE_CAP)], ids=str
)
def test_weights_and_bounds_that_surely_act_act_on_the_wild_batch(level, bound):
    steps = (Reweight(level), *([] if bound is None else [bound]), Veto(high=5.0))
    assert idle._surely_act(steps) and acts(steps)
    assert bound is None or (not idle._surely_act((*steps, bound)) and not idle._surely_act((bound,)))


@pytest.mark.parametrize("unit", ["token", "turn", "sequence"])
@pytest.mark.parametrize("statistic", FARTHEST)
def test_rejections_that_surely_act_act_on_the_wild_batch(unit, statistic):
    """Within a unit of one token nothing is aggregated. A tighter bound rejects more."""
    aggregates = ("mean",) if unit == "token" else ("sum", "mean", "max")
    for aggregate, when in itertools.product(aggregates, idle.SURE_WHEN):
        steps = (Reject(unit, statistic, aggregate, None, FARTHEST[statistic], when),)
        assert idle._surely_act(steps) and acts(steps)


@pytest.mark.parametrize(
    "step",
    [
        Reject(high=2 * idle.SURE_CAP),
        Reject(high=2.0, when="outward_negative"),
        Reject(statistic="tv", high=1.0),
        Veto(low=0.5 / idle.SURE_CAP),
        Clip(1.0, 1.0),
        SecondMoment(0.04),
    ],
    ids=str,
)
def test_other_steps_are_tried(step):
    assert not idle._surely_act((Reweight(), step))


@pytest.mark.parametrize("name", presets.PRESETS)
def test_each_step_of_a_preset_acts(name):
    assert acts(presets.get(name).steps)
