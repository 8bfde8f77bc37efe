"""Sampling parameters in the source of a rollout function, and fields that the installed router drops."""

from __future__ import annotations

import sys

import pytest

from slime_ext.errors import ConfigError
from slime_ext.rules.setup import UNREAD
from slime_ext.tools.check import router
from slime_ext.tools.check.rollout_source import parameters_of
from slime_ext.tools.commands.check_answer import check
from slime_ext.tools.launch.sources import named_sources

ARGUMENTS = "args, sample, sampling_params, evaluation=False"
# (statements of the function, what it sets)
BODIES = [
    ("sampling_params['min_p'] = 0.1", {"min_p": 0.1}),
    ("sampling_params = {'temperature': 0.7, 'max_new_tokens': 9}", {"temperature": 0.7}),
    ("sampling_params = dict(temperature=0.7, top_p=args.rollout_top_p)", {"temperature": 0.7}),
    ("ask(sampling_params={'regex': 'a+'})", {"regex": "a+"}),
    ("payload = {'text': '', 'sampling_params': {**sampling_params, 'top_k': 5}}", {"top_k": 5}),
    ("own = sampling_params.copy()\n    own['logit_bias'] = {'5': 1.0}", {"logit_bias": {"5": 1.0}}),
    ("own = dict(sampling_params, presence_penalty=1)", {"presence_penalty": 1}),
    ("own = deepcopy(sampling_params)\n    own.update({'min_p': 0.2}, top_k=3)", {"min_p": 0.2, "top_k": 3}),
    ("sampling_params |= {'repetition_penalty': 1.1}", {"repetition_penalty": 1.1}),
    ("own = sampling_params | {'min_new_tokens': 4}", {"min_new_tokens": 4}),
    ("sampling_params.setdefault('ebnf', 'root')", {"ebnf": "root"}),
    ("params = SamplingParams(frequency_penalty=0.5)", {"frequency_penalty": 0.5}),
    ("payload = {}\n    payload['sampling_params']['min_p'] = 0.1", {"min_p": 0.1}),
    ("sampling_params['min_p'] = LOWEST", {"min_p": 0.05}),
    ("sampling_params['min_p'] = CHANGED", {"min_p": UNREAD}),
    ("sampling_params['min_p'] = args.my_min_p", {"min_p": UNREAD}),
    ("return helper(sampling_params)", {"top_p": 0.9}),
    ("if not evaluation:\n        sampling_params['min_p'] = 0.1", {"min_p": 0.1}),
    # Nothing of the policy's sampling:
    ("sampling_params['temperature'] = args.rollout_temperature", {}),
    ("sampling_params = {'temperature': sampling_params['temperature']}", {}),
    ("sampling_params['top_p'] = sampling_params.get('top_p', 1.0)", {}),
    ("sampling_params['max_new_tokens'] -= 5", {}),
    ("sampling_params['min_p'] = 0.1\n    sampling_params.pop('min_p')", {}),
    ("sampling_params['min_p'] = 0.1\n    del sampling_params['min_p']", {}),
    ("if evaluation:\n        sampling_params['temperature'] = 0", {}),
    ("if not evaluation:\n        pass\n    else:\n        sampling_params['temperature'] = 0", {}),
    ("sampling_params['temperature'] = 0 if args.evaluation else args.rollout_temperature", {
        "temperature": UNREAD}),
    ("judge_sampling_params = {'temperature': 0}", {}),
    ("chat = {'model': 'judge', 'temperature': 0}", {}),
    ("return eval_rollout(sampling_params)", {}),
    ("x = sampling_params['min_p']", {}),
]  # fmt: skip
REST = """
LOWEST = 0.05
CHANGED = 1
CHANGED = 2
def helper(sampling_params):
    sampling_params["top_p"] = 0.9
def eval_rollout(sampling_params):
    sampling_params["temperature"] = 0
def not_called(sampling_params):
    sampling_params["min_p"] = 0.9
"""


