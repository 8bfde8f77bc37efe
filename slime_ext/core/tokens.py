"""Defines the tensors of a call that a correction reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from slime_ext.ops.segments import Segments

if TYPE_CHECKING:
    from torch import Tensor

Unit = Literal["token", "turn", "sequence"]
Level = Literal["token", "turn", "sequence", "geometric"]


@dataclass(frozen=True)
class Head:
    """The sampler's K most likely tokens at each of T positions.

    The log-probs are normalised over the whole vocabulary.
    """

    sampler: Tensor  # [T, K] log-probs, nats; -inf where a head is shorter
    trainer: Tensor  # [T, K] log-probs of the same tokens under the policy being trained, nats, with grad
    proximal: Tensor | None = None  # [T, K] under the proximal policy; None: equal to the trainer's


@dataclass(frozen=True)
class Support:
    """All tokens that the sampler could draw at each of T positions, N in total.

    With a support, every log-prob is normalised over the support, including those of ``Tokens``. So the ratio
    of a sampled token compares the two policies after top-p or top-k has cut them to the support.
    """

    sampler: Tensor  # [N] log-probs, nats
    trainer: Tensor  # [N] log-probs of the same tokens under the policy being trained, nats, with grad
    offsets: Tensor  # [T + 1] int64: position t has tokens offsets[t] to offsets[t + 1] - 1, or none
    proximal: Tensor | None = None  # [N] under the proximal policy; None: equal to the trainer's


@dataclass(frozen=True)
class Tokens:
    """The packed response tokens [T] that a correction reads; masked positions may hold anything."""

    segments: Segments
    proximal: Tensor  # log-probs under the trainer's frozen policy, nats
    behavior: Tensor  # log-probs under the policy that sampled the tokens, nats
    target: Tensor | None = None  # log-probs under the policy that is being trained, nats, with grad
    advantages: Tensor | None = None
    ages: Tensor | None = None  # [S] trainer's weight version minus the sample's; NaN where unknown
    head: Head | Support | None = None  # what ``center`` reads
    age_steps: Tensor | None = None  # [S] optimizer steps since the sample's weights; NaN where unknown
