"""SkyRL's blocks: values that SkyRL never looks at are checked, and said where they are not its defaults."""

from __future__ import annotations

import pytest

from slime_ext.config.load import read_config
from slime_ext.errors import ConfigError

DEFAULTS = {
    "tis_ratio_type": None,
    "token_tis_ratio_clip_high": 2.0,
    "sequence_tis_ratio_clip_high": 5.0,
    "sequence_mask_metric": None,
    "geo_mask_low": 0.99,
    "geo_mask_high": 1.01,
    "product_mask_low": 0.5,
    "product_mask_high": 2.0,
    "outlier_token_is_threshold_low": None,
    "outlier_token_is_threshold_high": None,
    "token_mask_is_threshold_low": None,
    "token_mask_is_threshold_high": None,
}


@pytest.mark.parametrize(
    ("block", "ignored"),
    [
        ({"sequence_tis_ratio_clip_high": 3.0}, ["sequence_tis_ratio_clip_high"]),
        ({"geo_mask_low": 0.9, "tis_ratio_type": "token"}, ["geo_mask_low"]),
        (
            {"tis_ratio_type": "sequence", "token_tis_ratio_clip_high": 3, "product_mask_high": "3"},
            ["token_tis_ratio_clip_high", "product_mask_high"],
        ),
        (
            {"use_tis": True, "tis_imp_ratio_cap": 2.0, "token_tis_ratio_clip_high": 3.0},
            ["use_tis", "token_tis_ratio_clip_high"],
        ),
        ({**DEFAULTS}, []),
        ({**DEFAULTS, "tis_ratio_type": "token", "sequence_mask_metric": "product"}, []),
        ({"tis_ratio_type": "token", "token_tis_ratio_clip_high": 3.0}, []),
        ({"sequence_mask_metric": "geometric", "geo_mask_low": 0.9}, []),
    ],
)
def test_a_value_that_skyrl_never_looks_at_is_said(block, ignored):
    notes = read_config({"skyrl": block}).notes
    assert [note.split()[0] for note in notes] == ignored
    assert all("is ignored by SkyRL" in note or "deprecated in SkyRL" in note for note in notes)


@pytest.mark.parametrize("key", [key for key, value in DEFAULTS.items() if isinstance(value, float)])
def test_a_value_that_skyrl_never_looks_at_is_a_number_all_the_same(key):
    with pytest.raises(ConfigError, match=f"slime_ext.skyrl.{key}: expected a finite number, got 'abc'"):
        read_config({"skyrl": {key: "abc"}})
