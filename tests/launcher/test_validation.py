"""What is wrong is said in one line before anything starts."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from benchmarks import tiny_task as tiny
from slime_ext import host
from slime_ext.errors import SlimeExtError
from slime_ext.launcher.arguments import parse_args
from slime_ext.launcher.output import checkpoint
from slime_ext.launcher.validation import model, validate
from tests.test_configs import FILES

MODEL = tiny.Model(layers=2, heads=4, kv_heads=2)
PYTHON = "/bin/sh"  # any file: nothing is started here


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """The small task in the working directory."""
    tiny.write_all(tmp_path, tiny.Task(length=4, train=8, heldout=4), MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


def check(line: str = ""):
    flags = (
        "--hf-checkpoint model --prompt-data train.jsonl --label-key label --rm-type characters "
        "--num-rollout 2 "
        "--rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 8 "
        f"--sglang-python {PYTHON} "
    )
    return validate(parse_args(shlex.split(flags + line)))


def said(line: str) -> str:
    with pytest.raises(SlimeExtError) as error:
        check(line)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_right_command_line_passes_and_is_completed(place):
    args = check("--eval-prompt-data heldout heldout.jsonl")
    config = json.loads(Path("model/config.json").read_text())
    filled = (args.num_layers, args.num_query_groups, args.rotary_base)
    assert filled == (config["num_hidden_layers"], config["num_key_value_heads"], config["rope_theta"])
    assert args.untie_embeddings_and_output_weights is True


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_file_of_configs_also_runs_in_the_embedded_launcher(place, path, capsys):
    args = check(f"--custom-config-path {path}")
    host.init(args)
    assert args.custom_megatron_init_path == "slime_ext.host.init"
    assert capsys.readouterr().out.startswith("slime_ext: ")


MISTAKES = (
    (
        "--tensor-model-parallel-size 3",
        "--tensor-model-parallel-size: expected a divisor of attention heads 4",
    ),
    ("--tensor-model-parallel-size 4", "divisor of query groups 2, got 4"),
    ("--pipeline-model-parallel-size 4", "divisor of layers 2, got 4"),
    (
        "--hf-checkpoint model_moe --tensor-model-parallel-size 2",
        "expected 1 with a mixture of experts, got 2",
    ),
    ("--hf-checkpoint nowhere", "--hf-checkpoint nowhere: expected config.json"),
    ("--prompt-data nowhere", "nowhere: expected a readable JSONL file"),
    ("--label-key answer", "train.jsonl:1: expected the key 'answer' of --label-key"),
    ("--rm-type exactt", "did you mean 'exact'?"),
    ("--rollout-max-response-len 125", "train.jsonl:1: expected a prompt of at most 3 tokens"),
    ("--sglang-context-length 12", "expected a prompt of at most 4 tokens"),
    ("--rollout-max-response-len 500", "expected room for a prompt"),
    (
        "--rollout-max-prompt-len 3",
        "expected a prompt of at most 3 tokens (--rollout-max-prompt-len), got none",
    ),
    ("--eval-prompt-data heldout gone.jsonl", "gone.jsonl: expected a readable"),
    ("--actor-num-gpus-per-node 3", "--global-batch-size: expected a multiple of 3"),
    (
        "--ppo-n-minibatches 3",
        "--ppo-n-minibatches: samples of a step on a rank: expected a multiple of 3",
    ),
    ("--micro-batch-size 3", "--micro-batch-size: samples of a minibatch: expected a multiple of 3"),
    ("--ppo-n-minibatches 4 --micro-batch-size 8", "expected a multiple of 8"),
    ("--rollout-top-k 0", "--rollout-top-k: expected -1 or at least 1"),
    ("--use-tis --use-rollout-logprobs", "--use-rollout-logprobs: expected off beside --use-tis"),
    ("--get-mismatch-metrics", "expected a function beside --get-mismatch-metrics"),
    ("--custom-tis-function-path a.b", "--use-tis: expected on beside --custom-tis-function-path"),
    (
        "--advantage-estimator cispo --eps-clip-c 3",
        "expected --advantage-estimator grpo or gspo beside it",
    ),
    ("--lr-warmup-iters 2", "--lr-warmup-iters: expected fewer than the 2 steps"),
    ("--eval-interval 3", "--eval-prompt-data: expected prompts with --eval-interval"),
    ("--load nowhere", "--load nowhere: expected a directory with checkpoints"),
    ("--sglang-python nowhere", "--sglang-python: expected the interpreter"),
    ("--sglang-server-url localhost", "--sglang-server-url: expected http://host:port"),
    ("--sglang-server-url http://localhost:99999", "--sglang-server-url: expected http://host:port"),
    ("--sglang-python model/config.json", "--sglang-python: expected the interpreter"),
    ("--sglang-context-length 500", "--sglang-context-length: expected at most 128"),
    ("--sglang-max-total-tokens 12", "expected a prompt of at most 4 tokens"),
    ("--rollout-stop-token-ids 3 4000", "--rollout-stop-token-ids: expected ids in [0, 16), got 4000"),
    ("--eval-prompt-data a heldout.jsonl a train.jsonl", "expected each name once, got a a"),
    ("--run-name ..", "--run-name: expected one name below --run-dir, got '..'"),
    ("--use-tis --custom-tis-function-path slime_ext.tis.correct", "slime_ext: expected a mapping in"),
)


def test_a_mistake_is_named(place):
    for line, expected in MISTAKES:
        assert expected in said(line), line


BAD_LINES = (
    ("{", "train.jsonl:9: expected a JSON object"),
    ('{"input": 3, "label": "a"}', "train.jsonl:9: expected text under 'input', got 3"),
    ('{"label": "a"}', "train.jsonl:9: expected the key 'input'"),
    ('{"input": "xyz>", "label": "a"}', "train.jsonl:9: expected text of the tokenizer's characters"),
    ('{"input": "ab>", "label": "a", "metadata": {"rm_type": "math"}}', "--rm-type: expected one of"),
)


def test_a_bad_line_is_named_with_its_number(place):
    good = Path("train.jsonl").read_text()
    for row, expected in BAD_LINES:
        Path("train.jsonl").write_text(good + row + "\n")
        assert expected in said(""), row


def test_a_prompt_that_just_fits_passes(place):
    for line in ("--rollout-max-response-len 123", "--rollout-max-prompt-len 5"):
        check(line)  # 5 tokens, 128 positions


def test_half_precision_needs_cuda(place, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "--bf16: expected a CUDA device, got none" in said("--bf16")


FUNCTIONS = """
def ok(args, *, pg_loss, train_log_probs, **kwargs): ...
def narrow(args, pg_loss, train_log_probs, rollout_log_probs, loss_masks,
           total_lengths, response_lengths): ...
