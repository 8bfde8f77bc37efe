"""Verifiable rewards: a response is compared with the label of its prompt. --custom-rm-path replaces them."""

from __future__ import annotations

import asyncio
import inspect
import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from slime_ext.errors import ConfigError, DataError, did_you_mean
from slime_ext.host.contract import load_function
from slime_ext.without_cuda.tiny import tokens_in_place  # noqa: F401

EOS = "<eos>"  # of the model in configs/tiny


def characters(response: str, label: str, ended: bool) -> float:
    """Share of positions that are right, the end of the answer being one of them, in [0, 1].

    The longer of answer and label sets the number of positions, so padding an answer out costs.

    >>> characters("dcb", "dcba", ended=True)
    0.6
    >>> characters("dcba", "dcba", ended=True)
    1.0
    """
    answer = response.removesuffix(EOS)
    right = sum(a == b for a, b in zip(answer, label, strict=False))
    at_the_end = ended and len(answer) == len(label)
    return (right + at_the_end) / (max(len(answer), len(label)) + 1)


def exact(response: str, label: str, ended: bool) -> float:
    """1 when the response is the label and has ended, else 0."""
    return float(ended and response.removesuffix(EOS) == label)


RULES: dict[str, Callable[[str, str, bool], float]] = {"characters": characters, "exact": exact}


def check_rm_type(rm_type: str | None) -> None:
    """Raises ConfigError unless `rm_type` names a built-in reward."""
    if rm_type not in RULES:
        near = did_you_mean(rm_type or "", RULES)
        known = ", ".join(RULES)
        raise ConfigError(
            f"--rm-type: expected one of {known}, got {rm_type or 'nothing'}{near}: or give --custom-rm-path"
        )


def score(args: Namespace, samples: Sequence[Any]) -> list[float]:
    """The reward of each sample, dimensionless; sets ``sample.reward`` to it.

    A custom function is called as slime calls it, ``fn(args, sample)``, and may be async or not.

    Raises:
        DataError: a reward that is no finite number, a label that is missing.
    """

    async def ask() -> list[Any]:
        return await asyncio.gather(*(_ask(args, sample) for sample in samples))

    for sample, answer in zip(samples, asyncio.run(ask()), strict=True):
        sample.reward = _value(f"reward of sample {sample.index}", answer)
    return [sample.reward for sample in samples]


async def _ask(args: Namespace, sample: Any) -> Any:
    if args.custom_rm_path:
        answer = load_function(args.custom_rm_path, "--custom-rm-path")(args, sample)
        return await answer if inspect.isawaitable(answer) else answer
    rm_type = (sample.metadata or {}).get("rm_type") or args.rm_type
    check_rm_type(rm_type)
    if sample.label is None:
        raise DataError(f"reward of sample {sample.index}: expected a label, got none: give --label-key")
    return RULES[rm_type](sample.response, sample.label, sample.status == "completed")


def _value(where: str, answer: Any) -> float:
    try:
        value = float(answer)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: expected a number, got {answer!r}") from error
    if not math.isfinite(value):
        raise DataError(f"{where}: expected a finite number, got {value}")
    return value
