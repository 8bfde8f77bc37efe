"""Launches that break each rule of this subject, and launches that keep it."""

from __future__ import annotations

import pytest

from tests.rules.launches import ALONE, HOOK, THEIRS, TOKEN, judged

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
    ("host_flag_in_file", {"file": ["kl_coef", "save"]},
     "--custom-config-path: expected slime's flags on the command line, got kl_coef, save in the file: move"),
    ("host_flag_in_file", {"file": ["use_tis", "my_key"]}, None),
    ("metrics_file_is_no_file", {"of": {"metrics": {"file": "/tmp"}}},
     "slime_ext.metrics.file: expected a file, got a folder at /tmp: name a file such as metrics.jsonl"),
    ("metrics_file_is_no_file", {"of": {"metrics": {"file": "/dev/full"}}},
     "slime_ext.metrics.file: expected a file, got a device, a pipe or a socket at /dev/full: name a file s"),
    ("metrics_file_is_no_file", {"of": {"metrics": {"file": __file__}}}, None),
    ("metrics_file_is_no_file", {"of": {"metrics": {"file": "/none/steps.jsonl"}}}, None),
    ("missing_function", {}, "names no function: for slime, add custom_tis_function_path: slime_ext.tis.cor"),
    ("missing_function", HOOK, None),
    ("missing_function", {"function": "token_tis"}, None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "line"), CASES, ids=lambda value: str(value)[:40])
def test_a_rule_says_its_line_where_it_is_broken_and_nothing_where_it_is_kept(name, arguments, line):
    judged(name, arguments, line)
