"""``slime_ext.correct``: corrects packed tensors in one call, without a host."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime_ext import presets
from slime_ext.config.files import is_file_name
from slime_ext.config.load import load_config
from slime_ext.core.correction import Correction, HookInputs, apply
from slime_ext.core.metrics.layout import MetricsLayout
from slime_ext.core.metrics.names import scalars
from slime_ext.core.metrics.totals import reduce
from slime_ext.core.needs import Need, require
from slime_ext.core.tokens import Head, Tokens
from slime_ext.errors import DataError, NonFiniteError, expect, quoted
from slime_ext.ops.divergences import HIGHEST, is_log_prob
from slime_ext.ops.segments import Segments

OFFERS = frozenset({Need.TARGET, Need.ADVANTAGES, Need.WHOLE_STEP, Need.MASKS, Need.HEAD})
ALWAYS = ("loss", "behavior", "proximal")  # every correction takes these
NEEDS_A_HOST = "run it in a host, with --custom-tis-function-path slime_ext.tis.correct"


def correct(
    loss: Tensor,
    behavior: Tensor,
    proximal: Tensor,
    lengths: Sequence[int],
    correction: str | Path | Mapping[str, Any] | Correction,
    *,
    mask: Tensor | None = None,
    target: Tensor | None = None,
    advantages: Tensor | None = None,
    head: tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Corrects the policy loss of packed responses: T tokens in S sequences.

    Args:
        loss: [T] policy loss per token, with grad. It is not used if the correction has its own surrogate.
        behavior: [T] log-probs under the policy that sampled the tokens, nats.
        proximal: [T] log-probs under the trainer's policy before the optimizer step, nats.
        lengths: [S] tokens of each response.
        correction: a preset's name, the path of a YAML file, the mapping under ``slime_ext:``, or a
            Correction. Coupled steps treat these tokens as the whole optimizer step.
        mask: [T] nonzero where the behavior policy sampled the token; None: it sampled every token.
        target: [T] log-probs under the policy being trained, nats, with grad.
        advantages: [T].
        head: what ``center`` reads: [T, K] log-probs of the sampler's K most likely tokens, nats, under the
            sampler and under the policy being trained, the second with grad. Beside PPO's loss, or weights of
            ``numerator: proximal``, a third tensor has them under the proximal policy; it may be left out
            where target and proximal are equal.

    Returns:
        loss [T]; keep [T] bool, the tokens that stay in the policy loss; and the metrics by the names of
        docs/metrics.md. Computing the metrics waits for the device. The loss is 0 at rejected and masked
        tokens before terms and ``center`` add theirs. A correction without any part returns ``loss`` itself.

    Raises:
        ConfigError: the correction does not load, or needs a tensor that was not passed.
        DataError: a tensor does not have T floating-point numbers, or is a list or None; it has probabilities
            instead of log-probs; a length is no whole number; the mask has NaN; the head has not two or three
            tensors [T, K] of log-probs.
        NonFiniteError: a proximal or target log-prob, an advantage that is read, or a log-prob of the
            trainer's or the proximal policy's head is not finite at a response token.

    >>> from math import log
    >>> behavior, proximal = torch.tensor([-3.0, -1.0, -2.0]), torch.tensor([-3.0, -1.0, log(4) - 2])
    >>> loss, keep, metrics = correct(torch.ones(3), behavior, proximal, [2, 1], "token_tis")
    >>> loss, keep, round(metrics["off_policy/clipped_fraction"], 3)
    (tensor([1., 1., 2.]), tensor([True, True, True]), 0.333)
    """
    correction = _loaded(correction)
    tensors = {"loss": loss, "behavior": behavior, "proximal": proximal, "mask": mask}
    _check_types(tensors | {"target": target, "advantages": advantages})
    lengths, heads = _whole_numbers(lengths), _heads(head)
    if mask is not None and not mask.isfinite().all():
        raise DataError("mask: expected a number at every token, got NaN or an infinity: write 0 or 1")
    segments = Segments.whole(lengths, torch.ones_like(loss) if mask is None else mask)
    tokens = Tokens(segments, proximal, behavior, target, advantages, head=heads)
    _check(correction, tokens, loss)
    layout = MetricsLayout.of(correction, curves=False)
    result = apply(correction, HookInputs(tokens, loss, layout=layout))
    totals, _ = reduce(layout, result.measured)
    return result.loss, segments.mask & (result.rejected == 0), scalars(totals)


