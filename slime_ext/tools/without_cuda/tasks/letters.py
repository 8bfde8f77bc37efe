"""A model of 0.5 million random weights learns to copy four letters, in minutes.

python -m slime_ext.tools.without_cuda.tasks.letters FOLDER SEED      # the model alone
"""

from __future__ import annotations

import json
import random
import string
import sys
from pathlib import Path

from slime_ext.errors import ConfigError
from slime_ext.tools.without_cuda.tasks import Task, failure_of, write_prompts

LETTERS, LENGTH = string.ascii_lowercase[:8], 4
TRAIN, HELDOUT = 2048, 128
END_OF_PROMPT = ">"
PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
SPECIALS = (PAD, BOS, EOS)
MULTIPLE = 8  # of the vocabulary, so that tensor-parallel ranks share it evenly
PAD_STD = 0.02
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 16,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 128,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "initializer_range": 0.02,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
MODEL = """
--num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 --num-query-groups 2
--kv-channels 32 --max-position-embeddings 128 --seq-length 64 --vocab-size 16
--make-vocab-size-divisible-by 8 --norm-epsilon 1e-06 --rotary-base 10000 --normalization RMSNorm
--swiglu --group-query-attention --use-rotary-position-embeddings --disable-bias-linear --qk-layernorm
--untie-embeddings-and-output-weights
""".split()  # Megatron's flags for it
ALGORITHM = """
--custom-rm-path slime_ext.tools.without_cuda.tiny.reward --rollout-batch-size 32 --n-samples-per-prompt 16
--rollout-max-response-len 5 --num-steps-per-rollout 4 --micro-batch-size 128
--lr 1e-3 --lr-decay-style linear --entropy-coef 0.06
""".split()


def prompts() -> tuple[list[dict], list[dict]]:
    """Rows to train on and rows held out, all different: four letters to copy."""
    numbers = random.Random(0).sample(range(len(LETTERS) ** LENGTH), TRAIN + HELDOUT)
    rows = [{"input": _text(number) + END_OF_PROMPT, "label": _text(number)} for number in numbers]
    return rows[:TRAIN], rows[TRAIN:]


def _text(number: int) -> str:
    """`number` written with the letters as digits."""
    letters = []
    for _ in range(LENGTH):
        number, digit = divmod(number, len(LETTERS))
        letters.append(LETTERS[digit])
    return "".join(letters)


def vocabulary() -> list[str]:
    """Special tokens, the letters, then reserved tokens up to a multiple of eight.

    >>> len(vocabulary()), vocabulary()[3:5], vocabulary()[-1]
    (16, ['>', 'a'], '<reserved3>')
    """
    tokens = [*SPECIALS, END_OF_PROMPT, *LETTERS]
    return tokens + [f"<reserved{i}>" for i in range(-len(tokens) % MULTIPLE)]


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of single letters: it adds nothing to a text and refuses unknown letters."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    table = {token: i for i, token in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def write_config(folder: Path) -> None:
    """Writes config.json and the tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    write_tokenizer(folder)


def write_model(folder: Path, seed: int) -> None:
    """Writes config.json, tokenizer and random weights in bfloat16.

    Hugging Face sets the embedding of the pad token to zero. Behind a zero row RMSNorm multiplies gradients
    by 1/sqrt(eps) = 1000, and Megatron trains that row: here it is as random as the others.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    write_config(folder)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).bfloat16()
    torch.nn.init.normal_(model.get_input_embeddings().weight.data[0], std=PAD_STD)
    model.save_pretrained(folder)


def write(folder: Path, seed: int) -> Path:
    """Writes the prompts and the model of a run below its folder; returns the model's.

    Raises:
        ConfigError: transformers could not make the model.
    """
    write_prompts(folder, *prompts())
    if said := failure_of(__name__, str(folder / "model"), str(seed)):
        raise ConfigError(f"--task letters: expected a model in {folder / 'model'}, got '{said}'")
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

if __name__ == "__main__":
    write_model(Path(sys.argv[1]), int(sys.argv[2]))
