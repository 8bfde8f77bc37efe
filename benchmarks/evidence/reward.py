"""The lag panel's reward: the share of an answer's tokens that stand where the label has them."""

from __future__ import annotations

from argparse import Namespace
from functools import cache

from transformers import AutoTokenizer

from slime_ext.launcher.rollout.sample import RolloutSample


def tokens_in_place(args: Namespace, sample: RolloutSample) -> float:
    """Right tokens / the longer of answer and label, in tokens, the end being one of them; in [0, 1].

    The built-in ``characters`` compares text, where a special token is several characters: one of them in an
    answer moves all letters behind it. A model with random weights earns half as much then, and learns late.
    Prompts with ``rm_type: exact`` in their metadata (the held-out ones) are worth 1 for the whole answer.
    """
    answer, wanted = sample.tokens[-sample.response_length :], _ids(args.hf_checkpoint, sample.label)
    if (sample.metadata or {}).get("rm_type") == "exact":
        return float(answer == wanted)
    right = sum(a == b for a, b in zip(answer, wanted, strict=False))
    return right / max(len(answer), len(wanted))


async def of_host(args: Namespace, sample: object, **kwargs: object) -> float:
    """The same as slime and miles call it at --custom-rm-path."""
    return tokens_in_place(args, sample)


@cache
def _ids(directory: str, label: str) -> list[int]:
    """Token ids of a label and of the end."""
    tokenizer = _tokenizer(directory)
    return [*tokenizer.encode(label, add_special_tokens=False), tokenizer.eos_token_id]


@cache
def _tokenizer(directory: str):
    return AutoTokenizer.from_pretrained(directory)
