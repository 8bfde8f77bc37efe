"""The finding ``other_log_probs``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slime_ext.core.metrics.names import HEALTHY
from slime_ext.tools.analysis.detectors.shared.ages import older_are_far
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.detectors.shared.kinds import Sizes, two_kinds, whole_prompts
from slime_ext.tools.analysis.detectors.shared.layouts import Layouts
from slime_ext.tools.analysis.detectors.shared.twice import Twice
from slime_ext.tools.analysis.detectors.shared.unrelated import TRIED, Unrelated, relation_of
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import zeros

BEGIN, FAR = 4, 0.5  # tokens at the start of a response; nats, their mean |l| from which they are far off
MIXER = 0x1E3779B1  # an odd number with irregular bits, for hashes
COMPARED, FITS = 12, 0.3  # tokens; share of the distance to the sample itself


@dataclass
class Swapped(Measure):
    """Unrelated samples.

    Args:
        samples: how many fit the tokens of another sample of the rollout.
        far: [2] number of tokens and sum of k3.
    """

    samples: int = 0
    far: Tensor = field(default_factory=lambda: zeros(2))

    def add(self, part: DumpedRollout) -> None:
        unrelated = relation_of(part).unrelated
        if unrelated.any():
            count, *_, near = part.columns
            self.far += part.segments.local_sums([count, near])[:, unrelated].sum(1)
            self.samples += _swapped(part, unrelated.nonzero()[:TRIED, 0])


def _swapped(part: DumpedRollout, which: Tensor) -> int:
    """Returns how many of some samples have the log-probs of another sample of the part."""
    lengths = torch.tensor(part.lengths)
    begins = lengths.cumsum(0) - lengths
    long = (lengths >= COMPARED).nonzero()[:, 0]
    which = which[lengths[which] >= COMPARED]
    if not len(which) or not len(long):
        return 0
    at = torch.arange(COMPARED)
    trainer = part.proximal[begins[long][:, None] + at].double()
    sampler = part.behavior[begins[which][:, None] + at].double()
    apart = (sampler[:, None] - trainer[None]).abs().mean(2).nan_to_num(math.inf)
    to_itself = apart[which[:, None] == long[None]]
    return int((apart.amin(1) < FITS * to_itself).sum())


@dataclass
class Borrowed(Measure):
    """Numbers of samples with a far start, and of those whose first numbers are those of another sample.

    The first BEGIN log-probs of the sampler must be, bit by bit, those of BEGIN other tokens in a row.
    """

    far: int = 0
    elsewhere: int = 0

    def add(self, part: DumpedRollout) -> None:
        lengths = torch.tensor(part.lengths)
        begins = (lengths.cumsum(0) - lengths)[lengths >= 2 * BEGIN]
        if not len(begins) or part.tokens is None:
            return
        first = begins[:, None] + torch.arange(BEGIN)
        is_far = (part.log_ratio.abs()[first].mean(1) > FAR) & part.finite[first].all(1)
        if not is_far.any():
            return
        begins, bits = begins[is_far], part.behavior.view(torch.int32).long()
        ids, windows = part.segments.ids, bits.unfold(0, BEGIN, 1)
        inside = ids[BEGIN - 1 :] == ids[: 1 - BEGIN]
        is_one_value = (windows == windows[:, :1]).all(1)
        powers = MIXER ** torch.arange(1, BEGIN + 1)
        keys = (windows * powers).sum(1)
        texts = keys + (part.tokens.unfold(0, BEGIN, 1) * (powers + 2)).sum(1)
        known = inside & ~is_one_value
        numbers, same_text = ((x[begins][:, None] == x[known][None]).sum(1) for x in (keys, texts))
        self.far += len(begins)
        self.elsewhere += int((numbers > same_text).sum())


DETECTOR = Detector(
    severity="error",
    group="parts",
    after=("spoilt", "other_run"),
    what="some samples have the log-probs of another text: of another sample, or of an earlier attempt",
    asks="samples of 12 tokens",
    title="""
        {{ count }} of {{ samples }} samples {% if starts %}begin with{% else %}have{% endif %} the log-probs
        of another text: {% if starts or swapped > count / 2 %}of another sample.{% else %}of an earlier
        attempt, or of a sample that the dump lacks. {%- endif %}
    """,
    evidence="""
        {% if starts -%} Of {{ starts }} samples whose first four tokens are far off, the first four
        log-probs of {{ count }} are those of another sample of their rollout, bit by bit. {%- else -%} In
        these samples the sampler's log-probs do not follow the trainer's token by token
        (correlation below 0.3; it is above 0.7 in {{ related }} others). {%- if swapped %} {{ swapped
        }} of them fit the tokens of another sample of their rollout. {%- else %} None of them fits
        the tokens of another sample of its rollout.{% endif %} {%- endif %}
    """,
    threshold="""
        3 samples and 1.5% of all with a correlation below 0.3 and a mean |l| of 0.4 nats, while most
        others are above 0.7 and agree (k3 up to 5e-3 nats, or hardly any sample between both kinds)
    """,
    ruled_out="""
        Old or rounded weights, because they change every sample a little, and likely tokens stay
        likely. Another prompt on one side, because all samples of a prompt would be far off. A shift
        of the list (off_by_one), because no nearby position fits.
    """,
    fix="""
        {%- if starts %} Look for offsets into a batch of log-probs that ignore discarded tokens
        (speculative decoding, chunked prefill), and mask these tokens until then. {%- elif swapped > count
        / 2 %} Look for lists that are sorted or gathered separately from their
        tokens (asyncio results, a reorder by length, a zip of two lists). {%- else %} Look at
        retries: if a request is sent again, the log-probs must belong to the answer that is kept.
        Reset sample.rollout_log_probs before each attempt. {%- endif %} Append log-probs and tokens
        from the same response of the engine, in one place.
    """,
)
AGAIN, MATTERS = 40, 0.01  # tokens after equal texts; nats by which the trainer's log-probs of these differ
EVEN = 0.01  # smallest k3 of a rollout over the largest
NOISY, LEVEL = 0.05, 3.0  # nats, median |l| that two bfloat16 engines stay below; over the smallest median
AGREES = HEALTHY["k3_kl"][1] or 0.0  # nats of k3 of all other samples
WHOLLY = 0.8  # share of unrelated samples in far prompts, if the cause is the log-probs of another text
BETWEEN = 1.0  # samples with a correlation between both limits, for each unrelated sample
FEWEST, SHARE, MOST = 3, 0.015, 0.5  # samples; share of all; unrelated samples for each related one


def look(d: Diagnosis) -> Figures | None:
    """Finds samples that have, or begin with, the log-probs of another text."""
    if d.of(Layouts).fit is not None:  # they are in another order, as permuted_log_probs says
        return None
    borrowed = d.of(Borrowed)
    if borrowed.elsewhere < max(FEWEST, MOST * borrowed.far):
        return _unrelated(d)
    count, samples = borrowed.elsewhere, int(d.sums.sequences)
    return {"starts": borrowed.far, "count": count, "samples": samples, "swapped": 0, "related": 0}


def _unrelated(d: Diagnosis) -> Figures | None:
    """Returns the figures if some samples' log-probs are unrelated on both sides, and others' are not."""
    by_sample, swapped = d.of(Unrelated), d.of(Swapped)
    need(
        by_sample.unrelated + by_sample.related >= FEWEST, "samples of 12 tokens with log-probs of both sides"
    )
    every, between = by_sample.correlated, by_sample.correlated - by_sample.unrelated - by_sample.related
    if by_sample.unrelated < max(FEWEST, SHARE * every) or by_sample.unrelated > MOST * by_sample.related:
        return None
    count, sampler, trainer, _ = d.of(Twice).sums.tolist()
    if count >= AGAIN and trainer > max(
        MATTERS * count, sampler
    ):  # the trainer scores the same text differently each time
        return None
    medians = [s.median for s in d.rollouts]
    if max(medians) > max(NOISY, LEVEL * min(medians)):  # the other samples do not agree in every rollout
        return None
    rollouts = [s.k3 for s in d.rollouts]
    is_uneven = min(rollouts) < EVEN * max(rollouts)  # other weights in a few rollouts look the same
    if is_uneven and 2 * swapped.samples < by_sample.unrelated:
        return None
    is_mixed = between > BETWEEN * by_sample.unrelated + FEWEST
    others = d.of(Sizes).sums.sum(0)[1:] - swapped.far
    is_far = float(others[1]) > AGREES * float(others[0])  # what moves these may move the unrelated ones, too
    if (is_mixed or (is_far and 2 * swapped.samples < by_sample.unrelated)) and two_kinds(d) is None:
        return None
    if older_are_far(d):
        return None
    prompts = whole_prompts(d)
    if (
        prompts and by_sample.unrelated < WHOLLY * prompts.kinds.far[0]
    ):  # other samples of these prompts are related
        return None
    return {
        "starts": 0,
        "count": by_sample.unrelated,
        "related": by_sample.related,
        "samples": int(d.sums.sequences),
        "swapped": swapped.samples,
    }