def two(args, sample): ...
VALUE = 3
"""


NOT_CALLABLE = (
    ("--use-tis --custom-tis-function-path mine.narrow", "'cur_log_probs': add **kwargs to it"),
    ("--use-tis --custom-tis-function-path mine.okk", "did you mean 'ok'?"),
    ("--use-tis --custom-tis-function-path mine.VALUE", "expected a function, got a int"),
    ("--use-tis --custom-tis-function-path yours.ok", "No module named 'yours'"),
    ("--use-tis --custom-tis-function-path broken.ok", "expected a module that imports, got SyntaxError"),
    ("--use-tis --custom-tis-function-path exits.ok", "expected a module that imports, got SystemExit"),
    ("--use-tis --custom-tis-function-path mine.py:ok", "expected package.module.function"),
    ("--custom-rm-path mine.narrow", "expected a function of args, sample"),
    ("--custom-megatron-init-path mine.two", "expected a function of args, got (args, sample)"),
    ("--rollout-data-postprocess-path mine.two", "expected a function of args, rollout_id, rollout_data"),
)


def test_a_function_that_cannot_be_called_is_named(place):
    Path("mine.py").write_text(FUNCTIONS)
    Path("broken.py").write_text("def")
    Path("exits.py").write_text("raise SystemExit(3)")
    for line, expected in NOT_CALLABLE:
        assert expected in said(line), line


def test_functions_with_slimes_signatures_pass(place):
    Path("mine.py").write_text(FUNCTIONS)
    check("--use-tis --custom-tis-function-path mine.ok --custom-rm-path mine.two")


COUPLED = "--use-tis --custom-tis-function-path slime_ext.tis.m2"
PLAN = "--rollout-data-postprocess-path slime_ext.host.rollout_data_postprocess"


def test_what_couples_samples_needs_its_function_and_log_probs(place):
    assert "--rollout-data-postprocess-path: expected slime_ext.host" in said(COUPLED)
    assert "--get-mismatch-metrics: expected on" in said(f"{COUPLED} {PLAN}")
    check(f"{COUPLED} {PLAN} --get-mismatch-metrics")


OTHER_MODELS = (
    ("model_type", "llama"),
    ("hidden_size", None),
    ("num_attention_heads", "4"),
    ("num_key_value_heads", 3),
    ("num_hidden_layers", 0),
    ("hidden_act", "gelu"),
    ("attention_bias", True),
    ("use_sliding_window", True),
    ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
    ("vocab_size", 4),
)


def test_another_model_is_named(place):
    file = Path("model/config.json")
    config = json.loads(file.read_text())
    for key, value in OTHER_MODELS:
        changed = {k: v for k, v in (config | {key: value}).items() if v is not None}
        file.write_text(json.dumps(changed))
        assert ("rope_type" if key == "rope_parameters" else key) in said(""), key


OTHER_MIXTURES = (
    ("num_experts", None),
    ("num_experts_per_tok", "2"),
    ("moe_intermediate_size", 0),
    ("decoder_sparse_step", 2),
    ("mlp_only_layers", [0]),
)


def test_a_mixture_of_experts_is_read_and_another_is_named(place):
    args = check("--hf-checkpoint model_moe")
    assert (args.num_experts, args.moe_router_topk, args.moe_ffn_hidden_size) == (8, 2, 128)
    file = Path("model_moe/config.json")
    config = json.loads(file.read_text())
    for key, value in OTHER_MIXTURES:
        changed = {k: v for k, v in (config | {key: value}).items() if v is not None}
        file.write_text(json.dumps(changed))
        error = said("--hf-checkpoint model_moe")
        assert f"{key}: expected " in error or f"expected the key {key}" in error, key
    assert "mlp_only_layers: expected an empty list, got [0]" in error


def test_a_missing_tokenizer_is_named(place):
    Path("model/tokenizer.json").unlink()
    assert "expected a tokenizer.json that loads, got" in said("")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("config.json", "[1]", "expected a JSON object, got a list"),
        ("tokenizer.json", "{", "expected a tokenizer.json that loads"),
        ("tokenizer_config.json", "{}", "expected eos_token in tokenizer_config.json"),
        ("model.safetensors", "abc", "expected safetensors weights, got a damaged file"),
    ],
)
def test_a_damaged_file_of_the_model_is_named(place, name, text, expected):
    Path("model", name).write_text(text)
    assert expected in said("")


def _saved(line: str, where: str) -> None:
    args = check(line)
    checkpoint.save(where, 1, 0, {}, sizes=model.sizes_of(args))


def test_another_runs_files_are_not_overwritten(place):
    _saved("", "elsewhere")
    assert "--save elsewhere: expected no checkpoint yet" in said("--save elsewhere")
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine/metrics.jsonl").write_text("")
    assert "--run-name mine: expected a new run" in said("--run-name mine")


def test_a_run_goes_on_from_its_own_checkpoints(place):
    _saved("", "runs/mine/checkpoints")
    Path("runs/mine/metrics.jsonl").write_text("")
    assert check("--load runs/mine/checkpoints").run_name == "mine"
    assert "expected tensor 1, which it was saved with, got 2" in said(
        "--load runs/mine/checkpoints --tensor-model-parallel-size 2"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [("rms_norm_eps", 1e-5), ("rope_theta", 5e5), ("num_hidden_layers", 3), ("num_experts_per_tok", 1)],
)
def test_a_model_that_changed_since_is_refused(place, key, value):
    _saved("--hf-checkpoint model_moe", "runs/mine/checkpoints")
    file = Path("model_moe/config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    line = "--hf-checkpoint model_moe --load runs/mine/checkpoints"
    assert "which it was saved with, got" in said(line)


def test_a_complete_run_is_not_continued(place):
    _saved("", "runs/mine/checkpoints")
    line = "--load runs/mine/checkpoints --num-rollout 1"
    assert "--num-rollout: expected more than the 1 rollouts that --load" in said(line)


def test_a_damaged_checkpoint_is_noted(place):
    _saved("", "there")
    checkpoint.save("there", 2, 0, {}, sizes=model.sizes_of(check("")))
    Path("there/iter_0000002/rank_0.pt").write_bytes(b"half")
    args = check("--load there --num-rollout 2")
    assert args.load_iteration == 1 and "iter_0000002 is damaged" in args.notes[0]
