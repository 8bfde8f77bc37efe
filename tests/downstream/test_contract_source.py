"""The contract that this package works by, read off real hosts: their source, not their behaviour.

``SLIME_GIT=path/to/repository MILES_DIR=path/to/miles pytest tests/downstream/test_contract_source.py``.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from slime_ext.host import contract, hosts
from tests.downstream.checkouts import folder_of, named

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


@pytest.fixture(scope="module", params=named())
def host(request, tmp_path_factory):
    """(its description, the folder that it lies in)."""
    scripts = ("scripts",) if request.param == ("slime", "HEAD") else ()
    folder = folder_of(request.param, tmp_path_factory.mktemp("host"), *scripts)
    return next(h for h in hosts.HOSTS if h.name == request.param[0]), folder


def tree_of(host, folder, module):
    return ast.parse(_text(folder, module))


def test_the_hook_is_called_with_these_keywords_and_three_values_come_back(host):
    tree = tree_of(*host, host[0].loss)
    (made,) = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and _name(n.targets[0]) == "tis_kwargs"]
    passed = [key.value for key in made.value.keys]
    assert passed[: len(contract.REQUIRED)] == list(contract.REQUIRED)
    assert set(passed[len(contract.REQUIRED) :]) <= {"parallel_state", "max_seq_lens"}  # miles
    (call,) = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and _called(n.value) == "tis_func"]
    assert len(call.targets[0].elts) == len(contract.RETURNED)


def test_the_loss_looks_up_what_the_carriers_wrap(host):
    tree = tree_of(*host, host[0].loss)
    defined = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    loss = defined["policy_loss_function"]
    assert [a.arg for a in loss.args.args] == ["args", "batch", "logits", "sum_of_sample_mean"]
    assert any(_called(n) == "get_log_probs_and_entropy" for n in ast.walk(loss))


@pytest.mark.parametrize("dest", CALLED_AS)
def test_a_function_that_a_flag_names_is_called_as_the_contract_says(host, dest):
    found = [call for path in _files(host) if (call := _call_in(path, dest)) is not None]
    if not found:
        pytest.skip("this release has no such flag")
    wanted = len(contract.CALLS[dest])
    if dest == "rollout_data_postprocess_path" and not _hands_out_data(host):
        wanted = 1
    assert [len(call.args) for call in found] == [wanted] * len(found)


def _files(host):
    description, folder = host
    return [p for p in sorted((folder / description.name).rglob("*.py")) if "fsdp" not in str(p)]


def _call_in(path: Path, dest: str):
    """The call of the function that `dest` names, if this file loads it."""
    text = path.read_text()
    if not re.search(rf"args\.{dest}\b|\"{dest}\"", text) or f"{CALLED_AS[dest]}(" not in text:
        return None
    after = text.index(dest)
    calls = [n for n in ast.walk(ast.parse(text)) if _called(n) == CALLED_AS[dest]]
    line = text[:after].count("\n") + 1
    return next((call for call in calls if call.lineno >= line), None)


def _hands_out_data(host):
    return not hosts.WITHOUT_DATA.search(_text(host[1], host[0].actor))


def _called(node):
    return _name(node.func) if isinstance(node, ast.Call) else None


def _name(node):
    return getattr(node, "id", None) or getattr(node, "attr", None)


FACTS = {  # release -> whether the postprocess sees the rollout, whether proximal log-probs may be skipped
    ("slime", "v0.2.0"): (False, False),
    ("slime", "v0.2.4"): (True, False),
    ("slime", "v0.3.0"): (True, True),
    ("slime", "v0.3.1"): (True, True),
    ("slime", "HEAD"): (True, True),
    ("miles", "HEAD"): (False, False),
}


@pytest.mark.parametrize("pair", named())
def test_what_a_release_does_is_read_off_its_source(pair, tmp_path, monkeypatch):
    folder = folder_of(pair, tmp_path)
    monkeypatch.setattr(hosts.Host, "source", lambda self, module: _text(folder, module))
    host = next(h for h in hosts.HOSTS if h.name == pair[0])
    assert not host.passes_target
    if pair in FACTS:
        assert (host.hands_out_data, host.may_skip_proximal) == FACTS[pair]


def _text(folder, module):
    return (folder / module.replace(".", "/")).with_suffix(".py").read_text()


def test_the_launch_script_of_the_examples_has_flags_that_exist(host):
    """slime's in its parser or in one of its scripts, which pass Megatron's flags too; SGLang's by prefix."""
    description, folder = host
    if description.name != "slime" or not (folder / "scripts").is_dir():
        pytest.skip("the script is held against slime's newest commit, or a folder of it")
    flags = re.findall(r"^ *(--[a-z0-9-]+)", EXAMPLE.read_text(), re.M)
    texts = [_text(folder, "slime.utils.arguments"), *(p.read_text() for p in folder.glob("scripts/**/*.sh"))]
    unknown = [f for f in flags if not any(re.search(rf"{f}(?![a-z-])", text) for text in texts)]
    assert len(flags) > 50 and not unknown
