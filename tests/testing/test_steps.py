"""Steps and hooks of a user's own module: found by name, tried before they run, refused in one line."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch

from slime_ext import load_config, tis
from slime_ext.config.load import to_mapping
from slime_ext.core.correction import Correction
from slime_ext.core.needs import Need
from slime_ext.core.state import Effect
from slime_ext.core.statistics import ByPosition, ExceedsLimit, StatisticKey, statistics_of
from slime_ext.core.steps import STEPS, Reject, Step, Truncate, Veto
from slime_ext.errors import ConfigError, SlimeExtError
from slime_ext.testing import check_hook, check_step, samples
from slime_ext.testing.steps import packed, split

HERE = __name__


@dataclass(frozen=True)
class Tempered(Step):
    power: float = 0.5

    effects = frozenset({Effect.REWEIGHT})

    def __call__(self, state, inputs):
        return state.reweight("token", self.ratio(inputs))

    def ratio(self, inputs):
        return (self.power * inputs.log_ratio).exp()


@dataclass(frozen=True)
class Silent(Tempered):
    effects = frozenset()


def ratios(sample):
    return [math.exp(p - b) for p, b in zip(sample.proximal, sample.behavior, strict=True)]


class NotFrozen(Step):
    pass


def step(call, **more):
    """A step whose call is the function."""
    return dataclass(frozen=True)(type("Own", (Tempered,), {"__call__": call, **more}))()


def index(state, inputs):
    return float(inputs.log_ratio[inputs.log_ratio > 0].sum())


def total(own, inputs):
    return inputs.aggregate("sequence", "sum", own.ratio(inputs)).sum()


def branch(inputs):
    if inputs.log_ratio.max() > 0:
        return 2.0
    return 1.0


BREAKS = {  # what the line names -> what the call does
    "no gradient": lambda self, s, i: s.reweight(
        "token", (torch.tensor(0.5, requires_grad=True) * i.log_ratio).exp()
    ),
    "Tensor.item": lambda self, s, i: s.reweight("token", self.ratio(i) / i.log_ratio.max().item()),
    "not .item(), .tolist()": lambda self, s, i: s.reweight("token", self.ratio(i) + index(s, i)),
    "shape [5], one per sequence": lambda self, s, i: s.reweight("sequence", self.ratio(i)),
    "got NaN at sample 0, token 0": lambda self, s, i: s.reweight("token", i.log_ratio * 0 / 0),
    "whatever shares the micro-batch": lambda self, s, i: s.reweight("token", self.ratio(i).cumsum(0)),
    "statistics_of('sequence', 'sum', 'ratio')": lambda self, s, i: s.reweight(
        "sequence", i.total("sequence", "sum", "ratio").exp()
    ),
    "written to": lambda self, s, i: s.bound(s.weights.clamp_(max=2)),
    "expected a State, got a Tensor": lambda self, s, i: i.log_ratio,
    "keep['token']: expected bool": lambda self, s, i: s._replace(keep={"token": s.keep["token"] * 1.0}),
    "unit token, turn or sequence, got 'tokens'": lambda self, s, i: s.reweight("tokens", i.log_ratio),
    "needs: expected Need.ADVANTAGES or Need.AGES or Need.AGE_STEPS, got none of them": lambda self, s, i: (
        s.reweight("token", (i.advantages > 0) * self.ratio(i))
    ),
    "the step reads, inputs.advantages or inputs.ages or inputs.age_steps": lambda self, s, i: s.reweight(
        "sequence", (-i.ages).exp()
    ),
    "got none of them: add the one for what the step reads, inputs": lambda self, s, i: s.reweight(
        "sequence", (-i.age_steps).exp()
    ),
    "at `if inputs.log_ratio.max() > 0:` (test_steps.py:": lambda self, s, i: s.reweight(
        "token", self.ratio(i) * branch(i)
    ),
    "where context parallelism splits a response, got different ones for sample 0": lambda self, s, i: (
        s.reweight("token", i.segments.expand(i.segments.local_sums([self.ratio(i)])[0]))
    ),
    "expected the same sums on every rank": lambda self, s, i: s.reweight(
        "token", self.ratio(i) + (total(self, i) * 0 if len(i.log_ratio) % 2 else 0)
    ),
    "Own: statistics: expected what inputs.total('sequence', 'mean', 'ratio') reads, got none: add "
    "statistics_of('sequence', 'mean', 'ratio') to statistics": lambda self, s, i: s.reweight(
        "sequence", i.total("sequence", "mean", "ratio").exp()
    ),
    "Own: statistics: expected a known unit, got 'Sequence'; did you mean 'sequence'?": lambda self, s, i: (
        s.reweight("sequence", i.total("Sequence", "sum", "ratio").exp())
    ),
    "Own: statistics: expected a known aggregate, got 'average'": lambda self, s, i: s.reweight(
        "sequence", i.total("sequence", "average", "ratio").exp()
    ),
    "Own: statistics: expected a known quantity, got 'k9'": lambda self, s, i: s.reweight(
        "sequence", i.total("sequence", "max", "k9").exp()
    ),
    "Own: statistics: expected a known quantity, got 'k8'": lambda self, s, i: s.reweight(
        "token", i.total("token", "max", "k8").exp()
    ),
    "statistics: expected a known unit, got 'sequnce'; did you mean 'sequence'?": lambda self, s, i: (
        s.reweight("sequence", i.aggregate("sequnce", "sum", self.ratio(i)))
    ),
    "statistics: expected a known aggregate, got 'max' (known: sum, mean)": lambda self, s, i: s.reweight(
        "token", i.prefix("sequence", "max", self.ratio(i))
    ),
    "got ZeroDivisionError": lambda self, s, i: 1 / 0,
    "got a result of state.reject that is lost: a state never changes; write state = ": lambda self, s, i: (
        discard(s.reject("token", self.ratio(i) < 2)) or s.reweight("token", self.ratio(i))
    ),
    "got a result of state.reweight that is lost": lambda self, s, i: (
        discard(s.reweight("token", self.ratio(i))) or s
    ),
    "got a result of state.bound that is lost": lambda self, s, i: (
        s.reweight("token", self.ratio(i))
        if discard(s.reweight("token", self.ratio(i)).bound(s.weights))
        else s
    ),
    "weights: expected numbers >= 0, got -0.222295 at sample 0, token 0": lambda self, s, i: s.reweight(
        "token", self.ratio(i) - 1
    ),
    "weights: expected numbers, got NaN at sample 0, token 0, where ratios are above e^": lambda self, s, i: (
        s.reweight("sequence", quotient(i.segments.sum(i.log_ratio).exp()))
    ),
    "at `print(values)` (test_steps.py:": lambda self, s, i: s.reweight("token", printed(self.ratio(i))),
    'at `return values * len(f"{values}")` (test_steps.py:': lambda self, s, i: s.reweight(
        "token", formatted(self.ratio(i))
    ),
}


def discard(state):
    """Nothing, as of a line whose result is not assigned."""


def quotient(values):
    return values / (1 + values)


def printed(values):
    print(values)
    return values


def formatted(values):
    return values * len(f"{values}")


def bounded(call, **more):
    """A step that says that it bounds the weights."""
    return step(call, **{"effects": frozenset({Effect.BOUND})} | more)


UNBOUNDED = {  # what the line says -> a step that says that it bounds
    "weights: expected at most 4.29497e+09, got ": lambda self, s, i: s.bound(s.weights * 0.5),
    "where ratios are above e^200: effects has Effect.BOUND": lambda self, s, i: s.bound(s.weights.sqrt()),
    "where ratios are below e^-200": lambda self, s, i: s.bound(1 / s.weights.clamp(max=1)),
}


def test_a_bound_that_bounds_nothing_is_refused():
    for text, call in UNBOUNDED.items():
        with pytest.raises(ConfigError) as caught:
            check_step(bounded(call))
        assert text in str(caught.value), caught.value
    half = bounded(lambda self, s, i: s.bound(torch.where(i.log_ratio < 1, s.weights, 0)), sets_zero=True)
    check_step(half)  # weights up to e


def test_a_bound_that_makes_weights_of_0_larger_says_so():
    def floored(self, s, i):
        return s.bound(s.weights.clamp(0.1, 2.0))

    with pytest.raises(ConfigError) as caught:
        check_step(bounded(floored))
    assert str(caught.value) == (
        "Own: raises_zero: expected True, got False, and 0.1 at sample 0, token 0 for a weight of 0: add "
        "raises_zero = True, because zero_outside must not come before such a step"
    )
    check_step(bounded(floored, raises_zero=True))


def test_a_step_that_only_zeroes_weights_says_their_range():
    def call(self, s, i):
        return s.bound(torch.where(i.advantages < 0, 0, s.weights))

    more = {"needs": frozenset({Need.ADVANTAGES})}
    with pytest.raises(
        ConfigError, match=r"effects has Effect\.BOUND; cap the weights, or define weight_range"
    ):
        check_step(bounded(call, **more))
    more |= {"weight_range": lambda self, before: before}
    with pytest.raises(ConfigError) as caught:
        check_step(bounded(call, **more))
    assert str(caught.value) == (
        "Own: sets_zero: expected True, got False, and 0 at sample 0, token 5 for a weight of 1: add "
        "sets_zero = True, because no lower bound must come after such a step"
    )
    check_step(bounded(call, **more, sets_zero=True))


def test_a_state_that_a_step_reads_is_not_thrown_away():
    """As a step that zeroes weights where another step would reject."""

    def call(self, s, i):
        kept = i.kept(Reject(low=0.5, high=2.0)(s, i))
        return s.bound(torch.where(kept, s.weights, 0).clamp(max=2.0))

    check_step(bounded(call, sets_zero=True))


def test_what_is_no_step_is_refused_in_one_line():
    for given, said in {
        ratios: "got a function: use check_hook for a hook",
        Tempered: "got the class Tempered: write Tempered(...)",
        3: "got a int",
    }.items():
        with pytest.raises(
            ConfigError, match=r"check_step: expected an instance of a class derived from"
        ) as caught:
            check_step(given)
        assert said in str(caught.value), caught.value


def test_a_step_that_breaks_the_contract_is_refused_in_one_line():
    for text, call in BREAKS.items():
        with pytest.raises(ConfigError) as caught:
            check_step(step(call))
        assert text in str(caught.value) and "\n" not in str(caught.value), caught.value


WRITES = {  # what the call writes to -> the call
    "log_ratio": lambda self, s, i: s.reweight("token", i.log_ratio.mul_(0.5).exp()),
    "the ratio": lambda self, s, i: s.reweight("token", i.ratio.clamp_(max=2)),
    "usable tokens": lambda self, s, i: s.reweight("token", self.ratio(i) * (i.usable.logical_not_() | True)),
    "the mask": lambda self, s, i: s.reweight("token", self.ratio(i) * i.segments.mask.fill_(True)),
    "the mask of all ranks": lambda self, s, i: s.reweight(
        "token", self.ratio(i) * (0 * i.segments.full_mask.fill_(True).sum() + 1)
    ),
    "places": lambda self, s, i: s.reweight("token", self.ratio(i) + 0 * i.segments.within.add_(1)),
    "the first weights": lambda self, s, i: s.reweight("token", self.ratio(i) + 0 * i.start.weights.mul_(2)),
}
BOUNDS_AND_WRITES = {
    "weights": lambda self, s, i: s.bound(s.weights.clamp_(max=2)),
    "the log of the weights": lambda self, s, i: s.bound(s.log_ratio.exp_().clamp(max=2)),
}


@pytest.mark.parametrize("name", [*WRITES, *BOUNDS_AND_WRITES])
def test_a_step_that_writes_in_place_is_refused_whatever_it_writes_to(name):
    own = step(WRITES[name]) if name in WRITES else bounded(BOUNDS_AND_WRITES[name])
    for _ in range(2):  # the first call left nothing behind
        with pytest.raises(ConfigError, match="Own: expected inputs that stay as they are, got one that was"):
            check_step(own)


@pytest.mark.parametrize("aggregate", ["sum", "mean", "max"])
def test_the_line_about_a_statistic_says_what_makes_the_step_run(aggregate):
    def call(self, s, i):
        return s.reweight("sequence", i.total("sequence", aggregate, "ratio").exp())

    with pytest.raises(ConfigError) as caught:
        check_step(step(call))
    proposed = eval(str(caught.value).partition(": add ")[2].partition(" to statistics")[0])
    check_step(step(call, unit="sequence", statistics=proposed))
    with pytest.raises(ConfigError, match=r"expected what inputs\.total"):  # also without check_step
        Correction(steps=(step(call),))(packed(samples()))


def test_every_step_of_ours_keeps_the_contract():
    made = {Reject: Reject(high=2.0), Veto: Veto(low=1e-3)}
    for cls in STEPS.values():
        if cls is not STEPS["normalize"]:  # wants a bound before it
            check_step(made.get(cls) or cls())


def coupled(number):
    """A step whose number for the step is the function's."""
    return step(
        lambda self, s, i: s.reweight("token", self.ratio(i) * i.plan[self]),
        needs=frozenset({Need.WHOLE_STEP}),
        number_for_step=number,
    )


