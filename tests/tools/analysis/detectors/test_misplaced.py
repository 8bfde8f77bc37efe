"""Log-probs that belong to other tokens: the place that they come from is named, with its share of k3."""

from __future__ import annotations

import numpy
import pytest
import torch

from tests.tools.analysis.detectors.toys import edited, findings, run

SAMPLES, LENGTH, PROMPT = 64, 48, 8


def ranks_of(chunks, cp, is_contiguous):
    """What each context-parallel rank holds, as a list of chunks."""
    if is_contiguous:
        return [[chunks[2 * rank], chunks[2 * rank + 1]] for rank in range(cp)]
    return [[chunks[rank], chunks[2 * cp - 1 - rank]] for rank in range(cp)]


def joined(ranks, is_contiguous):
    """The text that a trainer gets which takes the ranks' chunks for those of a layout."""
    if is_contiguous:
        return numpy.concatenate([chunk for rank in ranks for chunk in rank])
    first, second = ([rank[half] for rank in ranks] for half in (0, 1))
    return numpy.concatenate(first + second[::-1])


def mixed_up(text, cp, is_contiguous):
    """A text cut in one layout and joined in the other, padded to equal chunks."""
    padded = numpy.append(text, numpy.zeros(-len(text) % (2 * cp)))
    ranks = ranks_of(padded.reshape(2 * cp, -1), cp, is_contiguous)
    return joined(ranks, not is_contiguous)[: len(text)]


def disordered(rollout, cp, is_contiguous, pack):
    """The trainer's log-probs of each pack of samples, prompts included, in the order of another layout."""
    rows = rollout.proximal.view(SAMPLES, LENGTH).double().numpy()
    whole = numpy.concatenate([numpy.full((SAMPLES, PROMPT), -1.0), rows], 1)
    # The log-prob of a token lies in the row of the token before it.
    whole = numpy.concatenate([whole[:, 1:], numpy.full((SAMPLES, 1), -1.0)], 1)
    packs = [mixed_up(text, cp, is_contiguous) for text in whole.reshape(SAMPLES // pack, -1)]
    rows = numpy.concatenate(packs).reshape(SAMPLES, -1)[:, PROMPT - 1 : -1]
    batches = tuple(i // pack for i in range(SAMPLES))
    places = tuple(i % pack for i in range(SAMPLES))
    proximal = torch.from_numpy(rows.reshape(-1).copy()).float()
    return {"proximal": proximal, "batches": batches, "places": places}


@pytest.mark.parametrize("pack", [1, 4])
@pytest.mark.parametrize("is_contiguous", [True, False])
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_chunks_of_another_layout_are_put_back_and_the_layout_is_named(cp, is_contiguous, pack):
    found = findings(edited(run(), lambda r: disordered(r, cp, is_contiguous, pack)))
    assert set(found) == {"permuted_log_probs"}
    text = found["permuted_log_probs"].evidence
    assert f"context-parallel size {cp}" in text
    first, second = ("contiguous", "zigzag") if is_contiguous else ("zigzag", "contiguous")
    assert text.index(first) < text.index(second)
    assert ("over each micro-batch" in text) == (pack > 1)
    assert found["permuted_log_probs"].explains > 0.99
