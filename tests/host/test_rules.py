"""The rules of a launch: for each, arguments that break it and arguments that keep it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from slime_ext.config.load import Loaded, read_config
from slime_ext.core.correction import Correction
from slime_ext.core.steps import Reject, Reweight, Truncate
from slime_ext.errors import ConfigError
from slime_ext.host.rules import (
    LAUNCH,
    REFUSE,
    RULES,
    ArgumentUnknownError,
    BrokenRuleError,
    HostUnknownError,
    Line,
    Rule,
    Setup,
    Severity,
    expected_weight,
    require,
    said,
    unchecked,
)
from slime_ext.hosts.flags import ARGUMENTS

DEFAULTS = {name: argument.default for name, argument in ARGUMENTS.items()}
TOKEN = {"preset": "token_tis"}
PLANNED, CENTERED = {"preset": "m2"}, {"preset": "cispo", "center": {"top_k": 8}}
ON_HOST = TOKEN | {"center": {"top_k": 8}}
TARGET = {"numerator": "target", "steps": ["reweight", {"truncate": {"high": 2.0}}]}
REINFORCE, KEPT = {"surrogate": "reinforce"}, {"preset": "geo_rs", "denominator": "kept"}
RAW = REINFORCE | {"numerator": "target", "steps": ["reweight"], "center": {"top_k": 8}}
REBASED = {"preset": "geo_rs", "group": "rebaseline"}
WATCHED = {"preset": "token_tis", "guards": {"staleness_mean": {"max": 4}}}
CERTIFIED = {"preset": "token_tis", "guards": {"certified": {"min": 1}}, "metrics": {"certify": True}}
AGES = {"steps": [{"reject": {"max_staleness": 4}}]}
HOOK, OFF = {"custom_tis_function_path": "slime_ext.tis.correct"}, {"use_tis": False}
INIT = {"custom_megatron_init_path": "slime_ext.host.init"}
SEED = {"function": "off_policy_is_function", "of": TARGET}
STRAW = {"rollout_data_transport": "straw"}
THEIRS = {"custom_tis_function_path": "my.hook"}
BATCHES = {"rollout_batch_size": 8, "n_samples_per_prompt": 8, "global_batch_size": 32}  # two steps
ALONE = {"function": "", "of": None}  # nothing of ours but init


def a_host(**says):
    """The code of a host in which everything fits, but for what ``says`` says."""
    fits = {"name": "slime", "fault": "", "has_step": True, "carries_versions": True}
    yes = dict.fromkeys(("passes", "defines", "accepts"), lambda *_: True)
    return SimpleNamespace(**fits | yes | {"may_skip_proximal": True, "replays_top_p": True} | says)


HOST, WITHOUT_FLAGS = a_host(), a_host(accepts=lambda *_: False)
UNSCORED = a_host(defines=lambda name: name != "forward_only")
# (rule, arguments, line): what the rule says of a launch with these arguments starts with the line; None
# where it says nothing. Arguments that are no flags: the function, what it is made ``of``, the keys of the
# file, the host's code. Neighbours differ in what the rule looks at.
CASES = [
    ("misplaced_key", {"file": ["steps"]}, "--custom-config-path: expected the key steps "),
    ("misplaced_key", {"file": ["verl"]}, "--custom-config-path: expected no key of verl beside slime"),
    ("misplaced_key", {"file": ["my_key"]}, None),
    ("misplaced_key", {"file": ["verl"], **ALONE}, None),
    ("misplaced_key", {"file": ["verl"], **ALONE, "slime_ext": {}}, "--custom-config-path: expected no key"),
    ("misplaced_key", {"file": ["verl"], **HOOK}, "--custom-config-path: expected no key of verl beside sli"),
    ("misplaced_key", {"file": ["verl"], **ALONE, "slime_ext": {}, **THEIRS}, None),
    ("misplaced_key", {"file": ["guards"], **ALONE, "slime_ext": {}, **THEIRS}, "--custom-config-path: expe"),
    ("unread_configuration", {**ALONE, "slime_ext": TOKEN},
     "--custom-tis-function-path: expected slime_ext.tis.correct beside the key slime_ext, got none: name"),
    ("unread_configuration", {**ALONE, "slime_ext": [1]}, "--custom-tis-function-path: expected slime_ext."),
    ("unread_configuration", {**ALONE, "slime_ext": {"guards": {}}}, None),
    ("unread_configuration", {"slime_ext": TOKEN}, None),
    ("unread_configuration", {**ALONE, "slime_ext": []}, "--custom-tis-function-path: expected slime_ext.ti"),
    ("unread_configuration", {"function": "icepop_function", "slime_ext": TOKEN, **THEIRS},
     "--custom-tis-function-path: expected slime_ext.tis.correct beside the key slime_ext, got my.hook: nam"),
    ("unread_configuration", ALONE, None),
    ("function_never_called", {**HOOK, **OFF}, "--use-tis: expected on beside --custom-tis-function-path, g"),
    ("function_never_called", {**HOOK, **OFF, "get_mismatch_metrics": True}, None),
    ("function_never_called", {**HOOK, **OFF, "file": ["use_tis"]},
     "--custom-config-path: expected no key use_tis, or true, beside a correction, got false, which replac"),
    ("function_never_called", {**HOOK, "file": ["use_tis"]}, None),
    ("function_never_called", HOOK, None),
    ("function_never_called", {**OFF, "custom_tis_function_path": "my.hook"}, None),
    ("sft_beside_function", {"loss_type": "sft_loss"}, "--loss-type: expected policy_loss beside slime_ext"),
    ("sft_beside_function", {"loss_type": "policy_loss"}, None),
    ("sft_beside_function", {"loss_type": "sft_loss", **ALONE}, None),
    ("greedy_sampling", {"rollout_temperature": 0.0}, "--rollout-temperature: expected a number above 0, go"),
    ("greedy_sampling", {"rollout_temperature": 0.1}, None),
    ("greedy_sampling", {"rollout_temperature": None}, None),
    ("greedy_sampling", {"rollout_temperature": 0.0, **ALONE}, None),
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
    ("center_without_generate", {"of": CENTERED}, "--custom-generate-function-path: expected slime_ext.host"),
    ("center_without_generate", {"of": CENTERED, "custom_generate_function_path": "my.generate"}, None),
    ("center_without_generate", {}, None),
    ("center_beside_allgather_cp", {"of": CENTERED, "allgather_cp": True}, "--allgather-cp: expected off be"),
    ("center_beside_allgather_cp", {"allgather_cp": True}, None),
    ("center_beside_allgather_cp", {"of": CENTERED}, None),
    ("center_beside_top_p", {"of": CENTERED, "rollout_top_p": 0.9, "host": a_host(replays_top_p=False)},
     "--rollout-top-p: expected 1.0 beside center, got 0.9: "),
    ("center_beside_top_p", {"of": CENTERED, "rollout_top_p": 0.9, "host": HOST}, None),
    ("center_beside_top_p", {"of": CENTERED, "rollout_top_p": 1.0}, None),
    ("center_beside_top_p", {"rollout_top_p": 0.9}, None),
    ("center_beside_top_k", {"of": CENTERED, "rollout_top_k": 20}, "--rollout-top-k: expected -1 beside cen"),
    ("center_beside_top_k", {"of": CENTERED, "rollout_top_k": -1}, None),
    ("center_beside_top_k", {"rollout_top_k": 20}, None),
    ("center_beside_sequence_ratio", {"of": ON_HOST, "advantage_estimator": "gspo"}, "--advantage-estimat"),
    ("center_beside_sequence_ratio", {"of": ON_HOST}, None),
    ("center_beside_sequence_ratio", {"advantage_estimator": "gspo"}, None),
    ("center_beside_cispo", {"of": ON_HOST, "advantage_estimator": "cispo"}, "--advantage-estimator: e"),
    ("center_beside_cispo", {"of": ON_HOST, "pg_loss_type": "cispo"}, "--advantage-estimator: expected g"),
    ("center_beside_cispo", {"of": ON_HOST}, None),
    ("center_beside_cispo", {"of": CENTERED, "advantage_estimator": "cispo"}, None),
    ("center_beside_opsm", {"of": ON_HOST, "use_opsm": True}, "--use-opsm: expected off beside center"),
    ("center_beside_opsm", {"of": CENTERED, "use_opsm": True}, None),
    ("center_beside_opsm", {"use_opsm": True}, None),
    ("center_without_proximal_head", {"of": ON_HOST, "num_steps_per_rollout": 4, "host": UNSCORED},
     "slime_ext.center: expected one optimizer step per rollout and no --keep-old-actor, got 4 steps"),
    ("center_without_proximal_head", {"of": ON_HOST, "keep_old_actor": True, "host": UNSCORED}, "slime_ext"),
    ("center_without_proximal_head", {"of": ON_HOST, "num_steps_per_rollout": 4, "host": HOST}, None),
    ("center_without_proximal_head", {"of": ON_HOST, "host": UNSCORED}, None),
    ("center_without_proximal_head", {"of": ON_HOST, "num_steps_per_rollout": 4, "pg_loss_type": "reinforce",
      "host": UNSCORED}, None),
    ("center_without_proximal_head", {"of": CENTERED, "num_steps_per_rollout": 4, "host": UNSCORED}, None),
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
    ("group_of_one_sample", {"of": REBASED, "n_samples_per_prompt": 1}, "slime_ext.group: expected ignore w"),
    ("group_of_one_sample", {"of": REBASED, "n_samples_per_prompt": 2}, None),
    ("group_of_one_sample", {"n_samples_per_prompt": 1}, None),
    ("group_of_one_sample", {**OFF, "of": REBASED, "n_samples_per_prompt": 1}, None),
    *(case for name, broken, kept, beside in (
        ("without_group_baseline", {"advantage_estimator": "rloo"}, {"advantage_estimator": "gspo"}, "an --"),
        ("without_normalization", {"rewards_normalization": False}, {}, "--disable-rewards-normalization"),
        ("beside_whitening", {"normalize_advantages": True}, {}, "--normalize-advantages (the host normalis"),
        ("beside_distillation", {"use_opd": True}, {}, "--use-opd (the advantages already contain the teach"),
        ("beside_own_advantages", {"custom_advantage_function_path": "my.f"}, {}, "--custom-advantage-funct"),
        ("beside_own_rewards", {"custom_reward_post_process_path": "my.f"}, {}, "--custom-reward-post-proce"),
    ) for case in (
        (f"rebaseline_{name}", {"of": REBASED, **broken},
         f"slime_ext.group: expected ignore or atomic with {beside}"),
        (f"rebaseline_{name}", {"of": REBASED, **kept}, None),
        (f"rebaseline_{name}", {"of": REBASED | {"group": "atomic"}, **broken}, None),
    )),
    ("proximal_unknown_before_step", {"of": PLANNED, "pg_loss_type": "reinforce", "num_steps_per_rollout": 4},
     "--pg-loss-type: expected ppo with a correction that couples the samples of an optimizer step, got rei"),
    ("proximal_unknown_before_step", {"of": PLANNED, "pg_loss_type": "reinforce"}, None),
    ("proximal_unknown_before_step", {"of": PLANNED, "num_steps_per_rollout": 4}, None),
    ("proximal_unknown_before_step", {"pg_loss_type": "reinforce", "num_steps_per_rollout": 4}, None),
    ("proximal_unknown_before_step",
     {**OFF, "of": PLANNED, "pg_loss_type": "reinforce", "num_steps_per_rollout": 4}, None),
    ("dynamic_context_parallel", {"dynamic_context_parallel": True}, "--dynamic-context-parallel: expected"),
    ("dynamic_context_parallel", {}, None),
    ("unknown_release", {"host": a_host(fault="slime.loss: expected f, got g")}, "slime.loss: expected f, g"),
    ("unknown_release", {"host": HOST}, None),
    ("flag_unknown_to_host", {"host": WITHOUT_FLAGS}, "--use-tis: expected a host that has this flag"),
    ("flag_unknown_to_host", {"host": WITHOUT_FLAGS, "file": ["use_tis"]}, None),
    ("flag_unknown_to_host", {"host": HOST}, None),
    ("missing_init", {"of": TARGET}, "--custom-megatron-init-path: expected slime_ext.host.init beside slim"),
    ("missing_init", {"of": AGES}, "--custom-megatron-init-path: expected slime_ext.host.init beside slime_"),
    ("missing_init", {"of": TARGET, **INIT, "train_backend": "fsdp"}, "--train-backend: expected megatron b"),
    ("missing_init", {"of": TARGET, **INIT}, None),
    ("missing_init", {"of": TARGET, "host": HOST}, None),
    ("missing_init", {}, None),
    ("missing_train_step", {"of": PLANNED, "host": a_host(has_step=False)}, "slime: expected a trainer with"),
    ("missing_train_step", {"of": PLANNED, "host": HOST}, None),
    ("missing_train_step", {"host": a_host(has_step=False)}, None),
    ("missing_weight_versions", {"of": AGES, **INIT, "host": a_host(carries_versions=False)},
     "max_staleness: expected the samples' weight versions, got a slime that keeps them in its rollout mana"),
    ("missing_weight_versions", {"of": AGES, **INIT, "host": HOST}, None),
    ("missing_weight_versions", {"of": AGES, **INIT, "host": a_host(carries_versions=False),
     "custom_rollout_log_function_path": "slime_ext.host.log_rollout"}, None),
    ("missing_weight_versions", {"of": WATCHED, **INIT, "host": a_host(carries_versions=False)},
     "slime_ext.guards.staleness_mean: expected the samples' weight versions, got a slime that keeps them i"),
    ("missing_weight_versions", {"of": CERTIFIED, **INIT, "host": a_host(carries_versions=False)},
     "slime_ext.guards.certified: expected the samples' weight versions, got a slime that keeps them in it"),
    ("missing_weight_versions",
     {"of": AGES, **INIT, "host": a_host(carries_versions=False, accepts=lambda *_: False)},
     "max_staleness: expected the samples' weight versions, got a slime that keeps them and has no --custom"),
    ("missing_weight_versions", {"of": AGES, "host": a_host(carries_versions=False)}, None),
    ("missing_weight_versions", {**INIT, "host": a_host(carries_versions=False)}, None),
    ("missing_head", {"of": CENTERED, "host": a_host(defines=lambda *_: False)},
     "slime_ext.center: expected a host with get_responses among its modules, got slime without: remove cen"),
    ("missing_head", {"of": CENTERED, "host": HOST}, None),
    ("missing_head", {"host": a_host(defines=lambda *_: False)}, None),
    ("missing_head", {"of": CENTERED, "host": a_host(has_step=False)}, "slime_ext.center: expected a host w"),
    ("missing_head", {"of": CENTERED, "host": HOST, "train_backend": "fsdp"}, "slime_ext.center: expected a"),
    ("sft_beside_init", {"loss_type": "sft_loss", **ALONE}, "--loss-type: expected policy_loss beside slime"),
    ("sft_beside_init", {"loss_type": "sft_loss"}, None),
    ("sft_beside_init", ALONE, None),
    ("fsdp_beside_init", {"train_backend": "fsdp", **ALONE}, "--train-backend: expected megatron beside sli"),
    ("fsdp_beside_init", {"train_backend": "fsdp"}, None),
    ("fsdp_beside_init", ALONE, None),
    ("unread_tis_clip", {"tis_clip": 5.0}, "--tis-clip: expected none beside slime_ext.tis.correct, got 5: "),
    ("unread_tis_clip", {"tis_clip_low": 0.5}, "--tis-clip-low: expected none beside slime_ext.tis.correct,"),
    ("unread_tis_clip", {"tis_clip": 2.0}, None),
    ("unread_tis_clip", {"tis_clip": 5.0, "function": "icepop_function"}, None),
    ("unread_tis_clip", {"tis_clip": 5.0, **ALONE}, None),
    ("masks_beside_reducer", {"of": {"preset": "geo_rs"}, "custom_pg_loss_reducer_function_path": "my.f"},
     "--custom-pg-loss-reducer-function-path my.f: expected slime's reducer beside mask_scope: policy"),
    ("masks_beside_reducer", {"of": {"preset": "geo_rs"}}, None),
    ("masks_beside_reducer", {"custom_pg_loss_reducer_function_path": "my.f"}, None),
    ("correction_switched_off", OFF, "--use-tis: expected on beside a correction, got off, so slime_ext onl"),
    ("correction_switched_off", {**OFF, "file": ["use_tis"]}, "--custom-config-path: expected no key use_ti"),
    ("correction_switched_off", {}, None),
    ("correction_switched_off", {**OFF, "of": {"steps": []}}, None),
    ("correction_switched_off", {**OFF, "function": ""}, None),
    ("correction_without_steps", {"of": {"steps": []}}, "slime_ext.steps: expected a step beside --use-"),
    ("correction_without_steps", {}, None),
    ("correction_without_steps", {**OFF, "of": {"steps": []}}, None),
    ("correction_without_steps", ALONE, None),
    ("fsdp_beside_function", {"train_backend": "fsdp"}, "--train-backend: expected megatron beside slime_ex"),
    ("fsdp_beside_function", {"train_backend": "fsdp", **ALONE}, None),
    ("fsdp_beside_function", {}, None),
    ("guards_beside_release_train", {"release_train": True}, "--release-train: expected off beside slime_ex"),
    ("guards_beside_release_train", {}, None),
    ("metrics_of_one_replica", {"indep_dp": True}, "--ft-components: expected data parallel ranks of one gr"),
    ("metrics_of_one_replica", {}, None),
    ("nan_is_not_skipped", {"check_for_nan_in_loss_and_grad": False}, "--no-check-for-nan-in-loss-and-grad:"),
    ("nan_is_not_skipped", {"check_for_nan_in_loss_and_grad": None}, None),
    ("host_flag_in_file", {"file": ["kl_coef", "save"]},
     "--custom-config-path: expected slime's flags on the command line, got kl_coef, save in the file: move"),
    ("host_flag_in_file", {"file": ["use_tis", "my_key"]}, None),
    ("missing_function", {}, "names no function: for slime, add custom_tis_function_path: slime_ext.tis.cor"),
    ("missing_function", HOOK, None),
    ("missing_function", {"function": "token_tis"}, None),
    ("missing_metrics", {}, "no metrics: in slime add --custom-megatron-init-path slime_ext.host.init"),
    ("missing_metrics", INIT, None),
    ("missing_metrics", {"of": TARGET}, None),  # which is refused
    ("missing_metrics", ALONE, None),
    ("ages_of_straw", STRAW, "--rollout-data-transport straw: the oldest samples come first"),
    ("ages_of_straw", STRAW | {"of": AGES}, None),
    ("ages_of_straw", STRAW | {"of": WATCHED}, None),
    ("ages_of_straw", {"rollout_data_transport": "nixl"}, None),
    ("ages_beside_kept_cache", {"of": AGES, "flush_cache_interval": 0}, "--flush-cache-interval: expected 1"),
    ("ages_beside_kept_cache", {"of": WATCHED, "flush_cache_interval": 2}, "--flush-cache-interval:"),
    ("ages_beside_kept_cache", {"flush_cache_interval": 2}, None),
    ("ages_beside_kept_cache", {"of": AGES, "flush_cache_interval": 1}, None),
    ("ages_beside_kept_cache", {"of": AGES, "flush_cache_interval": None}, None),
    ("ages_beside_kept_cache", {"of": AGES, "pause_generation_mode": "in_place"}, "--pause-generation-mode:"),
    ("ages_beside_kept_cache", {"of": AGES, "pause_generation_mode": "retract"}, None),
    ("ages_beside_kept_cache", {"pause_generation_mode": "in_place"}, None),
    ("init_of_your_own", {"custom_megatron_init_path": "my.init"}, "no metrics and no check at start-up, un"),
    ("center_without_effect", {"of": RAW}, "slime_ext.center: expected a bound on the token weights besid"),
    ("center_without_effect", {"of": RAW, "num_steps_per_rollout": 4}, "slime_ext.center: expected a bound"),
    ("center_without_effect", {"of": RAW | {"steps": ["reweight", {"truncate": {"high": 2.0}}]}}, None),
    ("center_without_effect", {"of": RAW | {"steps": []}}, None),
    ("center_without_effect", {"of": RAW, **OFF}, None),
    ("center_without_effect", {"of": REINFORCE | {"numerator": "target", "steps": ["reweight"]}}, None),
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
    ("top_p_without_replay", {"rollout_top_p": 0.9, "host": a_host(replays_top_p=False)},
     "--rollout-top-p: expected 1.0, or a host that replays what top-p leaves, got 0.9: remove the flag"),
    ("top_p_without_replay", {"rollout_top_p": 0.9, "host": HOST}, None),
    ("top_p_without_replay", {"rollout_top_p": 1.0, "host": a_host(replays_top_p=False)}, None),
    ("top_p_without_replay", {"rollout_top_p": 0.9, "use_sampling_support_replay": True}, None),
    ("top_p_without_replay", {"rollout_top_p": 0.9, "host": a_host(replays_top_p=False), **ALONE}, None),
    ("top_k_without_replay", {"rollout_top_k": 50}, "--rollout-top-k: expected -1, or a host that replays"),
    ("top_k_without_replay", {"rollout_top_k": -1}, None),
    ("top_k_without_replay", {"rollout_top_k": 50, "use_sampling_support_replay": True}, None),
    ("top_k_without_replay", {"rollout_top_k": 50, **ALONE}, None),
    ("score_centering_refused", {"use_score_centering": True, "use_opsm": True, **ALONE},
     "--use-opsm: expected off beside --use-score-centering, got on: remove one, because the host refuses"),
    ("score_centering_refused", {"use_score_centering": True, "advantage_estimator": "gspo", **ALONE},
     "--advantage-estimator: expected grpo or reinforce beside --use-score-centering, got gspo: remove one"),
    ("score_centering_refused", {"use_score_centering": True, "rollout_top_k": 20}, "--rollout-top-k: expe"),
    ("score_centering_refused", {"use_score_centering": True, **ALONE}, None),
    ("score_centering_refused", {"use_opsm": True}, None),
    ("init_of_your_own", INIT, None),
    ("init_of_your_own", {}, None),
]  # fmt: skip


def setup_of(function="correct", of=TOKEN, file=(), host=None, **flags):
    """A launch with --use-tis and the host's defaults, its flags beside them."""
    loaded = Loaded(Correction()) if of is None else read_config(of)
    args = SimpleNamespace(**{**DEFAULTS, "use_tis": True, "slime_ext": None, **flags})
    return Setup(args, function, loaded, file=file, host=host)


