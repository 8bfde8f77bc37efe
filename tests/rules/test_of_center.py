"""Launches that break each rule of this subject, and launches that keep it."""

from __future__ import annotations

import pytest

from tests.rules.launches import CENTERED, HOST, OFF, ON_HOST, RAW, REINFORCE, UNSCORED, a_host, judged

# (rule, arguments, line): what the rule says of a launch with these arguments starts with the line; None
# where it says nothing. Arguments that are no flags: the function, what it is made ``of``, the keys of the
# file, the host's code. Neighbours differ in what the rule looks at.
CASES = [
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
    ("missing_head", {"of": CENTERED, "host": a_host(defines=lambda *_: False)},
     "slime_ext.center: expected a host with get_responses among its modules, got slime without: remove cen"),
    ("missing_head", {"of": CENTERED, "host": HOST}, None),
    ("missing_head", {"host": a_host(defines=lambda *_: False)}, None),
    ("missing_head", {"of": CENTERED, "host": a_host(has_step=False)}, "slime_ext.center: expected a host w"),
    ("missing_head", {"of": CENTERED, "host": HOST, "train_backend": "fsdp"}, "slime_ext.center: expected a"),
    ("center_without_effect", {"of": RAW}, "slime_ext.center: expected a bound on the token weights besid"),
    ("center_without_effect", {"of": RAW, "num_steps_per_rollout": 4}, "slime_ext.center: expected a bound"),
    ("center_without_effect", {"of": RAW | {"steps": ["reweight", {"truncate": {"high": 2.0}}]}}, None),
    ("center_without_effect", {"of": RAW | {"steps": []}}, None),
    ("center_without_effect", {"of": RAW, **OFF}, None),
    ("center_without_effect", {"of": REINFORCE | {"numerator": "target", "steps": ["reweight"]}}, None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "line"), CASES, ids=lambda value: str(value)[:40])
def test_a_rule_says_its_line_where_it_is_broken_and_nothing_where_it_is_kept(name, arguments, line):
    judged(name, arguments, line)
