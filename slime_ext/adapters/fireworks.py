"""Makes a custom loss for the fireworks cookbook.

The loss is a correction of PPO's clipped loss, or of the correction's own surrogate.

    policy.forward_backward_custom(data, slime_ext.adapters.fireworks.loss("token_tis", advantages=advantages,
        prompt_len=prompt_lengths, inf_logprobs=rollout_logprobs, old_policy_logprobs=old_policy_logprobs))

This replaces the recipes' call of ``make_grpo_loss_fn(..., kl_beta=0)``, and the arguments have the same
names. A call sees every sample of its forward_backward, and coupled steps compute their number over those
samples. The recipe adds the reference KL itself, so it is not added here.

Source: fw-ai/cookbook 76821fa, training/utils/rl/{grpo,common}.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from slime_ext.adapters.seam import correction_named, naming, with_ppo
from slime_ext.config.flat import correct
from slime_ext.core.needs import Need, require
from slime_ext.errors import ConfigError, DataError

OFFERS = frozenset({Need.TARGET, Need.ADVANTAGES, Need.WHOLE_STEP})
NAN = "write 0 to leave the token out"
NAMES = {  # our tensors -> the arguments that they come from
    "behavior": "fireworks.loss: inf_logprobs",
    "proximal": "fireworks.loss: old_policy_logprobs",
    "target": "fireworks.loss: logprobs",
    "advantages": "fireworks.loss: advantages",
}
Loss = Callable[[Sequence[Any], Sequence[Tensor]], tuple[Tensor, dict[str, float]]]


def loss(
    correction: str | Mapping[str, Any],
    *,
    advantages: Sequence[float],
    prompt_len: int | Sequence[int],
    inf_logprobs: Sequence[Sequence[float]],
    old_policy_logprobs: Sequence[Sequence[float]],
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
) -> Loss:
    """Makes the closure that ``forward_backward_custom`` calls.

    It returns the sum of the corrected loss over response tokens, and metrics.

    Args:
        correction: a preset's name, a YAML file's path, or a mapping.
        advantages: one per sample.
        prompt_len: number of tokens of each prompt, or of all prompts.
        inf_logprobs: per sample, the sampler's log-probs at the target tokens (sequence length - 1).
        old_policy_logprobs: per sample, the trainer's log-probs before the optimizer step, at the same
            tokens.
        eps_clip: width of PPO's clip range below 1, and above 1 if ``eps_clip_high`` is None.
        eps_clip_high: width of PPO's clip range above 1.

    Raises:
        ConfigError: the correction does not load or needs what the cookbook lacks, or the lists differ in
            length.
        DataError: an advantage is not a number. Later, when the loss is called: a list does not fit the data,
            or holds something other than numbers.
    """
    where = "fireworks.loss"
    loaded = correction_named(correction, where)
    starts = [prompt_len] * len(advantages) if isinstance(prompt_len, int) else list(prompt_len)
    lengths = {len(advantages), len(starts), len(inf_logprobs), len(old_policy_logprobs)}
    if len(lengths) > 1:
        raise ConfigError(
            f"{where}: expected lists of one length, got {sorted(lengths)}: pass one entry per sample"
        )
    require(loaded.needs, OFFERS, where, "samples carry no group, version or head, and the loss is a sum")
    acting = with_ppo(loaded, eps_clip, eps_clip if eps_clip_high is None else eps_clip_high)

    per_sample = _numbers("advantages", None, advantages, 0, len(advantages))

    def loss_fn(data: Sequence[Any], logprobs_list: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        if len(logprobs_list) != len(starts):
            count = len(logprobs_list)
            raise DataError(
                f"{where}: logprobs: expected {len(starts)} samples, got {count}: pass the samples that the "
                "lists describe"
            )
        begins = [max(0, start - 1) for start in starts]
        target = torch.cat([row[begin:] for row, begin in zip(logprobs_list, begins, strict=True)])
        ends = [len(row) for row in logprobs_list]
        sizes = [max(end - begin, 0) for begin, end in zip(begins, ends, strict=True)]

        def packed(name: str, values: Sequence[Sequence[float]]) -> Tensor:
            rows = [
                _numbers(name, i, row, begin, end)
                for i, (row, begin, end) in enumerate(zip(values, begins, ends, strict=True))
            ]
            return target.new_tensor([value for row in rows for value in row])

        mask = packed("weights", [_mask(data, i, end) for i, end in enumerate(ends)])
        if not mask.isfinite().all():
            at = int((~mask.isfinite()).int().argmax())
            sample = next(i for i, end in enumerate(accumulate(sizes)) if at < end)
            raise DataError(
                f"{where}: weights, sample {sample}: expected 0 or 1, got {float(mask[at])}: {NAN}"
            )
        spread = torch.repeat_interleave(target.new_tensor(per_sample), torch.tensor(sizes).to(target.device))
        with naming(NAMES):
            corrected, _, metrics = correct(
                torch.zeros_like(target),
                packed("inf_logprobs", inf_logprobs),
                packed("old_policy_logprobs", old_policy_logprobs),
                sizes,
                acting,
                mask=mask > 0.5,
                target=target,
                advantages=spread,
            )
        return corrected.sum(), metrics

    return loss_fn


def _numbers(
    name: str, sample: int | None, values: Sequence[Any] | None, begin: int, end: int
) -> list[float]:
    """Reads values ``begin`` to ``end`` of a list as numbers.

    Samplers write None where there is no number. It becomes NaN.

    Args:
        sample: the sample that the list belongs to; None: it belongs to all samples.
    """
    place = name if sample is None else f"{name}, sample {sample}"
    values = () if values is None else values
    part = values[begin:end]
    if len(part) != max(end - begin, 0):
        raise DataError(
            f"fireworks.loss: {place}: expected {end} numbers, one per target token, got {len(values)}: "
            "pass one for each token of prompt and response except the first"
        )
    try:
        return [math.nan if value is None else float(_no_text(value)) for value in part]
    except (TypeError, ValueError):
        raise DataError(
            f"fireworks.loss: {place}: expected numbers, got something else: pass floats"
        ) from None


def _no_text(value: Any) -> Any:
    if isinstance(value, str):
        raise TypeError
    return value


def _mask(data: Sequence[Any], sample: int, length: int) -> Sequence[float]:
    """Returns a sample's weights over its target tokens, or ones if it has no weights."""
    if sample >= len(data):
        return [1.0] * length
    inputs = data[sample].loss_fn_inputs
    weights = inputs.get("weights") or inputs.get("loss_mask")
    values = [1.0] * length if weights is None else list(weights.data)
    return [*values, *[0.0] * (length - len(values))]
