"""The contract that this package works by, read off real hosts: their source, not their behaviour.

``HOSTS=path/to/hosts pytest tests/downstream/test_contract_source.py``.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from slime_ext.host import contract, hosts

# Where a function that a flag names is called, and under which name there.
CALLED_AS = {
    "custom_megatron_init_path": "custom_init",
    "custom_megatron_before_log_prob_hook_path": "custom_before_log_prob_hook",
    "custom_megatron_before_train_step_hook_path": "custom_before_train_step_hook",
    "custom_rollout_log_function_path": "custom_log_func",
    "custom_eval_rollout_log_function_path": "custom_log_func",
    "custom_pg_loss_reducer_function_path": "custom_pg_loss_reducer_func",
    "custom_advantage_function_path": "custom_adv_fn",
    "rollout_data_postprocess_path": "rollout_data_postprocess",
}


EXAMPLE = Path(__file__).parents[2] / "examples/run_slime_multinode.sh"


def loss_of(host):
    """The syntax tree of the module that defines this release's policy loss."""
    texts = [host.module(name) for name in host.host.losses]
    return ast.parse(next(text for text in texts if hosts.DEFINED in text))


def test_the_hook_is_called_with_these_keywords_and_three_values_come_back(host):
    tree = loss_of(host)
    (made,) = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and _name(n.targets[0]) == "tis_kwargs"]
    passed = [key.value for key in made.value.keys]
    assert passed[: len(contract.REQUIRED)] == list(contract.REQUIRED)
    assert set(passed[len(contract.REQUIRED) :]) <= {"parallel_state", "max_seq_lens"}  # miles
    (call,) = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and _called(n.value) == "tis_func"]
    assert len(call.targets[0].elts) == len(contract.RETURNED)


def test_the_loss_looks_up_what_our_hooks_wrap(host):
    tree = loss_of(host)
    defined = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    loss = defined["policy_loss_function"]
    assert [a.arg for a in loss.args.args] == ["args", "batch", "logits", "sum_of_sample_mean"]
    assert any(_called(n) == "get_log_probs_and_entropy" for n in ast.walk(loss))


def test_a_function_that_a_flag_names_is_called_as_the_contract_says(host):
    files = sorted((host.folder / host.name).rglob("*.py"))
    texts = [path.read_text() for path in files if "fsdp" not in str(path)]
    known = 0
    for dest in CALLED_AS:
        found = [call for text in texts if (call := _call_in(text, dest)) is not None]
        wanted = len(contract.CALLS[dest])
        if dest == "rollout_data_postprocess_path" and not host.hands_out_data:
            wanted = 1
        assert [len(call.args) for call in found] == [wanted] * len(found), dest
        known += bool(found)  # older releases have fewer flags
    assert known >= 4


def _call_in(text: str, dest: str):
    """The call of the function that `dest` names, if this file loads it."""
    if not re.search(rf"args\.{dest}\b|\"{dest}\"", text) or f"{CALLED_AS[dest]}(" not in text:
        return None
    after = text.index(dest)
    calls = [n for n in ast.walk(ast.parse(text)) if _called(n) == CALLED_AS[dest]]
    line = text[:after].count("\n") + 1
    return next((call for call in calls if call.lineno >= line), None)


def _called(node):
    return _name(node.func) if isinstance(node, ast.Call) else None


def _name(node):
    return getattr(node, "id", None) or getattr(node, "attr", None)


FACTS = {  # release -> whether the postprocess sees the rollout, whether proximal log-probs may be skipped
    ("slime", "v0.2.0"): (False, False),
    ("slime", "v0.2.4"): (True, False),
    ("slime", "v0.3.0"): (True, True),
    ("slime", "v0.3.1"): (True, True),
    ("slime", "624b824"): (True, True),
    ("miles", "31f1ca9"): (False, False),
    ("miles", "wheel"): (False, False),
}


def test_what_a_release_does_is_read_off_its_source(host, monkeypatch):
    monkeypatch.setattr(hosts.Host, "source", lambda self, module: host.module(module))
    assert not host.host.passes_target
    if (host.name, host.release) in FACTS:
        assert (host.host.hands_out_data, host.host.may_skip_proximal) == FACTS[host.name, host.release]


def test_the_launch_script_of_the_examples_has_flags_that_exist(host):
    """slime's in its parser or in one of its scripts, which pass Megatron's flags too; SGLang's by prefix."""
    if not host.module("slime.observability.rollout_metrics"):
        pytest.skip("the script is for slime since 624b824")
    flags = re.findall(r"^ *(--[a-z0-9-]+)", EXAMPLE.read_text(), re.M)
    scripts = [path.read_text() for path in host.folder.glob("scripts/**/*.sh")]
    texts = [host.module("slime.utils.arguments"), *scripts]
    unknown = [f for f in flags if not any(re.search(rf"{f}(?![a-z-])", text) for text in texts)]
    assert len(flags) > 50 and not unknown
