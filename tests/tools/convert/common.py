"""Batches with the awkward cases of these systems, and one comparison for all of them."""

from __future__ import annotations

import functools
import math

import torch

from slime_ext import load_config
from slime_ext.tools.convert import read
from tests import oracle
from tests.batches import tokens

BATCHES, EACH = 25, 4  # batches, and random ones in each: a call costs more than its sequences
KEYS = ("behavior", "proximal", "target")


def batch_of(seed, *, far=True):
    """Ragged sequences with finite log-probs; some log-ratios beyond +-20 unless ``far`` is False."""
    batch = oracle.random_batch(seed, wild=False)
    rng = oracle.random.Random(-seed - 1)
    for s in batch:
        for key in (*KEYS, "advantage", "host_loss"):
            s[key] = [x if math.isfinite(x) and abs(x) < 1e3 else -1.0 for x in s[key]]
        for i in range(len(s["mask"])):
            if far and rng.random() < 0.03:
                apart = rng.choice([25.0, -25.0, 60.0, 7.0, -7.0])
                for key in ("proximal", "target"):  # the sampler's must stay a log-prob, at most 0
                    s[key][i] -= max(apart, 0.0)
                s["behavior"][i] = s["proximal"][i] + apart
    return batch


@functools.cache
def prepared(seed, numerator):
    """What every configuration is given: rows for a transcription, packed tokens for us."""
    batch = [s for i in range(EACH) for s in batch_of(EACH * seed + i)]
    return rows(batch, numerator), tokens(batch)[0]


def rows(batch, numerator="proximal"):
    """Per sequence: log-ratios and mask, as the transcriptions take them."""
    return [
        ([n - b for n, b in zip(s[numerator], s["behavior"], strict=True)], list(s["mask"])) for s in batch
    ]


def flat(values):
    return [x for row in values for x in row]


def compare(system, block, transcription, *, numerator="proximal", seeds=range(BATCHES)):
    """Weights at kept tokens and the kept tokens themselves, against (weights, mask) per sequence."""
    correction = load_config(read(system, block).mapping)
    assert correction.numerator == numerator
    for seed in seeds:
        given, packed = prepared(seed, numerator)
        weights, masks = transcription(given)
        outcome = correction(packed)
        assert outcome.keep.int().tolist() == [int(m) for m in flat(masks)], f"seed {seed}"
        expected = torch.tensor(flat(weights), dtype=torch.float64)
        got = torch.where(outcome.keep, outcome.weights, 0).double()
        expected = torch.where(outcome.keep, expected, 0)
        torch.testing.assert_close(
            got, expected, rtol=1e-9, atol=1e-8, msg=lambda m, s=seed: f"seed {s}: {m}"
        )
