"""Judges an engine's answers: what is in the recorded log-probs, and what finds that out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.engines import model
from benchmarks.engines.model import Answer, Trainer
from benchmarks.engines.settings import LONGEST, Setting
from slime_ext.tools.analysis.request import Request
from slime_ext.tools.analysis.run import analyse

NOISE = 1e-3  # nats; float32 engines agree to 1e-5
ABSENT = -1e30  # SGLang writes -3.4e38 for the log-prob of a token that is not possible, vLLM -inf
SAME = 2.0  # factor by which the mean |log-ratio| of two runs may differ, since answers are random


@dataclass(frozen=True)
class Row:
    """What is known of a setting.

    Args:
        in_value: whether recorded log-probs differ from those of the raw logits at temperature 1.
        is_renormalised: whether some tokens have no probability, and the others add up to 1.
        ratio: mean |recorded - the trainer's at its temperature|, nats; 0 below NOISE.
        findings: what ``slime-ext analyze`` finds in a dump of the answers, errors and warnings.
        ends: whether answers end before they have LONGEST tokens.
    """

    in_value: bool
    is_renormalised: bool
    ratio: float
    findings: tuple[str, ...]
    ends: bool = False

    def agrees(self, other: Row) -> bool:
        """Whether two runs say the same."""
        if replace(self, ratio=0) != replace(other, ratio=0):
            return False
        less, more = sorted((self.ratio, other.ratio))
        return more <= SAME * less


def row_of(setting: Setting, answers: Sequence[Answer], trainer: Trainer, folder: Path) -> Row:
    """Judges the answers of an engine under a setting, and writes the dump for that into a folder."""
    raw, trained, lines = [], [], []
    for number, answer in enumerate(answers):
        recorded, tokens = torch.tensor(answer.recorded), torch.tensor(answer.tokens)[:, None]
        at_1 = trainer.log_probs(answer, 1.0).gather(1, tokens)[:, 0]
        at_its = trainer.log_probs(answer, setting.temperature).gather(1, tokens)[:, 0]
        raw.append((recorded - at_1).abs())
        trained.append((recorded - at_its).abs())
        lines.append(line(number, answer, at_its.tolist()))
    dump = folder / "dump.jsonl"
    dump.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    ratio = torch.cat(trained).mean().item()
    return Row(
        in_value=torch.cat(raw).mean().item() > NOISE,
        is_renormalised=_is_renormalised([answer for answer in answers if answer.whole]),
        ratio=float(f"{ratio:.1g}") if ratio > NOISE else 0.0,
        findings=findings(dump),
        ends=any(len(answer.tokens) < LONGEST for answer in answers),
    )


def findings(dump: Path) -> tuple[str, ...]:
    """Returns the names of the errors and warnings that ``slime-ext analyze`` finds in a dump."""
    request = Request((str(dump),))
    all_findings = analyse(request, request.files()).findings
    return tuple(sorted(finding.name for finding in all_findings if finding.severity != "note"))


def line(number: int, answer: Answer, log_probs: list[float]) -> dict:
    """Returns an answer as a line of a dump, with the trainer's log-probs."""
    return {
        "rollout_id": 0,
        "group_index": number // model.ANSWERS,
        "tokens": answer.prompt + answer.tokens,
        "prompt_length": len(answer.prompt),
        "rollout_log_probs": answer.recorded,
        "log_probs": log_probs,
        "reward": float(number % 2),
        "advantages": 1.0 if number % 2 else -1.0,
    }


def _is_renormalised(answers: Sequence[Answer]) -> bool:
    steps = [list(step.values()) for answer in answers for step in answer.whole or ()]
    kept = [[value for value in step if value is not None and value > ABSENT] for step in steps]
    mass = torch.tensor([torch.tensor(step, dtype=torch.float64).exp().sum() for step in kept])
    is_one = bool(((mass - 1).abs() < NOISE).all())
    return is_one and sum(len(step) < model.VOCABULARY for step in kept) > len(steps) / 2
