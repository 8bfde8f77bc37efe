"""Mapping -> Correction: what is accepted; what is refused: tests/config/golden/wrong_configurations.txt."""

from __future__ import annotations

import pytest
import yaml

from slime_ext import load_config, presets
from slime_ext.core.correction import Correction
from slime_ext.core.losses import PpoClip
from slime_ext.core.steps import Reject, Reweight, Truncate, Veto

FROM_THE_DESIGN = """
numerator: proximal
surrogate: host
steps:
  - reject: {unit: sequence, statistic: ratio, aggregate: mean, low: 0.999, high: 1.001}
  - veto: {low: 1.0e-4}
  - reweight: {level: token}
  - truncate: {high: 2.0}
"""
OFF_POLICY_IS = presets.get("off_policy_is")
READ = {  # a mapping as YAML -> the correction
    FROM_THE_DESIGN: Correction(
        steps=(Reject("sequence", "ratio", "mean", 0.999, 1.001), Veto(1e-4), Reweight(), Truncate(2.0))
    ),
    "{preset: off_policy_is, steps: [reweight, {truncate: {high: 3}}]}": Correction(
        "target", OFF_POLICY_IS.surrogate, (Reweight(), Truncate(3))
    ),
    "{steps: [reweight, {truncate: null}]}": Correction(steps=(Reweight(), Truncate())),
    "{steps: [{veto: {low: '1e-4'}}]}": Correction(steps=(Veto(low=1e-4),)),
    "{steps: [{veto: {low: ' 1.0E-04 '}}]}": Correction(steps=(Veto(low=1e-4),)),
    "{steps: [{reject: {max_staleness: '3'}}]}": Correction(steps=(Reject(max_staleness=3),)),
    "{surrogate: {ppo_clip: {anchor: behavior}}}": Correction(surrogate=PpoClip("behavior")),
    **{f"preset: {name}": presets.get(name) for name in (*presets.PRESETS, *presets.ALIASES)},
}


@pytest.mark.parametrize("text", READ)
def test_a_mapping_is_its_correction(text):
    assert load_config(yaml.safe_load(text)) == READ[text]
