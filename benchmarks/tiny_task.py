"""The small task of configs/tiny: letters that are to be copied, a small model, a character tokenizer.

``python -m benchmarks.tiny_task --out DIR`` writes DIR/train.jsonl, DIR/heldout.jsonl and DIR/model
(config.json of a Qwen3 and the tokenizer, no weights), and DIR/model_moe, where each MLP is a mixture of
experts. The same settings give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import random
import string
from dataclasses import dataclass
from pathlib import Path

END_OF_PROMPT = ">"
PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
SPECIALS = (PAD, BOS, EOS)


@dataclass(frozen=True)
class Task:
    """The prompts: `length` of `alphabet` letters; the label is the same letters."""

    alphabet: int = 8
    length: int = 4
    train: int = 2048
    heldout: int = 128
    seed: int = 0

    @property
    def letters(self) -> str:
        return string.ascii_lowercase[: self.alphabet]


@dataclass(frozen=True)
class Model:
    """The sizes of the Qwen3-shaped model."""

    layers: int = 2
    hidden: int = 128
    ffn: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    positions: int = 128
    experts: int = 8
    active: int = 2


def prompts(task: Task) -> tuple[list[str], list[str]]:
    """Training and held-out texts, all different; at most `alphabet` ** `length` of them."""
    numbers = random.Random(task.seed).sample(range(task.alphabet**task.length), task.train + task.heldout)
    texts = [_text(number, task) for number in numbers]
    return texts[: task.train], texts[task.train :]


def _text(number: int, task: Task) -> str:
    """`number` written with `task.letters` as digits."""
    letters = []
    for _ in range(task.length):
        number, digit = divmod(number, task.alphabet)
        letters.append(task.letters[digit])
    return "".join(letters)


def lines(texts: list[str]) -> str:
    """JSONL with the keys input and label."""
    rows = ({"input": text + END_OF_PROMPT, "label": text} for text in texts)
    return "".join(json.dumps(row) + "\n" for row in rows)


def model_config(model: Model, vocab_size: int) -> dict[str, object]:
    """config.json of a Qwen3ForCausalLM."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": model.positions,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "initializer_range": 0.02,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }


def moe_config(model: Model, vocab_size: int) -> dict[str, object]:
    """config.json of a Qwen3MoeForCausalLM, whose `active` experts together are as wide as the dense MLP."""
    return {
        **model_config(model, vocab_size),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": model.experts,
        "num_experts_per_tok": model.active,
        "moe_intermediate_size": model.ffn // model.active,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def vocabulary(characters: str) -> list[str]:
    """Special tokens, then `characters`, then reserved tokens up to a multiple of 8.

    The multiple lets tensor-parallel ranks share the table evenly. A reserved token is an ordinary one: the
    model may sample it, and it decodes to its name.

    Raises:
        ValueError: a character twice.

    >>> vocabulary("ab")
    ['<pad>', '<bos>', '<eos>', 'a', 'b', '<reserved0>', '<reserved1>', '<reserved2>']
    """
    if len(set(characters)) != len(characters):
        raise ValueError(f"characters: expected each once, got {characters!r}")
    tokens = [*SPECIALS, *characters]
    return tokens + [f"<reserved{i}>" for i in range(-len(tokens) % 8)]


def build_tokenizer(characters: str):
    """The tokenizer as ``tokenizers.Tokenizer``. It adds nothing to a text and refuses unknown characters."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    tokens = vocabulary(characters)
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


def save_tokenizer(directory: Path, characters: str) -> None:
    """Writes tokenizer.json and tokenizer_config.json, which ``AutoTokenizer.from_pretrained`` reads."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(build_tokenizer(characters).to_str(pretty=True) + "\n")
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def write_all(out: Path, task: Task | None = None, model: Model | None = None) -> None:
    """Writes the two prompt files and the two model directories below `out`."""
    task, model = task or Task(), model or Model()
    train, heldout = prompts(task)
    alphabet = END_OF_PROMPT + task.letters
    for name, config in {"model": model_config, "model_moe": moe_config}.items():
        directory = out / name
        directory.mkdir(parents=True, exist_ok=True)
        settings = config(model, len(vocabulary(alphabet)))
        (directory / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
        save_tokenizer(directory, alphabet)
    (out / "train.jsonl").write_text(lines(train))
    (out / "heldout.jsonl").write_text(lines(heldout))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the small task and its model directory.")
    parser.add_argument("--out", type=Path, required=True)
    write_all(parser.parse_args().out)
