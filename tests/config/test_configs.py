"""The files of configs/, wrong configurations, and the way back from a correction to its keys: golden texts
(tests/golden.py)."""

from __future__ import annotations

import hashlib
from argparse import Namespace
from pathlib import Path

import pytest
import yaml

from slime_ext import host, presets
from slime_ext.config.foreign import SYSTEMS
from slime_ext.config.load import Loaded, load_config, read_config, to_mapping
from slime_ext.core.correction import Correction
from slime_ext.core.losses import PpoClip
from slime_ext.core.steps import Reject, Reweight, Truncate, Veto
from slime_ext.errors import ConfigError
from slime_ext.tools.commands.presets import KINDS
from tests.golden import golden, pairs

HERE = Path(__file__).parent
CONFIGS = HERE.parents[1] / "configs"
GOLDEN = HERE / "golden"
FILES = sorted((CONFIGS / "modes").glob("*.yaml"))


def loaded(path):
    return yaml.safe_load(path.read_text())


def dumped(value):
    return yaml.safe_dump(value, sort_keys=False, default_flow_style=None, width=100)


def refusal(mapping):
    with pytest.raises(ConfigError) as caught:
        load_config(mapping)
    return str(caught.value)


def test_when_to_use_each_preset_and_at_what_risk():
    said = loaded(CONFIGS / "presets.yaml")
    assert set(said) == set(presets.PRESETS)
    assert all(set(entry) - {"for"} == {"use", "risk"} for entry in said.values())
    assert {kind for entry in said.values() for kind in entry.get("for", ())} == set(KINDS)


def digest(keys):
    return hashlib.sha256(dumped(keys).encode()).hexdigest()[:16]


def test_what_a_preset_and_a_file_resolve_to_has_its_digest():
    """A number that changes shows here; git and ``slime-ext presets NAME`` say which."""
    keys = {name: to_mapping(entry.correction) for name, entry in presets.PRESETS.items()}
    for path in FILES:
        flags = loaded(path)
        keys[str(path.relative_to(CONFIGS))] = {
            **flags,
            "slime_ext": to_mapping(load_config(flags["slime_ext"])),
        }
    golden(GOLDEN / "configs.txt", "".join(f"{name} {digest(each)}\n" for name, each in keys.items()))


def test_a_file_sets_the_function_path_and_says_when_whence_and_at_what_risk():
    for path in FILES:
        text, flags = path.read_text(), loaded(path)
        assert all(f"# {word}: " in text for word in ("Use", "Risk", "Source")), path
        assert flags["custom_tis_function_path"] == "slime_ext.tis.correct"
        assert flags["use_tis"] or flags["get_mismatch_metrics"], path


def test_a_file_is_all_that_slime_needs(capsys):
    for path in FILES:
        host.init(Namespace(**loaded(path)))
        name = path.stem if path.stem == "metrics_only" else "correct"
        assert f"{name}: " in capsys.readouterr().out


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


def test_a_correction_and_its_keys_are_the_same():
    for name in presets.PRESETS:
        assert load_config(to_mapping(presets.get(name))) == presets.get(name)


def test_wrong_configurations_are_refused_in_one_line_each():
    """What stands under slime_ext: and the answer."""
    answers = pairs(GOLDEN / "wrong_configurations.txt", lambda line: [refusal(yaml.safe_load(line))])
    assert len(answers) > 190 and all(answer.startswith("slime_ext") for (answer,) in answers)


def test_what_native_keys_leave_without_effect_is_noted():
    pairs(GOLDEN / "notes.txt", lambda line: read_config(yaml.safe_load(line)).notes)


@pytest.mark.parametrize("system", SYSTEMS)
def test_another_systems_block_is_refused_with_the_command_that_translates_it(system):
    for beside in ({}, {"numerator": "proximal"}, {"preset": "token_tis"}):
        said = refusal({**beside, system: {"rollout_is": "token"}})
        assert said.startswith(f"slime_ext.{system}: ") and f"slime-ext convert --from {system} FILE" in said


def test_a_step_with_neutral_scope_is_the_native_step():
    steps = [{"reweight": {"over": "response"}}, {"truncate": None}, {"reject": {"high": 2.0, "clamp": None}}]
    correction = load_config({"steps": steps})
    assert type(correction.steps[0]) is Reweight and type(correction.steps[2]) is Reject


def test_notes_are_handed_back():
    assert read_config({"preset": "token_tis"}) == Loaded(presets.get("token_tis"))
