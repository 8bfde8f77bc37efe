"""The policy loss against float loops written from slime's rules, and the contract of its boundary."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from slime_ext.errors import NonFiniteError
from slime_ext.host import staleness, step_metrics
from slime_ext.launcher.megatron import parallel
from slime_ext.launcher.megatron.batching import Layout, pack_micro_batch
from slime_ext.launcher.megatron.loss import PolicyLoss, StepLog
from slime_ext.launcher.training_data import TrainSample
from slime_ext.metrics import MetricsLayout
from slime_ext.tis import correct, vanilla_tis_function
from tests.launcher.megatron.tiny_rollout import arguments, rollout

VOCAB = 48


@pytest.fixture(scope="module", autouse=True)
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel.initialize(arguments())
    yield
    parallel.destroy()


def make(hook=None, proximal=None, **more):
    args = arguments(**more)
    log = StepLog()
    return PolicyLoss(args, hook, proximal or {}, 0, log)


def batch_and_logits(seed=0):
    batch = pack_micro_batch(rollout(8, seed), Layout(dtype=torch.float64))
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, batch.input_ids.size(1), VOCAB, dtype=torch.float64, generator=generator)
    return batch, logits.requires_grad_()


def oracle(samples, logits, args, proximal=None, weight=lambda ratio: 1.0, keep=lambda i, t: True):
    """sum_i sum_t m_t keep_t w_t max(-r A, -clip(r) A) / D_i, minus the entropy bonus; plain floats."""
    rows, begin, total = logits[0].tolist(), 0, 0.0
    for i, s in enumerate(samples):
        first = s.total_length - s.response_length
        for t in range(s.response_length):
            x = [v / args.rollout_temperature for v in rows[begin + first + t - 1]]
            lse = max(x) + math.log(sum(math.exp(v - max(x)) for v in x))
            cur = x[s.tokens[first + t]] - lse
            entropy = -sum(math.exp(v - lse) * (v - lse) for v in x)
            anchor = proximal[i][t] if proximal else cur
            r, a = math.exp(cur - anchor), s.advantage
            clipped = min(max(r, 1 - args.eps_clip), 1 + args.eps_clip_high)
            pg = max(-r * a, -clipped * a) * weight(math.exp(anchor - s.rollout_log_probs[t]))
            scale = 1.0 if args.calculate_per_token_loss else max(s.mask_sum, 1)
            if s.loss_mask[t] and keep(i, t):
                total += (pg - args.entropy_coef * entropy) / scale
        begin += s.total_length
    return total


def draw_proximal(samples):
    generator = torch.Generator().manual_seed(5)
    return {
        s.position: torch.rand(s.response_length, dtype=torch.float64, generator=generator) * -4
        for s in samples
    }


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
def test_loss_equals_the_definition(per_token, recomputed):
    batch, logits = batch_and_logits()
    proximal = draw_proximal(rollout(8)) if recomputed else {}
    loss = make(proximal=proximal, calculate_per_token_loss=per_token)
    value, _ = loss.policy(batch, logits)
    expected = oracle(rollout(8), logits, loss.args, proximal)
    assert value.item() == pytest.approx(expected, abs=1e-12)


def test_vanilla_tis_multiplies_by_the_truncated_ratio():
    batch, logits = batch_and_logits()
    proximal = draw_proximal(rollout(8))
    loss = make(hook=vanilla_tis_function, proximal=proximal)
    value, metrics = loss.policy(batch, logits)
    expected = oracle(rollout(8), logits, loss.args, proximal, weight=lambda ratio: min(ratio, 2.0))
    assert value.item() == pytest.approx(expected, abs=1e-12)
    assert {"ois", "tis", "tis_clipfrac", "tis_abs"} <= metrics.keys()


def test_rejected_tokens_leave_the_numerator_only():
    def reject_even_samples(**call):
        masks = [m * (i % 2) for i, m in enumerate(call["loss_masks"])]
        return call["pg_loss"], masks, {"kept": torch.ones_like(call["pg_loss"])}

    batch, logits = batch_and_logits()
    loss = make(hook=reject_even_samples)
    value, metrics = loss.policy(batch, logits)
    expected = oracle(rollout(8), logits, loss.args, keep=lambda i, t: i % 2 == 1)
    assert value.item() == pytest.approx(expected, abs=1e-12)
    assert float(metrics["kept"]) == pytest.approx(
        7.0
    )  # reduced with the host's masks; one sample is masked out


def test_the_hook_gets_slimes_keywords_and_ours():
    seen = {}

    def look(**call):
        seen.update(call)
        return call["pg_loss"], call["loss_masks"], {}

    batch, logits = batch_and_logits()
    make(hook=look).policy(batch, logits)
    samples = rollout(8)
    lengths = [s.response_length for s in samples]
    assert set(seen) == {
        *("args", "pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths"),
        *("response_lengths", "cur_log_probs", "advantages"),
    }
    for key in ("train_log_probs", "rollout_log_probs", "loss_masks", "cur_log_probs", "advantages"):
        assert [x.numel() for x in seen[key]] == lengths
    assert seen["pg_loss"].shape == (sum(lengths),) and seen["pg_loss"].requires_grad
    assert all(x.requires_grad for x in seen["cur_log_probs"])
    assert not any(x.requires_grad for x in [*seen["train_log_probs"], *seen["rollout_log_probs"]])
    assert seen["loss_masks"][0].dtype == torch.int32


def test_gradient_reaches_the_logits_through_cur_log_probs():
    batch, logits = batch_and_logits()

    def only_cur(**call):
        return torch.cat(call["cur_log_probs"]), call["loss_masks"], {}

    value, _ = make(hook=only_cur, entropy_coef=0.0).policy(batch, logits)
    value.backward()
    assert float(logits.grad.abs().sum()) > 0


def test_metrics_only_leaves_the_loss_as_it_is():
    batch, logits = batch_and_logits()
    plain, _ = make(use_tis=False).policy(batch, logits)
    watched, _ = make(hook=vanilla_tis_function, use_tis=False, get_mismatch_metrics=True).policy(
        batch, logits
    )
    assert torch.equal(plain, watched)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_masked_behavior_log_probs_may_hold_anything(value):
    samples = rollout(8)
    reference, logits = batch_and_logits()
    at = next(
        (i, s.loss_mask.index(0)) for i, s in enumerate(samples) if 0 in s.loss_mask and any(s.loss_mask)
    )
    samples[at[0]].rollout_log_probs[at[1]] = value
    dirty = pack_micro_batch(samples, Layout(dtype=torch.float64))
    expected, _ = make(hook=vanilla_tis_function).policy(reference, logits)
    found, metrics = make(hook=vanilla_tis_function).policy(dirty, logits)
    assert found.item() == expected.item()
    assert all(math.isfinite(v) for v in metrics.values())


def test_a_sample_without_a_response_changes_nothing():
    batch, logits = batch_and_logits()
    empty = TrainSample(position=8, rollout_id=8, tokens=[4, 5], loss_mask=[], rollout_log_probs=[])
    longer = pack_micro_batch([*rollout(8), empty], Layout(dtype=torch.float64))
    more = torch.cat([logits, torch.zeros(1, 2, VOCAB, dtype=torch.float64)], dim=1)
    expected, _ = make(hook=vanilla_tis_function).policy(batch, logits)
    found, _ = make(hook=vanilla_tis_function).policy(longer, more)
    assert found.item() == expected.item()


def test_a_diverged_model_stops_and_names_the_token():
    batch, logits = batch_and_logits()
    broken = logits.detach().clone()
    broken[0, batch.logit_rows[0]] = math.nan
    with pytest.raises(NonFiniteError, match="sample 0, response token 0"):
        make().policy(batch, broken)


def test_recompute_counts_once():
    batch, logits = batch_and_logits()
    loss = make(hook=vanilla_tis_function, recompute_loss_function=True)
    with step_metrics.under_way(MetricsLayout()) as step:
        value, _, _ = loss(batch, 1, logits)
        value.backward()
        scalars, _ = step.reduce()
    assert loss.log.hook_calls == 2
    assert scalars["off_policy/tokens"] == sum(int(mask.sum()) for mask in batch.loss_masks)


def test_beside_another_hook_nothing_is_said_of_a_correction():
    batch, logits = batch_and_logits()
    loss = make(hook=lambda *, pg_loss, loss_masks, **_: (pg_loss * 0.5, loss_masks, {}))
    with step_metrics.under_way(MetricsLayout(of_policies=True)) as step:
        loss(batch, 1, logits)
        scalars, curves = step.reduce()
    assert {"off_policy/k3_kl", "off_policy/ess_ratio"} <= scalars.keys()
    told = {name.rpartition("/")[2] for name in (*scalars, *curves)}
    assert not told & {"ess_weight", "weight_mean", "kept_fraction", "clipped_fraction"}


def test_a_bound_on_staleness_drops_the_samples_that_are_older():
    """The launcher's micro-batches say which weights sampled them."""
    batch, logits = batch_and_logits()
    versions = [["4"], ["1", "4"], *[["3"]] * (len(batch.positions) - 2)]
    batch = replace(batch, weight_versions=versions)
    mapping = {"steps": [{"reject": {"max_staleness": 1}}]}
    loss = make(hook=correct, slime_ext=mapping, custom_tis_function_path="slime_ext.tis.correct")
    staleness.set_trainer_version(4)
    with step_metrics.under_way(step_metrics.layout_of(loss.args, curves=True)) as step:
        loss(batch, 1, logits)
        scalars, curves = step.reduce()
    staleness.set_trainer_version(None)
    masks = [int(mask.sum()) for mask in batch.loss_masks]
    assert scalars["off_policy/kept_fraction"] == pytest.approx(1 - masks[1] / sum(masks))
    assert scalars["off_policy/staleness_max"] == 3 and curves["off_policy/by_staleness/3/kept_fraction"] == 0
