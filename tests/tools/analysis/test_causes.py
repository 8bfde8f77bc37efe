"""A cause is named only where the dump rules out old weights, which look like it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.faults.figures import joined
from slime_ext.tools.analysis.findings import examine
from tests.tools.analysis.rollouts import rollout as random_rollout
from tests.tools.analysis.synthetic import BF16, Arithmetic, Engine, World, recorded_late, run
from tests.tools.analysis.test_findings import diagnosed

SMALL = World(rollouts=4, samples=32, length=64)
# A policy that became surer since the weights of the sampler: the log-ratio follows from the probability.
SHARPENED = replace(SMALL, engine=Engine(how=Arithmetic(activations=BF16), temperature=1.25), learning=0)
INT4 = replace(SMALL, engine=Engine(how=Arithmetic(activations=BF16), quantise=4), learning=0)


def of_versions(rollouts, first, version, newest):
    """The rollouts under numbers from ``first`` on, with the version and the trainer's of each number (None:
    not in the dump)."""
    made = []
    for i, rollout in enumerate(rollouts, first):
        known = version(i)
        versions = None if known is None else torch.full((rollout.size,), known)
        made.append(replace(rollout, rollout_id=i, versions=versions, newest=newest(i)))
    return made


def held(i):
    return 20


def pushed(i):
    return i + 1


def unknown(i):
    return None


# part of a run -> number of its first rollout, version of each, the trainer's
PARTS = {
    "a lag that the dump tells": (24, held, lambda i: 4 * i),
    "one version over all": (24, held, held),
    "a push before each": (24, pushed, pushed),
    "no versions": (24, unknown, unknown),
    "rollout 0": (0, pushed, pushed),
}
SHARPENED_IS = {
    "a lag that the dump tells": ("stale_weights", "warning", ("temperature",)),
    "one version over all": ("stale_weights", "warning", ("temperature",)),
    "a push before each": ("temperature", "warning", ("stale_weights",)),
    "no versions": ("temperature", "warning", ("stale_weights",)),
    "rollout 0": ("temperature", "error", ()),
}
INT4_IS = {
    "a lag that the dump tells": ("stale_weights", "warning", ()),
    "one version over all": ("stale_weights", "warning", ()),
    "a push before each": ("quantised", "warning", ("stale_weights", "dropout")),
    "no versions": ("quantised", "warning", ("stale_weights", "dropout")),
    "rollout 0": ("quantised", "warning", ("dropout", "layer")),
}


@pytest.fixture(scope="module")
def worlds():
    return {"sharpened": run(SHARPENED), "int4": run(INT4)}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("name", "wanted"), [("sharpened", SHARPENED_IS), ("int4", INT4_IS)])
def test_what_looks_like_old_weights_is_named_with_them(worlds, name, wanted, part):
    findings, _ = examine(diagnosed(of_versions(worlds[name], *PARTS[part])))
    assert [(f.name, f.severity, f.or_else) for f in findings] == [wanted[part]]
    (finding,) = findings
    assert all(other in finding.title and other in finding.ruled_out for other in finding.or_else)


def test_no_part_of_a_run_whose_weights_lag_has_an_error():
    rollouts = run(World(rollouts=14, samples=24, length=32, interval=6, learning=0.02))
    for known in (True, False):
        if not known:
            rollouts = [replace(r, newest=int(r.versions.max())) for r in rollouts]
        parts = [diagnosed([rollout]) for rollout in rollouts]
        for size, begin in ((s, b) for s in (3, 5) for b in range(len(rollouts) - s + 1)):
            findings, _ = examine(joined(parts[begin : begin + size]))
            named = {name for f in findings for name in (f.name, *f.or_else)}
            assert "stale_weights" in named and not [f for f in findings if f.severity == "error"], begin


def test_a_distance_that_grows_names_a_sampler_only_where_the_first_policy_is_known():
    rollouts = run(World(rollouts=8, samples=16, length=32, interval=100, learning=0.02))
    first = rollouts[0].proximal.abs().mean()
    assert first > 0
    rollouts = of_versions(rollouts, 0, pushed, pushed)
    (finding,), _ = examine(diagnosed(rollouts))
    assert (finding.name, finding.severity) == ("frozen_sampler", "warning")
    assert finding.or_else == ("partial_push", "growing_mismatch") and "ref_log_probs" in finding.fix
    known = [replace(r, reference=r.behavior) for r in rollouts]  # its first weights sampled all of it
    (finding,), _ = examine(diagnosed(known))
    assert (finding.name, finding.severity, finding.or_else) == ("frozen_sampler", "error", ())


def test_a_distance_from_the_first_push_on_that_does_not_grow_is_a_lag_or_a_push_of_other_weights():
    rollouts = run(replace(SMALL, rollouts=6, late=1, learning=0.02))
    (finding,), _ = examine(diagnosed(of_versions(rollouts, 0, pushed, pushed)))
    assert (finding.name, finding.or_else) == ("stale_weights", ("damaged_weights",))


def test_a_distance_that_grows_for_some_rollouts_is_no_push_of_damaged_weights():
    g = torch.Generator().manual_seed(0)
    rollouts = []
    for i, r in enumerate(of_versions(run(replace(SMALL, rollouts=5, samples=16)), 0, pushed, pushed)):
        behavior = r.proximal + (0.004 + 0.12 * i**0.5) * torch.randn(r.size, generator=g)
        rollouts.append(replace(r, behavior=behavior.clamp(max=0), entropy=None))
    (finding,), _ = examine(diagnosed(rollouts))
    assert (finding.name, finding.or_else) == ("stale_weights", ("growing_mismatch", "partial_push"))


def test_noise_that_grows_from_the_first_push_on_is_no_part_that_is_missing():
    g = torch.Generator().manual_seed(0)
    rollouts = []
    for i, r in enumerate(of_versions(run(replace(SMALL, rollouts=8, samples=16)), 0, pushed, pushed)):
        reference = r.proximal - 0.1 * i * torch.randn(r.size, generator=g)  # the trainer moves away
        behavior = r.proximal + (0.004 + 0.06 * i) * torch.randn(r.size, generator=g)
        rollouts.append(replace(r, behavior=behavior.clamp(max=0), reference=reference, entropy=None))
    findings, _ = examine(diagnosed(rollouts))
    assert "growing_mismatch" in {f.name for f in findings} and not {"partial_push", "frozen_sampler"} & {
        f.name for f in findings
    }


def test_tokens_that_are_less_certain_later_are_no_drift():
    g = torch.Generator().manual_seed(0)
    length, samples = 12, 200
    rollouts = []
    for i in range(4):
        sure = torch.linspace(3e-4, 1.0, length).repeat(
            samples
        )  # -log q: sure at first, as of a fixed format
        behavior = -sure * torch.rand(length * samples, generator=g)
        proximal = behavior * (1 + 0.06 * torch.randn(length * samples, generator=g))
        rollouts.append(
            replace(
                random_rollout(rollout_id=i, samples=samples),
                lengths=(length,) * samples,
                behavior=behavior,
                proximal=proximal.clamp(max=0),
                mask=torch.ones(length * samples, dtype=torch.bool),
                advantages=None,
            )
        )
    assert not examine(diagnosed(rollouts))[0]


def uncertain_from(begin, end, length, samples=200):
    """A rollout in bfloat16's noise, which grows with -log q, whose tokens are unsure in [begin, end) and,
    one in ten, elsewhere."""
    g = torch.Generator().manual_seed(begin)
    at = torch.arange(length).repeat(samples)
    unsure = ((at >= begin) & (at < end)) | (torch.rand(len(at), generator=g) < 0.1)
    behavior = torch.where(unsure, -4.0, -0.05) * (1 + 0.2 * torch.rand(len(at), generator=g))
    return replace(
        random_rollout(samples=samples),
        lengths=(length,) * samples,
        behavior=behavior,
        proximal=(behavior * (1 + 0.06 * torch.randn(len(at), generator=g))).clamp(max=0),
        mask=torch.ones(len(at), dtype=torch.bool),
        advantages=None,
    )


@pytest.mark.parametrize(("begin", "end", "length"), [(0, 8, 48), (64, 128, 128)], ids=["begins", "blocks"])
def test_tokens_that_are_less_certain_at_a_place_are_no_other_text_and_no_other_kernel(begin, end, length):
    names = {f.name for f in examine(diagnosed([uncertain_from(begin, end, length)]))[0]}
    assert not names & {"prefix_mismatch", "kv_precision"}


def test_a_stale_run_that_is_shifted_by_one_is_both():
    rollouts = recorded_late(run(replace(SMALL, rollouts=8, interval=4, learning=0.02)), 1)
    assert {f.name for f in examine(diagnosed(rollouts))[0]} == {"off_by_one", "stale_weights"}
    fresh = recorded_late(run(SMALL), 1)
    assert {f.name for f in examine(diagnosed(fresh))[0]} == {"off_by_one"}


def test_a_prefix_cache_that_warmed_up_beside_old_weights_is_not_the_fault():
    """Where prompts begin alike only the first rollout misses the cache, and its weights are new."""
    rollouts = run(replace(SMALL, rollouts=8, interval=8, learning=0.02))
    made = [replace(r, cached=((9 if i else 0),) * r.count) for i, r in enumerate(rollouts)]
    assert {f.name for f in examine(diagnosed(made))[0]} == {"stale_weights"}


def test_a_lag_is_a_note_until_the_run_s_chi2_leaves_its_healthy_range():
    """Rollout 0 shows that the rest is healthy, and versions record the lag, so k3 alone is no fault."""
    found = {}
    for share in (0.5, 1.0, 2.0):  # of what the weights moved while they were held
        rollouts = run(replace(SMALL, rollouts=8, interval=4, learning=0.02))
        moved = [replace(r, proximal=r.behavior + share * (r.proximal - r.behavior)) for r in rollouts]
        diagnosis = diagnosed(moved)
        (finding,) = examine(diagnosis)[0]
        assert finding.name == "stale_weights"
        found.setdefault(finding.severity, []).append(diagnosis.numbers())
        assert ("sample size are healthy" in finding.evidence) is (finding.severity == "note")
    notes, warnings = ([numbers.chi2_token for numbers in found[name]] for name in ("note", "warning"))
    assert max(notes) < 0.1 < min(warnings)  # where the healthy range ends (docs/metrics.md)
    assert max(numbers.k3 for numbers in found["note"]) > 5e-3  # nats, where that of k3 ends
