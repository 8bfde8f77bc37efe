"""Every preset against the oracle, and the table itself."""

from __future__ import annotations

import functools
import math

import pytest
import torch

import slime_ext
from slime_ext import load_config, presets, tis
from slime_ext.config.load import to_mapping
from slime_ext.core.correction import Correction
from slime_ext.core.losses import DualClip, PpoClip, Reinforce, Sapo
from slime_ext.errors import ConfigError
from slime_ext.tools.convert import read
from tests import oracle
from tests.batches import flat, flat_call, tokens

ALONE, TOGETHER = 10, range(10, 100, 10)  # seeds of random batches: a call for each, and one for ten


def same(got, expected, rel, abs_):
    expected = torch.tensor([x for s in expected for x in s], dtype=torch.float64)
    torch.testing.assert_close(got.detach().double(), expected, rtol=rel, atol=abs_, equal_nan=True)


@functools.cache
def of_seeds(*seeds):
    """Random batches as one, made once for all presets. Nobody may change it."""
    return [s for seed in seeds for s in oracle.random_batch(seed)]


def several():
    return of_seeds(*range(8))


@pytest.mark.parametrize("name", presets.PRESETS)
def test_matches_the_oracle(name):
    compare_with_the_oracle(name, [several()])


@pytest.mark.slow
@pytest.mark.parametrize("name", presets.PRESETS)
def test_matches_the_oracle_in_every_batch(name):
    """A sample's numbers are its own, so ten batches in one call are compared as strictly as alone."""
    compare_with_the_oracle(name, map(of_seeds, range(ALONE)))
    compare_with_the_oracle(name, [of_seeds(*range(seed, seed + 10)) for seed in TOGETHER])


def compare_with_the_oracle(name, batches):
    for seed, batch in enumerate(batches):
        expected = oracle.correct(oracle.SPECS[name], batch)
        loss, keep, metrics = slime_ext.correct(**flat_call(batch), correction=name)
        assert keep.tolist() == [k for s in expected for k in s["keep"]], f"seed {seed}"
        assert metrics["off_policy/sequences"] == sum(any(s["mask"]) for s in batch)
        same(presets.get(name)(tokens(batch)[0]).weights, [s["weights"] for s in expected], 1e-12, 1e-12)
        if name != "metrics_only":
            same(loss, [s["loss"] for s in expected], 1e-11, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["token_tis", "seq_is", "fireworks_geometric", "turn_tis", "off_policy_is"])
def test_lower_precision_costs_what_its_inputs_cost(name, dtype):
    """Compared with the oracle on the rounded inputs: what is left is the float32 arithmetic."""
    for seed in range(30):
        batch = oracle.random_batch(seed, wild=False)
        rounded = [
            {k: torch.tensor(v, dtype=dtype).tolist() if k != "mask" else v for k, v in s.items()}
            for s in batch
        ]
        expected = oracle.correct(oracle.SPECS[name], rounded)
        outcome = presets.get(name)(tokens(batch, dtype)[0])
        assert outcome.weights.dtype == torch.float32
        same(outcome.weights, [s["weights"] for s in expected], 2e-5, 1e-6)


def test_on_policy_data_is_left_alone():
    for name in presets.PRESETS:
        batch = oracle.random_batch(3, wild=False)
        for s in batch:
            s["proximal"] = s["target"] = s["behavior"]
        outcome = presets.get(name)(tokens(batch)[0])
        mask = flat(batch, "mask") > 0
        assert torch.equal(outcome.keep, mask) and torch.equal(outcome.weights, mask.double())


@pytest.mark.parametrize("name", presets.PRESETS)
def test_gradients_are_finite_whatever_stands_at_masked_positions_and_weights_have_none(name):
    correction = presets.get(name)
    batch = several()
    packed, _ = tokens(batch)
    call = flat_call(batch, target=packed.target)
    call["loss"] = torch.where(packed.segments.mask, packed.target, 0)
    loss, keep, _ = slime_ext.correct(**call, correction=correction)
    (gradient,) = torch.autograd.grad(loss.sum(), packed.target)
    outcome = correction(packed)
    assert gradient.isfinite().all() and not outcome.weights.requires_grad
    reached = outcome.finite if correction.terms else keep
    assert correction.is_identity or not gradient[~reached].any()


