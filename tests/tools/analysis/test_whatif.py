"""What-if: the same numbers as the hook itself, exactly; merging; what a dump cannot tell."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch

from slime_ext import load_config, presets, tis
from slime_ext.core.losses import Bounds
from slime_ext.errors import NonFiniteError
from slime_ext.tools.analysis.measures.planned import (
    NO_ADVANTAGES,
    NO_AGE_STEPS,
    NO_AGES,
    NO_GROUPS,
    NO_HEADS,
    STOPS,
)
from slime_ext.tools.analysis.measures.tally import Tally, spans
from slime_ext.tools.analysis.measures.whatif import WhatIf, apply
from slime_ext.tools.analysis.records import DumpedRollout
from tests.host import slime_rollouts as slime
from tests.host.test_step_plan import CASES
from tests.tools.analysis.in_process import empty_whatif, whatif
from tests.tools.analysis.rollouts import rollout

ARGS = SimpleNamespace(use_tis=True, eps_clip=0.2, eps_clip_high=0.2)
HOLES = {2: float("nan"), 5: float("inf"), 9: float("-inf")}


def with_holes(r):
    behavior = r.behavior.clone()
    for at, value in HOLES.items():
        behavior[at] = value
    return rollout(behavior=behavior)


def run_hook(name, r, args=ARGS):
    """The function of the flag, called as slime does at the first step: target = proximal, ratio 1."""
    lengths = list(r.lengths)

    def split(values):
        return list(values.split(lengths))

    target = r.proximal.clone().requires_grad_()
    host_loss = torch.where(r.mask, -r.advantages * (target - r.proximal).exp(), 0)
    loss, _, metrics = getattr(tis, name)(
        args,
        pg_loss=host_loss,
        train_log_probs=split(r.proximal),
        rollout_log_probs=split(r.behavior),
        loss_masks=split(r.mask.int()),
        total_lengths=[n + 5 for n in lengths],
        response_lengths=lengths,
        cur_log_probs=split(target),
        advantages=split(r.advantages),
    )
    (slope,) = torch.autograd.grad(loss.sum(), target)
    return slope, metrics


def sizes(effect):
    return effect.kept_tokens, effect.clipped_tokens, effect.tokens


def test_it_is_the_hook_exactly():
    for make in [rollout, lambda: with_holes(rollout())]:
        for name in [
            n for n, p in presets.PRESETS.items() if n != "metrics_only" and not p.correction.center
        ]:
            r = make()
            slope, metrics = run_hook(name, r)
            applied = apply(presets.get(name), r)
            rejected, clipped = (metrics[f"off_policy/host/{key}"].bool() for key in ("rejected", "clipped"))
            assert torch.equal(applied.slope, slope)
            assert torch.equal(applied.keep, r.mask & ~rejected) and torch.equal(applied.clipped, clipped)
            (effect,) = whatif([r], {name: presets.get(name)})
            assert sizes(effect) == (int((r.mask & ~rejected).sum()), int(clipped.sum()), int(r.mask.sum()))
            scale = slope.double().abs().sum() / torch.where(r.mask, r.advantages, 0).double().abs().sum()
            assert effect.gradient_scale == float(scale)


WITH_TERMS = {
    "alone": {"terms": [{"squared_log_ratio": {"coefficient": 0.3}}]},
    "beside weights": {"preset": "token_tis", "terms": [{"reverse_k3": {"coefficient": 0.5}}]},
    "both, and rejected tokens": {
        "preset": "icepop",
        "terms": [{"squared_log_ratio": {"coefficient": 0.3}}, {"reverse_k3": {"coefficient": 0.5}}],
    },
    "on our own loss": {"preset": "ipo"},
}


@pytest.mark.parametrize("name", WITH_TERMS)
def test_a_term_counts_by_its_slope(name):
    r, mapping = with_holes(rollout()), WITH_TERMS[name]
    args = SimpleNamespace(**vars(ARGS), slime_ext=mapping)
    slope, _ = run_hook("correct", r, args)
    torch.testing.assert_close(apply(load_config(mapping), r).slope, slope)
    (effect,) = whatif([r], {name: load_config(mapping)})
    scale = slope.double().abs().sum() / torch.where(r.mask, r.advantages, 0).double().abs().sum()
    assert effect.gradient_scale == pytest.approx(float(scale))


def test_the_slope_of_a_squared_log_ratio_is_twice_the_log_ratio():
    r, c = rollout(), 0.3
    (effect,) = whatif([r], {"x": load_config({"terms": [{"squared_log_ratio": {"coefficient": c}}]})})
    rows = [
        (float(a), float(p) - float(b))
        for a, p, b, m in zip(r.advantages, r.proximal, r.behavior, r.mask, strict=True)
        if m
    ]
    slopes = sum(abs(-a + 2 * c * log_ratio) for a, log_ratio in rows)
    assert effect.gradient_scale == pytest.approx(slopes / sum(abs(a) for a, _ in rows), rel=1e-5)


def test_a_correction_under_a_presets_name_is_not_shown_as_the_preset():
    effect = whatif([rollout()], {"token_tis": load_config({"steps": ["reweight"]})})[0]
    assert effect.formula.startswith("proximal / behavior, loss host, reweight") and not effect.source


def test_the_clip_range_is_the_files():
    r, correction = rollout(), load_config({"surrogate": {"ppo_clip": {"anchor": "behavior"}}})
    bounds = Bounds(0.01, 0.02)
    found = WhatIf({"x": Tally(correction, bounds)})
    found.add(r)
    slope = apply(correction, r, bounds).slope
    args = SimpleNamespace(**vars(ARGS) | {"eps_clip": 0.01, "eps_clip_high": 0.02})
    assert torch.equal(slope, run_hook("ppo_is_bypass", r, args)[0])
    scale = slope.double().abs().sum() / torch.where(r.mask, r.advantages, 0).double().abs().sum()
    assert found.effects()[0].gradient_scale == float(scale)


def test_a_correction_of_the_users_own_is_shown_by_its_steps():
    own = load_config({"steps": ["reweight", {"truncate": {"high": 3.0}}]})
    effect = whatif([rollout()], {"mine": own})[0]
    assert (
        effect.formula == "proximal / behavior, loss host, reweight(token) > truncate(high 3), masks policy"
    )


def test_metrics_only_leaves_everything_as_it_is():
    r = with_holes(rollout())
    slope, _ = run_hook("metrics_only", r)
    effect = whatif([r], {"metrics_only": presets.get("metrics_only")})[0]
    assert torch.equal(apply(presets.get("metrics_only"), r).slope, slope)
    assert (effect.kept_tokens, effect.gradient_scale, effect.ess) == (effect.tokens, 1.0, 1.0)


def test_numbers_are_those_of_plain_loops():
    for name in ["token_tis", "seq_mis", "kpop", "topr", "off_policy_is", "m2", "min_prefix"]:
        r, correction = rollout(seed=3), presets.get(name)
        applied, effect = apply(correction, r), whatif([r], {name: correction})[0]
        kept = [float(w) for w, k in zip(applied.weights, applied.keep, strict=True) if k]
        seen = [(float(a), bool(k)) for a, k, m in zip(r.advantages, applied.keep, r.mask, strict=True) if m]
        for sign, share in ((1, effect.kept_positive), (-1, effect.kept_negative)):
            masses = [(abs(a), k) for a, k in seen if a * sign > 0]
            assert share == pytest.approx(sum(a for a, k in masses if k) / sum(a for a, _ in masses))
        assert effect.weight_mean == pytest.approx(sum(kept) / len(kept))
        assert effect.ess == pytest.approx(sum(kept) ** 2 / (effect.tokens * sum(w * w for w in kept)))
        middle = sorted(kept)[(len(kept) + 1) // 2 - 1]
        assert middle * (1 - 2**-7) <= effect.weight_quantiles["p50"] <= middle
        assert effect.weight_quantiles["max"] == max(kept)


def test_rejected_sequences_are_named_by_rollout_and_position():
    r = rollout(seed=1, rollout_id=7, positions=tuple(range(100, 112)))
    correction = presets.get("skyrl_geo_mask")
    keep = apply(correction, r).keep
    gone, begin = [], 0
    for position, n in zip(r.positions, r.lengths, strict=True):
        part = slice(begin, begin := begin + n)
        if r.mask[part].any() and not keep[part].any():
            gone.append(position)
    effect = whatif([r], {"x": correction})[0]
    assert gone and effect.rejected == {"7": spans(gone)}
    assert effect.sequences - effect.kept_sequences == len(gone)


def test_tallies_of_parts_merge_into_the_whole():
    parts = [rollout(seed=i, rollout_id=i) for i in range(4)]
    whole, left, right = (empty_whatif() for _ in range(3))
    for r in parts:
        whole.add(r)
    for i, r in enumerate(parts):
        (left, right)[i % 2].add(r)
    left.merge(pickle.loads(pickle.dumps(right)))
    for a, b in zip(whole.effects(), left.effects(), strict=True):
        assert (a.rejected, a.weight_quantiles, sizes(a)) == (b.rejected, b.weight_quantiles, sizes(b))
        assert (a.ess, a.gradient_scale) == pytest.approx((b.ess, b.gradient_scale))


def as_rollout(samples):
    """What a dump would hold of the step plan's test samples."""

    def joined(key, dtype=torch.float64):
        return torch.tensor([x for s in samples for x in s[key]], dtype=dtype)

    return DumpedRollout(
        rollout_id=0,
        source="0.pt",
        lengths=tuple(len(s["mask"]) for s in samples),
        prompt_lengths=tuple(s["prompt"] for s in samples),
        positions=tuple(s["position"] for s in samples),
        behavior=joined("behavior"),
        proximal=joined("proximal"),
        mask=joined("mask", torch.bool),
        advantages=joined("advantage"),
        groups=tuple(s["index"] // slime.GROUP for s in samples),
        steps=tuple(i for i, step in enumerate(slime.steps_of(samples)) for _ in step),
    )


def test_what_is_settled_over_steps_is_what_the_host_settles():
    for seed in range(3):
        for name in CASES:
            mapping = CASES[name][0]
            samples = slime.samples(seed, split=False)
            data = slime.data_of(samples)
            data["host_loss"] = [-torch.ones_like(a) for a in data["advantages"]]
            r, correction = as_rollout(samples), load_config(mapping)
            slopes = apply(correction, r).slope.split(list(r.lengths))
            losses = [
                float(s.sum() / max(float(m.sum()), 1))
                for s, m in zip(slopes, data["loss_masks"], strict=True)
            ]
            assert losses == slime.train(slime.arguments(mapping), data)


def test_what_a_dump_lacks_is_said():
    for keys, why in [
        ({"steps": [{"reject": {"high": 2.0, "max_staleness": 1}}]}, NO_AGES),
        ({"steps": [{"reject": {"high": 2.0, "max_staleness_steps": 1}}]}, NO_AGES),
        ({"steps": [{"reject": {"high": 2.0}}], "group": "atomic"}, NO_GROUPS),
        ({"steps": ["reweight"], "on_nonfinite": "raise"}, STOPS),
        ({"preset": "cispo", "center": {"top_k": 8}}, NO_HEADS),
    ]:
        r = with_holes(rollout())
        assert whatif([r], {"x": load_config(keys)})[0].unavailable == why


def test_ages_are_those_of_the_oldest_token():
    r = rollout(
        samples=4,
        lengths=(1, 2, 0, 3),
        **{k: torch.zeros(6) for k in ("behavior", "proximal", "advantages")},
        mask=torch.ones(6, dtype=torch.bool),
        versions=torch.tensor([4, 3, 1, 2, 2, 2]),
        newest=4,
    )
    correction = load_config({"steps": [{"reject": {"max_staleness": 2}}]})
    assert apply(correction, r).keep.tolist() == [True, False, False, True, True, True]
    in_steps = {"x": load_config({"steps": [{"reject": {"max_staleness_steps": 2}}]})}
    assert whatif([r], in_steps)[0].unavailable == NO_AGE_STEPS


def test_without_advantages_what_needs_them_says_so():
    r = rollout(advantages=None)
    effects = {e.name: e for e in whatif([r])}
    needing = {"opsm", "topr", "dppo_tv", "cppo", "ctpo", "score_centering"}
    assert {n for n, e in effects.items() if e.unavailable == NO_ADVANTAGES} == needing
    assert effects["token_tis"].kept_tokens == effects["token_tis"].tokens
    assert effects["token_tis"].gradient_scale is None


def test_a_rollout_at_which_the_hook_stops_is_left_out_and_named():
    proximal = rollout().proximal.clone()
    proximal[rollout().mask.nonzero()[0, 0]] = float("nan")
    broken = rollout(proximal=proximal, rollout_id=4)
    with pytest.raises(NonFiniteError):
        run_hook("token_tis", broken)
    found = empty_whatif({"token_tis": presets.get("token_tis")})
    for r in (rollout(), broken):
        found.add(r)
    assert found.stopped == [4] and "rollouts 4 are left out" in found.notes()[0]
    assert found.effects() == whatif([rollout()], {"token_tis": presets.get("token_tis")})


def test_memory_does_not_grow_with_rollouts():
    found = empty_whatif({"token_tis": presets.get("token_tis")})
    found.add(rollout())
    before = len(pickle.dumps(found))
    for i in range(20):
        found.add(rollout(rollout_id=i))
    assert len(pickle.dumps(found)) <= before + 64
