"""``rehearsal.refused`` says what the host's own parser says, of a launch and of one change after another."""

from __future__ import annotations

import json
import shlex

import pytest

from slime_ext.tools.launch.launch import Launch, WrittenFlag
from slime_ext_cpu.rehearsal.refused import refusals
from tests.downstream.host_parser import on_a_rank
from tests.ranks import run_ranks

CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
FLAGS = """--num-layers 36 --hidden-size 2560 --num-attention-heads 32 --ffn-hidden-size 9728
--norm-epsilon 1e-6 --rotary-base 1000000 --kv-channels 128 --group-query-attention --num-query-groups 8
--vocab-size 151936 --swiglu --normalization RMSNorm --disable-bias-linear --hf-checkpoint {model}
--prompt-data /d.jsonl --num-rollout 3 --rollout-batch-size 8 --n-samples-per-prompt 4
--global-batch-size 32 --rollout-max-response-len 64 --actor-num-nodes 1 --actor-num-gpus-per-node 1
--rollout-num-gpus 1 --micro-batch-size 1"""
CHANGES = """
--save-interval 2
--save-interval 2 --save {model}
--eval-interval 5
--eval-interval 5 --eval-prompt-data held /held.jsonl
--eval-prompt-data held /held.jsonl more
--use-dynamic-batch-size
--use-dynamic-batch-size --max-tokens-per-gpu 999
--over-sampling-batch-size 4
--over-sampling-batch-size 8
--rollout-max-context-len 8 --rollout-max-prompt-len 8
--rollout-max-context-len 9 --rollout-max-prompt-len 8
--num-layers 28
--hidden-size 4096
--num-attention-heads 16
--ffn-hidden-size 1
--norm-epsilon 1e-5
--rotary-base 10000
--untie-embeddings-and-output-weights
""".splitlines()  # the first is none


def launched(words):
    """A launch of these words."""
    begins = [i for i, word in enumerate(words) if word.startswith("--")]
    pairs = zip(begins, [*begins[1:], len(words)], strict=True)
    flags = tuple(WrittenFlag(words[a], tuple(words[a + 1 : b]), "run.sh:1") for a, b in pairs)
    return Launch("run.sh", "train.py", flags)


@pytest.mark.slow
@pytest.mark.host
def test_what_is_refused_here_is_what_the_host_refuses(host, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    text = FLAGS.format(model=tmp_path)
    texts = [f"{text} {change.format(model=tmp_path)}" for change in CHANGES]
    texts.append(text.replace("--num-rollout 3", ""))
    found = [tuple(shlex.split(each)) for each in texts]
    (theirs,) = run_ranks(on_a_rank, 1, host.name, str(host.folder), found)
    for change, words, (who, line) in zip([*CHANGES, "no end"], found, theirs, strict=True):
        ours = list(refusals(launched(words)))
        assert (len(ours), who) == ((1, "host") if line else (0, "")), (change, ours, line)
    assert sum(bool(line) for _, line in theirs) == 14