@pytest.mark.parametrize(("body", "expected"), BODIES, ids=[body[:50] for body, _ in BODIES])
def test_a_parameter_is_read_in_the_forms_in_which_functions_pass_it(body, expected):
    text = f"def generate({ARGUMENTS}):\n    {body}\n{REST}"
    parameters = parameters_of(text, "generate", "my.py")
    assert {each.name: each.value for each in parameters} == expected
    assert len(parameters) == len(expected)
    assert all(each.where.startswith("my.py:") for each in parameters)


def test_a_parameter_is_where_its_line_is_and_a_class_counts_as_its_methods():
    text = "class Rollout:\n    def __call__(self):\n        self.ask()\n    def ask(self):\n"
    text += "        sampling = {'min_p': 0.1,\n            'top_k': 5}\n"
    wheres = {each.name: each.where for each in parameters_of(text, "Rollout", "my.py")}
    assert wheres == {"min_p": "my.py:5", "top_k": "my.py:6"}


@pytest.mark.parametrize("text", ["def generate(:", "", "\0", "x = 1"])
def test_a_source_that_does_not_parse_or_lacks_the_function_sets_nothing(text):
    assert parameters_of(text, "generate", "my.py") == []


LAUNCH = (
    "python3 train.py --rollout-batch-size 8 --n-samples-per-prompt 8 --global-batch-size 64 --use-tis "
    "--custom-tis-function-path slime_ext.tis.token_tis --custom-megatron-init-path slime_ext.host.init "
)


def rules_of(folder, flags):
    script = folder / "run.sh"
    script.write_text(f"{LAUNCH} {flags}")
    return {line.rule.name: line.message for line in check(named_sources(str(script))).notes if line.rule}


@pytest.mark.parametrize("flag", ["--rollout-function-path", "--custom-generate-function-path"])
def test_check_reads_the_function_beside_the_script_and_shows_no_value_of_it(tmp_path, flag):
    function = "async def generate(args, sample, sampling_params):\n    sampling_params['min_p'] = 0.375\n"
    (tmp_path / "ours_to_sample.py").write_text(function)
    lines = rules_of(tmp_path, f"{flag} ours_to_sample.generate")
    assert lines["truncation_of_function"].startswith("ours_to_sample.py:2: expected min_p 0")
    assert not any("0.375" in line for line in lines.values())
    (tmp_path / "ours_to_sample.py").write_text(function.replace("0.375", "0.0"))
    assert "truncation_of_function" not in rules_of(tmp_path, f"{flag} ours_to_sample.generate")


def installed_router(folder, monkeypatch, content):
    """Makes a sglang-router 0.3.2 whose compiled module has this content."""
    package, metadata = folder / "sglang_router", folder / "sglang_router-0.3.2.dist-info"
    package.mkdir(parents=True), metadata.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "sglang_router_rs.abi3.so").write_bytes(content)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-router\nVersion: 0.3.2\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "sglang_router", raising=False)


@pytest.mark.parametrize(
    ("content", "is_said"), [(b"x" * 99 + b"input_ids", True), (b"a return_routed_experts", False)]
)
def test_check_says_that_the_installed_router_drops_routed_experts(tmp_path, monkeypatch, content, is_said):
    installed_router(tmp_path / "site", monkeypatch, content)
    assert ("router_without_replay" in rules_of(tmp_path, "--use-rollout-routing-replay")) is is_said
    assert "router_without_replay" not in rules_of(tmp_path, "")


def test_a_router_without_a_compiled_module_or_none_at_all_drops_nothing(tmp_path, monkeypatch):
    installed_router(tmp_path / "site", monkeypatch, b"")  # an empty file cannot be mapped
    assert router.drops("min_p") is None
    (tmp_path / "site/sglang_router/sglang_router_rs.abi3.so").unlink()
    assert router.drops("min_p") is None


def test_a_missing_function_is_still_refused(tmp_path):
    (tmp_path / "ours_to_sample.py").write_text("def other(): ...")
    with pytest.raises(ConfigError, match="has no generate"):
        rules_of(tmp_path, "--custom-generate-function-path ours_to_sample.generate")
