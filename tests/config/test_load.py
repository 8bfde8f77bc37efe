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


@pytest.mark.parametrize(
    ("mapping", "line"),
    [
        (["token_tis"], "slime_ext: expected a mapping, got ['token_tis']: see the files in configs/"),
        ({"presets": "x"}, "slime_ext: unknown key 'presets'; did you mean 'preset'?"),
        ({"preset": 3}, "slime_ext.preset: expected a name, got 3"),
        ({"preset": "geo_r"}, "slime_ext.preset: expected one of "),
        ({"preset": "geo_r"}, "did you mean 'geo_rs'?"),
        ({"numerator": "old"}, "slime_ext.numerator: expected 'proximal' or 'target', got 'old'"),
        ({"mask_scope": True}, "slime_ext.mask_scope: expected 'policy' or 'all', got True"),
        ({"on_nonfinite": "drop"}, "slime_ext.on_nonfinite: expected 'reject' or 'raise', got 'drop'"),
        ({"steps": {"truncate": {}}}, "slime_ext.steps: expected a list of steps, got {'truncate': {}}"),
        (
            {"steps": [{"truncat": {}}]},
            "slime_ext.steps[0]: unknown step 'truncat'; did you mean 'truncate'?",
        ),
        ({"steps": ["veto"]}, "slime_ext.steps[0].veto: expected low or high or both, got neither"),
        ({"steps": [{"truncate": {}, "veto": {}}]}, "slime_ext.steps[0]: expected one step with its fields"),
        (
            {"steps": [{"truncate": 2.0}]},
            "slime_ext.steps[0].truncate: expected a mapping of its fields, got 2.0",
        ),
        (
            {"steps": ["reweight", {"truncate": {"high": 0.5}}]},
            "slime_ext.steps[1].truncate.high: expected a number >= 1",
        ),
        (
            {"steps": [{"truncate": {"hihg": 2}}]},
            "slime_ext.steps[0].truncate: unknown key 'hihg'; did you mean 'high'?",
        ),
        ({"steps": [{"truncate": {"high": "two"}}]}, "truncate.high: expected a number, got 'two'"),
        ({"steps": [{"truncate": {"high": "inf"}}]}, "truncate.high: expected a number, got 'inf'"),
        ({"steps": [{"truncate": {"high": "2_0"}}]}, "truncate.high: expected a number, got '2_0'"),
        ({"steps": [{"truncate": {"high": "true"}}]}, "truncate.high: expected a number, got 'true'"),
        ({"steps": [{"truncate": {"high": "0.5"}}]}, "truncate.high: expected a number >= 1, got 0.5"),
        ({"steps": [{"reject": {"max_staleness": "1.5"}}]}, "max_staleness: expected a"),
        (
            {"steps": [{"truncate": {"high": True}}]},
            "slime_ext.steps[0].truncate.high: expected a number, got True",
        ),
        ({"steps": [{"truncate": {"high": float("nan")}}]}, "expected a finite number, got nan"),
        (
            {"steps": [{"reweight": {"level": "seq"}}]},
            "'token', 'turn', 'sequence' or 'geometric', got 'seq'",
        ),
        (
            {"steps": [{"reject": {"low": 2.0}}]},
            "slime_ext.steps[0].reject: expected low <= 1 <= high, got [2.0, None]",
        ),
        ({"steps": [{"reject": {"statistic": "k2", "high": -1.0}}]}, "expected low <= 0 <= high"),
        ({"surrogate": "ppo"}, "slime_ext.surrogate: unknown surrogate 'ppo'"),
        (
            {"surrogate": {"sapo": {"tau_pos": 0.0}}},
            "slime_ext.surrogate.sapo.tau_pos: expected a number from 1e-06 to 1e+06",
        ),
        (
            {"surrogate": {"dual_clip": {"eps_c": 1.0}}},
            "slime_ext.surrogate.dual_clip.eps_c: expected a number > 1",
        ),
        ({"preset": "ppo_is_bypass", "steps": ["reweight"]}, "slime_ext.surrogate.anchor: expected proximal"),
        (
            {"steps": ["reweight", "normalize"]},
            "slime_ext.steps[1].normalize: expected a truncate or clip step before it",
        ),
    ],
)
def test_mistakes_are_one_line_with_the_full_key(mapping, line):
    with pytest.raises(ConfigError) as caught:
        load_config(mapping)
    assert line in str(caught.value) and "\n" not in str(caught.value)