def test_the_oracle_knows_every_preset():
    assert set(oracle.SPECS) == set(presets.PRESETS)


def test_every_name_is_a_function_with_formula_and_source():
    for name in [*presets.PRESETS, *presets.ALIASES]:
        function = getattr(tis, name)
        assert function.__name__ == name and "Source: " in function.__doc__


def test_an_alias_is_its_preset():
    assert presets.get("disabled") == presets.get("metrics_only")
    assert all(
        target in presets.PRESETS and alias not in presets.PRESETS
        for alias, target in presets.ALIASES.items()
    )


PPO, PG = ({"bypass_mode": True, "loss_type": loss} for loss in ("ppo_clip", "reinforce"))
SUM = {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"}
GEO = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
K3 = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
TOKEN, SEQUENCE = {"rollout_is": "token"}, {"rollout_is": "sequence"}
OF_VERL = {  # its own constructors' blocks; those of IcePop zero a weight and keep the mask
    "decoupled_token_is": TOKEN,
    "decoupled_seq_is": SEQUENCE,
    "decoupled_seq_is_rs": SEQUENCE | SUM,
    "decoupled_geo_rs": GEO,
    "decoupled_geo_rs_seq_tis": SEQUENCE | GEO,
    "decoupled_geo_rs_token_tis": TOKEN | GEO,
    "decoupled_k3_rs": K3,
    "decoupled_k3_rs_seq_tis": SEQUENCE | K3,
    "decoupled_k3_rs_token_tis": TOKEN | K3,
    "bypass_ppo_clip": PPO,
    "bypass_ppo_clip_geo_rs": PPO | GEO,
    "bypass_ppo_clip_k3_rs": PPO | K3,
    "bypass_pg_is": PG | SEQUENCE,
    "bypass_pg_geo_rs": PG | GEO,
    "bypass_pg_geo_rs_seq_tis": PG | SEQUENCE | GEO,
    "bypass_pg_geo_rs_token_tis": PG | TOKEN | GEO,
}


def in_short(correction):
    """Without verl's clamp, and over which tokens; five digits: verl bounds rollout / train, and 1 / 1.001 is
    nearly 0.999."""
    keys = to_mapping(correction)
    steps = [
        {
            key: round(x, 5) if isinstance(x, float) else x
            for key, x in fields.items()
            if key not in ("clamp", "over")
        }
        for step in keys["steps"]
        for fields in step.values()
    ]
    return keys["numerator"], keys["surrogate"], steps


def test_a_preset_of_verl_is_what_its_block_says_but_for_clamp_masks_and_denominator():
    for name in OF_VERL:
        assert in_short(presets.get(name)) == in_short(load_config(read("verl", OF_VERL[name]).mapping))


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'geo_mis'"):
        presets.get("geo_mi")
    with pytest.raises(ConfigError, match=r"^preset: expected a known preset, got None "):
        presets.get(None)
    with pytest.raises(AttributeError, match="did you mean 'icepop'"):
        tis.icepopp  # noqa: B018


def test_a_truncated_weight_is_exactly_the_cap_even_where_the_ratio_overflows():
    batch = [
        {k: [x] for k, x in {"proximal": 0.0, "behavior": -800.0, "target": 0.0, "advantage": 1.0}.items()}
    ]
    batch[0] |= {"mask": [1], "host_loss": [1.0]}
    assert presets.get("token_tis")(tokens(batch)[0]).weights.tolist() == [2.0]
    assert math.isinf(oracle.exp(800.0))


@pytest.mark.parametrize("surrogate", [Reinforce(), PpoClip(), DualClip("behavior"), Sapo()], ids=str)
def test_the_gradient_of_a_surrogate_flows_through_the_target_alone(surrogate):
    call = flat_call(oracle.random_batch(1, wild=False), correction=Correction(surrogate=surrogate))
    fixed = [call[key].requires_grad_() for key in ("proximal", "behavior", "advantages")]
    slime_ext.correct(**call)[0].sum().backward()
    assert call["target"].grad.any() and not any(value.grad is not None for value in fixed)
