"""What no other detector has a name for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_ext.analysis.document import Finding
from slime_ext.analysis.findings import Detector
from slime_ext.analysis.findings.words import nats

if TYPE_CHECKING:
    from collections.abc import Iterable

    from slime_ext.analysis.diagnosis import Diagnosis

FEWEST = 100  # tokens
LARGE = 0.05  # nats, mean |l|; five times what bfloat16 makes, and more than a harmless lag of weights
SURE = 3.0  # standard errors above it


def unexplained(d: Diagnosis) -> Finding | None:
    """Mean |log-ratio| significantly above what arithmetic makes."""
    distance = d.evidence.means["absolute"]
    if distance.count < FEWEST or distance.value - SURE * distance.error < LARGE:
        return None
    return Finding(
        name="unexplained",
        severity="warning",
        title="The policies are far apart, and no detector can tell why.",
        evidence=(
            f"Mean |log-ratio| {nats(distance.value)} ± {distance.error:.1g}, k3 {nats(d.sums.mean('k3'))}. "
            f"Two engines in bfloat16 with the same weights stay below {LARGE}."
        ),
        fix=(
            "Find the cause before you train on: score one fixed text with both sides (the same weights?), "
            "compare the request's sampling_params with the trainer's flags (temperature, top-p, penalties, "
            "logit bias), the tokens that are scored with those that the engine returned (chat template, "
            "text tokenised again), and where its log-probs begin. Read the worst tokens."
        ),
    )


def after_all(others: Iterable[Detector]) -> Detector:
    """The detector, silent where any other found something."""
    return Detector("unexplained", unexplained, after=tuple(other.name for other in others))
