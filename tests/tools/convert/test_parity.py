"""Each dialect gives the weights and masks of a plain transcription of that system, on 200 ragged batches."""

from __future__ import annotations

import itertools

import pytest
import yaml

from tests.tools.convert import oracle_fireworks, oracle_skyrl, oracle_slime_mis, oracle_verl
from tests.tools.convert.common import compare

HEAD = """
    {rollout_is: token, rollout_is_threshold: 2.0}
    {rollout_is: sequence, rollout_is_threshold: "3"}
    {rollout_is: token, rollout_is_threshold: "0.5_5.0"}
    {rollout_is: sequence, rollout_is_threshold: "0.5_2.0", rollout_is_batch_normalize: true}
    {rollout_is: token, rollout_is_threshold: 2.0, rollout_is_batch_normalize: true}
    {rollout_is: sequence, rollout_is_threshold: 2.0, rollout_is_batch_normalize: true}
    {rollout_is: token, rollout_is_threshold: "0.5_5.0", rollout_rs: seq_mean_k1, rollout_rs_threshold: "0.7_1.2"}
    {rollout_rs: "token_k1,seq_sum_k3,seq_max_k2", rollout_rs_threshold: "0.5_1.5, 5.0, 3.0"}
    {rollout_rs: token_k1, rollout_rs_threshold: "0.5_1.2", loss_type: ppo_clip}
    {rollout_rs: token_k2, rollout_rs_threshold: 0.02, loss_type: ppo_clip}
    {rollout_rs: token_k3, rollout_rs_threshold: "25.0", loss_type: ppo_clip}
    {rollout_rs: seq_sum_k1, rollout_rs_threshold: 2.0, loss_type: ppo_clip}
    {rollout_rs: seq_sum_k2, rollout_rs_threshold: 1.0, loss_type: ppo_clip}
    {rollout_rs: seq_sum_k3, rollout_rs_threshold: 1.0, loss_type: ppo_clip}
    {rollout_rs: seq_mean_k1, rollout_rs_threshold: "0.95_1.2", loss_type: ppo_clip}
    {rollout_rs: seq_mean_k2, rollout_rs_threshold: 0.05, loss_type: ppo_clip}
    {rollout_rs: seq_mean_k3, rollout_rs_threshold: 0.05, loss_type: ppo_clip}
    {rollout_rs: seq_max_k2, rollout_rs_threshold: 0.3, loss_type: ppo_clip}
    {rollout_rs: seq_max_k3, rollout_rs_threshold: 0.3, loss_type: ppo_clip}
"""  # noqa: E501
HEAD = [yaml.safe_load(line) for line in HEAD.strip().splitlines()]
# fmt: off
PR3984 = [
    *({"rollout_is": level, "rollout_rs": rs, "rollout_rs_threshold": 1.3, "rollout_rs_threshold_lower": low}
      for level in (None, "token", "sequence") for rs in ("token", "sequence", "geometric")
      for low in (None, 0.0)),
    {"rollout_is": "sequence", "rollout_token_veto_threshold": 1e-4},
    {"rollout_rs": "geometric", "rollout_rs_threshold": 1.1, "rollout_token_veto_threshold": "1e-4",
     "use_pure_rollout_correction": False},
]
RELEASES = [  # of PyPI, each with all its keys
    {"rollout_is": level, "rollout_is_threshold": 2.0, "rollout_is_batch_normalize": level is not None,
     "rollout_rs": rs, "rollout_rs_threshold": rs and 1.3, "rollout_rs_threshold_lower": None,
     "rollout_token_veto_threshold": veto, "bypass_mode": False, key: off}
    for key, off in (("use_policy_gradient", False), ("loss_type", "ppo_clip"))
    for level in (None, "token", "sequence") for rs in (None, "token", "geometric") for veto in (None, 1e-4)
]
OUTLIERS = {"outlier_token_is_threshold_low": 1e-4, "outlier_token_is_threshold_high": 100}
TOKENS = {"token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 2.0}
SKYRL = [
    {"tis_ratio_type": level, "sequence_mask_metric": metric, **outliers, **tokens}
    for level in (None, "token", "sequence") for metric in (None, "geometric", "product")
    for outliers in ({}, OUTLIERS) for tokens in ({}, TOKENS)
]
REJECTIONS = [
    {"use_rs": False},
    {"use_rs": True, "rs_level": "token", "rs_veto_threshold": 1.0e-4},
    {"use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.9, "rs_upper_bound": "1.2"},
]
MIS = [
    {"use_tis": True, "tis_level": level, "tis_mode": mode, "tis_upper_bound": 2.0,
     "tis_lower_bound": 0.7 if mode == "clip" else None, "tis_batch_normalize": normalize, **rs}
    for level in ("token", "sequence", "geometric") for mode in ("truncate", "clip", "mask")
    for normalize in (False, True) for rs in REJECTIONS
    if not (level == "geometric" and normalize)
]
# fmt: on


def numbers(config):
    """The transcriptions take numbers as numbers; thresholds of verl's today stay text."""
    texts = {"rs_upper_bound", "rollout_token_veto_threshold"}
    return {k: float(v) if k in texts and v is not None else v for k, v in config.items()}


def of_verl(config):
    compare("verl", config, lambda rows: oracle_verl.head(rows, **config))


def of_skyrl(config):
    compare("skyrl", config, lambda rows: oracle_skyrl.correct(rows, **config))


def test_verl_of_today_and_skyrl():
    for config in HEAD[::3]:
        of_verl(config)
    for config in SKYRL[::3]:
        of_skyrl(config)


@pytest.mark.slow
def test_verl_of_today_and_skyrl_in_full():
    for config in HEAD:
        of_verl(config)
    for config in SKYRL:
        of_skyrl(config)


@pytest.mark.slow
def test_verl_pr_3984():
    for config in PR3984:
        compare("verl", config, lambda rows, c=config: oracle_verl.by_level(rows, **numbers(c)))


def test_verl_0_6_1_and_0_7_0():
    for config in RELEASES:
        given = numbers(config)
        compare("verl", config, lambda rows, c=given: oracle_verl.by_level(rows, **c), seeds=range(20))


def test_verl_without_a_proximal_policy_weighs_by_the_target():
    for config in (
        {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "sequence"},
        {"bypass_mode": True, "loss_type": "reinforce", **HEAD[6]},
        {"bypass_old_logprob_for_rollout": True, "use_pure_rollout_correction": True, **PR3984[-4]},
        {"bypass_mode": True, "use_policy_gradient": True, **PR3984[-4]},
        {"bypass_mode": True, "loss_type": "reinforce", **PR3984[-4]},
        {"bypass_mode": True, "loss_type": "reinforce", "rollout_token_veto_threshold": 1e-4},
    ):
        by_option = "bypass_mode" in config and config.get("rollout_rs") not in (
            "token",
            "sequence",
            "geometric",
        )
        by_option = by_option and "rollout_token_veto_threshold" not in config
        transcription = oracle_verl.head if by_option else oracle_verl.by_level
        compare("verl", config, lambda rows, t=transcription, c=config: t(rows, **c), numerator="target")


@pytest.mark.slow
def test_slime_mis():
    for config in MIS:
        compare("slime_mis", config, lambda rows, c=config: oracle_slime_mis.correct(rows, **numbers(c)))


def of_fireworks(config, *given):
    compare("fireworks", config, lambda rows: oracle_fireworks.weights(rows, *given))


def test_fireworks_pr_169_and_of_today():
    for level, cap in itertools.product(("token", "sequence"), (1.5, 5.0)):
        of_fireworks({"tis_cap": cap, "tis_level": level}, cap, level)
    for level, band in (("token", None), ("token", 2.0), ("sequence", None)):
        of_fireworks({"cap": 5.0, "level": level, "icepop_threshold": band}, 5.0, level, band)