SHARED = {  # what the line names -> a number for the step that hands all_sum something else than its own sum
    "all_sum: expected a contiguous tensor, got one of shape [3] with strides [0]": lambda self, b, all_sum: (
        all_sum(b[0][1].log_ratio.sum().expand(3))[0].exp()
    ),
    "expected inputs that stay as they are, got one that was written to": lambda self, b, all_sum: all_sum(
        b[0][1].ages
    ).sum(),
}


def test_what_an_all_reduce_in_place_would_corrupt_is_refused():
    for text, number in SHARED.items():
        with pytest.raises(SlimeExtError) as caught:
            check_step(coupled(number))
        assert str(caught.value).startswith(f"Own: {text}"), caught.value


def test_a_rank_that_holds_no_response_token_is_tried():
    def unless_empty(self, s, i):
        return s.reweight("token", self.ratio(i) + (0 * total(self, i) if len(i.log_ratio) else 0))

    with pytest.raises(ConfigError, match="expected the same sums on every rank, got different ones"):
        check_step(step(unless_empty))


def test_behind_a_long_prompt_the_first_rank_holds_every_response():
    tokens = packed(samples())
    held = [split(tokens, rank, 9).segments.size for rank in range(2)]
    assert held == [tokens.segments.size, 0]


UNDECLARED = {  # the line -> what the call does without saying so
    "effects: expected Effect.REWEIGHT beside state.reweight": lambda self, s, i: s.reweight(
        "token", self.ratio(i)
    ),
    "effects: expected Effect.BOUND beside state.bound": lambda self, s, i: s.bound(
        self.ratio(i).clamp(max=1)
    ),
    "effects: expected Effect.REJECT beside state.reject": lambda self, s, i: s.reject(
        "token", self.ratio(i) < 2
    ),
}


