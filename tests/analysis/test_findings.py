"""Every fault planted by its mechanism is found, and nothing is found in healthy dumps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slime_ext.analysis.diagnosis import Diagnosis
from slime_ext.analysis.findings import DETECTORS, find
from tests.analysis.synthetic import (
    BF16,
    Arithmetic,
    Engine,
    World,
    overflowing,
    padded_late,
    recorded_late,
    recorded_late_in,
    run,
    unrecorded,
)

FP8 = torch.float8_e4m3fn
SMALL = World(rollouts=4, samples=32, length=64)
BF = SMALL.engine
LONG_MEMORY = Arithmetic(stays=0.99, reads=0.05)
SUM = Arithmetic(stays=1.0, reads=0.02)


def engine(**changes):
    return replace(SMALL, engine=replace(BF, **changes))


def same(rollouts):
    return rollouts


FAULTS = {
    "sampled cold, scored at 1": (engine(temperature=0.8), same, {"temperature"}),
    "sampled hot, scored at 1": (engine(temperature=1.2), same, {"temperature"}),
    "recorded before temperature": (
        replace(engine(temperature=0.8, recorded_temperature=1.0), score_temperature=0.8),
        same,
        {"before_temperature"},
    ),
    "recorded before a temperature above 1": (
        replace(engine(temperature=1.3, recorded_temperature=1.0), score_temperature=1.3),
        same,
        {"before_temperature"},
    ),
    "temperature that nobody records": (
        engine(temperature=0.8, recorded_temperature=1.0),
        same,
        {"unlike_entropy"},
    ),
    "top-p": (engine(top_p=0.9), same, {"truncated_sampling"}),
    "top-k": (engine(top_k=20), same, {"truncated_sampling"}),
    "greedy": (engine(top_k=1), same, {"greedy_sampling"}),
    "zeros for log-probs": (
        SMALL,
        lambda rs: [replace(r, behavior=torch.zeros(r.size)) for r in rs],
        {"greedy_sampling"},
    ),
    "top-p that nobody records": (engine(top_p=0.9, recorded_temperature=1.0), same, {"unlike_entropy"}),
    "one token late": (SMALL, lambda r: recorded_late(r, 1), {"off_by_one"}),
    "one token early": (SMALL, lambda r: recorded_late(r, -1), {"off_by_one"}),
    "two tokens late": (SMALL, lambda r: recorded_late(r, 2), {"off_by_one"}),
    "weights every fourth rollout": (
        replace(SMALL, rollouts=8, interval=4, learning=0.02),
        same,
        {"stale_weights"},
    ),
    "weights two rollouts late": (replace(SMALL, rollouts=6, late=2, learning=0.02), same, {"stale_weights"}),
    "cache kept over an update": (
        replace(
            SMALL,
            switch=True,
            learning=0.05,
            trainer=LONG_MEMORY,
            engine=replace(BF, rewrite_cache=False),
        ),
        same,
        {"stale_cache", "stale_weights"},
    ),
    "int4 weights": (engine(quantise=4), same, {"quantised"}),
    "int6 weights": (engine(quantise=6), same, {"quantised"}),
    "fp8 activations": (engine(how=Arithmetic(activations=FP8)), same, {"quantised"}),
    "router in bfloat16": (
        replace(SMALL, samples=64, moe=True, engine=Engine(how=Arithmetic(activations=BF16, router=BF16))),
        same,
        {"routing_flips"},
    ),
    "NaN": (SMALL, overflowing, {"nan_log_probs"}),
    "no log-probs": (SMALL, unrecorded, {"missing_log_probs"}),
    "probabilities": (
        SMALL,
        lambda rs: [replace(r, behavior=r.behavior.exp()) for r in rs],
        {"positive_log_probs"},
    ),
    "tool output in the mask": (
        replace(SMALL, tools=range(20, 28), masks_tools=False),
        same,
        {"tool_tokens"},
    ),
    "cache in fp8": (
        replace(SMALL, length=128, trainer=SUM, engine=Engine(how=Arithmetic(activations=BF16, cache=FP8))),
        same,
        {"position_drift"},
    ),
    "resumed with other weights": (
        replace(SMALL, rollouts=6, resumed_wrong=1),
        same,
        {"resumed_wrong_weights"},
    ),
    "weights that never reach the engine": (
        replace(SMALL, resumed_wrong=SMALL.rollouts),
        same,
        {"unexplained"},
    ),
    "three tokens late": (SMALL, lambda r: recorded_late(r, 3), {"unexplained"}),
}
HEALTHY = [
    SMALL,
    replace(SMALL, engine=Engine(how=Arithmetic())),
    replace(SMALL, samples=4, length=8, rollouts=1),
    replace(SMALL, samples=2, length=200, rollouts=2),
    replace(SMALL, samples=200, length=16),
    replace(SMALL, samples=128, length=96, rollouts=2),
    replace(SMALL, rollouts=12, samples=16, length=32),
    replace(SMALL, trainer=Arithmetic(confidence=2)),
    replace(SMALL, trainer=Arithmetic(confidence=15)),
    replace(SMALL, trainer=Arithmetic(activations=BF16, confidence=6)),
    replace(SMALL, trainer=LONG_MEMORY, length=128),
    replace(SMALL, trainer=SUM, length=128),
    replace(SMALL, rollouts=8, interval=2),
    replace(SMALL, rollouts=6, late=1),
    replace(SMALL, first=100, learning=0.01),
    replace(SMALL, tools=range(20, 28)),
    replace(SMALL, switch=True),
    replace(SMALL, engine=replace(BF, temperature=0.7), score_temperature=0.7),
    replace(SMALL, engine=replace(BF, temperature=1.3), score_temperature=1.3),
    replace(SMALL, engine=replace(BF, how=Arithmetic(activations=BF16, cache=BF16))),
    replace(SMALL, rollouts=10, samples=64, learning=0.006),
    replace(SMALL, samples=24, length=48, rollouts=3),
    replace(SMALL, samples=4, rollouts=1, vocabulary=512),
    replace(SMALL, samples=128, vocabulary=512, tools=range(5, 64, 17)),
    replace(SMALL, engine=replace(BF, temperature=50.0), score_temperature=50.0),
    replace(SMALL, samples=4, length=400, late=1, vocabulary=512),
]


def diagnosed(rollouts):
    diagnosis = Diagnosis()
    for rollout in rollouts:
        diagnosis.add(rollout)
    return diagnosis


def found(rollouts):
    return {finding.name for finding in find(diagnosed(rollouts))}


LARGE, MANY = (pytest.param(number, marks=pytest.mark.slow) for number in (512, 128))


# Each takes half a second: the fast tests look at every third.
PLANTED = [
    fault if i % 3 == 0 else pytest.param(fault, marks=pytest.mark.slow) for i, fault in enumerate(FAULTS)
]


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found_and_no_other(fault):
    world, harm, expected = FAULTS[fault]
    assert found(harm(run(world))) == expected


# All of them take seconds: the fast tests look at five.
NUMBERS = [*range(5), *(pytest.param(n, marks=pytest.mark.slow) for n in range(5, len(HEALTHY)))]


@pytest.mark.parametrize("number", NUMBERS)
def test_nothing_is_found_in_healthy_dumps(number):
    assert found(run(replace(HEALTHY[number], seed=number))) == set()


@pytest.mark.parametrize("far", [-1e4, 1e4])
def test_one_token_that_is_far_off_makes_no_other_finding(far):
    rollouts = [
        replace(r, proximal=torch.where(torch.arange(r.size) == 5, r.behavior + far, r.proximal))
        for r in run(SMALL)
    ]
    assert found(rollouts) == {"routing_flips"}


@pytest.mark.parametrize("part", [slice(1, 4), slice(3, 6), slice(3, 8), slice(5, 8)], ids=str)
def test_weights_that_are_known_to_lag_are_named_in_any_part_of_the_run(part):
    world = replace(SMALL, rollouts=8, interval=4, learning=0.02)
    assert found(run(world)[part]) == {"stale_weights"}


def test_some_old_tokens_do_not_hide_wrong_weights_after_a_resume():
    rollouts = run(replace(SMALL, rollouts=6, resumed_wrong=1))
    for rollout in rollouts:
        rollout.versions[:10] -= 1
        rollout.ages[:10] += 1
    assert "resumed_wrong_weights" in found(rollouts)


def test_a_share_of_tokens_that_do_not_exist_is_no_evidence_of_noise():
    rollouts = [replace(r, mask=r.mask & (r.behavior.exp() < 0.7)) for r in run(replace(SMALL, samples=64))]
    for rollout in rollouts:
        noise = torch.randn(rollout.size, generator=torch.Generator().manual_seed(1))
        rollout.proximal[:] = rollout.behavior + 0.03 * noise
    assert found(rollouts) == set()


@pytest.mark.parametrize("at", [0, -1], ids=["first", "last"])
def test_a_token_of_every_response_that_is_far_off_is_no_shift(at):
    rollouts = run(World(rollouts=4, samples=40, length=6))
    for rollout in rollouts:
        ends = torch.tensor(rollout.lengths).cumsum(0)
        where = ends - 1 if at else ends - torch.tensor(rollout.lengths)
        rollout.behavior[where] = -30.0
    assert "off_by_one" not in found(rollouts)


@pytest.mark.parametrize("by", [1, -1, -2])
@pytest.mark.parametrize("every", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 16))])
@pytest.mark.parametrize("samples", [16, MANY])
def test_a_shift_in_some_responses_is_found(samples, every, by):
    world = replace(SMALL, rollouts=2, samples=samples, length=48)
    assert found(recorded_late_in(run(world), by, every)) == {"off_by_one"}


@pytest.mark.parametrize("by", [1, -1, 2, -2])
@pytest.mark.parametrize("confidence", [6, 60], ids=["some sure", "most sure"])
@pytest.mark.parametrize("length", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_zeros_that_a_shift_puts_on_other_tokens_are_no_tool_output(length, confidence, by):
    world = replace(SMALL, length=length, trainer=Arithmetic(confidence=confidence))
    assert found(padded_late(run(world), by)) == {"off_by_one"}


@pytest.mark.parametrize("confidence", [0, 6, 60])
@pytest.mark.parametrize("samples", [4, MANY])
def test_tool_output_in_the_mask_is_no_shift(samples, confidence):
    model = Arithmetic(confidence=confidence)
    world = replace(SMALL, samples=samples, trainer=model, tools=range(20, 28), masks_tools=False)
    assert found(run(world)) == {"tool_tokens"}


@pytest.mark.parametrize("confidence", [0, 2, 20])
@pytest.mark.parametrize("samples", [16, MANY])
def test_greedy_sampling_is_found_whatever_the_model(samples, confidence):
    world = replace(engine(top_k=1), samples=samples, trainer=Arithmetic(confidence=confidence))
    assert found(run(world)) == {"greedy_sampling"}


@pytest.mark.parametrize("temperature", [0.01, 0.1])
@pytest.mark.parametrize("samples", [4, MANY])
def test_policies_that_are_both_sure_of_nearly_every_token_are_healthy(samples, temperature):
    sure = Engine(how=Arithmetic(), temperature=temperature)
    rollouts = run(replace(SMALL, samples=samples, engine=sure, score_temperature=temperature))
    assert torch.cat([r.behavior == 0 for r in rollouts]).float().mean() > 0.25
    assert found(rollouts) == set()


@pytest.mark.parametrize("temperature", [0.8, 1.2, 1.5])
@pytest.mark.parametrize("vocabulary", [64, LARGE])
@pytest.mark.parametrize(
    ("flat", "confidence"),
    [(1.0, 60), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in ((1.0, 0), (2.5, 8)))],
)
@pytest.mark.parametrize(("rollouts", "samples"), [(1, 16), pytest.param(4, 128, marks=pytest.mark.slow)])
def test_a_temperature_is_found_whatever_the_entropies(
    rollouts, samples, flat, confidence, vocabulary, temperature
):
    setting = replace(engine(temperature=flat * temperature), score_temperature=flat)
    model = Arithmetic(confidence=confidence)
    sizes = {"rollouts": rollouts, "samples": samples, "vocabulary": vocabulary}
    assert found(run(replace(setting, trainer=model, **sizes))) == {"temperature"}


@pytest.mark.parametrize("temperature", [0.8, 1.1])
@pytest.mark.parametrize("vocabulary", [64, LARGE])
@pytest.mark.parametrize("confidence", [0, 6])
def test_log_probs_from_before_the_temperature_are_told_apart(confidence, vocabulary, temperature):
    setting = engine(temperature=temperature, recorded_temperature=1.0)
    model = Arithmetic(confidence=confidence)
    world = replace(setting, vocabulary=vocabulary, trainer=model, score_temperature=temperature)
    assert found(run(world)) == {"before_temperature"}


def test_noise_of_nearly_uniform_policies_is_no_temperature():
    g = torch.Generator().manual_seed(0)
    rollouts = []
    for r in run(SMALL):
        logits = 0.3 * torch.randn(r.size, 64, generator=g)
        drawn = logits.softmax(-1).multinomial(1, generator=g)[:, 0]
        behavior = logits.log_softmax(-1)[torch.arange(r.size), drawn]
        rollouts.append(
            replace(r, behavior=behavior, proximal=torch.full((r.size,), 1 / 64).log(), entropy=None)
        )
    assert not found(rollouts) & {"temperature", "before_temperature"}


@pytest.mark.parametrize("vocabulary", [64, LARGE])
@pytest.mark.parametrize("confidence", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 6))])
@pytest.mark.parametrize(("temperature", "top_p"), [(0.6, 0.95), (0.8, 0.95), (0.7, 0.9), (1.2, 0.9)])
def test_top_p_is_found_at_another_temperature_too(temperature, top_p, confidence, vocabulary):
    setting = engine(temperature=temperature, top_p=top_p)
    world = replace(setting, vocabulary=vocabulary, trainer=Arithmetic(confidence=confidence))
    diagnosis = diagnosed(run(world))
    (only,) = find(diagnosis)
    assert only.name == "truncated_sampling" and "temperatures differ besides" in only.evidence


@pytest.mark.parametrize("samples", [4, pytest.param(16, marks=pytest.mark.slow), MANY])
@pytest.mark.parametrize("confidence", [0, 6, 60])
def test_single_tokens_of_tools_in_the_mask_are_found(confidence, samples):
    model = Arithmetic(confidence=confidence)
    apart = range(5, 64, 17)
    world = replace(SMALL, samples=samples, trainer=model, tools=apart, masks_tools=False)
    assert found(run(world)) == {"tool_tokens"}
    assert found(run(replace(world, masks_tools=True))) == set()


def test_every_detector_has_a_planted_fault():
    assert {detector.name for detector in DETECTORS} == set().union(*(names for *_, names in FAULTS.values()))
