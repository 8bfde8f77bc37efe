"""Makes a two-layer model of the launch's kind. It gets the launch's tokenizer if this machine has it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_ext.tools.folders import is_file, is_folder
from slime_ext.tools.launch.launch import Launch

LAYERS, HIDDEN, FFN, HEADS, QUERY_GROUPS, HEAD_DIM = 2, 64, 128, 4, 2, 16
INIT_STD = 0.1  # log-probs of neighbouring tokens differ by 0.5 nats or more, which shows a shift by one
POSITIONS = 1 << 16
MULTIPLE = 16  # divides the vocabulary, for two tensor-parallel ranks
ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
TOKENIZER_FILES = "tokenizer* vocab* merges* special_tokens* added_tokens* chat_template* *.model".split()
END, BEGIN, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    + BEGIN
    + "{{ message.role }}\n{{ message.content }}"
    + STOP
    + "\n{% endfor %}"
    "{% if add_generation_prompt %}" + BEGIN + "assistant\n{% endif %}"
)
NOT_DENSE = {
    "--num-experts": "mixture of experts",
    "--multi-latent-attention": "multi-latent attention",
    "--attention-output-gate": "gated attention",
    "--mtp-num-layers": "multi-token prediction",
    "--post-self-attn-layernorm": "norms after attention and MLP",
}


@dataclass(frozen=True)
class Twin:
    """The configuration of a small model, for Hugging Face and for Megatron.

    Args:
        family: a key of ``ARCHITECTURES``.
        config: Hugging Face's configuration.
        flags: Megatron's flags.
        lost: properties of the model that the twin lacks.
    """

    family: str
    config: dict[str, Any]
    flags: tuple[str, ...]
    lost: tuple[str, ...]

    def __str__(self) -> str:
        lost = f"; without {', '.join(self.lost)}" if self.lost else ""
        return f"{LAYERS} layers x {HIDDEN} of the kind {self.family}, random weights{lost}"


def twin_of(launch: Launch, vocabulary: int) -> Twin:
    """Returns the twin of the model that a launch's flags describe.

    Args:
        vocabulary: number of tokens in the vocabulary.
    """
    family = (
        "qwen3" if launch.flag("--qk-layernorm") else "qwen2" if launch.flag("--add-qkv-bias") else "llama"
    )
    vocabulary += -vocabulary % MULTIPLE
    is_tied = not launch.flag("--untie-embeddings-and-output-weights")
    groups = QUERY_GROUPS if launch.flag("--group-query-attention") else HEADS
    eps = launch.known_number("--norm-epsilon") or 1e-6
    base = int(launch.known_number("--rotary-base") or 10000)
    config = {
        "architectures": [ARCHITECTURES[family]], "model_type": family, "vocab_size": vocabulary,
        "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
        "head_dim": HEAD_DIM, "num_attention_heads": HEADS, "num_key_value_heads": groups,
        "hidden_act": "silu", "rms_norm_eps": eps, "rope_theta": base,
        "max_position_embeddings": POSITIONS, "attention_bias": False, "tie_word_embeddings": is_tied,
        "initializer_range": INIT_STD, "torch_dtype": "bfloat16",
    }  # fmt: skip
    words = {
        "num-layers": LAYERS, "hidden-size": HIDDEN, "ffn-hidden-size": FFN, "num-attention-heads": HEADS,
        "num-query-groups": groups, "kv-channels": HEAD_DIM, "vocab-size": vocabulary, "norm-epsilon": eps,
        "make-vocab-size-divisible-by": 8, "max-position-embeddings": POSITIONS, "seq-length": 4096,
        "rotary-base": base, "normalization": "RMSNorm",
    }  # fmt: skip
    flags = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    flags += "--swiglu --group-query-attention --use-rotary-position-embeddings --disable-bias-linear".split()
    flags += {"qwen3": ["--qk-layernorm"], "qwen2": ["--add-qkv-bias"], "llama": []}[family]
    flags += [] if is_tied else ["--untie-embeddings-and-output-weights"]
    lost = tuple(text for flag, text in NOT_DENSE.items() if launch.flag(flag))
    return Twin(family, config, tuple(flags), lost)


def tokenizer_files(folder: Path) -> list[Path]:
    """Returns the tokenizer's files in a model's folder.

    There are none if the folder is not on this machine, or if the model brings its tokenizer as code.
    """
    if not is_folder(folder) or is_code(folder):
        return []
    return [f for pattern in TOKENIZER_FILES for f in folder.glob(pattern) if not f.is_dir()]


def is_code(folder: Path) -> bool:
    """Returns whether a model brings its tokenizer as code. We never run such code."""
    settings = folder / "tokenizer_config.json"
    return is_file(settings) and b'"auto_map"' in settings.read_bytes()


def tokenizer_fault(folder: Path) -> str:
    """Says what is wrong with the tokenizer's files; "" if they show nothing wrong."""
    files = tokenizer_files(folder)
    for file in files:
        if not file.is_file():
            return f"{file.name}, a link to nothing"
        if file.read_bytes().startswith(b"version https://git-lfs"):
            return f"{file.name}, a pointer of Git LFS: run `git lfs pull`"
        try:
            json.loads(file.read_bytes() if file.suffix == ".json" else "0")
        except ValueError:
            return f"{file.name}, which is not JSON"
    if files and not any(f.name.startswith(("tokenizer.", "vocab")) or f.suffix == ".model" for f in files):
        return "no tokenizer.json"
    return ""


def has_chat_template(folder: Path) -> bool:
    """Returns whether the tokenizer in a model's folder has a chat template."""
    settings = folder / "tokenizer_config.json"
    beside = [*folder.glob("chat_template*"), *folder.glob("additional_chat_templates")]
    return bool(beside) or (settings.is_file() and '"chat_template"' in settings.read_text())


def write_tokenizer(out: Path, real: Path) -> bool:
    """Copies the real tokenizer, or writes a tokenizer of bytes with a chat template.

    Returns:
        whether the tokenizer is the real one.
    """
    out.mkdir(parents=True, exist_ok=True)
    files = tokenizer_files(real)
    for file in files:
        shutil.copy(file, out / file.name)
    if not files:
        _write_byte_tokenizer(out)
    return bool(files)


def _write_byte_tokenizer(out: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (END, BEGIN, STOP)])
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": STOP,
        "pad_token": END,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
