"""The lag panel's reward: the share of an answer's tokens that stand where the label has them."""

from __future__ import annotations

from argparse import Namespace
from functools import cache

from transformers import AutoTokenizer

from slime_ext.launcher.rollout.sample import Sample
from slime_ext.launcher.task.rewards import RULES


def tokens_in_place(args: Namespace, sample: Sample) -> float:
    """Right tokens / the longer of answer and label, in tokens, the end being one of them; in [0, 1].

    The built-in ``characters`` compares text, where a special token is several characters: one of them in an
    answer moves all letters behind it: a model with random weights earns half as much, and learns late.
    A prompt that names a rule in its metadata (held-out ones: ``exact``) is scored by that.
    """
    named = sample.metadata.get("rm_type")
    if named:
        return RULES[named](sample.response, sample.label, sample.status == "completed")
    answer, wanted = sample.response_tokens, _ids(args.hf_checkpoint, sample.label)
    right = sum(a == b for a, b in zip(answer, wanted, strict=False))
    return right / max(len(answer), len(wanted))


@cache
def _ids(directory: str, label: str) -> list[int]:
    """Token ids of a label and of the end."""
    tokenizer = _tokenizer(directory)
    return [*tokenizer.encode(label, add_special_tokens=False), tokenizer.eos_token_id]


@cache
def _tokenizer(directory: str):
    return AutoTokenizer.from_pretrained(directory)