def _loaded(correction: str | Path | Mapping[str, Any] | Correction) -> Correction:
    if isinstance(correction, Correction):
        return correction
    is_preset = isinstance(correction, str) and not is_file_name(correction)
    return presets.get(str(correction)) if is_preset else load_config(correction)


def _check_types(tensors: Mapping[str, Any]) -> None:
    """Raises DataError unless each value is a tensor, or None where it may be absent.

    All but the mask need floating point.
    """
    for name, values in tensors.items():
        if values is None and name in ALWAYS:
            raise DataError(f"{name}: expected a tensor, got None: pass {name} of every token")
        if values is None:
            continue
        if not isinstance(values, Tensor):
            is_list = isinstance(values, list | tuple)
            is_nested = is_list and any(isinstance(v, list | tuple) or getattr(v, "ndim", 0) for v in values)
            each = f"cat([torch.as_tensor(x) for x in {name}])" if is_nested else f"as_tensor({name})"
            raise DataError(f"{name}: expected a tensor, got a {type(values).__name__}: pass torch.{each}")
        if name != "mask" and not values.is_floating_point():  # a loss of integers would cut weights off
            raise DataError(
                f"{name}: expected floating-point numbers, got {values.dtype}: pass {name}.float()"
            )


def _whole_numbers(lengths: Any) -> list[int]:
    """Returns the lengths as integers. Raises DataError unless all are whole numbers from 0 up."""
    try:
        numbers = [operator.index(length) for length in lengths]
    except TypeError:
        numbers = [-1]
    if any(number < 0 for number in numbers):
        raise DataError(
            f"lengths: expected a list of whole numbers from 0 up, got {quoted(lengths)}: pass the number of "
            "tokens of each response"
        )
    return numbers


def _heads(head: Any) -> Head | None:
    """Returns the heads. Raises DataError unless they are two or three tensors [T, K] of one shape."""
    if head is None:
        return None
    heads = head if isinstance(head, tuple | list) else []
    shapes = [list(of.shape) for of in heads if isinstance(of, Tensor) and of.is_floating_point()]
    are_tensors = len(heads) == len(shapes) in (2, 3)
    if not are_tensors or any(shape != shapes[0] or len(shape) != 2 for shape in shapes):
        got = f"shapes {shapes}" if are_tensors else f"a {type(head).__name__}"
        raise DataError(
            f"head: expected two or three tensors of log-probs, [T, K] each, got {got}: pass (sampler, "
            "trainer) or (sampler, trainer, proximal)"
        )
    return Head(*heads)


def _check(correction: Correction, tokens: Tokens, loss: Tensor) -> None:
    """Raises an error unless the correction can run on these tensors.

    Every tensor that it reads must be passed, have the right shape, and be finite where the loss needs that.
    """
    read = {
        "loss": loss,
        "mask": tokens.segments.mask,
        "behavior": tokens.behavior,
        "proximal": tokens.proximal,
        "target": tokens.target,
        "advantages": tokens.advantages,
    }
    for name, need in {"target": Need.TARGET, "advantages": Need.ADVANTAGES}.items():
        is_there = read[name] is not None or need not in correction.needs
        expect(is_there, name, "a tensor", "None", f"pass {name}=, which this correction reads")
    has_head = tokens.head is not None or Need.HEAD not in correction.needs
    why = "pass head=, because this correction centers"
    expect(has_head, "head", "log-probs of sampler and trainer", "None", why)
    require(correction.needs, OFFERS, "correction", NEEDS_A_HOST)
    size = tokens.segments.size
    for name, values in read.items():
        if values is not None and values.shape != (size,):
            got = list(values.shape)
            raise DataError(
                f"{name}: expected shape [{size}], the sum of lengths, got {got}: pack the tokens"
            )
    if isinstance(tokens.head, Head):
        _check_heads(tokens.head, tokens.segments)
        _check_proximal_head(correction, tokens)
    _check_log_probs(read, tokens.segments)
    _check_values(correction, read, tokens.segments)


