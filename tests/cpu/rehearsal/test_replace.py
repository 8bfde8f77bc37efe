"""What a rehearsal replaces: sizes keep their ratios, what decides behaviour stays, the rest is said."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from pathlib import Path

import pytest

from slime_ext.errors import ConfigError
from slime_ext.tools.launch.read import read_launch as read
from slime_ext_cpu.rehearsal import preflight, replace, twin
from slime_ext_cpu.rehearsal.replace import Sizes, kept, replaced_flags, small_sizes
from tests.cpu.rehearsal.launches import launch

HOSTS = Path(os.environ.get("HOSTS", "absent"))
SMALL = (("--num-layers", "2"), 40, Path("/out"))  # the twin's flags, the longest prompt, the folder
DECIDING = """--rm-type --custom-rm-path --custom-generate-function-path --rollout-function-path
--advantage-estimator --use-tis --tis-clip --tis-clip-low --custom-tis-function-path
--custom-config-path --get-mismatch-metrics --eps-clip --eps-clip-high --use-kl-loss
--kl-loss-coef --entropy-coef --n-samples-per-prompt --input-key --label-key
--apply-chat-template --rollout-temperature --calculate-per-token-loss
--num-steps-per-rollout --loss-type --use-rollout-logprobs --keep-old-actor
--update-weights-interval --use-dynamic-batch-size --partial-rollout --weight-decay
--adam-beta2 --lr-decay-style --use-opsm --custom-megatron-init-path --metadata-key""".split()


def test_small_batches_keep_samples_and_steps():
    for prompts, samples, steps in itertools.product((1, 2, 8, 32, 96), (1, 3, 8, 16), (1, 2, 4, 16)):
        if prompts * samples % steps == 0:
            large = Sizes(prompts, samples, prompts * samples // steps)
            small = small_sizes(large)
            assert (small.samples, small.steps) == (samples, steps), large
            assert small.prompts * samples == small.batch * steps and small.prompts <= max(prompts, 2), large


def test_flags_that_decide_behaviour_stay():
    assert [name for name in DECIDING if replace.group_of(name)] == []
    said = launch("--use-tis --custom-rm-path a.b --eps-clip-high 0.28")
    words = replaced_flags(said, *SMALL)
    for flag in kept(said):
        at = words.index(flag.name)
        assert tuple(words[at + 1 : at + 1 + len(flag.values)]) == flag.values


def test_the_command_line_is_small_and_says_each_flag_once():
    words = replaced_flags(launch(), *SMALL)
    flags = [word for word in words if word.startswith("--")]
    once = ("--num-rollout", "--rollout-batch-size", "--global-batch-size", "--lr", "--hf-checkpoint")
    assert all(flags.count(name) == 1 for name in (*once, "--prompt-data", "--actor-num-gpus-per-node"))
    value = {name: words[words.index(name) + 1] for name in once}
    assert value == dict(zip(once, ("2", "2", "4", "1e-3", "/out/model"), strict=True))
    assert words[words.index("--context-parallel-size") + 1] == "2"  # as the hook sees a split
    assert "--tensor-model-parallel-size" not in words and "--colocate" not in words
    assert "--sglang-mem-fraction-static" not in words and "--eval-prompt-data" not in words


def test_responses_are_never_longer_than_the_scripts():
    for length, small in {"5": "5", "8192": "16"}.items():
        words = replaced_flags(launch(f"--rollout-max-response-len {length}"), *SMALL)
        assert words[words.index("--rollout-max-response-len") + 1] == small


@pytest.mark.parametrize(
    ("flags", "split"),
    [
        ("", None),
        ("--tensor-model-parallel-size 8", "tensor"),
        ("--pipeline-model-parallel-size 4", "pipeline"),
    ],
)
def test_one_parallelism_stays_over_two_ranks(flags, split):
    plain = tuple(f for f in launch().flags if "parallel" not in f.name)
    said = dataclasses.replace(launch(), flags=(*plain, *launch(flags).flags[len(launch().flags) :]))
    assert replace.split_of(said) == split


def test_micro_batches_divide_the_step():
    words = replaced_flags(launch("--micro-batch-size 3"), *SMALL)
    assert words[words.index("--micro-batch-size") + 1] == "2"
    words = replaced_flags(launch("--use-dynamic-batch-size --max-tokens-per-gpu 9216"), *SMALL)
    assert words[words.index("--max-tokens-per-gpu") + 1] == "144" and "--micro-batch-size" not in words


def test_what_is_replaced_is_said():
    rows = dict(replace.account(launch("--dynamic-sampling-filter-path a.b"), "a twin", "64 rows"))
    assert rows["sizes"].startswith(
        "32 prompts x 8 samples, 64 per step (4 optimizer steps) -> 2 prompts x 8"
    )
    assert rows["ranks"] == "2 x 8 GPUs (context 2, tensor 4) -> 2 ranks, context parallel"
    assert "--recompute-granularity" in rows["speed and memory of a GPU"] and "a.b" in rows["filter"]
    assert "--use-wandb" in rows["services outside"] and "8192 -> 16" in rows["lengths"]


@pytest.mark.parametrize(
    ("flags", "family", "lost"),
    [
        ("", "qwen3", ()),
        (
            "--num-experts 8 --multi-latent-attention",
            "qwen3",
            ("mixture of experts", "multi-latent attention"),
        ),
        ("--add-qkv-bias", "qwen3", ()),
    ],
)
def test_the_twin_is_of_the_same_kind_in_both_configurations(flags, family, lost):
    small = twin.twin_of(launch(flags), 259)
    words = small.flags
    assert (small.family, small.lost) == (family, lost)
    assert small.config["vocab_size"] == 272 == int(words[words.index("--vocab-size") + 1])
    assert small.config["tie_word_embeddings"] and "--untie-embeddings-and-output-weights" not in words
    pairs = {
        "hidden_size": "--hidden-size",
        "num_key_value_heads": "--num-query-groups",
        "head_dim": "--kv-channels",
    }
    assert all(small.config[key] == int(words[words.index(flag) + 1]) for key, flag in pairs.items())


def test_numbers_of_the_model_that_are_not_known_are_defaults():
    config = twin.twin_of(launch("--rotary-base '$X' --norm-epsilon abc"), 259).config
    assert (config["rope_theta"], config["rms_norm_eps"]) == (10000, 1e-6)


@pytest.mark.skipif(not HOSTS.is_dir(), reason="HOSTS names no folder of hosts")
def test_every_script_of_slime_becomes_a_small_launch(monkeypatch):
    """No flag of a large run is left; each script's own host knows all flags."""
    for name in ("BASE_DIR", "BASE_FOLDER"):
        monkeypatch.setenv(name, "/data")
    large, unknown = ("--moe-", "--sglang-enable", "--mtp", "--offload", "--recompute", "--wandb"), set()
    megatron = Path(sys.prefix, "miles/megatron")
    for host in sorted(HOSTS.glob("slime-*")):
        known = preflight.known_flags(host / "slime", megatron)
        for path in host.glob("**/run-*.sh"):
            try:
                said = read(str(path))
            except ConfigError:
                continue
            if said.others:  # which are refused before
                continue
            words = replaced_flags(said, *SMALL)
            assert not [word for word in words if word.startswith(large)], path
            assert not [word for word in words if "$" in word], path
            if (host / "docker").is_dir():  # with what its image adds to Megatron
                unknown |= {flag.name for flag, _ in preflight.unknown_flags(said.flags, known)}
    if megatron.is_dir():
        assert not unknown
