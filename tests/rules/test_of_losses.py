"""Launches that break each rule of this subject, and launches that keep it."""

from __future__ import annotations

import pytest

from slime_ext.rules.judge import broken, unchecked
from slime_ext.rules.rule import Severity
from slime_ext.rules.setup import HostUnknownError
from tests.rules.launches import (
    ALONE,
    BATCHES,
    KEPT,
    OFF,
    PLANNED,
    REINFORCE,
    SEED,
    TARGET,
    THEIRS,
    a_host,
    judged,
    setup_of,
)

CUSTOM_LOSS = {"loss_type": "custom_loss", "custom_loss_function_path": "my.loss", "custom_loss": "def loss"}
# (rule, arguments, line): what the rule says of a launch with these arguments starts with the line; None
# where it says nothing. Arguments that are no flags: the function, what it is made ``of``, the keys of the
# file, the host's code. Neighbours differ in what the rule looks at.
CASES = [
    ("custom_loss_beside_function", CUSTOM_LOSS, "--loss-type: expected policy_loss beside slime_ext.tis.co"),
    ("custom_loss_beside_function", {**CUSTOM_LOSS, "custom_loss": "loss.policy_loss_function("}, None),
    ("custom_loss_beside_function", {"loss_type": "custom_loss"}, "--loss-type: expected policy_loss beside"),
    ("custom_loss_beside_function", {"loss_type": "policy_loss"}, None),
    ("custom_loss_beside_function", {**CUSTOM_LOSS, **ALONE}, None),
    ("custom_loss_beside_init", {**CUSTOM_LOSS, **ALONE}, "--loss-type: expected policy_loss beside slime_e"),
    ("custom_loss_beside_init", {**CUSTOM_LOSS, **ALONE, **THEIRS}, "--loss-type: expected policy_loss besi"),
    ("custom_loss_beside_init", {**CUSTOM_LOSS, **ALONE, "custom_loss": "policy_loss_function"}, None),
    ("custom_loss_beside_init", ALONE, None),
    ("custom_loss_beside_init", CUSTOM_LOSS, None),
    ("sft_beside_function", {"loss_type": "sft_loss"}, "--loss-type: expected policy_loss beside slime_ext"),
    ("sft_beside_function", {"loss_type": "policy_loss"}, None),
    ("sft_beside_function", {"loss_type": "sft_loss", **ALONE}, None),
    ("proximal_not_computed", {"of": PLANNED}, "--get-mismatch-metrics: expected on with a correction that "),
    ("proximal_not_computed", {"of": PLANNED, "num_steps_per_rollout": 2}, None),
    ("proximal_not_computed", {"of": PLANNED, "kl_coef": 0.1}, None),
    ("proximal_not_computed", {"of": PLANNED, "host": a_host(may_skip_proximal=False)}, None),
    ("proximal_not_computed", {"of": PLANNED, "kl_coef": 0.1, "use_rollout_logprobs": True}, "--get-mismat"),
    ("proximal_not_computed",
     {"of": PLANNED, "use_rollout_logprobs": True, "get_mismatch_metrics": True}, None),
    ("proximal_not_computed", {"of": PLANNED, "kl_coef": 0.1, "skip_actor_forward_only": True}, "--skip-act"),
    ("proximal_not_computed", {"skip_actor_forward_only": True}, None),
    ("proximal_not_computed", {}, None),
    ("ratio_applied_twice", {"use_rollout_logprobs": True},
     "--use-rollout-logprobs: expected off beside --use-tis, got on: remove one, because the ratio would b"),
    ("ratio_applied_twice", {"use_rollout_logprobs": True, "of": REINFORCE}, None),
    ("ratio_applied_twice", {"use_rollout_logprobs": True, "of": {"steps": []}}, None),
    ("ratio_applied_twice", {**OFF, "use_rollout_logprobs": True}, None),
    ("ratio_applied_twice", {"use_rollout_logprobs": True, "pg_loss_type": "reinforce"}, None),
    ("ratio_applied_twice", {"use_rollout_logprobs": True, "of": TARGET | REINFORCE}, None),
    ("ratio_applied_twice", {}, None),
    ("target_counted_twice", {"of": TARGET, "num_steps_per_rollout": 4},
     "slime_ext.numerator: expected proximal beside the host's surrogate with 4 optimizer steps per rollout"),
    ("target_counted_twice", {"of": TARGET, "keep_old_actor": True}, "slime_ext.numerator: expected pr"),
    ("target_counted_twice", {"of": TARGET, **BATCHES}, "slime_ext.numerator: expected proximal beside the "),
    ("target_counted_twice", {"of": TARGET, **BATCHES, "use_dynamic_global_batch_size": True}, None),
    ("target_counted_twice", {"of": TARGET}, None),
    ("target_counted_twice", {"of": TARGET, "keep_old_actor": True, "pg_loss_type": "reinforce"}, None),
    ("target_counted_twice", {**SEED, "num_steps_per_rollout": 4}, None),
    ("discarded_opsm", {"of": REINFORCE, "use_opsm": True}, "--use-opsm: expected off, got on: its mask wou"),
    ("discarded_opsm", {"use_opsm": True}, None),
    ("discarded_opsm", {"of": REINFORCE}, None),
    ("discarded_gspo", {"of": REINFORCE, "advantage_estimator": "gspo"}, "--advantage-estimator: expected a"),
    ("discarded_gspo", {"of": REINFORCE, "advantage_estimator": "cispo"}, None),
    ("discarded_gspo", {"advantage_estimator": "gspo"}, None),
    ("discarded_cispo", {"of": REINFORCE, "advantage_estimator": "cispo"}, "--advantage-estimator: expected"),
    ("discarded_cispo", {"of": REINFORCE, "pg_loss_type": "cispo"}, "--advantage-estimator: expected anothe"),
    ("discarded_cispo", {"of": REINFORCE, "advantage_estimator": "gspo"}, None),
    ("discarded_cispo", {"advantage_estimator": "cispo"}, None),
    ("discarded_dual_clip", {"of": REINFORCE, "eps_clip_c": 3.0}, "--eps-clip-c: expected none beside this"),
    ("discarded_dual_clip", {"of": {"surrogate": "dual_clip"}, "eps_clip_c": 3.0}, None),
    ("discarded_dual_clip", {"eps_clip_c": 3.0}, None),
    ("discarded_dual_clip", {"of": REINFORCE}, None),
    ("off_policy_is_counted_twice", {**SEED, "num_steps_per_rollout": 2},
     "off_policy_is_function: expected one optimizer step per rollout and no --keep-old-actor, got 2 steps"),
    ("off_policy_is_counted_twice", SEED, None),
    ("off_policy_is_counted_twice", {**SEED, "num_steps_per_rollout": 2, "pg_loss_type": "reinforce"}, None),
    ("off_policy_is_counted_twice", {"of": TARGET, "num_steps_per_rollout": 2}, None),
    ("kept_denominator_beside_reducer", {"of": KEPT, "custom_pg_loss_reducer_function_path": "my.f"},
     "slime_ext.denominator: expected host beside --custom-pg-loss-reducer-function-path, got kept"),
    ("kept_denominator_beside_reducer", {"of": KEPT}, None),
    ("kept_denominator_beside_reducer", {"custom_pg_loss_reducer_function_path": "my.f"}, None),
    ("kept_denominator_beside_reducer",
     {**OFF, "of": KEPT, "custom_pg_loss_reducer_function_path": "my.f"}, None),
    ("proximal_unknown_before_step", {"of": PLANNED, "pg_loss_type": "reinforce", "num_steps_per_rollout": 4},
     "--pg-loss-type: expected ppo with a correction that couples the samples of an optimizer step, got rei"),
    ("proximal_unknown_before_step", {"of": PLANNED, "pg_loss_type": "reinforce"}, None),
    ("proximal_unknown_before_step", {"of": PLANNED, "num_steps_per_rollout": 4}, None),
    ("proximal_unknown_before_step", {"pg_loss_type": "reinforce", "num_steps_per_rollout": 4}, None),
    ("proximal_unknown_before_step",
     {**OFF, "of": PLANNED, "pg_loss_type": "reinforce", "num_steps_per_rollout": 4}, None),
    ("sft_beside_init", {"loss_type": "sft_loss", **ALONE}, "--loss-type: expected policy_loss beside slime"),
    ("sft_beside_init", {"loss_type": "sft_loss"}, None),
    ("sft_beside_init", ALONE, None),
    ("masks_beside_reducer", {"of": {"preset": "geo_rs"}, "custom_pg_loss_reducer_function_path": "my.f"},
     "--custom-pg-loss-reducer-function-path my.f: expected slime's reducer beside mask_scope: policy"),
    ("masks_beside_reducer", {"of": {"preset": "geo_rs"}}, None),
    ("masks_beside_reducer", {"custom_pg_loss_reducer_function_path": "my.f"}, None),
    ("sequence_weights_vanish", {"of": {"preset": "seq_is"}, "rollout_max_response_len": 8192},
     "slime_ext.steps: expected weights of tokens, or a geometric mean, beside --rollout-max-response-len 8"),
    ("sequence_weights_vanish", {"of": {"preset": "seq_is"}, "rollout_max_response_len": 1024}, None),
    ("sequence_weights_vanish", {"of": {"preset": "seq_is"}}, None),
    ("sequence_weights_vanish", {"of": {"preset": "seq_is"}, "rollout_max_response_len": 8192, **OFF}, None),
    ("sequence_weights_vanish", {"rollout_max_response_len": 8192}, None),
    ("sequence_weights_vanish", {"of": {"preset": "fireworks_geometric"}, "rollout_max_response_len": 8192},
     None),
    ("sequence_weights_vanish", {"rollout_max_response_len": 8192, "of": {"steps": [
        {"reweight": {"level": "sequence"}}, {"clip": {"low": 0.5, "high": 2.0}}]}}, None),
    ("sequence_weights_vanish", {"rollout_max_response_len": 8192, "of": {"steps": [
        {"reweight": {"level": "sequence"}}, {"truncate": {"high": 2.0}}, "normalize"]}}, None),
]  # fmt: skip


@pytest.mark.parametrize("more", [{}, ALONE], ids=["function", "init"])
def test_a_users_loss_whose_source_is_not_here_is_not_judged(more):
    setup = setup_of(**{**CUSTOM_LOSS, "custom_loss": None, **more})
    assert not any("custom_loss" in line.message for line in broken(setup, tuple(Severity)))
    (line,) = unchecked(setup, HostUnknownError)
    assert line.message == (
        "whether my.loss calls policy_loss_function, which alone calls the hook: its source is not here"
    )


@pytest.mark.parametrize(("name", "arguments", "line"), CASES, ids=lambda value: str(value)[:40])
def test_a_rule_says_its_line_where_it_is_broken_and_nothing_where_it_is_kept(name, arguments, line):
    judged(name, arguments, line)
