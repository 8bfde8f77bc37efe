"""Launches that break each rule of this subject, and launches that keep it."""

from __future__ import annotations

import pytest

from tests.rules.launches import OFF, REBASED, judged

# (rule, arguments, line): what the rule says of a launch with these arguments starts with the line; None
# where it says nothing. Arguments that are no flags: the function, what it is made ``of``, the keys of the
# file, the host's code. Neighbours differ in what the rule looks at.
CASES = [
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
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "line"), CASES, ids=lambda value: str(value)[:40])
def test_a_rule_says_its_line_where_it_is_broken_and_nothing_where_it_is_kept(name, arguments, line):
    judged(name, arguments, line)
