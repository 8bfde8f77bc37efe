"""Converted settings have the loss, divisor and gradient of the system's own package, from its wheel."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from slime_ext.adapters import seam
from slime_ext.adapters import skyrl as skyrl_adapter
from slime_ext.adapters import verl as adapter
from slime_ext.core.correction import Correction
from slime_ext.tools.convert import CONVERTED
from slime_ext.tools.releases import PEERS as RELEASES
from slime_ext.tools.releases import newest
from tests import releases
from tests.adapters.test_seams import CALLS
from tests.peers import areal, compare, ms_swift, openrlhf, rlinf, skyrl, trl, verl, wheels
from tests.tools.commands.in_process import run, written

PEERS = (verl, skyrl, trl, openrlhf, areal, ms_swift, rlinf)
CASES = [
    pytest.param(peer, version, id=f"{peer.NAME} {version}") for peer in PEERS for version in peer.VERSIONS
]
BLOCKS = 25


@pytest.fixture(autouse=True)
def _are_here():
    for release in RELEASES:
        try:
            wheels.folder(release.distribution, release.version)
        except FileNotFoundError as missing:
            pytest.skip(str(missing))


def test_the_table_of_releases_has_what_runs_here_and_the_pages_name_it():
    versions = {}
    for release in RELEASES:
        versions.setdefault(release.distribution.replace("-", "_"), []).append(release.version)
    assert versions == {peer.NAME: list(peer.VERSIONS) for peer in PEERS}
    page = (Path(__file__).parents[2] / "docs/convert.md").read_text()
    assert [each for each in versions.values() if each[0] not in page] == []
    assert metadata.version("sglang") == newest()["sglang"].version
    assert metadata.version("miles-rl") == newest()["miles-rl"].version


FLAT = {  # a system whose correction lies among all other settings -> the class of its arguments, and a block
    "trl": (
        "trl/trainer/grpo_config.py",
        {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
    ),
    "ms_swift": ("swift/rlhf_trainers/args_mixin.py", {"rollout_importance_sampling_mode": "token_truncate"}),
}


@pytest.mark.parametrize("system", FLAT)
def test_a_whole_configuration_is_read_as_its_own_system(capsys, tmp_path, system):
    """With the names of all fields that the package's arguments have, of which some belong to others, too."""
    place, block = FLAT[system]
    release = next(each for each in RELEASES if each.distribution.replace("-", "_") == system)
    fields = wheels.fields_of(wheels.folder(release.distribution, release.version) / place)
    whole = (
        dict.fromkeys(fields) | dict(CONVERTED[system].defaults) | {"beta": 0.04, "use_vllm": True} | block
    )
    status, out, err = run(capsys, "convert", "--from", system, written(tmp_path / "a.yaml", whole))
    assert (status, err) == (0, "") and "- reweight: {level: token}\n  - truncate:" in out


def test_a_newer_release_is_reported_with_the_functions_that_changed(monkeypatch):
    monkeypatch.setattr(releases, "BLOCKS", 10)
    said = releases.report(verl, RELEASES[1], RELEASES[0].version)  # from 0.8.0 to 0.9.1
    assert "agg_loss" in said and "masked_mean" not in said
    assert said.endswith("30 losses compared, 0 differ")


@pytest.mark.parametrize(("peer", "version"), CASES)
def test_converted_settings_are_those_of_the_package(peer, version):
    result = compare.compare(peer, version, BLOCKS, seeds=2)
    assert result.differences == [] and result.unnamed == []
    assert result.refused < BLOCKS / 4 and result.losses == 2 * (BLOCKS - result.refused)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.NAME)
def test_a_bound_that_is_a_tenth_off_is_a_difference(peer, monkeypatch):
    """The comparison sees a translation that is wrong."""

    def widened(reading):
        text = str(reading.mapping["steps"]) if "steps" in reading.mapping else ""
        steps = [
            {
                name: {k: v * FACTORS.get(k, 1) if k in FACTORS else v for k, v in fields.items()}
                for name, fields in step.items()
            }
            for step in reading.mapping.get("steps", [])
        ]
        return dataclasses.replace(reading, mapping={**reading.mapping, "steps": steps}) if text else reading

    read = compare.read
    monkeypatch.setattr(compare, "read", lambda *block: widened(read(*block)))
    assert compare.compare(peer, peer.VERSIONS[0], BLOCKS, seeds=2).differences


