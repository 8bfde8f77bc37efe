"""The reward of the letters, by hand."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from pathlib import Path

import pytest

from slime_ext_cpu import tiny

ARGS = Namespace(hf_checkpoint=str(Path(__file__).parents[2] / "configs/tiny/model"))
PROMPT = [4, 5, 4, 5, 3]  # abab>; the label abab and the end are 4, 5, 4, 5, 2; 12 is <reserved0>


@pytest.mark.parametrize(
    ("answer", "share", "exact"),
    [
        ([4, 5, 4, 5, 2], 1.0, 1.0),
        ([4, 5, 4, 5, 4], 4 / 5, 0.0),  # no end
        ([12, 5, 4, 5, 2], 4 / 5, 0.0),  # one token of eleven characters moves nothing behind it
        ([4, 5, 2], 2 / 5, 0.0),
        ([4, 5, 4, 5, 4, 2], 4 / 6, 0.0),  # to pad an answer out costs
        ([5, 4, 5, 4, 2], 1 / 5, 0.0),
        ([12], 0.0, 0.0),
        ([], 0.0, 0.0),
    ],
)
def test_the_reward_is_the_share_of_tokens_in_place(answer, share, exact):
    sample = Namespace(tokens=PROMPT + answer, response_length=len(answer), label="abab", metadata={})
    assert tiny.tokens_in_place(ARGS, sample) == pytest.approx(share)
    assert asyncio.run(tiny.reward(ARGS, sample, evaluation=True)) == pytest.approx(share)
    sample.metadata = {"rm_type": "exact"}
    assert tiny.tokens_in_place(ARGS, sample) == exact
