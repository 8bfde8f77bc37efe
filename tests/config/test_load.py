"""Mapping -> Correction: what is accepted, and one line with the full key for all else."""

from __future__ import annotations

import pytest
import yaml

from slime_ext import load_config, presets
from slime_ext.core.correction import Correction
from slime_ext.core.losses import PpoClip, Reinforce
from slime_ext.core.steps import Reject, Reweight, Truncate, Veto
from slime_ext.errors import ConfigError

FROM_THE_DESIGN = """
numerator: proximal
surrogate: host
steps:
  - reject: {unit: sequence, statistic: ratio, aggregate: mean, low: 0.999, high: 1.001}
  - veto: {low: 1.0e-4}
  - reweight: {level: token}
  - truncate: {high: 2.0}
"""


def test_the_example_of_the_design():
    steps = (Reject("sequence", "ratio", "mean", 0.999, 1.001), Veto(1e-4), Reweight("token"), Truncate(2.0))
    assert load_config(yaml.safe_load(FROM_THE_DESIGN)) == Correction(steps=steps)


def test_every_preset_loads_by_name():
    for name in (*presets.PRESETS, *presets.ALIASES):
        assert load_config({"preset": name}) == presets.get(name)


def test_keys_beside_a_preset_replace_its_fields():
    loaded = load_config({"preset": "off_policy_is", "steps": ["reweight", {"truncate": {"high": 3}}]})
    assert loaded.surrogate == Reinforce() and loaded.steps[1] == Truncate(3)


def test_a_step_may_be_its_bare_name_or_have_no_fields():
    assert load_config({"steps": ["reweight", {"truncate": None}]}).steps == (Reweight(), Truncate())


@pytest.mark.parametrize("text", ["1e-4", "0.0001", " 1.0E-04 "])
def test_a_number_given_as_text_is_a_number(text):
    assert load_config({"steps": [{"veto": {"low": text}}]}).steps == (Veto(low=1e-4),)


def test_text_where_a_word_is_wanted_stays_text():
    with pytest.raises(ConfigError, match="level: expected 'token'"):
        load_config({"steps": [{"reweight": {"level": "2"}}]})


def test_a_whole_number_given_as_text_is_one():
    (step,) = load_config({"steps": [{"reject": {"max_staleness": "3"}}]}).steps
    assert step.max_staleness == 3 and isinstance(step.max_staleness, int)


def test_a_surrogate_takes_fields():
    assert load_config({"surrogate": {"ppo_clip": {"anchor": "behavior"}}}).surrogate == PpoClip("behavior")
