"""The prompt files: every line readable, every prompt short enough, a reward for each."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from slime_ext.errors import ConfigError, DataError
from slime_ext.launcher.task.prompts import Prompt, read_prompts
from slime_ext.launcher.task.rewards import check_rm_type

Count = Callable[[str], int]


def check_prompts(args: argparse.Namespace) -> None:
    """Reads training and held-out prompts."""
    count = token_counter(args.hf_checkpoint, args.vocab_size)
    limits = (args.max_position_embeddings, args.sglang_context_length, args.sglang_max_total_tokens)
    context = min(limit for limit in limits if limit is not None)  # of prompt and response
    files = [(args.prompt_data, args.rollout_max_response_len)]
    files += [(path, args.eval_max_response_len) for _, path in args.eval_datasets]
    for path, response in files:
        prompts = read_prompts(path, args.input_key, args.label_key)
        _check_rewards(args, path, prompts)
        _check_lengths(path, prompts, count, context - response, args)


def token_counter(directory: str, vocab_size: int) -> Count:
    """Counts the tokens of a text with the tokenizer in `directory`; needs no torch.

    Raises:
        ConfigError: a tokenizer that does not load, or has more tokens than the model's `vocab_size`.
    """
    from tokenizers import Tokenizer

    where = f"--hf-checkpoint {directory}"
    try:
        tokenizer = Tokenizer.from_file(str(Path(directory) / "tokenizer.json"))
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{where}: expected a tokenizer.json that loads, got {reason}") from error
    # An id outside of the model's vocabulary would end SGLang's CPU server.
    if (size := max(tokenizer.get_vocab().values()) + 1) > vocab_size:
        raise ConfigError(
            f"{where}: expected a tokenizer of at most {vocab_size} tokens (vocab_size of config.json), "
            f"got {size}: it belongs to another model"
        )
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _check_rewards(args: argparse.Namespace, path: str, prompts: list[Prompt]) -> None:
    if args.custom_rm_path:
        return
    for prompt in prompts:
        check_rm_type(prompt.metadata.get("rm_type") or args.rm_type)
        if prompt.label is None:
            raise ConfigError(
                f"--label-key: expected the key of the label in {path}, got nothing: the reward needs it"
            )


def _check_lengths(
    path: str, prompts: list[Prompt], count: Count, room: int, args: argparse.Namespace
) -> None:
    """Every prompt that --rollout-max-prompt-len lets through fits, and there is one."""
    if room < 1:
        raise ConfigError(
            f"--rollout-max-response-len: expected room for a prompt in the context, got {room} tokens"
        )
    longest = args.rollout_max_prompt_len
    lengths = {p.line: _length(f"{path}:{p.line}", p.text, count) for p in prompts}
    taken = {line: length for line, length in lengths.items() if longest is None or length <= longest}
    if not taken:
        raise DataError(
            f"{path}: expected a prompt of at most {longest} tokens (--rollout-max-prompt-len), got none"
        )
    for line, length in taken.items():
        if length > room:
            raise ConfigError(
                f"{path}:{line}: expected a prompt of at most {room} tokens (context less longest response), "
                f"got {length}: lower --rollout-max-response-len or --rollout-max-prompt-len"
            )


def _length(where: str, text: str, count: Count) -> int:
    try:
        return count(text)
    except Exception as error:
        raise DataError(f"{where}: expected text of the tokenizer's characters, got {text[:40]!r}") from error
