"""The mean ratio over drawn tokens is 1 for honest records, in each rollout, part and place."""

from __future__ import annotations

import pytest
import torch

from slime_ext.tools.analysis.detectors.shared.identities import ratios, record_of
from slime_ext.tools.analysis.findings import DETECTORS, examine
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from tests.tools.analysis.detectors.toys import Asked, Policy, diagnosed, edited, run, sampled
from tests.tools.analysis.rollouts import rollout

SAMPLES, LENGTH, KINDS = 48, 12, 6


def honest(seed, distance=0.5, samples=SAMPLES, kept=KINDS):
    """Tokens of random policies q, each context its own, and a trainer p at some distance: by definition.

    Args:
        kept: how many of the KINDS tokens q is renormalised to, the likeliest ones.
    """
    g = torch.Generator().manual_seed(seed)
    size = samples * LENGTH
    logits = torch.randn(size, KINDS, generator=g, dtype=torch.float64)
    gone = logits < logits.topk(kept, dim=1).values[:, -1:]
    q = logits.masked_fill(gone, -torch.inf).log_softmax(-1)
    p = (logits + distance * torch.randn(size, KINDS, generator=g, dtype=torch.float64)).log_softmax(-1)
    token = torch.multinomial(q.exp(), 1, generator=g)
    behavior, proximal = (x.gather(1, token)[:, 0].float() for x in (q, p))
    mask = torch.ones(size, dtype=torch.bool)
    return rollout(
        samples=samples,
        lengths=(LENGTH,) * samples,
        behavior=behavior,
        proximal=proximal,
        mask=mask,
        advantages=None,
    )


def ratios_of(rollout):
    """The mean ratios of a rollout of which nothing else is measured."""
    return ratios(Diagnosis(measures=Asked([rollout])))


def side(rollouts):
    return record_of(diagnosed(rollouts)).side


def test_its_error_is_right():
    """200 runs: 95% intervals leave out about 5%, of the run, its rollout and its places together."""
    zs = [ratio.mean.z for seed in range(200) for ratio in ratios_of(honest(seed))]
    outside = sum(abs(z) > 1.96 for z in zs) / len(zs)
    assert len(zs) >= 600 and 0.02 <= outside <= 0.08, outside
    assert max(zs) < 5


def test_its_error_is_that_of_samples_drawn_again():
    """The bootstrap over samples, of one run whose tokens depend on each other within a sample."""
    one = honest(1)
    of_sample = torch.randn(SAMPLES, generator=torch.Generator().manual_seed(2)).repeat_interleave(LENGTH)
    one.proximal.add_(0.3 * of_sample)
    error = next(ratios_of(one)).mean.error
    sums = torch.expm1((one.proximal - one.behavior).double()).view(SAMPLES, LENGTH).sum(1)
    draws = torch.randint(SAMPLES, (4000, SAMPLES), generator=torch.Generator().manual_seed(3))
    assert error == pytest.approx(float((sums[draws].sum(1) / (SAMPLES * LENGTH)).std()), rel=0.1)


@pytest.mark.parametrize("distance", [0.1, 1.0, 3.0])
def test_no_honest_record_is_altered(distance):
    assert not any(side([honest(seed, distance)]) == "altered" for seed in range(20))
    assert side(run(4)) != "altered"


def test_a_garbled_sampler_is_honest_although_large_ratios_are_too_rare_to_be_drawn():
    trainer, sampler = Policy(1), Policy(2)
    rollouts = [sampled(trainer, number, sampler=2 * sampler.table) for number in range(6)]
    d = diagnosed(rollouts)
    whole = next(ratios(d))
    assert whole.mean.z < -6 and whole.mean.value < -0.1
    assert record_of(d).side != "altered"


def test_a_large_run_tells_that_its_record_is_honest():
    assert side([honest(seed, 1.0, 6000) for seed in range(3)]) == "honest"
    assert side([honest(0, 0.5, SAMPLES)]) == "unknown"
    assert side([honest(0, 0.5, 4)]) == "unknown"


@pytest.mark.parametrize(
    ("distance", "end"),
    [
        (0.01, "within 3 standard errors. k3 is healthy, which leaves little to explain."),
        (0.5, "too large to exclude an altered record that makes half of k3."),
    ],
)
def test_a_mean_ratio_of_1_is_called_1_and_a_healthy_run_healthy(distance, end):
    record = record_of(diagnosed([honest(0, distance)])).documented()
    assert record.side == "unknown" and record.said.endswith(end)
    assert "here it is" in record.said


def at_the_start(r):
    return {"behavior": torch.where(r.segments.within < 2, r.behavior.roll(7), r.behavior)}


def filled(r):
    return {"behavior": torch.where(r.segments.within % 7 == 3, 0.0, r.behavior)}


def in_one_engine(r):
    is_one = r.segments.ids % 8 == 0
    names = tuple("a" if i % 8 == 0 else "b" for i in range(r.count))
    return {"behavior": torch.where(is_one, r.behavior.roll(1), r.behavior), "engines": names}


@pytest.mark.parametrize("edit", [at_the_start, filled, in_one_engine])
def test_log_probs_of_other_tokens_alter_the_record(edit):
    assert side(edited(run(4), edit)) == "altered"


def test_a_part_is_named_if_only_its_record_is_altered():
    record = record_of(diagnosed(edited(run(4), in_one_engine)))
    assert record.ratio.where == "engine a" and record.documented().where == "engine a"
    assert "engine a is " in record.documented().said


def test_a_record_that_is_renormalised_is_altered():
    assert side([honest(seed, 0.05, kept=2) for seed in range(3)]) == "altered"


def test_a_cause_on_the_wrong_side_is_not_considered():
    """Noise is named where the mean ratio is 1, and not where every recorded log-prob is too low as well."""
    noisy = run(6, noise=0.1, groups=None)
    assert [f.name for f in examine(diagnosed(noisy))[0]] == ["quantised"]
    lowered = edited(noisy, lambda r: {"behavior": r.behavior - 0.12})
    findings, rows = examine(diagnosed(lowered))
    (row,) = [row for row in rows if row.name == "quantised"]
    assert row.state == "excluded" and "and no weights, precision or routing" in row.detail
    assert [f.name for f in findings] == ["unexplained"]


def test_every_side_that_is_open_has_a_reason_beside_it():
    """In the module, as a comment; only detectors that explain a distance have a side."""
    import slime_ext.tools.analysis.detectors as room

    for name, detector in DETECTORS.items():
        if detector.explains and detector.side == "either":
            text = (__import__("pathlib").Path(room.__file__).parent / f"{name}.py").read_text()
            assert 'side="either",  # ' in text, name