SWAPPED = {  # a step that says that it only bounds -> whether it also undoes the weights before it
    "sets": (lambda self, s, i: s.reweight("token", i.ratio.clamp(max=2)), True),
    "sets, then bounds": (lambda self, s, i: s.reweight("token", i.ratio).bound(i.ratio.clamp(max=2)), True),
    "sets through a change of its own": (
        lambda self, s, i: s.reweight("token", i.ratio)._replace(clipped=None).bound(i.ratio.clamp(max=2)),
        True,
    ),
    "reads what it sets": (
        lambda self, s, i: s.bound(
            torch.minimum(s.weights, s.reweight("token", i.ratio).weights.clamp(max=2))
        ),
        False,
    ),
}


@pytest.mark.parametrize("name", SWAPPED)
def test_a_step_that_only_bounds_may_not_set_weights(name):
    call, sets = SWAPPED[name]
    if not sets:
        check_step(bounded(call))
        return
    with pytest.raises(ConfigError, match=r"Own: effects: expected Effect.REWEIGHT beside state.reweight"):
        check_step(bounded(call))
    check_step(bounded(call, effects=frozenset({Effect.REWEIGHT, Effect.BOUND})))


def test_a_class_that_does_not_say_what_its_call_does_is_refused_itself():
    for text, call in UNDECLARED.items():
        with pytest.raises(ConfigError, match=text):
            check_step(step(call, effects=frozenset()))
    with pytest.raises(ConfigError, match=r"steps\[0\].*Silent: effects: expected Effect.REWEIGHT"):
        load_config({"steps": [f"{HERE}.Silent", "truncate"]})


