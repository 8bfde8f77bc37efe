"""Whether samples are of two kinds, by how far off they are for how sure the sampler was."""

from __future__ import annotations

from typing import NamedTuple

import torch

from slime_ext.tools.analysis.measures.by_sample import SIZES
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

GAP, APART = 1, 6.0  # bins on each side of a cut that hold hardly any; between the means of both kinds
HOLDS, BETWEEN = 0.8, 0.1  # of k3; of the smaller kind
SHARE = 0.03  # of the samples and of the tokens: responses that end at once agree by chance
LEAST = 2e-3  # nats of k3 over the run


class Kinds(NamedTuple):
    """Samples, tokens and sum of k3 of the near ones and of the far ones."""

    near: list[float]
    far: list[float]


def two_kinds(d: Diagnosis) -> Kinds | None:
    """The cut with the fewest samples between, if there are hardly any; None where all are of one kind."""
    sizes = d.statistics.samples.sizes
    samples, tokens, k3 = sizes.sum(0).tolist()
    if not samples or k3 < LEAST * tokens:
        return None
    best: tuple[float, Kinds] | None = None
    bins = torch.arange(SIZES).double()
    for cut in range(GAP, SIZES - GAP):
        low, high = sizes[: cut - GAP + 1], sizes[cut + GAP :]
        near, far = low.sum(0).tolist(), high.sum(0).tolist()
        between, smaller = samples - near[0] - far[0], min(near[0], far[0])
        if not smaller:
            continue
        apart = bins[cut + GAP :] @ high[:, 0] / far[0] - bins[: cut - GAP + 1] @ low[:, 0] / near[0]
        is_some = smaller >= max(2, SHARE * samples) and min(near[1], far[1]) >= SHARE * tokens
        is_cut = apart >= APART and is_some and between <= BETWEEN * smaller
        if is_cut and far[2] >= HOLDS * k3 and (best is None or between < best[0]):
            best = between, Kinds(near, far)
    return best[1] if best else None
