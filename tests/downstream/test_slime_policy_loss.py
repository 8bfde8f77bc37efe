"""The launcher's policy loss and slime's own on the same logits: a hook that works at one works at the other.

``HOSTS=path/to/hosts pytest tests/downstream/test_slime_policy_loss.py``

Bound: slime computes in float32; sums of about 40 terms of size 1 differ by less than 1e-5.
"""

from __future__ import annotations

import sys

import pytest
import torch

from slime_ext.launcher.megatron import parallel
from slime_ext.launcher.megatron.batching import Layout, pack_micro_batch
from slime_ext.launcher.megatron.loss import PolicyLoss, StepLog, hook_of
from tests.launcher.megatron.tiny_model import LAYOUTS
from tests.launcher.megatron.tiny_rollout import arguments, rollout
from tests.ranks import run_ranks

BOUND = 1e-5
VOCAB = 48
pytestmark = [pytest.mark.slow]
VARIANTS = {
    "vanilla": {},
    "token_tis": {"custom_tis_function_path": "slime_ext.tis.token_tis"},
    "geo_rs": {"custom_tis_function_path": "slime_ext.tis.geo_rs"},
    "icepop": {"custom_tis_function_path": "slime_ext.tis.icepop_function", "tis_clip_low": 0.5},
    "slime_vanilla": {"custom_tis_function_path": "slime.backends.megatron_utils.loss.vanilla_tis_function"},
    "none": {"use_tis": False},
    "metrics_only": {"use_tis": False, "get_mismatch_metrics": True},
    "gspo": {"advantage_estimator": "gspo", "policy_loss": "gspo"},
    "cispo": {"advantage_estimator": "cispo", "policy_loss": "cispo"},
    "dual_clip": {"eps_clip_c": 3.0},
    "per_token": {"calculate_per_token_loss": True},
    "bypass": {"use_tis": False, "use_rollout_logprobs": True},
    "recompute": {"recompute_loss_function": True},
}
SLIME_ONLY = {
    "use_opsm": False,
    "use_kl_loss": False,
    "log_probs_chunk_size": -1,
    "allgather_cp": False,
    "loss_type": "policy_loss",
    "use_rollout_top_p_replay": False,
    "rollout_top_p": 1.0,
}


def every_variant(folder, layout):
    """Of each variant on this rank: (loss, gradient, metrics, tokens) of ours and of slime's."""
    sys.path.insert(0, folder)
    parallel.initialize(arguments(layout, dtype=torch.float32))
    return {name: both(layout, more) for name, more in VARIANTS.items()}


def both(layout, more):
    args = arguments(layout, dtype=torch.float32, **more)
    vars(args).update(SLIME_ONLY)
    samples, cp, tp = rollout(8), parallel.cp_group(), parallel.tp_group()
    batch = pack_micro_batch(samples, Layout(cp_rank=cp.rank(), cp_size=cp.size()))
    generator = torch.Generator().manual_seed(cp.rank())
    logits = torch.randn(1, batch.input_ids.size(1), VOCAB, generator=generator).chunk(tp.size(), -1)[
        tp.rank()
    ]
    proximal = {
        p: torch.rand(n, generator=generator) * -4
        for p, n in zip(batch.positions, batch.local_lengths, strict=True)
    }
    mine, theirs = (logits.clone().requires_grad_() for _ in range(2))
    return ours(args, batch, proximal, mine), slimes(args, batch, samples, proximal, theirs)


def ours(args, batch, proximal, logits):
    log = StepLog()
    loss, count, metrics = PolicyLoss(args, proximal=proximal, optimizer_step=0, log=log, hook=hook_of(args))(
        batch, 2, logits
    )
    loss.backward()
    return loss.detach(), logits.grad, {k: float(v) for k, v in metrics.items()}, float(count)


def slimes(args, batch, samples, proximal, logits):
    from slime.backends.megatron_utils.loss import loss_function

    tensors = {
        "advantages": batch.advantages,
        "log_probs": None if args.use_rollout_logprobs else list(proximal.values()),
        "rollout_log_probs": batch.rollout_log_probs,
        "unconcat_tokens": [torch.tensor(s.tokens) for s in samples],
        "total_lengths": batch.total_lengths,
        "response_lengths": batch.response_lengths,
        "loss_masks": batch.loss_masks,
        "rollout_mask_sums": list(batch.denominators),
    }
    loss, count, log = loss_function(args, tensors, 2, 8, logits)
    loss.backward()
    values = dict(zip(["tokens", *log["keys"]], log["values"].tolist(), strict=True))
    return loss.detach(), logits.grad, values, float(count)


def test_same_loss_gradient_and_metrics(host, monkeypatch):
    if not host.module("slime.observability.rollout_metrics"):
        pytest.skip("the arguments are those of slime since 624b824")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    for layout in ("one", "cp2", "tp2"):
        for rank in run_ranks(every_variant, LAYOUTS[layout][0], str(host.folder), layout):
            for name, (ours, theirs) in rank.items():
                assert same(ours, theirs), (layout, name)


def same(ours, theirs):
    (loss, gradient, metrics, count), (their_loss, their_gradient, their_metrics, their_count) = ours, theirs
    their_metrics = {key: value for key, value in their_metrics.items() if key != "tokens"}
    return (
        abs(float(loss - their_loss)) < BOUND
        and float((gradient - their_gradient).abs().max()) < BOUND
        and count == their_count
        and {key: metrics[key] for key in their_metrics} == pytest.approx(their_metrics, rel=BOUND, abs=BOUND)
    )