@pytest.mark.parametrize(("name", "arguments", "line"), CASES, ids=lambda value: str(value)[:40])
def test_a_rule_says_its_line_where_it_is_broken_and_nothing_where_it_is_kept(name, arguments, line):
    message = RULES[name].judge(setup_of(**arguments))
    assert bool(message) is (line is not None) and (message or "").startswith(line or ""), message


def test_every_rule_has_a_case_that_breaks_it_and_one_that_keeps_it():
    assert {name for name, _, line in CASES if line} == set(RULES)
    assert {name for name, _, line in CASES if line is None} == set(RULES)


def test_a_rules_name_and_docstring_say_what_it_judges():
    for name, rule in RULES.items():
        assert rule.name == name and rule.judge.__doc__.endswith(".") and "\n" not in rule.judge.__doc__, name


def test_a_line_ends_with_the_rules_name_and_what_is_raised_does_not():
    setup = setup_of(loss_type="sft_loss")
    (line,) = said(setup, (REFUSE,), [RULES["sft_beside_function"]])
    assert str(line) == f"{line.message} [sft_beside_function]" and str(Line("a note")) == "a note"
    with pytest.raises(BrokenRuleError) as caught:
        require(setup)
    assert str(caught.value) == line.message and caught.value.rule is RULES["sft_beside_function"]


