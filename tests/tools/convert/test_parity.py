"""The systems without a wheel: weights and masks are those of a plain transcription, on ragged batches."""

from __future__ import annotations

import itertools

import pytest

from tests.tools.convert import oracle_fireworks, oracle_slime_mis, oracle_verl
from tests.tools.convert.common import compare

# fmt: off
PR3984 = [
    *({"rollout_is": level, "rollout_rs": rs, "rollout_rs_threshold": 1.3, "rollout_rs_threshold_lower": low}
      for level in (None, "token", "sequence") for rs in ("token", "sequence", "geometric")
      for low in (None, 0.0)),
    {"rollout_is": "sequence", "rollout_token_veto_threshold": 1e-4},
    {"rollout_rs": "geometric", "rollout_rs_threshold": 1.1, "rollout_token_veto_threshold": "1e-4",
     "use_pure_rollout_correction": False},
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


@pytest.mark.slow
def test_verl_pr_3984():
    for config in PR3984:
        compare("verl", config, lambda rows, c=config: oracle_verl.by_level(rows, **numbers(c)))


def test_verl_pr_3984_without_a_proximal_policy_weighs_by_the_target():
    config = {"bypass_old_logprob_for_rollout": True, "use_pure_rollout_correction": True, **PR3984[-4]}
    compare("verl", config, lambda rows: oracle_verl.by_level(rows, **config), numerator="target")


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
