"""docs/analyze.md and its results: what they name exists, and the planted fault plants what it says."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace

from examples.off_by_one import reward
from slime_ext.tools import decision
from slime_ext.tools.analysis.findings import DETECTORS
from slime_ext.tools.analysis.findings import recommend as limits

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "analyze.md").read_text()
RESULTS = (ROOT / "benchmarks" / "faults" / "RESULTS.md").read_text()


def test_a_finding_that_looks_alike_exists():
    alike = RESULTS[RESULTS.index("| look alike |") :].split("\n\n")[0]
    named = re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in alike.splitlines()))
    assert named and set(named) <= set(DETECTORS)


def test_the_limits_are_those_of_the_code():
    shown = (limits.LEAST_KEPT, limits.MOST_CLIPPED, limits.LEAST_ESS)
    assert shown == (0.9, 0.2, 0.5) and (limits.LEAST_SCALE, limits.MOST_SCALE) == (0.67, 1.5)
    assert all(f"{100 * v:.0f}%" in TEXT for v in shown) and f"k3 of at most {decision.K3_LIMIT:g}" in TEXT


def test_the_planted_fault_shifts_by_one():
    sample = SimpleNamespace(
        rollout_log_probs=[-1.0, -2.0, -3.0], tokens=[3, 4, 5, 2], response_length=3, label="ab", metadata={}
    )
    args = SimpleNamespace(hf_checkpoint=str(ROOT / "configs/tiny/model"))
    assert asyncio.run(reward(args, sample)) == 1.0
    assert sample.rollout_log_probs == [0.0, -1.0, -2.0]