def test_a_field_without_a_value_which_would_take_the_interfaces_is_refused(tmp_path, monkeypatch):
    (tmp_path / "valueless.py").write_text(
        "from dataclasses import dataclass\nfrom slime_ext.steps import Step\n"
        "@dataclass(frozen=True)\nclass Own(Step):\n    unit: str\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"steps\[0\]\.valueless\.Own: .*'unit'") as caught:
        load_config({"steps": ["valueless.Own"]})
    assert "\n" not in str(caught.value)


DECLARED = {  # what a class declares wrongly -> the line
    "Own.needs: expected a frozenset of Need.ADVANTAGES, Need.WHOLE_STEP, ": {"needs": Need.ADVANTAGES},
    "got frozenset({<Need.TARGET: ": {"needs": frozenset({Need.TARGET})},
    "Own.effects: expected a frozenset of Effect.REWEIGHT, Effect.BOUND, Effect.REJECT, got {'reweight'}: "
    "write effects = frozenset({Effect.REWEIGHT})": {"effects": {"reweight"}},
    "got 'reweight'": {"effects": "reweight"},
}


def test_needs_and_effects_are_sets_of_what_a_step_can_need_and_do():
    for line, declared in DECLARED.items():
        own = step(lambda self, s, i: s.reweight("token", self.ratio(i)), **declared)
        for refuse in (check_step, lambda own: Correction(steps=(own,))):
            with pytest.raises(ConfigError) as caught:
                refuse(own)
            assert line in str(caught.value), caught.value
    check_step(step(lambda self, s, i: s.reweight("token", self.ratio(i)), effects={Effect.REWEIGHT}))


@pytest.mark.parametrize(
    "name",
    ["advantage", ExceedsLimit("advantage", 1.0), ByPosition("advantage")],
    ids=["alone", "over a limit", "by place"],
)
def test_a_statistic_of_the_advantage_is_declared_as_a_need(name):
    declared = {"unit": "sequence", "statistics": (StatisticKey("sum", "sequence", name),)}
    reject = {"effects": frozenset({Effect.REJECT})}

    def call(self, s, i):
        return s.reject("sequence", i.table[self.statistics[0]] >= 0)

    for refuse in (check_step, lambda own: Correction(steps=(own,))):
        with pytest.raises(ConfigError, match=r"needs: expected Need\.ADVANTAGES beside a statistic of ad"):
            refuse(step(call, **declared, **reject))
    check_step(step(call, **declared, **reject, needs=frozenset({Need.ADVANTAGES})))


@pytest.mark.parametrize(
    ("declared", "line"),
    [
        ({"unit": "turns"}, r"unit: expected a known unit, got 'turns'; did you mean 'turn'"),
        (
            {"statistics": (StatisticKey("mean", "sequence", "ratio"),)},
            "expected a known aggregate, got 'mean'",
        ),
        ({"statistics": (StatisticKey("sum", "token", "ratio"),)}, "expected a known unit, got 'token'"),
    ],
)
def test_a_word_that_a_step_declares_is_known(declared, line):
    own = step(
        lambda self, s, i: s.reject("token", i.log_ratio < 1), effects=frozenset({Effect.REJECT}), **declared
    )
    for refuse in (check_step, lambda own: Correction(steps=(own,))):
        with pytest.raises(ConfigError, match=line):
            refuse(own)


def test_a_definition_in_plain_python_is_compared():
    check_step(Tempered(0.5), lambda s: [x**0.5 for x in ratios(s)])
    with pytest.raises(ConfigError, match=r"sample 0, token 0: expected .* by the definition"):
        check_step(Tempered(0.5), lambda s: [1.0] * len(s.mask))


OWN_SUMS = {  # unit of the weights, what a step sums by itself, and its definition over the response tokens
    "sum": ("sequence", lambda i, x: i.aggregate("sequence", "sum", x), lambda x: [math.fsum(x)] * len(x)),
    "mean": ("sequence", lambda i, x: i.aggregate("sequence", "mean", x),
             lambda x: [math.fsum(x) / len(x)] * len(x)),
    "max": ("sequence", lambda i, x: i.aggregate("sequence", "max", x), lambda x: [max(x)] * len(x)),
    "sum before": ("token", lambda i, x: i.prefix("sequence", "sum", x),
                   lambda x: [math.fsum(x[: t + 1]) for t in range(len(x))]),
    "mean before": ("token", lambda i, x: i.prefix("sequence", "mean", x),
                    lambda x: [math.fsum(x[: t + 1]) / (t + 1) for t in range(len(x))]),
    "declared": ("sequence", lambda i, x: (0.5 * i.total("sequence", "sum", "ratio")).exp(),
                 lambda x: [math.prod(x)] * len(x)),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN_SUMS)
def test_a_sum_is_the_definitions_however_ranks_split_a_response(name):
    """The step's ratios are square roots of the sample's."""
    unit, ours, of = OWN_SUMS[name]
    declared = {"statistics": statistics_of("sequence", "sum", "ratio")} if name == "declared" else {}
    own = step(lambda self, s, i: s.reweight(unit, ours(i, self.ratio(i))), unit=unit, **declared)

    def definition(sample):
        response = [x**0.5 for x, m in zip(ratios(sample), sample.mask, strict=True) if m]
        values = iter(of(response or [0]))
        return [next(values) if m else 0 for m in sample.mask]

    check_step(own, definition)


def test_a_step_is_named_in_yaml_and_comes_back_as_written():
    mapping = {"steps": [{f"{HERE}.Tempered": {"power": 0.25}}, {"truncate": {"high": 2.0}}]}
    correction = load_config(mapping)
    assert correction.steps == (Tempered(0.25), Truncate(2.0)) and correction.sets_weights
    assert to_mapping(correction)["steps"] == mapping["steps"]
    tokens = packed(samples())
    wanted = Correction(steps=(Tempered(0.25), Truncate(2.0)))(tokens).weights
    assert torch.equal(correction(tokens).weights, wanted)


@dataclass(frozen=True)
class Powers(Tempered):
    powers: tuple[float, ...] = (0.5,)


@dataclass(frozen=True)
class Listed(Tempered):
    powers: list[float] = field(default_factory=list)


def test_a_list_in_yaml_is_a_field_that_can_be_hashed():
    mapping = {"steps": [{f"{HERE}.Powers": {"power": 0.5, "powers": [0.25, 1.0]}}]}
    correction = load_config(mapping)
    assert (
        correction.steps == (Powers(0.5, (0.25, 1.0)),)
        and to_mapping(correction)["steps"] == mapping["steps"]
    )
    with pytest.raises(ConfigError, match="Listed: expected fields that can be hashed, got unhashable type"):
        load_config({"steps": [{f"{HERE}.Listed": {"powers": [0.25]}}]})


@dataclass(frozen=True)
class NoDefault(Tempered):
    base: float = field(kw_only=True)


@dataclass(frozen=True)
class Raises(Tempered):
    def __post_init__(self):
        raise ValueError("power: a bad one\nand more")


@dataclass(frozen=True)
class Unresolved(Tempered):
    table: Nowhere = None  # noqa: F821


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NoDefault", "base"),
        ("Raises", "ValueError: power: a bad one"),
        ("Unresolved", "Nowhere"),
    ],
)
def test_a_class_that_makes_no_step_is_one_line(name, said):
    with pytest.raises(ConfigError) as caught:
        load_config({"steps": [{f"{HERE}.{name}": {"power": 0.5}}]})
    assert f"{HERE}.{name}: expected a step that" in str(caught.value) and said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_hook_runs_it():
    steps = [{f"{HERE}.Tempered": {"power": 0.25}}, {"truncate": {"high": 1.2}}]
    check_hook(tis.correct, lambda s: [min(x**0.25, 1.2) for x in ratios(s)], slime_ext={"steps": steps})


