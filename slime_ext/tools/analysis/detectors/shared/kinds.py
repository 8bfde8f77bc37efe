"""Whether samples are of two kinds, by how far off they are for how sure the sampler was, and whether the
samples of one prompt are of one kind."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from slime_ext.core.metrics.names import HEALTHY
from slime_ext.tools.analysis.measures.by_sample import SIZES
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

GAP, APART = 1, 6.0  # bins on each side of a cut that hold hardly any; between the means of both kinds
HOLDS, BETWEEN = 0.8, 0.1  # of k3; of the smaller kind
SHARE = 0.03  # of the samples and of the tokens: responses that end at once agree by chance
LEAST = 2e-3  # nats of k3 over the run
AGREES = HEALTHY["k3_kl"][1] or 0.0  # nats of k3, of the near samples
PROMPTS, FEWER, SURE = 3, 0.25, 4.0  # far prompts; of the mixed ones that chance makes; standard errors
MOST = 0.6  # of the prompts of a rollout; one with more is far off itself


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


class Prompts(NamedTuple):
    """Prompts whose samples are all near, all far, or of both kinds; how many would be of both if the kind
    did not depend on the prompt; and the samples of both kinds."""

    near: int
    far: int
    mixed: int
    expected: float
    kinds: Kinds


def whole_prompts(d: Diagnosis) -> Prompts | None:
    """The cut with the fewest prompts of both kinds, if the samples of a prompt are near or far together and
    the near ones are healthy; None if not. Each rollout is compared with itself, because a rollout that is
    far off as a whole says nothing of prompts."""
    samples = d.statistics.samples
    if not samples.groups:
        return None
    table = torch.tensor([g[1:] for g in samples.groups], dtype=torch.float64)  # [rollouts, 3, SIZES]
    count, low, high = table.unbind(1)
    size = count.sum(1) / high.sum(1).clamp_min(1)
    best: Prompts | None = None
    for cut in range(1, SIZES):
        near, far = high[:, :cut].sum(1), low[:, cut:].sum(1)
        beside = far[far <= MOST * high.sum(1)].sum()
        mixed = high.sum(1) - near - far
        share = count[:, cut:].sum(1) / count.sum(1).clamp_min(1)
        expected = float((high.sum(1) * (1 - share**size - (1 - share) ** size)).sum())
        kinds = Kinds(samples.sizes[:cut].sum(0).tolist(), samples.sizes[cut:].sum(0).tolist())
        found = Prompts(int(near.sum()), int(far.sum()), int(mixed.sum()), expected, kinds)
        is_beside = float(beside) >= HOLDS * found.far
        if is_beside and _are_apart(found, samples.sizes, cut) and (best is None or found.mixed < best.mixed):
            best = found
    return best


def _are_apart(found: Prompts, sizes: torch.Tensor, cut: int) -> bool:
    """Whether the kinds of a cut are far apart, and prompts decide which kind a sample is of."""
    (n, _, _), (m, far, k3) = found.kinds.near, found.kinds.far
    if found.far < PROMPTS or found.far > found.near or not n or found.mixed > FEWER * found.expected:
        return False
    bins = torch.arange(SIZES).double()
    apart = bins[cut:] @ sizes[cut:, 0] / m - bins[:cut] @ sizes[:cut, 0] / n
    is_far = apart >= APART and k3 >= HOLDS * float(sizes[:, 2].sum()) and k3 >= AGREES * far
    agree = found.kinds.near[2] <= AGREES * found.kinds.near[1]
    return is_far and agree and found.expected - found.mixed >= SURE * math.sqrt(found.expected)
