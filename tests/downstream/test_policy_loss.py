"""A host's own policy loss with our hooks, against the equations written out in float64 for whole sequences.

``HOSTS=path/to/hosts pytest tests/downstream/test_policy_loss.py``

Bound: the hosts compute in float32; sums of about 40 terms of size 1 differ by less than 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.downstream.host_loss import DEFAULTS, ROLLOUT_IDS, Sample, samples
from tests.downstream.layouts import BAND, ICEPOP_LOW, VARIANT_LAYOUTS, source_of, variants_of

BOUND = 1e-5
BFLOAT16 = 2e-2  # relative, of the gradient of Megatron's fused cross entropy
SAME = 4  # the default three times and recomputed; what is measured alone and what is not
METRICS = ("pg_loss", "pg_clipfrac", "ppo_kl")
pytestmark = [pytest.mark.slow]


def capped(ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return ratio.clamp(max=DEFAULTS["tis_clip"]), mask


def in_band(ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """A token outside costs its loss and stays among the tokens that divide."""
    return ratio * ((ratio >= ICEPOP_LOW) & (ratio <= DEFAULTS["tis_clip"])), mask


def near_in_the_mean(ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """No weight; a sequence leaves the masks iff the geometric mean of its ratio is outside the band."""
    geometric = ((ratio.log() * mask).sum() / mask.sum().clamp(min=1)).exp()
    near = (geometric >= BAND["low"]) & (geometric <= BAND["high"])
    return torch.ones_like(ratio), mask * near


def unweighted(ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ones_like(ratio), mask


# variant -> (proximal / behavior, mask) to (weight, mask); the others have the hosts' default, a cap
CORRECTED: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "icepop": in_band,
    "geometric": near_in_the_mean,
    "none": unweighted,
    "metrics only": unweighted,
    "bypass": unweighted,
}


def surrogate(flags: dict[str, Any], current: Tensor, old: Tensor, mask: Tensor, advantage: Tensor) -> Any:
    """(loss, whether it is clipped, old - current) of every token."""
    apart = old - current
    if flags["advantage_estimator"] == "gspo":
        apart = ((apart * mask).sum() / mask.sum().clamp(min=1)).expand_as(apart)
    ratio = (-apart).exp()
    within = ratio.clamp(1 - flags["eps_clip"], 1 + flags["eps_clip_high"])
    if flags["advantage_estimator"] == "cispo":
        return -within.detach() * advantage * current, within != ratio, apart
    loss = torch.maximum(-ratio * advantage, -within * advantage)
    if bound := flags["eps_clip_c"]:
        loss = torch.where(advantage < 0, torch.minimum(loss, -bound * advantage), loss)
    return loss, -within * advantage > -ratio * advantage, apart


def written_out(name: str, flags: dict[str, Any], by_rollout: bool) -> dict[str, float]:
    """Loss, norm of its gradient, and the host's metrics.

    Args:
        by_rollout: whether a sample's sum is divided by its rollout's tokens, or by its own that are kept.
    """
    flags = DEFAULTS | flags
    sums, leaves = {key: torch.zeros((), dtype=torch.float64) for key in METRICS}, []
    for s in samples():
        leaves.append(logits := s.logits.double().requires_grad_())
        values, kept = _of_sample(s, name, flags, logits)
        count = (s.mask_sum.double() if by_rollout else kept.sum()).clamp(min=1)
        if flags["calculate_per_token_loss"]:
            count = torch.ones(())
        for key, value in zip(METRICS, values, strict=True):
            sums[key] = sums[key] + (value * kept).sum() / count
    sums["pg_loss"].backward()
    sums = {key: value.detach() for key, value in sums.items()}
    gradient = torch.stack([leaf.grad.square().sum() for leaf in leaves]).sum().sqrt()
    metrics = {key: float(value) / len(set(ROLLOUT_IDS)) for key, value in sums.items()}
    return {"loss": float(sums["pg_loss"]), "gradient": float(gradient), "metrics": metrics}


def _of_sample(
    s: Sample, name: str, flags: dict[str, Any], logits: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    made_by = slice(s.total - s.response - 1, s.total - 1)
    current = logits.log_softmax(-1)[made_by].gather(1, s.tokens[-s.response :, None])[:, 0]
    proximal, behavior, mask = s.proximal.double(), s.behavior.double(), s.mask.double()
    old = behavior if flags["use_rollout_logprobs"] else proximal
    loss, clipped, apart = surrogate(flags, current, old, mask, s.advantage.double())
    weight, kept = CORRECTED.get(name, capped)((proximal - behavior).exp(), mask)
    return (loss * weight, clipped.double(), apart), kept


@pytest.mark.parametrize("layout", VARIANT_LAYOUTS)
def test_loss_gradient_and_metrics_are_those_of_the_equations(host, measured, layout):
    source = source_of(host)
    by_rollout = "_mask_sums" in source
    is_fused = "fused_vocab_parallel_cross_entropy" in source
    for (name, case), found in zip(variants_of(host).items(), measured[f"variants, {layout}"], strict=True):
        wanted = written_out(name, case.flags, by_rollout)
        assert found["loss"] == pytest.approx(wanted["loss"], abs=BOUND, rel=BOUND), name
        near = {"rel": BFLOAT16} if is_fused else {"abs": BOUND, "rel": BOUND}
        assert found["gradient"] == pytest.approx(wanted["gradient"], **near), name
        if not case.flags.get("calculate_per_token_loss"):
            told = {key: found["metrics"][key] for key in METRICS}
            assert told == pytest.approx(wanted["metrics"], abs=BOUND), name


def test_the_variants_differ_from_each_other(host, measured):
    """But the two spellings of the default, and the two without a correction."""
    found = dict(zip(variants_of(host), measured["variants, 1 process"], strict=True))
    assert len({round(one["loss"], 4) for one in found.values()}) >= len(found) - SAME