WRONG = {
    f"{HERE}.Temperd": "did you mean 'Tempered'?",
    "no_such_module.Step": "expected a module that imports",
    f"{HERE}.NotFrozen": "@dataclass(frozen=True)",
    "math.pi": "expected a class derived from slime_ext.steps.Step, got a float",
}


def test_a_name_that_is_no_step_is_refused():
    for name, text in WRONG.items():
        with pytest.raises(ConfigError, match=r"slime_ext\.steps") as caught:
            load_config({"steps": [name]})
        assert text in str(caught.value), caught.value
    with pytest.raises(ConfigError, match="expected a known key, got 'powr'; did you mean 'power'"):
        load_config({"steps": [{f"{HERE}.Tempered": {"powr": 1.0}}]})
    with pytest.raises(ConfigError, match="second after steps"):
        load_config({"steps": ["reweight", f"{HERE}.Tempered"]})


def hook(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
    mask = torch.cat(loss_masks).bool()
    log_ratio = torch.where(mask, torch.cat(train_log_probs) - torch.cat(rollout_log_probs), 0)
    return pg_loss * log_ratio.exp().clamp(max=args.tis_clip), loss_masks, {}


def attached(args, *, pg_loss, cur_log_probs, loss_masks, **kwargs):
    mask = torch.cat(loss_masks).bool()
    return pg_loss * torch.where(mask, torch.cat(cur_log_probs), 0).exp(), loss_masks, {}


def printing(args, *, pg_loss, train_log_probs, **kwargs):
    print(train_log_probs[0])
    return hook(args, pg_loss=pg_loss, train_log_probs=train_log_probs, **kwargs)


def reading(args, *, pg_loss, train_log_probs, **kwargs):
    out = hook(args, pg_loss=pg_loss, train_log_probs=train_log_probs, **kwargs)
    return (out[0] * float(train_log_probs[0][0]), *out[1:])


def multiplying(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
    behavior = [torch.where(b.isnan(), -30.0, b) for b in rollout_log_probs]  # a mask that is off by one
    weight = torch.cat(train_log_probs).roll(1).exp() / torch.cat(behavior).exp()
    return pg_loss * weight.detach(), loss_masks, {}


def test_a_hook_is_called_as_slime_does():
    check_hook(hook, lambda s: [min(x, 2) for x in ratios(s)])
    wrong = {
        attached: "one through a weight",
        reading: "read no value",
        printing: "at `print(train_log_probs[0])`",
        multiplying: "expected a finite loss",
        lambda args, *, pg_loss: pg_loss: "unexpected keyword",
        lambda args, *, pg_loss, **kw: pg_loss: "expected it to return (pg_loss, loss_masks, metrics)",
        lambda args, *, pg_loss, loss_masks, **kw: (pg_loss.sum(), loss_masks, {}): "shape [29]",
    }
    for function, text in wrong.items():
        with pytest.raises(SlimeExtError) as caught:
            check_hook(function)
        assert text in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="by the definition"):
        check_hook(hook, lambda s: [1.0] * len(s.mask))
