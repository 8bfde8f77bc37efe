"""Launches that break each rule of this subject, and launches that keep it."""

from __future__ import annotations

import pytest

from tests.rules.launches import ALONE, HOOK, OFF, judged

# (rule, arguments, line): what the rule says of a launch with these arguments starts with the line; None
# where it says nothing. Arguments that are no flags: the function, what it is made ``of``, the keys of the
# file, the host's code. Neighbours differ in what the rule looks at.
CASES = [
    ("function_never_called", {**HOOK, **OFF}, "--use-tis: expected on beside --custom-tis-function-path, g"),
    ("function_never_called", {**HOOK, **OFF, "get_mismatch_metrics": True}, None),
    ("function_never_called", {**HOOK, **OFF, "file": ["use_tis"]},
     "--custom-config-path: expected no key use_tis, or true, beside a correction, got false, which replac"),
    ("function_never_called", {**HOOK, "file": ["use_tis"]}, None),
    ("function_never_called", HOOK, None),
    ("function_never_called", {**OFF, "custom_tis_function_path": "my.hook"}, None),
    ("score_centering_beside_function", {"use_score_centering": True}, "--use-score-centering: expected"),
    ("score_centering_beside_function", {**OFF, "use_score_centering": True}, None),
    ("score_centering_beside_function", {"use_score_centering": True, **ALONE}, None),
    ("score_centering_beside_function", {}, None),
    ("score_centering_beside_mismatch_metrics", {"use_score_centering": True, "get_mismatch_metrics": True},
     "--get-mismatch-metrics: expected off beside --use-score-centering, got on"),
    ("score_centering_beside_mismatch_metrics", {"use_score_centering": True}, None),
    ("score_centering_beside_mismatch_metrics", {"get_mismatch_metrics": True}, None),
    ("score_centering_beside_mismatch_metrics",
     {"use_score_centering": True, "get_mismatch_metrics": True, **ALONE}, None),
    ("rollout_logprobs_beside_tis", {"use_rollout_logprobs": True},
     "--use-rollout-logprobs: expected off beside --use-tis, got on: remove one, because the host refuses "),
    ("rollout_logprobs_beside_tis", {**OFF, "use_rollout_logprobs": True}, None),
    ("rollout_logprobs_beside_tis", {"use_rollout_logprobs": True, "pg_loss_type": "reinforce"}, None),
    ("rollout_logprobs_beside_tis", {}, None),
    ("unread_tis_clip", {"tis_clip": 5, "tis_clip_low": 0.5}, "--tis-clip-low and --tis-clip: expected none"),
    ("unread_tis_clip", {"tis_clip": 5.0}, "--tis-clip: expected none beside slime_ext.tis.correct, got 5: "),
    ("unread_tis_clip", {"tis_clip_low": 0.5}, "--tis-clip-low: expected none beside slime_ext.tis.correct,"),
    ("unread_tis_clip", {"tis_clip": 2.0}, None),
    ("unread_tis_clip", {"tis_clip": 5.0, "function": "icepop_function"}, None),
    ("unread_tis_clip", {"tis_clip": 5.0, **ALONE}, None),
    ("correction_switched_off", OFF, "--use-tis: expected on beside a correction, got off, so slime_ext onl"),
    ("correction_switched_off", {**OFF, "file": ["use_tis"]}, "--custom-config-path: expected no key use_ti"),
    ("correction_switched_off", {}, None),
    ("correction_switched_off", {**OFF, "of": {"steps": []}}, None),
    ("correction_switched_off", {**OFF, "function": ""}, None),
    ("correction_without_steps", {"of": {"steps": []}}, "slime_ext.steps: expected a step beside --use-"),
    ("correction_without_steps", {}, None),
    ("correction_without_steps", {**OFF, "of": {"steps": []}}, None),
    ("correction_without_steps", ALONE, None),
    ("nan_is_not_skipped", {"check_for_nan_in_loss_and_grad": False}, "--no-check-for-nan-in-loss-and-grad:"),
    ("nan_is_not_skipped", {"check_for_nan_in_loss_and_grad": None}, None),
    ("score_centering_refused", {"use_score_centering": True, "use_opsm": True, **ALONE},
     "--use-opsm: expected off beside --use-score-centering, got on: remove one, because the host refuses"),
    ("score_centering_refused", {"use_score_centering": True, "advantage_estimator": "gspo", **ALONE},
     "--advantage-estimator: expected grpo or reinforce beside --use-score-centering, got gspo: remove one"),
    ("score_centering_refused", {"use_score_centering": True, "rollout_top_k": 20}, "--rollout-top-k: expe"),
    ("score_centering_refused", {"use_score_centering": True, **ALONE}, None),
    ("score_centering_refused", {"use_opsm": True}, None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "line"), CASES, ids=lambda value: str(value)[:40])
def test_a_rule_says_its_line_where_it_is_broken_and_nothing_where_it_is_kept(name, arguments, line):
    judged(name, arguments, line)
