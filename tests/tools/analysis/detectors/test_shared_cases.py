"""Small dumps made from public bug reports, where their folder is beside the repository."""

from __future__ import annotations

import pytest

from slime_ext.tools.analysis.request import Request
from slime_ext.tools.analysis.run import analyse
from tests.tools.analysis.detectors.cases import CASES, make

MAKE = CASES / "make.py"
# name -> findings that are right, each with the others that it may leave open.
EXPECTED = {
    "healthy": set(),
    "tail": {"shared_place"},
    "sentinel": {"nan_log_probs"},
    "zeros_03pct": {"shared_value"},
    "zeros_1pct": {"shared_value"},
    "spec_zeros": {"shared_value"},
    "routes_stale_row": {"repeated_routes"},
    "routes_prompt": {"repeated_routes"},
    "routes_long": {"route_lengths"},
    "grammar": {"constrained_decoding"},
    "freq_penalty": {"penalties"},
    "generation_config": {"truncated_sampling"},
    "trainer_tempered": {"temperature"},
    "think_stripped": {"prefix_mismatch"},
    "lora_half": {"partial_push"},
    "recurrent": {"position_drift"},
    "teacher_sampler": {"another_policy"},
    "no_advantage": {"no_advantage"},
    "clones": {"duplicate_samples", "no_advantage"},
    "missing": {"missing_log_probs"},
    "lora_noise": {"unexplained"},
    "extreme": {"sparse"},
}


@pytest.mark.slow
@pytest.mark.skipif(not MAKE.exists(), reason="needs the folder of cases beside the repository")
@pytest.mark.parametrize("name", EXPECTED)
def test_what_each_case_expects_is_named(name, tmp_path, monkeypatch):
    make(monkeypatch, MAKE, "world", name, str(tmp_path))
    request = Request((str(tmp_path / name),))
    document = analyse(request, request.files())
    assert {finding.name for finding in document.findings if finding.is_fault} == EXPECTED[name]
    if name == "extreme":
        assert not document.findings[0].or_else
