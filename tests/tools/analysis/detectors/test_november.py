"""Cases of November 2026, where their folder is beside the repository: each is made and named."""

from __future__ import annotations

import pytest

from slime_ext.tools.analysis.request import Request
from slime_ext.tools.analysis.run import analyse
from tests.tools.analysis.detectors.cases import CASES, make

FOLDER = CASES / "november"
# Folder and words of its script -> the names that are right as an error or a warning; None: none may be.
EXPECTED: dict[tuple[str, ...], set[str] | None] = {
    ("02_damaged_weights",): {"damaged_weights"},
    ("02_damaged_weights", "healthy"): None,
    ("03_packed_order",): {"permuted_log_probs"},
    ("03_packed_order", "healthy"): None,
    ("04_lost_first_token",): {"shared_place"},
    ("04_lost_first_token", "healthy"): None,
    **{("06_soft_cap", side): {"soft_cap"} for side in ("engine", "trainer", "formula")},
    ("07_requeued_versions",): None,  # a note
    ("09_prefix_everywhere",): {"stale_prefix"},
    ("09_prefix_everywhere", "healthy"): None,
    ("10_constant_group",): {"advantages"},
    ("10_constant_group", "healthy"): None,
    ("12_steady_engine",): None,
    ("12_steady_engine", "healthy"): {"dropout"},
    ("14_borrowed_start",): {"other_log_probs"},
    ("14_borrowed_start", "healthy"): None,
    ("16_mixed_ages",): None,  # a note: chi^2 and effective sample size are healthy
    ("16_mixed_ages", "healthy"): None,
    **{
        ("17_engine_settings", f"grammar_{kind}"): {"constrained_decoding"}
        for kind in ("2", "4", "12", "all")
    },
    ("17_engine_settings", "label"): {"constrained_decoding"},
    ("17_engine_settings", "min_new"): {"minimum_length"},
    ("17_engine_settings", "healthy"): None,
}


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.exists(), reason="needs the folder of cases beside the repository")
@pytest.mark.parametrize("words", EXPECTED, ids=" ".join)
def test_what_a_case_expects_is_named(words, tmp_path, monkeypatch):
    case, *more = words
    make(monkeypatch, FOLDER / case / "make.py", "_world", str(tmp_path), *more)
    document = analyse(request := Request((str(tmp_path),), presets=("metrics_only",)), request.files())
    faults = [finding for finding in document.findings if finding.is_fault]
    wanted = EXPECTED[words]
    if wanted is None:
        assert [finding.name for finding in faults] == []
        assert words != ("16_mixed_ages",) or {finding.name for finding in document.findings} == {
            "stale_weights"
        }
    else:
        assert all(wanted & {finding.name, *finding.or_else} for finding in faults) and faults
