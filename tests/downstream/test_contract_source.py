"""The contract that this package works by, read off real hosts: their source, not their behaviour.

``HOSTS=path/to/hosts pytest tests/downstream/test_contract_source.py``.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from slime_ext.host import proximal_heads
from slime_ext.hosts.code import SCORE, TARGET, TRAIN
from tests.downstream.drift import LINES, main, report

# Flag that names a function of ours -> its name where the host calls it, and how many arguments it gets.
CALLED_AS = {
    "custom_megatron_init_path": ("custom_init", 1),
    "custom_rollout_log_function_path": ("custom_log_func", 5),
}


EXAMPLE = Path(__file__).parents[2] / "examples/run_slime_multinode.sh"


def test_every_door_keyword_and_field_fits(host):
    """``python -m tests.downstream.drift`` says the same of any tree."""
    lines = list(report(host.folder))
    assert len(lines) == len(LINES) and all(fits for fits, _ in lines), lines
    assert not any("; new: " in line or "; not read: " in line for _, line in lines)


def test_a_tree_that_has_moved_is_named_line_by_line(tmp_path, capsys):
    room = tmp_path / "host/backends"
    room.mkdir(parents=True)
    (room / "loss.py").write_text("\ndef policy_loss_function(batch, args): pass\n")
    assert main([str(tmp_path)]) == 1
    said = capsys.readouterr().out.splitlines()[1:]
    assert len(said) == len(LINES) and sum(line.startswith("  NOT ") for line in said) == 9
    assert "NOT   policy_loss_function: host.backends.loss: expected (args, batch, logits, " in said[0]
    assert "no function of that name in 1 modules" in said[2]


LOSS = """
MORE = {"weight_versions": 1}
def policy_loss_function(args, batch, logits, sum_of_sample_mean):
    extra = {"of_a_name": 1}
    tis_kwargs = {"args": args, **extra, **MORE, **({"of_a_branch": 1} if args.x else {}), **made(args)}
"""
STEP = """
from .data import TOP_P
MORE = ("returns",)
def with_more(args, keys):
    if args.x == 1:
        return list(keys)
    return [*keys, *TOP_P]
def train_one_step(args, rollout_id, step_id, data_iterator, model, *rest, num_microbatches, **more):
    get_batch(data_iterator, with_more(args, [
        "tokens", "loss_masks", *(["of_a_branch"] if args.y == "no field" else []), *MORE, *keys_of(args),
    ]))
"""


def test_what_comes_with_a_star_counts_or_is_named(tmp_path):
    room = tmp_path / "host/backends"
    room.mkdir(parents=True)
    (room / "loss.py").write_text(LOSS)
    (room / "data.py").write_text('TOP_P = ("of_another_module", "values")\n')
    (room / "model.py").write_text(STEP)
    said = {line[6:].partition(": ")[0]: line for _, line in report(tmp_path)}
    assert ": 4 keywords, without pg_loss, " in said["hook call"]
    assert said["hook call"].endswith("; new: of_a_name, of_a_branch; not read: made(args)")
    assert ": 6 parameters; not read: *rest, **more" in said["train step"]
    assert ": 6 fields, without " in said["its batches"]
    assert said["its batches"].endswith("; new: of_a_branch, of_another_module; not read: keys_of(args)")


def test_a_function_that_a_flag_names_is_called_as_the_contract_says(host):
    files = sorted((host.folder / host.name).rglob("*.py"))
    texts = [path.read_text() for path in files if "fsdp" not in str(path)]
    known = 0
    for dest, (_, wanted) in CALLED_AS.items():
        found = [call for text in texts if (call := _call_in(text, dest)) is not None]
        assert [len(call.args) for call in found] == [wanted] * len(found), dest
        known += bool(found)  # older releases have fewer flags
    assert known


def test_a_trainer_has_its_loss_and_its_step_before_it_calls_init(host):
    """Else init would call a trainer of Megatron's one without a step (FSDP)."""
    (actor,) = (host.folder / host.name / "backends/megatron_utils").glob("actor.py")
    imports = [node for node in ast.parse(actor.read_text()).body if isinstance(node, ast.ImportFrom)]
    assert {"loss", "model", "initialize"} <= {str(node.module).rpartition(".")[2] for node in imports}


def test_the_log_prob_pass_is_what_our_wrapper_around_it_reads(host):
    """``host.proximal_heads``: the pass is a global of the trainer's module, gets the host's own function and
    the prefix of what it scores, and its micro-batches have the rollout's own token tensors."""
    room = host.folder / host.name / "backends"
    actor = ast.parse((room / "megatron_utils/actor.py").read_text())
    imported = {a.name for n in actor.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert {SCORE, TARGET} <= imported
    methods = {n.name: n for n in ast.walk(actor) if isinstance(n, ast.FunctionDef)}
    (train,) = [methods[name] for name in TRAIN if name in methods]
    assert [a.arg for a in train.args.args][:3] == ["self", "rollout_id", "rollout_data"]
    passes = [n for n in ast.walk(methods["compute_log_prob"]) if _called(n) == SCORE]
    assert [_name(call.args[0]) for call in passes] == [TARGET]
    assert [{k.arg: _name(k.value) for k in call.keywords}["store_prefix"] for call in passes] == [
        "store_prefix"
    ]
    (score,) = [found for found in [host.tree.defining(SCORE)] if found]
    assert {*proximal_heads.PARAMETERS} <= {*score.parameters}
    names = [n.value for n in ast.walk(score.node) if isinstance(n, ast.Constant)]
    assert "unconcat_tokens" in names  # of the batch, and so of the host's function
    taken = [t for t in host.tree.texts.values() if 'batch["unconcat_tokens"] = tokens' in t]
    assert taken and all('tokens = batch["tokens"]' in text for text in taken)


def _call_in(text: str, dest: str):
    """The call of the function that `dest` names, if this file loads it."""
    if not re.search(rf"args\.{dest}\b|\"{dest}\"", text) or f"{CALLED_AS[dest][0]}(" not in text:
        return None
    after = text.index(dest)
    calls = [n for n in ast.walk(ast.parse(text)) if _called(n) == CALLED_AS[dest][0]]
    line = text[:after].count("\n") + 1
    return next((call for call in calls if call.lineno >= line), None)


def _called(node):
    return _name(node.func) if isinstance(node, ast.Call) else None


def _name(node):
    return getattr(node, "id", None) or getattr(node, "attr", None)


def test_the_launch_script_of_the_examples_has_flags_that_exist(host):
    """slime's in its parser or in one of its scripts, which pass Megatron's flags too; SGLang's by prefix."""
    if not host.module("slime.observability.rollout_metrics"):
        pytest.skip("the script is for slime since 624b824")
    flags = re.findall(r"^ *(--[a-z0-9-]+)", EXAMPLE.read_text(), re.M)
    scripts = [path.read_text() for path in host.folder.glob("scripts/**/*.sh")]
    texts = [host.module("slime.utils.arguments"), *scripts]
    unknown = [f for f in flags if not any(re.search(rf"{f}(?![a-z-])", text) for text in texts)]
    assert len(flags) > 50 and not unknown