WHOLE = {"rollout_is": "token", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2.0"}
BYPASS = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token"}
ACTOR = "actor_rollout_ref.actor"
HANDED = {"loss_mode": "bypass_mode", "rollout_correction": BYPASS}
AROUND = {"surrogate": {"ppo_clip": {"anchor": "behavior"}}, "steps": []}
KEPT = {"denominator": "kept"}
COMPOSED = {  # changes of verl's composed configuration -> what its native file has and what is noted
    "default": ({}, {}, {"steps": []}, ""),
    "rejects": (WHOLE, {}, {"mask_scope": "all"}, ""),
    "rejects before 0.9": (WHOLE, {"trainer.use_v1": False}, KEPT, "leave the denominator"),
    "per sequence": (WHOLE, {f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"}, KEPT, "mean without"),
    "bypass never reaches the actors": (BYPASS, {}, AROUND, "ignores loss_type, rollout_is"),
    "bypass that they have": (BYPASS, {f"{ACTOR}.policy_loss": HANDED}, {"surrogate": "reinforce"}, ""),
}


@pytest.mark.parametrize("case", COMPOSED)
def test_verls_composed_configuration_is_read_with_its_trainer_and_actors(capsys, tmp_path, case):
    """The whole file that 0.9.1 composes, which is recognised by its keys."""
    block, changes, native, note = COMPOSED[case]
    file = wheels.folder("verl", "0.9.1") / "verl/trainer/config/_generated_ppo_trainer.yaml"
    whole = yaml.safe_load(file.read_text())
    for place, value in {"algorithm.rollout_correction": block, **changes}.items():
        *parents, key = place.split(".")
        mapping = functools.reduce(operator.getitem, parents, whole)
        mapping[key] = {**mapping[key], **value} if isinstance(value, dict) else value
    status, out, err = run(capsys, "convert", written(tmp_path / "c.yaml", whole))
    assert (status, err) == (0, "") and note in " ".join(out.replace("#", "").split())
    found = yaml.safe_load(out)["slime_ext"]
    assert native.items() <= found.items() and ("denominator" in found) == ("denominator" in native)


def test_skyrl_calls_a_loss_with_what_is_recorded_and_ours_without_steps_is_its_own():
    functions, (rows, _) = skyrl.package("0.4.0"), compare.batch(3)
    assert [*inspect.signature(functions.ppo_policy_loss).parameters] == CALLS[skyrl_adapter.PolicyLoss]
    off = SimpleNamespace(**skyrl.DEFAULTS)
    config = SimpleNamespace(policy_loss_type="regular", off_policy_correction=off)
    config.eps_clip_low = config.eps_clip_high = 0.2
    values = rows.target, rows.proximal, rows.advantages
    more = {"config": config, "loss_mask": rows.mask, "rollout_logprobs": rows.behavior}
    ours, _ = skyrl_adapter.PolicyLoss(seam.correction_named({"steps": []}))(*values, **more)
    torch.testing.assert_close(ours, functions.ppo_policy_loss(*values, **more)[0], rtol=1e-6, atol=1e-6)


FACTORS = {"high": 1.1, "threshold": 1.1, "low": 1 / 1.1}
REJECTS = {"reject": {"unit": "token", "statistic": "ratio", "low": 0.9, "high": 1.1}}


@pytest.mark.parametrize("denominator", ["host", "kept"])
@pytest.mark.parametrize("uses_v1", [True, False], ids=["use_v1", "before 0.9"])
def test_verls_engine_divides_by_what_the_adapters_correction_says(denominator, uses_v1):
    """The engine of 0.9.1 counts the tokens itself, in both trainers."""
    if denominator == "host" and not uses_v1:
        return  # refused before the workers start: test_seams
    keys = {"mask_scope": "all", "denominator": denominator, "steps": ["reweight", REJECTS]}
    correction = seam.correction_named(keys)
    assert isinstance(correction, Correction)
    functions, (rows, _) = verl.package("0.9.1"), compare.batch(3)
    data = {"response_mask": rows.mask, "rollout_log_probs": rows.behavior, "old_log_probs": rows.proximal}
    data["loss_mask"] = rows.mask.clone()
    if not uses_v1:
        data["input_ids"] = torch.zeros_like(rows.mask)
    adapter.add_weights(correction, SimpleNamespace(batch=data))
    if not uses_v1:
        data["loss_mask"] = data["response_mask"]
    ratio = (rows.proximal - rows.behavior).exp()
    keep = (rows.mask != 0) & (ratio >= 0.9) & (ratio <= 1.1)
    total = verl.divided(functions, data, rows, data["rollout_is_weights"])
    count = keep.sum() if denominator == "kept" else rows.mask.sum()
    surrogate = (rows.target - rows.proximal).exp()
    terms = torch.maximum(-surrogate * rows.advantages, -surrogate.clamp(0.8, 1.2) * rows.advantages)
    torch.testing.assert_close(total, torch.where(keep, ratio * terms, 0).sum() / count, rtol=1e-7, atol=1e-9)
    assert 0 < keep.sum() < rows.mask.sum()
