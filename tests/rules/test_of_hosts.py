"""Launches that break each rule of this subject, and launches that keep it."""

from __future__ import annotations

import pytest

from tests.rules.launches import AGES, ALONE, HOST, INIT, PLANNED, TARGET, WITHOUT_FLAGS, a_host, judged

# (rule, arguments, line): what the rule says of a launch with these arguments starts with the line; None
# where it says nothing. Arguments that are no flags: the function, what it is made ``of``, the keys of the
# file, the host's code. Neighbours differ in what the rule looks at.
FLAGS = {"host": a_host(flags=lambda: frozenset({"--eps-clip-high", "--rollout-batch-size"}))}
CASES = [
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
    ("fsdp_beside_init", {"train_backend": "fsdp", **ALONE}, "--train-backend: expected megatron beside sli"),
    ("fsdp_beside_init", {"train_backend": "fsdp"}, None),
    ("fsdp_beside_init", ALONE, None),
    ("fsdp_beside_function", {"train_backend": "fsdp"}, "--train-backend: expected megatron beside slime_ex"),
    ("fsdp_beside_function", {"train_backend": "fsdp", **ALONE}, None),
    ("fsdp_beside_function", {}, None),
    ("guards_beside_release_train", {"release_train": True}, "--release-train: expected off beside slime_ex"),
    ("guards_beside_release_train", {}, None),
    ("metrics_of_one_replica", {"indep_dp": True}, "--ft-components: expected data parallel ranks of one gr"),
    ("metrics_of_one_replica", {}, None),
    ("missing_metrics", {}, "no metrics: in slime add --custom-megatron-init-path slime_ext.host.init"),
    ("misspelt_host_flag", {**FLAGS, "flag_names": ["--lr", "--rollout-batchsize"]},
     "--rollout-batchsize: expected a flag of slime, got a name that it does not define; did you mean --rol"),
    ("misspelt_host_flag", {**FLAGS, "flag_names": ["--eps-clip-hihg"]}, "--eps-clip-hihg: expected a flag"),
    ("misspelt_host_flag", {**FLAGS, "flag_names": ["--rollout-batchsize", "--eps-clip-hihg"]},
     "--rollout-batchsize and --eps-clip-hihg: expected flags of slime, got names that it does not define;"),
    ("misspelt_host_flag", {**FLAGS, "flag_names": ["--no-eps-clip-high", "--sglang-eps-clip-hihg"]}, None),
    ("misspelt_host_flag", {**FLAGS, "flag_names": ["--eps-clip-high"]}, None),
    ("misspelt_host_flag", {"flag_names": ["--eps-clip-hihg"]}, None),  # no host is known
    ("missing_metrics", INIT, None),
    ("missing_metrics", {"of": TARGET}, None),  # which is refused,
    ("missing_metrics", ALONE, None),
    ("init_of_your_own", {"custom_megatron_init_path": "my.init"}, "no metrics and no check at start-up, un"),
    ("init_of_your_own", INIT, None),
    ("init_of_your_own", {}, None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "line"), CASES, ids=lambda value: str(value)[:40])
def test_a_rule_says_its_line_where_it_is_broken_and_nothing_where_it_is_kept(name, arguments, line):
    judged(name, arguments, line)