def test_what_cannot_be_judged_is_named_with_the_reason():
    setup = setup_of(of=AGES, **INIT)
    unread = Setup(setup.args, setup.function, setup.loaded, {"loss_type"})
    reasons = {line.rule.name: line.message for line in unchecked(unread, ArgumentUnknownError)}
    assert reasons["sft_beside_function"] == "--loss-type is known only where the script runs"
    assert "missing_weight_versions" not in reasons
    (line,) = unchecked(unread, HostUnknownError)
    assert line.rule.name == "missing_weight_versions"
    assert line.message.startswith(
        "whether this host's trainer gets the samples' weight versions, which slim"
    )
    assert line.message.endswith(": no checkout of the host is here; name one with --host DIR")


def test_a_rule_that_reads_a_name_outside_the_list_fails():
    def reads_unlisted(s):
        return s.a.use_tis or s.a.unlisted

    with pytest.raises(KeyError, match="ARGUMENTS: expected unlisted, which a rule reads, got none: add it"):
        require(Setup(SimpleNamespace()), rules=(Rule(reads_unlisted, REFUSE, LAUNCH),))


@pytest.mark.parametrize("name", RULES)
def test_every_rule_reads_listed_arguments_alone_and_is_left_out_where_none_is_known(name):
    """Its whole condition and its message, with everything on and with everything off."""
    rules = (RULES[name],)
    correction = Correction("target", steps=(Reweight(), Reject("sequence", "ratio", high=2.0)))
    for value in (None, True, 2):
        args = SimpleNamespace(**dict.fromkeys(ARGUMENTS, value), slime_ext={})
        setup = Setup(args, "correct", Loaded(correction), file=("high", "kl_coef"))
        assert all("\n" not in line.message for line in said(setup, tuple(Severity), rules))
        unknown = Setup(args, "correct", Loaded(correction), {*ARGUMENTS, "slime_ext"})
        assert not [*said(unknown, tuple(Severity), rules)]


