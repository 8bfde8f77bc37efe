"""Teaches a model of 0.5 million random weights to copy four letters, in minutes.

configs/tiny contains its prompts, its configuration and a tokenizer whose tokens are single letters.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from slime_ext.config.files import of_package
from slime_ext_cpu.tasks import Task
from slime_ext_cpu.tiny import write_weights

TINY = "configs/tiny"
MODEL = """
--num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 --num-query-groups 2
--kv-channels 32 --max-position-embeddings 128 --seq-length 64 --vocab-size 16
--make-vocab-size-divisible-by 8 --norm-epsilon 1e-06 --rotary-base 10000 --normalization RMSNorm
--swiglu --group-query-attention --use-rotary-position-embeddings --disable-bias-linear --qk-layernorm
--untie-embeddings-and-output-weights
""".split()  # Megatron's flags for this model
ALGORITHM = """
--custom-rm-path slime_ext_cpu.tiny.reward --rollout-batch-size 32 --n-samples-per-prompt 16
--rollout-max-response-len 5 --num-steps-per-rollout 4 --micro-batch-size 128
--lr 1e-3 --lr-decay-style linear --entropy-coef 0.06
""".split()


def write(folder: Path, seed: int) -> Path:
    """Writes a run's prompts and model below its folder, and returns the model's folder.

    A run that is resumed has them, and to make the weights again would import transformers for 2 s.
    """
    if not (folder / "model/model.safetensors").exists():
        shutil.copytree(of_package(TINY), folder, dirs_exist_ok=True)
        write_weights(folder / "model", seed)
    return folder / "model"


TASK = Task(
    what="a model of 0.5 million random weights learns to copy four letters",
    rollouts=60,
    rollout_s=4.0,
    threads=1,
    write=write,
    flags=(*MODEL, *ALGORITHM),
    eval_every=20,
    save_every=20,
    concurrency=24,
    context=64,
    room=128 << 20,
)
