"""Flags: slime's spelling and defaults, files that equal flags, one line for what is wrong."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from slime_ext.errors import ConfigError
from slime_ext.launcher.arguments import parse_args
from slime_ext.launcher.arguments.parser import FLAGS

REPOSITORY = Path(__file__).parents[2]
NEEDED = shlex.split(
    "--hf-checkpoint m --prompt-data p --num-rollout 2 --rollout-batch-size 4 --rollout-max-response-len 5"
)

# flag: default, as in slime's arguments.py at 624b824 and in Megatron's
HOST_DEFAULTS = {
    "advantage_estimator": "grpo",
    "calculate_per_token_loss": False,
    "clip_grad": 1.0,
    "distributed_timeout_minutes": 10,
    "entropy_coef": 0.0,
    "eps_clip": 0.2,
    "eps_clip_c": None,
    "get_mismatch_metrics": False,
    "init_method_std": 0.02,
    "input_key": "input",
    "label_key": None,
    "lr": 1e-6,
    "lr_decay_style": "linear",
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "weight_decay": 0.01,
    "micro_batch_size": 1,
    "n_samples_per_eval_prompt": 1,
    "n_samples_per_prompt": 1,
    "normalize_advantages": False,
    "rewards_normalization": True,
    "rollout_seed": 42,
    "rollout_temperature": 1.0,
    "rollout_top_k": -1,
    "seed": 1234,
    "sglang_server_concurrency": 512,
    "tis_clip": 2.0,
    "tis_clip_low": 0,
    "update_weights_interval": 1,
    "use_rollout_logprobs": False,
    "use_tis": False,
}


def parse(line: str = ""):
    return parse_args(NEEDED + shlex.split(line))


def resolved(args) -> dict:
    return {key: value for key, value in vars(args).items() if key != "config"}


def test_defaults_are_the_hosts():
    found = vars(parse())
    assert {name: found[name] for name in HOST_DEFAULTS} == HOST_DEFAULTS


@pytest.mark.parametrize("line", ["--rollout-top-p 0.8", "--rollout-top-k 5"])
def test_sampling_from_a_part_of_the_distribution_is_told(line):
    assert not parse().notes
    (note,) = parse(line).notes
    assert note.startswith(f"{line}: SGLang draws from a part")


def test_no_flag_twice():
    assert len({flag.name for flag in FLAGS}) == len({flag.dest for flag in FLAGS}) == len(FLAGS)


def test_arguments_need_no_torch():
    code = "import sys; from slime_ext.launcher.arguments import parse_args; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


MISTAKES = (
    ("--clip-gradd 1", "did you mean '--clip-grad'?"),
    ("--eps-clipp 1", "did you mean '--eps-clip'?"),
    ("--use-kl-loss", "--use-kl-loss: expected a flag of this launcher, got another"),
    ("--moe-grouped-gemm", "--help` names what this launcher implements"),
    ("--lr much", "--lr: expected a valid number, got 'much'"),
    ("--lr nan", "--lr: expected a finite number"),
    ("--lr -1", "--lr: expected a number greater than or equal to 0, got '-1'"),
    ("--seed 1.5", "--seed: expected a valid integer, got '1.5'"),
    ("--seed -1", "--seed: expected a number greater than or equal to 0, got '-1'"),
    ("--rollout-seed 99999999999", "--rollout-seed: expected a number less than 4294967296"),
    ("--advantage-estimator ppo", "--advantage-estimator: expected 'grpo', 'gspo' or 'cispo', got 'ppo'"),
    ("--lr-decay-style cosinus", "did you mean 'cosine'?"),
    ("--roll 3", "expected a flag of this launcher"),
    ("stray", "got 'stray'"),
    ("--rollout-temperature 0", "--rollout-temperature: expected a number greater than 0, got '0'"),
    ("--rollout-top-k -2", "--rollout-top-k: expected a number greater than or equal to -1, got '-2'"),
    ("--eps-clip 1.1", "--eps-clip: expected a number less than or equal to 1"),
    ("--run-name ''", "--run-name: expected some text, got ''"),
    ("--use-tis --custom-tis-function-path ''", "--custom-tis-function-path: expected some text"),
    ("--num-steps-per-rollout 3", "divisor of the 4 samples"),
    ("--n-samples-per-prompt 0", "--n-samples-per-prompt: expected a number greater than or equal to 1"),
    ("--global-batch-size 3", "divisor of the 4 samples"),
    ("--num-steps-per-rollout 2 --global-batch-size 4", "--global-batch-size: expected 2"),
    ("--context-parallel-size 0", "--context-parallel-size: expected a number greater"),
    ("--tensor-model-parallel-size 2 --actor-num-gpus-per-node 3", "expected a multiple of 2"),
    ("--eval-prompt-data a b c", "expected pairs of name and path"),
    ("--run-name a/b", "--run-name: expected one name"),
)


def test_a_mistake_is_one_line():
    for line, said in MISTAKES:
        with pytest.raises(ConfigError) as error:
            parse(line)
        assert said in str(error.value) and "\n" not in str(error.value), line


def test_a_needed_flag_is_named():
    for flag in ("--hf-checkpoint", "--prompt-data", "--rollout-batch-size", "--rollout-max-response-len"):
        at = NEEDED.index(flag)
        with pytest.raises(ConfigError, match=f"{flag}: expected a value, got nothing"):
            parse_args(NEEDED[:at] + NEEDED[at + 2 :])


FOLLOWS = (
    ("", "eps_clip_high", 0.2),
    ("--eps-clip 0.3 --eps-clip-high 4", "eps_clip_high", 4.0),
    ("--n-samples-per-prompt 4 --num-steps-per-rollout 8", "global_batch_size", 2),
    ("--n-samples-per-prompt 4 --global-batch-size 8", "num_steps_per_rollout", 2),
    ("--n-samples-per-prompt 4", "global_batch_size", 16),
    ("", "grpo_std_normalization", False),
    ("--n-samples-per-prompt 2", "grpo_std_normalization", True),
    ("--n-samples-per-prompt 2 --disable-grpo-std-normalization", "grpo_std_normalization", False),
    ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", "world_size", 4),
    ("--tensor-model-parallel-size 2 --actor-num-gpus-per-node 8", "data_parallel_size", 4),
    ("--bf16", "sglang_dtype", "bfloat16"),
    ("--sglang-dtype bfloat16", "params_dtype", "float32"),
    ("--rollout-temperature 0.7", "eval_temperature", 0.7),
    ("--eval-prompt-data a b c d", "eval_datasets", [("a", "b"), ("c", "d")]),
    ("--use-tis", "custom_tis_function_path", "slime_ext.tis.vanilla_tis_function"),
    ("--run-name a", "save_debug_rollout_data", "runs/a/rollout_data/{rollout_id}.pt"),
    ("--no-dump-details", "save_debug_train_data", None),
    ("--rollout-stop-token-ids 2 -1", "rollout_stop_token_ids", [2, -1]),
)


def test_what_is_left_open_follows_from_the_rest():
    for line, name, value in FOLLOWS:
        assert getattr(parse(line), name) == value, line


def test_a_config_file_equals_its_flags(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(
        "lr: 1e-4\nuse_tis: true\nget-mismatch-metrics: false\ngrpo_std_normalization: false\n"
        "rollout_top_k: -1\n"
        "n_samples_per_prompt: 4\neval_prompt_data: [a, b]\nrollout_stop_token_ids: 2\n"
        "disable_rewards_normalization: true\nrun_name: r\n"
    )
    line = (
        "--lr 1e-4 --use-tis --disable-grpo-std-normalization --rollout-top-k -1 --n-samples-per-prompt 4 "
        "--eval-prompt-data a b --rollout-stop-token-ids 2 "
        "--disable-rewards-normalization --run-name r"
    )
    assert resolved(parse(f"--config {file}")) == resolved(parse(line))


def test_the_small_run_equals_its_flags(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    words = []
    for key, value in yaml.safe_load(Path("configs/tiny.yaml").read_text()).items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        words += ["--" + key.replace("_", "-"), *map(str, values)]
    name = ["--run-name", "r"]
    from_file, from_flags = parse_args(["--config", "configs/tiny.yaml", *name]), parse_args(words + name)
    assert resolved(from_file) == resolved(from_flags)


def test_the_command_line_wins_over_the_config_file(tmp_path):
    (tmp_path / "c.yaml").write_text("lr: 1.0\nseed: 7\n")
    args = parse(f"--config {tmp_path}/c.yaml --lr 2")
    assert (args.lr, args.seed) == (2.0, 7)


WRONG_FILES = (
    ("clip_gradd: 1", "did you mean 'clip_grad'?"),
    ("use_kl_loss: true", "use_kl_loss: expected a flag of this launcher, got another"),
    ("use_tis: 1", "use_tis: expected a valid boolean, got 1"),
    ("lr: [1, 2]", "lr: expected a valid number, got [1, 2]"),
    ("seed: 1.5", "seed: expected a valid integer"),
    ("seed: true", "seed: expected a valid integer, got True"),
    ("- lr", "expected a mapping"),
    ("a: [", "expected YAML, got an error at line"),
    ("lr: 1\nseed: 2\nlr: 3", "expected each key once, got 'lr' twice"),
)


def test_a_wrong_config_file_is_one_line(tmp_path):
    for text, said in WRONG_FILES:
        (tmp_path / "c.yaml").write_text(text)
        with pytest.raises(ConfigError) as error:
            parse(f"--config {tmp_path}/c.yaml")
        assert said in str(error.value) and "\n" not in str(error.value), text


def test_one_value_is_a_list_of_one(tmp_path):
    (tmp_path / "c.yaml").write_text("rollout_stop_token_ids: 3\n")
    assert parse(f"--custom-config-path {tmp_path}/c.yaml").rollout_stop_token_ids == [3]


def test_a_custom_config_goes_over_flags_as_in_slime(tmp_path):
    (tmp_path / "c.yaml").write_text("tis_clip: 5\nuse_tis: true\nslime_ext: {preset: tis}\n")
    args = parse(f"--tis-clip 3 --custom-config-path {tmp_path}/c.yaml")
    assert (args.tis_clip, args.use_tis, args.slime_ext) == (5.0, True, {"preset": "tis"})


WRONG_CUSTOM_FILES = (
    ("tis_clipp: 2", "did you mean 'tis_clip'?"),
    ("tis_mode: truncate", "belong under the key slime_ext"),
    ("tis_clip: 1e-4", "write it as 1.0e-4"),
    ("seed: 1.5", "expected a valid integer, got 1.5"),
    ("seed: true", "expected a valid integer, got True"),
    ("use_tis: 1", "expected a valid boolean, got 1"),
    ("lr_decay_style: cosinus", "did you mean 'cosine'?"),
    ("kl_loss_type: k1", "expected an argument of this launcher or slime_ext, got another"),
    ("lr: null", "lr: expected a valid number, got None"),
    ("tis_clip: .inf", "tis_clip: expected a finite number, got inf"),
    ("run_name: ''", "run_name: expected some text, got ''"),
    ("tis_clip: .nan", "tis_clip: expected a finite number, got nan"),
    ("tis_clip: -.inf", "tis_clip: expected a finite number, got -inf"),
)


def test_a_custom_config_is_checked_where_slime_is_silent(tmp_path):
    for text, said in WRONG_CUSTOM_FILES:
        (tmp_path / "c.yaml").write_text(text)
        with pytest.raises(ConfigError) as error:
            parse(f"--custom-config-path {tmp_path}/c.yaml")
        assert said in str(error.value), text


@pytest.mark.parametrize(
    ("there", "line", "path"),
    [
        ([], "", "run"),
        (["run"], "", "run-2"),
        (["run", "run-2", "run-11", "other"], "", "run-12"),
        (["run"], "--run-name mine", "mine"),
        (["mine"], "--load {runs}/mine/checkpoints", "mine"),
    ],
)
def test_a_run_gets_a_directory_of_its_own(tmp_path, there, line, path):
    for name in there:
        (tmp_path / name).mkdir()
    args = parse(f"--run-dir {tmp_path} " + line.format(runs=tmp_path))
    assert args.run_path == str(tmp_path / path)


@pytest.mark.parametrize(
    "load", ["runs/mine/checkpoints", "{here}/runs/mine/checkpoints", "./runs/mine/checkpoints/"]
)
def test_a_run_goes_on_in_its_own_directory_however_it_is_spelled(tmp_path, monkeypatch, load):
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    args = parse(f"--run-dir runs --load {load.format(here=tmp_path)}")
    assert args.run_path == "runs/mine"
