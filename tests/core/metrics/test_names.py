"""The names are frozen, and docs/metrics.md says of each what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime_ext import presets
from slime_ext.core.metrics import layout, names
from tests import oracle
from tests.core.metrics.test_statistics import accumulated

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
PER_STEP = ("rejected_fraction", "kept_fraction", "clipped_fraction")  # under steps/<place>_<name>/
FROZEN = """
    tokens sequences k1_kl k3_kl ratio_mean ratio_min ratio_max log_ratio_max ratio_p01 ratio_p10 ratio_p50
    ratio_p90 ratio_p99 chi2_token chi2_sequence log1p_chi2_sequence ess_ratio ess_sequence ess_weight
    weight_mean weight_max kept_fraction rejected_fraction rejected_sequence_fraction clipped_fraction
    surrogate_clipped_fraction nonfinite_fraction perplexity_behavior perplexity_numerator
    staleness_mean staleness_max staleness_known_fraction staleness_steps_mean staleness_steps_max
""".split()


def test_names_are_frozen():
    ages = {"ages": [1.0] * 4, "age_steps": [2.0] * 4}
    found = names.scalars(accumulated(presets.get("metrics_only"), oracle.random_batch(1), **ages))
    assert list(found) == [f"off_policy/{name}" for name in FROZEN]


def test_a_steps_names_carry_its_place_in_the_list():
    found = names.scalars(accumulated(presets.get("seq_is_rs"), oracle.random_batch(1)))
    assert [name for name in found if "/steps/" in name] == [
        "off_policy/steps/1_truncate/clipped_fraction",
        "off_policy/steps/2_reject/rejected_fraction",
        "off_policy/steps/2_reject/kept_fraction",
    ]


def test_curves_are_frozen():
    totals = accumulated(presets.get("metrics_only"), oracle.random_batch(1), ages=[1.0] * 4)
    columns = ("share", "k3_kl", "ratio_mean", "weight_mean", "kept_fraction")
    bins = {f"off_policy/by_staleness/1/{column}" for column in columns}
    assert bins <= set(names.curves(totals)) and list(layout.CURVES) == [
        "by_position",
        "by_staleness",
        "by_probability",
    ]
    assert layout.CURVES["by_probability"][0] == "0-0.0001" and layout.CURVES["by_position"][-1] == "65536+"


def rows_of_the_page():
    """[(name, what its text on healthy values begins with)] of every table."""
    rows = [line.split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
    return [(row[0].strip("| `"), row[3].removesuffix(" |")) for row in rows if len(row) == 4]


def test_the_page_has_every_name_and_no_other():
    tables = (
        names.METRICS,
        names.STALENESS,
        names.STALENESS_STEPS,
        names.EXACT,
        names.CENTER,
        names.CERTIFICATE,
        PER_STEP,
        ("share", *names.OF_BIN),
    )
    assert [name for name, _ in rows_of_the_page()] == [name for table in tables for name in table]


def test_what_is_healthy_is_what_the_page_says():
    number = r"([\d.]+(?:e-?\d+)?)"
    found = {}
    for name, text in rows_of_the_page()[: len(names.METRICS)]:
        if both := re.match(f"{number} to {number}", text):
            found[name] = float(both[1]), float(both[2])
        elif above := re.match(f"above {number}", text):
            found[name] = float(above[1]), None
        elif below := re.match(f"below {number}", text):
            found[name] = None, float(below[1])
    assert found == names.HEALTHY


@pytest.mark.parametrize("curve", layout.CURVES)
def test_the_page_has_the_bins(curve):
    assert ", ".join(f"`{name}`" for name in layout.CURVES[curve]) in PAGE


def test_every_guard_of_the_page_is_known():
    known = names.known_names(presets.get("geo_rs"))
    assert {"kept_fraction", "ess_weight", "k3_kl", "steps/0_reject/kept_fraction"} <= set(known)
