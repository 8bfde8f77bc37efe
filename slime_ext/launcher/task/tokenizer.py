"""A character tokenizer in Hugging Face format: one token per character, nothing to download."""

from __future__ import annotations

import json
from pathlib import Path

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
SPECIALS = (PAD, BOS, EOS)


def vocabulary(characters: str, multiple: int = 8) -> list[str]:
    """Special tokens, then `characters`, then reserved tokens up to a multiple of `multiple`.

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
    return tokens + [f"<reserved{i}>" for i in range(-len(tokens) % multiple)]


def build(characters: str, multiple: int = 8):
    """The tokenizer as ``tokenizers.Tokenizer``. It adds nothing to a text and refuses unknown characters."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    tokens = vocabulary(characters, multiple)
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return tokenizer


def save(directory: Path, characters: str, multiple: int = 8) -> None:
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
    (directory / "tokenizer.json").write_text(build(characters, multiple).to_str(pretty=True) + "\n")
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