def test_the_expected_weight_of_a_long_response_is_that_of_sampled_ones():
    """Against a sum over a fine grid of standard normal numbers."""
    for tokens, k3, cap in ((8192, 1e-3, 2.0), (1000, 1e-3, 5.0), (50, 0.01, 1.0)):
        spread = math.sqrt(2 * tokens * k3)
        grid = [i / 1000 for i in range(-10000, 10001)]
        density = [math.exp(-z * z / 2) / math.sqrt(2 * math.pi) / 1000 for z in grid]
        weights = [min(math.exp(-(spread**2) / 2 + spread * z), cap) for z in grid]
        mean = math.fsum(d * w for d, w in zip(density, weights, strict=True))
        assert expected_weight(tokens, k3, cap) == pytest.approx(
            (mean, min(math.exp(-tokens * k3), cap)), rel=1e-4
        )
    assert expected_weight(100, 1e-3, math.inf)[0] == 1


def test_a_rule_that_reads_what_is_not_known_is_left_out():
    args = SimpleNamespace(use_tis=True, use_rollout_logprobs=True)
    loaded = Loaded(Correction(steps=(Reweight(), Truncate())))
    with pytest.raises(ConfigError, match="--use-rollout-logprobs: expected off beside --use-tis"):
        require(Setup(args, "correct", loaded))
    require(Setup(args, "correct", loaded, {"use_rollout_logprobs"}))
