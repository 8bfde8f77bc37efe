"""Contains what the adapters share: finding a correction, and one call on padded tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slime_ext import presets
from slime_ext.config.files import is_file_name
from slime_ext.config.flat import correct
from slime_ext.config.load import OF_A_HOST, block_of, read_config
from slime_ext.core.correction import Correction
from slime_ext.core.losses import Anchor, HostLoss, PpoClip
from slime_ext.core.needs import Need
from slime_ext.errors import ConfigError, DataError, SlimeExtError, warn_once

KEY = "slime_ext"
ONE_MICRO_BATCH = frozenset({Need.TARGET, Need.ADVANTAGES})  # what a loss of one micro-batch offers
Rule = tuple[bool, str]  # whether the rule is broken, and the message for that


def correction_named(name: str | Mapping[str, Any], where: str = KEY) -> Correction:
    """Loads the correction that a preset's name, a YAML file's path or a mapping describes.

    The keys of a file or a mapping may be under ``slime_ext:``.

    Args:
        where: what the user types the name for, for the message about an unknown preset.

    Raises:
        ConfigError: the correction does not load, or has a key that nothing would read here.
    """
    if isinstance(name, str) and not is_file_name(name):
        return presets.find(name, where).correction
    loaded = read_config(block := block_of(name))
    for key in (key for key in OF_A_HOST if key in block):
        raise ConfigError(f"{KEY}.{key}: expected none outside of slime and miles, got one: remove it")
    for note in loaded.notes:
        warn_once(f"{KEY}: {note}")
    return loaded.correction


def with_ppo(correction: Correction, low: float, high: float, anchor: Anchor = "proximal") -> Correction:
    """Puts PPO's clipped surrogate into a correction that uses the host's loss."""
    if not isinstance(correction.surrogate, HostLoss):
        return correction
    return replace(correction, surrogate=PpoClip(anchor, low, high))


def correct_padded(
    correction: Correction,
    mask: Tensor,
    behavior: Tensor,
    proximal: Tensor,
    names: Mapping[str, str],
    **more: Tensor | None,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Calls ``slime_ext.correct`` on [B, T] tensors.

    Args:
        mask: nonzero at response tokens; all other tokens may hold anything.
        names: what the other system calls ``mask``, ``behavior``, ``proximal`` and ``target``, for messages.
        more: ``loss`` (ones by default, so that the result is the weights), ``target``, ``advantages``.

    Returns:
        loss [B, T], keep [B, T] bool, and metrics.

    Raises:
        DataError: a tensor has another shape than the mask, such as [T, B]. ``correct`` lists other errors.
    """
    arguments = {"behavior": behavior, "proximal": proximal, **more}
    tensors = {name: values for name, values in arguments.items() if values is not None}
    for name, values in tensors.items():
        if mask.dim() != 2 or values.shape != mask.shape:
            raise DataError(
                f"{names.get(name, name)}: expected the shape of {names['mask']}, {list(mask.shape)}, got "
                f"{list(values.shape)}: pass [batch, tokens]"
            )
    rows, length = mask.shape
    flat = {name: values.reshape(-1) for name, values in tensors.items()}
    loss = flat.pop("loss", torch.ones_like(flat["proximal"]))
    with naming(names):
        loss, keep, metrics = correct(
            loss, lengths=[length] * rows, correction=correction, mask=mask.reshape(-1), **flat
        )
    return loss.reshape(mask.shape), keep.reshape(mask.shape), metrics


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Replaces our names of tensors in errors with those of the other system."""
    try:
        yield
    except SlimeExtError as error:
        name, _, line = str(error).partition(": ")
        raise type(error)(f"{names.get(name, name)}: {line}") from None


def refuse(rules: Iterable[Rule]) -> None:
    """Raises ConfigError with the message of the first rule that is broken."""
    for is_broken, line in rules:
        if is_broken:
            raise ConfigError(line)