def _check_proximal_head(correction: Correction, tokens: Tokens) -> None:
    """Raises ConfigError if the trainer's head would stand in for that of another, proximal policy."""
    if not correction.needs_proximal_head or tokens.head is None or tokens.head.proximal is not None:
        return
    target, mask = tokens.target, tokens.segments.mask
    is_target = target is not None and not bool((mask & (target != tokens.proximal)).any())
    why = (
        "pass (sampler, trainer, proximal), because this correction reads the proximal policy's head, which "
        "is the trainer's only where target and proximal are equal"
    )
    expect(is_target, "head", "three tensors", "two", why)


def _check_log_probs(tensors: Mapping[str, Tensor | None], segments: Segments) -> None:
    """Raises DataError if a tensor of log-probs has probabilities.

    It has if all its numbers at response tokens are in [0, 1], and one is larger than rounding could make a
    log-prob. Single log-probs above 0 are another fault, which rejects the token (``is_log_prob``).
    """
    for name in ("behavior", "proximal", "target"):
        if (values := tensors[name]) is None:
            continue
        numbers = values.detach()[segments.mask & values.isfinite()]
        if numbers.numel() and bool(((numbers >= 0) & (numbers <= 1)).all() & (numbers > HIGHEST).any()):
            raise DataError(
                f"{name}: expected log-probs, at most 0, got only numbers from 0 to 1: pass {name}.log()"
            )


def _check_heads(head: Head, segments: Segments) -> None:
    """Raises an error at the first number of a head that would make the loss NaN, or that is ignored."""
    if len(head.sampler) != segments.size:
        rows = f"{segments.size} rows, the sum of lengths, got {len(head.sampler)}"
        raise DataError(f"head: expected {rows}: pass one row per token")
    is_there = segments.mask[:, None] & (head.sampler != -torch.inf)  # a shorter head ends in -inf
    if (wrong := head.sampler[is_there & ~is_log_prob(head.sampler)]).numel():
        raise DataError(
            "head: expected log-probs of the sampler, above -1000 and at most 0, or -inf, got "
            f"{float(wrong[0])}: pass log-probs, normalised over the whole vocabulary"
        )
    for whose, values in {"the trainer": head.trainer, "the proximal policy": head.proximal}.items():
        if values is None:
            continue
        if (wrong := values[is_there & ~values.isfinite()]).numel():
            raise NonFiniteError(
                f"head: expected finite log-probs of {whose}, got {float(wrong[0])}: the loss would be NaN"
            )
        if (wrong := values[is_there & (values > HIGHEST)]).numel():
            raise DataError(
                f"head: expected log-probs of {whose}, at most 0, got {float(wrong[0])}: pass log-probs, "
                "normalised over the whole vocabulary"
            )


def _check_values(correction: Correction, tensors: Mapping[str, Tensor | None], segments: Segments) -> None:
    """Raises NonFiniteError at the first value that would make the loss NaN."""
    why = "the loss would be NaN"
    checks = [("proximal", "finite log-probs", why), ("target", "finite log-probs", why)]
    if Need.ADVANTAGES in correction.needs:
        checks.append(("advantages", "finite numbers", why))
    if correction.on_nonfinite == "raise":
        why = "the correction has on_nonfinite: raise"
        checks.append(("behavior", "log-probs above -1000 and at most 0", why))
    for name, wanted, why in checks:
        if (values := tensors[name]) is None:
            continue
        is_sound = is_log_prob(values) if name == "behavior" else values.isfinite()
        if (wrong := segments.mask & ~is_sound).any():
            at = int(wrong.int().argmax())
            place = f"sequence {int(segments.ids[at])}, token {int(segments.within[at])}"
            raise NonFiniteError(
                f"{name}: expected {wanted} at response tokens, got {float(values[at])} at {place}: {why}"
            )
