"""Finds tokens that follow the same text: the same prompt, the same tokens before and the same weights.

Differences of log-probs between such tokens are differences of logits, because the normaliser is the same.
"""

from __future__ import annotations

from dataclasses import field
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from slime_ext.tools.analysis.measures.measure import Measure, once_per_part
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import any_true, run_begins
from slime_ext.tools.analysis.values import integers

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
    at = part.first_tokens(PREFIX).numpy()
    lengths = part.response_lengths.numpy().clip(max=PREFIX)
    mixed = (part.tokens.numpy()[at] + 1) * MIXER * (2 * part.segments.within.numpy()[at] + 1)
    mixed = (mixed ^ (mixed >> 31)) * MIXER
    sums = mixed.cumsum()  # modulo 2^64
    before = numpy.concatenate([[0], sums])[lengths.cumsum() - lengths]
    prompts = integers(part.groups).numpy() * 131 + integers(part.prompt_lengths).numpy()
    keys = sums + (prompts * MIXER - before).repeat(lengths)
    if part.versions is not None:  # other weights score the same text differently
        keys += (part.versions.numpy()[at] + 2) * (MIXER ^ (MIXER >> 17))
    known = part.finite.numpy()[at]
    return Texts(*(torch.from_numpy(x[known]) for x in (at, keys - mixed, keys)))


class Runs(NamedTuple):
    """Tokens in the order of a key, so that those with an equal key are next to each other.

    Attributes:
        at: place of each token in the part, [N]; those with an equal key are in order.
        order: the places before, [N].
        begins, sizes: first token and number of tokens of each key, in rising order of the keys.
        run: number of each token's key, [N].
    """

    at: Tensor
    order: Tensor
    begins: Tensor
    sizes: Tensor
    run: Tensor

    @classmethod
    def of(cls, at: Tensor, keys: Tensor) -> Runs:
        """Returns the tokens at some places [N] in the order of their keys [N]."""
        # In numpy, which sorts a few thousand keys in less time.
        order = keys.numpy().argsort(kind="stable")
        begins = run_begins(torch.from_numpy(keys.numpy()[order])).numpy()
        sizes = numpy.diff(begins, append=len(keys))
        run = numpy.arange(len(begins)).repeat(sizes)
        return cls(*map(torch.from_numpy, (at.numpy()[order], order, begins, sizes, run)))

    def sizes_of_tokens(self) -> Tensor:
        """Returns how many tokens have the key of each token, in the order before, [N]."""
        return torch.empty_like(self.order).index_copy_(0, self.order, self.sizes[self.run])

    def log_probs(self, part: DumpedRollout) -> tuple[Tensor, Tensor]:
        """Returns the log-probs of both sides, [2, N], sampler first, and their means by key, [2, keys]."""
        both = torch.stack([part.behavior[self.at].double(), part.proximal[self.at].double()])
        means = torch.zeros(2, len(self.begins), dtype=torch.float64).index_add_(1, self.run, both)
        return both, means / self.sizes


@once_per_part
def by_context(part: DumpedRollout) -> Runs:
    """Returns the tokens of ``texts_of`` by the text before them."""
    texts = texts_of(part)
    return Runs.of(texts.at, texts.before)


@once_per_part
def by_text(part: DumpedRollout) -> Runs:
    """Returns the tokens of ``texts_of`` by the text up to and including them."""
    texts = texts_of(part)
    return Runs.of(texts.at, texts.until)


# A context that is kept: log-probs of its tokens under the sampler, nats, then those under the trainer.
Context = tuple[tuple[float, ...], tuple[float, ...]]


class Contexts(Measure):
    """Contexts that several samples share and after which they have at least FEWEST different tokens."""

    rows: list[Context] = field(default_factory=list)

    def add(self, part: DumpedRollout) -> None:
        if not any_true(by_context(part).sizes >= FEWEST):
            return
        before, texts = texts_of(part).before, by_text(part)
        contexts = Runs.of(texts.at[texts.begins], before[texts.order[texts.begins]])
        shared = (contexts.sizes >= FEWEST).nonzero()[:KEPT, 0]
        if not len(shared):
            return
        # In numpy, because a context has a few tokens, and torch takes 4 us for each operation on them.
        means, order = texts.log_probs(part)[1].numpy(), contexts.order.numpy()
        places = (x[shared].tolist() for x in (contexts.begins, contexts.sizes))
        for begin, size in zip(*places, strict=True):
            of_one = means[:, order[begin : begin + size]]
            sampler, trainer = of_one[:, (-of_one[0]).argsort(kind="stable")[:LARGEST]].tolist()
            self.rows.append((tuple(sampler), tuple(trainer)))
