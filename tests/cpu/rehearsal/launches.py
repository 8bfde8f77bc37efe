"""Launches for the tests of a rehearsal."""

from __future__ import annotations

import shlex

from slime_ext.tools.launch.launch import Launch, Unread, WrittenFlag

WORDS = """--num-layers 36 --hidden-size 2560 --qk-layernorm --group-query-attention --hf-checkpoint /m
--ref-load /r --prompt-data /d.jsonl --input-key prompt --label-key label --rm-type math
--num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 64
--rollout-max-response-len 8192 --lr 1e-6 --advantage-estimator grpo --eps-clip 0.2
--tensor-model-parallel-size 4 --context-parallel-size 2 --actor-num-nodes 2
--actor-num-gpus-per-node 8 --colocate --sglang-mem-fraction-static 0.7 --recompute-granularity full
--use-wandb"""


def launch(more: str = "", program: str = "train.py") -> Launch:
    """A launch of slime with further flags; each flag is on the line of its place among them."""
    words = shlex.split(f"{WORDS} {more}")
    begins = [i for i, word in enumerate(words) if word.startswith("--")]
    flags = [
        WrittenFlag(words[a], tuple(Unread(w) if "$" in w else w for w in words[a + 1 : b]), f"run.sh:{n}")
        for n, (a, b) in enumerate(zip(begins, [*begins[1:], len(words)], strict=True), 1)
    ]
    unread = [flag for flag in flags if any(isinstance(word, Unread) for word in flag.values)]
    unknown = {flag.name: f"{flag.where}: {flag} is known only where the script runs" for flag in unread}
    return Launch("run.sh", program, tuple(flags), {}, unknown)
