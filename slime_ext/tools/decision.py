"""Decides what to do about the distance between the policies, by the kind of run.

README.md and SKILL.md have the same table. ``analyze`` names the row that applies to a
run, ``check`` the row of a launch, and ``presets --for`` the row of a kind of run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TRIAL = "token_tis"  # the preset that runs are compared with
K3_LIMIT = 0.005  # nats per token, mean over response tokens; a judgement
PUSH_OFTEN = "push them more often. If you cannot, "


@dataclass(frozen=True)
class Row:
    """What to do in one kind of run.

    Args:
        run: the kind of run.
        first: what comes before any correction.
        trial: how to find out whether a correction helps, with the punctuation before it; empty: not at all.
    """

    run: str
    first: str
    trial: str = ""

    @property
    def advice(self) -> str:
        """What to do, as the second cell of the table."""
        return self.first + self.trial


NEAR = Row(f"synchronous, `k3_kl` below {K3_LIMIT:g}", "no correction")
FAR = Row(
    f"synchronous, `k3_kl` above {K3_LIMIT:g}",
    "find the fault",
    f". If `slime-ext analyze` finds none, compare runs with and without `{TRIAL}`",
)
LAGGING = Row(
    "asynchronous, or weights pushed every Nth rollout",
    f"{PUSH_OFTEN}halve the learning rate (unless you tuned it under this lag)",
    f", and compare runs with and without `{TRIAL}`. k3 does not tell what a lag costs",
)
ROUNDED = Row(
    "INT4, INT8 or FP8 weights in the sampler",
    "train without a correction first",
    f". Then compare runs with and without `{TRIAL}`, scored with the weights that you will serve",
)
# Arguments of a host that round the sampler's weights, unless they have one of the values of WHOLE.
ROUND = ("sglang_quantization", "sglang_torchao_config")
WHOLE = (None, "", "none", "unquant")
# The name of a folder with rounded weights: Qwen3-4B-FP8, Moonlight-16B-INT4, Qwen2.5-7B-AWQ
ROUNDED_WEIGHTS = re.compile(
    r"(?<![a-z])(?:(?:mx|nv)?fp[48]|int[48]|awq|gptq|w[48]a\d+)(?![a-z\d])", re.IGNORECASE
)
TABLE = (NEAR, FAR, ROUNDED, LAGGING)  # the last row that fits a run applies to it


def row_of(k3: float, *, is_lagging: bool, is_rounded: bool) -> Row:
    """Returns the row of a run.

    Args:
        k3: mean over the response tokens, nats.
        is_lagging: whether the sampler's weights are older than the trainer's.
        is_rounded: whether the sampler's weights have fewer bits than the trainer's.
    """
    if is_lagging:
        return LAGGING
    if is_rounded:
        return ROUNDED
    return NEAR if k3 <= K3_LIMIT else FAR


def rounded_by(arguments: Mapping[str, Any]) -> str:
    """Returns the argument of a host that tells that the sampler's weights are rounded; empty if none does.

    Hosts round what they push to the sampler as the weights of ``hf_checkpoint`` are rounded, which the
    folder's name tells.
    """
    named = (name for name in ROUND if arguments.get(name) not in WHOLE)
    folder = str(arguments.get("hf_checkpoint") or "").rstrip("/").rpartition("/")[2]
    return next(named, "hf_checkpoint" if ROUNDED_WEIGHTS.search(folder) else "")


def plain(text: str) -> str:
    """Returns a cell of the table without the marks of Markdown."""
    return text.replace("`", "")


def markdown() -> str:
    """Returns the table as the pages have it."""
    return "\n".join(
        ["| your run | what to do |", "|---|---|", *(f"| {row.run} | {row.advice} |" for row in TABLE)]
    )
