"""What a host refuses of flags that a rehearsal replaces."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from slime_ext_cpu.rehearsal.refused import refusals
from tests.cpu.rehearsal.launches import launch

CASES = {  # further flags -> what is said of the one in line 27, and nothing where the host takes them
    "--save-interval 20": "--save-interval: expected --save beside it, got none",
    "--save-interval 20 --save /ckpt": None,
    "--save-interval 20 --save '$OUT'": None,
    "--release-train": "--release-train: expected --save beside it, got none",
    "--eval-interval 5": "--eval-interval: expected --eval-prompt-data or --eval-config beside it, got none",
    "--eval-interval 5 --eval-config eval.yaml": None,
    "--eval-interval 5 --eval-prompt-data aime /a": None,
    "--eval-prompt-data /a": None,
    "--eval-prompt-data aime /a amc": (
        "--eval-prompt-data: expected pairs of a name and a file, got 'aime /a amc'"
    ),
    "--eval-prompt-data aime /a amc --eval-config eval.yaml": None,
    "--use-dynamic-batch-size": "--use-dynamic-batch-size: expected --max-tokens-per-gpu beside it, got none",
    "--use-dynamic-batch-size --max-tokens-per-gpu 9216": None,
    "--over-sampling-batch-size 16": (
        "--over-sampling-batch-size 16: expected --rollout-batch-size at most it, got 32"
    ),
    "--over-sampling-batch-size 32": None,
    "--over-sampling-batch-size '$N'": None,
    "--rollout-max-context-len 8 --rollout-max-prompt-len 8": (
        "--rollout-max-context-len 8: expected --rollout-max-prompt-len less than it, got 8"
    ),
    "--rollout-max-context-len 9 --rollout-max-prompt-len 8": None,
}


@pytest.mark.parametrize("flags", CASES)
def test_what_the_host_would_refuse_is_one_line(flags):
    found = [line.removesuffix(": the host refuses that") for line in refusals(launch(flags))]
    line = CASES[flags]
    assert found == ([f"run.sh:27: {line}"] if line else [])


def test_a_number_that_a_gap_can_set_again_is_not_compared():
    over = "--over-sampling-batch-size"
    for name in (over, "--rollout-batch-size"):
        assert not list(refusals(replace(launch(f"{over} 16"), unknown={name: "run.sh:1: $MORE"})))


def test_a_launch_without_an_end_is_one_line():
    without = replace(launch(), flags=tuple(f for f in launch().flags if f.name != "--num-rollout"))
    assert list(refusals(without)) == [
        "run.sh: expected --num-rollout or --num-epoch in the launch, got neither: the host refuses that"
    ]
    assert not list(refusals(replace(without, others="run.sh:1: $MORE")))
    assert not list(refusals(replace(without, flags=())))  # of which others say that it launches nothing


QWEN3_4B = {
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "num_attention_heads": 32,
    "intermediate_size": 9728,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
}
MODELS = {  # changes of the configuration, flags -> what is said
    ("", "--rotary-base 1e6 --norm-epsilon 1e-6 --ffn-hidden-size 9728"): None,
    ("", "--hidden-size '$WIDTH'"): None,
    ('{"rope_parameters": {"rope_theta": 5000000}}', "--rotary-base 5000000"): None,
    ('{"num_experts": 8, "intermediate_size": 0}', "--ffn-hidden-size 9728"): None,
    ('{"hidden_size": 4096}', "--train-backend fsdp"): None,
    ('{"text_config": {"hidden_size": 2560}, "hidden_size": 1}', ""): None,
    ("[]", ""): None,
    ("{", ""): None,
    ("", "--ffn-hidden-size 1"): "--ffn-hidden-size 1 where its intermediate_size is 9728",
    ('{"hidden_size": 4096}', ""): "--hidden-size 2560 where its hidden_size is 4096",
    ('{"moe_intermediate_size": 768}', "--moe-ffn-hidden-size 1536"): (
        "--moe-ffn-hidden-size 1536 where its moe_intermediate_size is 768"
    ),
    ("", "--num-layers 28 --rotary-base 10000"): (
        "--num-layers 28 where its num_hidden_layers is 36, "
        "--rotary-base 10000 where its rope_theta is 1000000"
    ),
    ('{"text_config": {"hidden_size": 1}}', ""): "--hidden-size 2560 where its hidden_size is 1",
    ('{"tie_word_embeddings": false}', ""): (
        "--untie-embeddings-and-output-weights not set where its tie_word_embeddings is false"
    ),
    ("", "--untie-embeddings-and-output-weights"): (
        "--untie-embeddings-and-output-weights set where its tie_word_embeddings is true"
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_checkpoint_of_another_model_is_one_line(case, tmp_path):
    changes, flags = case
    try:
        text = json.dumps(QWEN3_4B | dict(json.loads(changes or "{}")))
    except ValueError:
        text = changes
    (tmp_path / "config.json").write_text("[]" if changes == "[]" else text)
    line = MODELS[case]
    said = (
        f"run.sh:27: --hf-checkpoint: expected the model of the launch's flags in {tmp_path}, got another: "
    )
    found = list(refusals(launch(f"--hf-checkpoint {tmp_path} {flags}")))
    assert found == ([f"{said}{line}: give the flags of that model"] if line else [])


def test_embeddings_are_compared_only_if_the_flags_of_the_model_are_known(tmp_path):
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    tied = launch(f"--hf-checkpoint {tmp_path}")
    without = replace(tied, flags=tuple(flag for flag in tied.flags if flag.name != "--num-layers"))
    unknown = {"--untie-embeddings-and-output-weights": "run.sh:1: $MODEL"}
    launches = tied, without, replace(tied, unknown=unknown)
    assert [len(list(refusals(each))) for each in launches] == [1, 0, 0]


def test_a_checkpoint_that_is_not_here_is_not_compared():
    assert not list(refusals(launch("--hf-checkpoint /absent")))
    assert not list(refusals(launch("--hf-checkpoint")))
