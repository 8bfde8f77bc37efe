"""Finds tokens that follow the same text: the same prompt, the same tokens before and the same weights.

Differences of log-probs between such tokens are differences of logits, because the normaliser is the same.
"""

from __future__ import annotations

from dataclasses import field
from typing import NamedTuple

import torch
from torch import Tensor

from slime_ext.tools.analysis.measures.measure import Measure, once_per_part
from slime_ext.tools.analysis.records import DumpedRollout

FEWEST, LARGEST, KEPT = 3, 6, 32  # tokens of a context that are needed and kept; contexts of a part
PREFIX = 32  # first tokens of a response that are compared with other samples of its prompt
MIXER = 0x1E3779B97F4A7C15  # an odd number with irregular bits, for hashes


class Texts(NamedTuple):
    """Hashes of the text before some tokens, [N] int64 each.

    Attributes:
        at: place of the token in the part.
        before: of everything before it.
        until: of everything up to and including it.
    """

    at: Tensor
    before: Tensor
    until: Tensor


@once_per_part
def texts_of(part: DumpedRollout) -> Texts:
    """Returns the texts of the first tokens of each sample; empty without token ids or prompts."""
    if not part.size or part.tokens is None or part.groups is None:
        return Texts(*(torch.zeros(0, dtype=torch.int64) for _ in Texts._fields))
    at = part.first_tokens(PREFIX)
    sample, within = part.segments.ids[at], part.segments.within[at]
    mixed = (part.tokens[at] + 1) * MIXER * (2 * within + 1)
    mixed = (mixed ^ (mixed >> 31)) * MIXER
    sums = mixed.cumsum(0)  # modulo 2^64
    lengths = part.response_lengths.clamp(max=PREFIX)
    before = torch.cat([sums.new_zeros(1), sums])[lengths.cumsum(0) - lengths]
    prompts = torch.tensor(part.groups) * 131 + torch.tensor(part.prompt_lengths)
    keys = sums + (prompts * MIXER - before)[sample]
    if part.versions is not None:  # other weights score the same text differently
        keys = keys + (part.versions[at] + 2) * (MIXER ^ (MIXER >> 17))
    known = part.finite[at]
    return Texts(at[known], (keys - mixed)[known], keys[known])


# A context that is kept: log-probs of its tokens under the sampler, nats, then those under the trainer.
Context = tuple[tuple[float, ...], tuple[float, ...]]


class Contexts(Measure):
    """Contexts that several samples share and after which they have at least FEWEST different tokens."""

    rows: list[Context] = field(default_factory=list)

    def add(self, part: DumpedRollout) -> None:
        at, before, until = texts_of(part)
        if not len(at):
            return
        first, index = _first_of_each(until)
        counts = torch.bincount(index).double()
        both = torch.stack([part.behavior[at].double(), part.proximal[at].double()])
        means = torch.zeros(2, len(counts), dtype=torch.float64).index_add_(1, index, both) / counts
        _, inverse, sizes = before[first].unique(return_inverse=True, return_counts=True)
        for number in (sizes >= FEWEST).nonzero()[:KEPT, 0].tolist():
            of_one = means[:, inverse == number]
            likeliest = of_one[0].topk(min(LARGEST, of_one.shape[1])).indices
            sampler, trainer = of_one[:, likeliest].tolist()
            self.rows.append((tuple(sampler), tuple(trainer)))


def _first_of_each(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the place of the first token with each key, and the number of each token's key."""
    values, index = keys.unique(return_inverse=True)
    places = torch.arange(len(keys))
    first = torch.full((len(values),), len(keys)).scatter_reduce(0, index, places, "amin")
    return first, index
