"""TRL, AReaL, NeMo-RL, prime-rl and ROLL in native keys, against what their code does (field survey)."""

from __future__ import annotations

import pytest

from slime_ext import load_config
from slime_ext.config.dialects import CONVERTED, DIALECTS, read
from slime_ext.errors import ConfigError

TOKEN = {"reweight": {"level": "token"}}
SEQUENCE = {"reweight": {"level": "sequence"}}
CAP = {"truncate": {"high": 2.0}}
IS = {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 2.0}
FILTER = {"enabled": True, "agg_type": "geometric"}
PRODUCT = {"unit": "sequence", "statistic": "ratio", "aggregate": "sum"}
MEAN = {"unit": "sequence", "statistic": "ratio", "aggregate": "mean"}
READ = [
    (
        "trl",
        {},
        [SEQUENCE, {"zero_outside": {"unit": "sequence", "aggregate": "sum", "low": 0.0, "high": 3.0}}],
    ),
    (
        "trl",
        {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_cap": 2.0},
        [TOKEN, CAP],
    ),
    (
        "trl",
        {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_min": 0.5},
        [TOKEN, {"clip": {"low": 0.5, "high": 3.0}}],
    ),
    (
        "trl",
        {"vllm_importance_sampling_correction": False, "off_policy_mask_threshold": 0.1},
        [
            {
                "reject": {
                    "unit": "sequence",
                    "statistic": "k1",
                    "aggregate": "mean",
                    "high": 0.1,
                    "when": "negative_advantage",
                }
            }
        ],
    ),
    ("areal", {"action": "clamp", "upper": 2.0}, [TOKEN, CAP]),
    (
        "areal",
        {"level": "sequence"},
        [{"reweight": {"level": "geometric"}}, {"reject": {**MEAN, "high": 5.0}}],
    ),
    (
        "areal",
        {
            "rejection_sampling": {
                "level": "sequence",
                "metric": "kl_k1",
                "agg": "sum",
                "upper": 0.1,
                "lower": -0.2,
            }
        },
        [TOKEN, {"reject": {**PRODUCT, "statistic": "k1", "low": -0.1, "high": 0.2}}],
    ),
    (
        "areal",
        {"metric": "binary_kl", "upper": 0.5, "m2_threshold": 0.04},
        [
            TOKEN,
            {"reject": {"unit": "token", "statistic": "binary_kl_max", "high": 0.5}},
            {"second_moment": {"threshold": 0.04}},
        ],
    ),
    ("nemo_rl", IS, [TOKEN, CAP]),
    (
        "nemo_rl",
        {
            **IS,
            "truncated_importance_sampling_type": "icepop",
            "truncated_importance_sampling_ratio_min": 0.5,
        },
        [TOKEN, {"zero_outside": {"unit": "token", "low": 0.5, "high": 2.0}}],
    ),
    (
        "nemo_rl",
        {
            **IS,
            "truncated_importance_sampling_type": "seq-mask-tis",
            "truncated_importance_sampling_ratio_min": 0.5,
        },
        [TOKEN, {"reject": {**MEAN, "low": 0.5, "high": 2.0}}],
    ),
    ("nemo_rl", {**IS, "sequence_level_importance_ratios": True}, [SEQUENCE, CAP]),
    (
        "prime_rl",
        {"type": "default"},
        [TOKEN, {"reject": {"unit": "token", "statistic": "tv", "high": 0.2, "when": "outward"}}],
    ),
    (
        "prime_rl",
        {"dppo_mask_low": 0.1, "dppo_mask_high": 0.28},
        [
            TOKEN,
            *(
                {"reject": {"unit": "token", "statistic": "tv", "high": high, "when": f"outward_{sign}"}}
                for sign, high in {"positive": 0.28, "negative": 0.1}.items()
            ),
        ],
    ),
    (
        "roll",
        {"is_weight": {"enabled": True, "weight_type": "segment", "upper_bound": 2}, "filters": [{}]},
        [{"reweight": {"level": "turn"}}, CAP],
    ),
    (
        "roll",
        {"filters": [FILTER, {"enabled": True, "ratio_enabled": False, "diff_enabled": True}]},
        [
            {"reject": {**MEAN, "low": 0.8, "high": 1.2}},
            {"reject": {"unit": "token", "statistic": "tv", "high": 0.2}},
        ],
    ),
]
REFUSED = [
    (
        "trl",
        {"off_policy_mask_threshold": 0.1},
        "expected vllm_importance_sampling_correction: false, got 0.1",
    ),
    (
        "trl",
        {"vllm_importance_sampling_mode": "seq"},
        "(known: token_truncate, token_mask, sequence_truncate",
    ),
    ("areal", {"metric": "kl_k3"}, "expected ratio, kl_k1, kl_k2 or binary_kl, got 'kl_k3'"),
    ("areal", {"level": "sequence", "metric": "kl_k1", "agg": "max"}, "expected sum or mean beside kl_k1"),
    ("nemo_rl", {**IS, "truncated_importance_sampling_ratio": 0.5}, "expected a number >= 1, got 0.5"),
    ("prime_rl", {"token_mask_low": 0.1}, "expected a known key, got 'token_mask_low'"),
    (
        "roll",
        {"filters": [{**FILTER, "diff_enabled": True}]},
        "filters[0].diff_low: expected -diff_high (-0.2)",
    ),
    ("roll", {"filters": {"enabled": True}}, "filters: expected a list of mappings"),
]


def test_a_block_is_its_steps():
    for system, block, steps in READ:
        mapping = read(system, block).mapping
        assert mapping["steps"] == steps, (system, block)
        load_config(mapping)


def test_what_nothing_here_does_is_refused():
    for system, block, line in REFUSED:
        with pytest.raises(ConfigError) as caught:
            read(system, block)
        assert line in str(caught.value) and str(caught.value).startswith(f"slime_ext.{system}")


def test_what_corrects_nothing_is_metrics_only():
    off = {"trl": {"vllm_importance_sampling_correction": False}, "nemo_rl": {}, "roll": {}}
    for system, block in off.items():
        assert read(system, block).mapping == {"preset": "metrics_only"}


def test_a_term_of_a_loss_that_is_not_converted_is_noted():
    (tau, unbounded) = read("prime_rl", {"adv_tau": 0.5}).notes
    assert tau.startswith("adv_tau 0.5 is a factor of its loss") and "nothing bounds the weights" in unbounded
    assert "seq_logprob_error_threshold" in read("nemo_rl", {"seq_logprob_error_threshold": 2.0}).notes[0]


def test_null_stands_for_the_default_of_a_word_and_for_no_term_of_a_loss():
    for key in ("level", "action", "metric", "agg"):
        assert read("areal", {key: None}) == read("areal", {"upper": 5.0})
    assert read("prime_rl", {"adv_tau": None}) == read("prime_rl", {})


@pytest.mark.parametrize(
    ("block", "tau"),
    [({}, 1e-3), ({"kl_tau": 0.01}, 0.01), ({"kl_tau": 0}, None), ({"type": "icepop"}, None)],
)
def test_prime_rls_squared_log_ratio_is_a_term(block, tau):
    mapping = read("prime_rl", block).mapping
    terms = [] if tau is None else [{"squared_log_ratio": {"coefficient": tau}}]
    assert mapping.get("terms", []) == terms
    load_config(mapping)


def test_they_are_for_convert_alone():
    for system in CONVERTED.keys() - DIALECTS.keys():
        with pytest.raises(ConfigError, match=f"expected a known key, got '{system}'"):
            load_config({system: {}})
