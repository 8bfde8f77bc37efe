"""The finding ``other_log_probs``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import field
from typing import Any, ClassVar

import torch
from torch import Tensor

from slime_ext.core.metrics.names import HEALTHY
from slime_ext.ops.divergences import k3
from slime_ext.tools.analysis.detectors.shared.ages import older_are_far
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.detectors.shared.exchanged import (
    STRETCH,
    STRETCH_FITS,
    Exchanged,
    have_another_text,
)
from slime_ext.tools.analysis.detectors.shared.explained import (
    K3,
    RESTORED,
    Explained,
    explained,
    explained_by_order,
    restored,
)
from slime_ext.tools.analysis.detectors.shared.kinds import Sizes, two_kinds, whole_prompts
from slime_ext.tools.analysis.detectors.shared.layouts import Layouts
from slime_ext.tools.analysis.detectors.shared.padded import Padded
from slime_ext.tools.analysis.detectors.shared.twice import Twice
from slime_ext.tools.analysis.detectors.shared.unrelated import Unrelated, relation_of
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import MOST_K3, DumpedRollout
from slime_ext.tools.analysis.tables import any_true, are_equal, is_above, run_begins, zeros

MIXER = 0x1E3779B1  # an odd number with irregular bits, for hashes
# Samples of a part, and tokens of each, that are compared with other places of their list; the shifts up to
# BESIDE tokens belong to off_by_one.
MOVABLE, REACH, BESIDE = 32, 512, 2
# Tokens at an end that are compared; nats, their mean |l| from which they are far off; samples of a part that
# are looked at; the most tokens that are counted; share of a response from which it is borrowed as a whole.
ENDS, FAR, LOOKED, MOST_BORROWED, WHOLE = 3, 0.5, 64, 256, 0.8
# First log-probs that are equal bit by bit, which then go on though ENDS ids differ; the log-probs that count
# as such, in nats, because likely tokens have equal ones by chance.
BEGIN, UNLIKELY = 8, -0.05


class Moved(Measure):
    """Far samples whose log-probs of one side lie several places away in the list of the other side.

    At most MOVABLE samples of a part are looked at, with their first REACH tokens.

    Args:
        tried: number of samples that were looked at.
        places: number of places -> number of samples that fit so far away.
        sums: [RESTORED] of those that fit.
        apart: sum of k3 over all samples that are far off and not related.
    """

    takes_joined: ClassVar[bool] = True

    tried: int = 0
    places: Counter[int] = field(default_factory=Counter)
    sums: Tensor = field(default_factory=lambda: zeros(RESTORED))
    apart: float = 0.0

    def add(self, part: DumpedRollout) -> None:
        relation = relation_of(part)
        if (relation.apart & ~relation.related).any():
            for one in part.rollouts:
                self._add(one)

    def _add(self, part: DumpedRollout) -> None:
        relation = relation_of(part)
        which = relation.apart & ~relation.related
        near = part.columns[-1]
        self.apart += float(part.sums([near])[0, which].sum())
        lengths = part.response_lengths
        begins = lengths.cumsum(0) - lengths
        for i in which.nonzero()[:MOVABLE, 0].tolist():
            at = slice(int(begins[i]), int(begins[i]) + part.lengths[i])
            if part.lengths[i] <= STRETCH or not part.finite[at].all():
                continue
            self.tried += 1
            if fit := _place_of(part.behavior[at][:REACH].double(), part.proximal[at][:REACH].double()):
                places, after = fit
                self.places[places] += 1
                self.sums += restored(near[at], after)


def _place_of(sampler: Tensor, trainer: Tensor) -> tuple[int, float] | None:
    """Returns how many places away one list fits the other, and the mean k3 there; None if it does not.

    Args:
        sampler, trainer: [T] log-probs of a sample.
    """
    size = len(sampler)
    # Row s + size - 1 has the sampler's log-probs s places later, [2 size - 1, size].
    padded = torch.nn.functional.pad(sampler, (size - 1, size - 1), value=math.nan)
    apart = (padded.unfold(0, size, 1) - trainer).abs()
    shifts = torch.arange(1 - size, size)
    overlap = size - shifts.abs()
    means = torch.where((shifts != 0) & (overlap >= STRETCH), apart.nansum(1) / overlap, math.inf)
    best = int(means.argmin())
    if float(means[best]) >= STRETCH_FITS * float((sampler - trainer).abs().mean()):
        return None
    shift, length = int(shifts[best]), int(overlap[best])
    later, here = (max(shift, 0), max(-shift, 0))
    log_ratio = trainer[here : here + length] - sampler[later : later + length]
    return abs(shift), float(k3(log_ratio).clamp(max=MOST_K3).mean())


class BorrowedEnds(Measure):
    """Samples of which only the first or the last numbers are those of another sample.

    The ENDS log-probs at one end must be, bit by bit, those of other tokens in a row. Or the first BEGIN
    log-probs must be those with which another sample begins, because answers to one prompt may begin with the
    same text, so that their first tokens agree whoever's log-probs they have.

    Args:
        far: [2] number of samples whose start is far off, and whose end is.
        starts, ends: how many first or last numbers are another sample's -> number of such samples.
        sums: [3] number of borrowed tokens, their sum of k3, and its square over samples.
    """

    version: ClassVar[int] = 2

    far: Tensor = field(default_factory=lambda: zeros(2))
    starts: Counter[int] = field(default_factory=Counter)
    ends: Counter[int] = field(default_factory=Counter)
    sums: Tensor = field(default_factory=lambda: zeros(3))

    def add(self, part: DumpedRollout) -> None:
        if part.size < 2 * ENDS or part.tokens is None:
            return
        lengths, firsts = part.response_lengths, part.segments.bounds[:-1]
        long = lengths >= 2 * ENDS
        begun = _begun(part, firsts, lengths)
        for sample, count in begun.items():
            is_whole = count >= WHOLE * part.lengths[sample]
            self.far[0] += not is_whole
            self._count(part, Counter() if is_whole else self.starts, int(firsts[sample]), count)
        if not any_true(is_above(part.log_ratio.abs(), FAR)):
            return
        is_new = torch.ones(part.count, dtype=torch.bool)
        is_new[list(begun)] = False
        for is_end, counter in ((False, self.starts), (True, self.ends)):
            there = long if is_end else long & is_new
            at = (firsts + lengths - ENDS if is_end else firsts)[there]
            sizes = lengths[there]
            window = at[:, None] + torch.arange(ENDS)
            is_far = (part.log_ratio[window].abs().mean(1) > FAR) & part.finite[window].all(1)
            far = is_far.nonzero()[:LOOKED, 0]
            self.far[int(is_end)] += len(far)
            for begin, count in _borrowed(part, at[far], sizes[far], is_end=is_end):
                self._count(part, counter, begin, count)

    def _count(self, part: DumpedRollout, counter: Counter[int], begin: int, count: int) -> None:
        counter[count] += 1
        k = float(part.columns[-1][begin : begin + count].sum())
        self.sums += torch.tensor([count, k, k * k], dtype=torch.float64)


def _begun(part: DumpedRollout, firsts: Tensor, lengths: Tensor) -> dict[int, int]:
    """Returns sample -> the number of log-probs with which another sample begins, though its tokens differ.

    Of several samples that begin alike, the one that is nearest to the trainer has its own log-probs.

    Args:
        firsts, lengths: [S] first token and number of tokens of each sample.
    """
    samples = (lengths >= BEGIN).nonzero()[:, 0]
    bits = part.behavior.view(torch.int32)
    alike = bits[firsts[samples]].sort().values
    if len(samples) < 2 or not any_true(are_equal(alike[1:], alike[:-1])):
        return {}
    window = firsts[samples, None] + torch.arange(BEGIN)
    known = part.finite[window].all(1)
    samples, window = samples[known], window[known]
    if part.tokens is None or len(samples) < 2:
        return {}
    powers = MIXER ** torch.arange(1, BEGIN + 1)
    keys, order = (bits[window] * powers).sum(1).sort(stable=True)
    begins = run_begins(keys)
    if len(begins) == len(keys):  # none begins alike
        return {}
    begun: dict[int, int] = {}
    for rows in order.tensor_split(begins[1:]):
        if len(rows) < 2:
            continue
        nearest = rows[part.columns[-1][window[rows]].sum(1).argmin()]
        is_other = (part.tokens[window[rows]] != part.tokens[window[nearest]]).any(1)
        for row in rows[is_other].tolist():
            sample, source = int(samples[row]), int(samples[nearest])
            size = min(part.lengths[sample], part.lengths[source], MOST_BORROWED)
            here, there = (slice(at, at + size) for at in firsts[[sample, source]].tolist())
            is_equal = (bits[here] == bits[there]).long().cumprod(0) > 0
            evidence = (
                is_equal & (part.tokens[here] != part.tokens[there]) & (part.behavior[there] < UNLIKELY)
            )
            if int(evidence.sum()) >= ENDS:
                begun[sample] = int(is_equal.sum())
    return begun


def _borrowed(part: DumpedRollout, at: Tensor, sizes: Tensor, *, is_end: bool) -> Iterator[tuple[int, int]]:
    """Yields the first token and the number of tokens that each sample borrows at one end, if it does.

    Args:
        at, sizes: [N] first of the ENDS tokens at that end, and length of each sample.
    """
    if not len(at) or part.tokens is None:
        return
    bits = part.behavior.view(torch.int32).long()
    ids, windows = part.segments.ids, bits.unfold(0, ENDS, 1)
    inside = ids[ENDS - 1 :] == ids[: 1 - ENDS]
    powers = MIXER ** torch.arange(1, ENDS + 1)
    keys = (windows * powers).sum(1)
    texts = keys + (part.tokens.unfold(0, ENDS, 1) * (powers + 2)).sum(1)
    known = (inside & ~(windows == windows[:, :1]).all(1)).nonzero()[:, 0]
    if not len(known):  # every stretch repeats one number, such as 0
        return
    is_match = (keys[at][:, None] == keys[known]) & (texts[at][:, None] != texts[known])
    matched = is_match.any(1).nonzero()[:, 0].tolist()
    sources = known[is_match.int().argmax(1)]
    for row in matched:
        here, there, size = int(at[row]), int(sources[row]), int(sizes[row])
        most = min(size, MOST_BORROWED)
        if is_end:
            here, there = here + ENDS - 1, there + ENDS - 1
            most = min(most, there + 1)
            one, other = (bits[last + 1 - most : last + 1].flip(0) for last in (here, there))
        else:
            most = min(most, len(bits) - there)
            one, other = bits[here : here + most], bits[there : there + most]
        count = int((one == other).long().cumprod(0).sum())
        if count < WHOLE * min(size, MOST_BORROWED / WHOLE):
            yield (here - count + 1 if is_end else here), count


DETECTOR = Detector(
    severity="error",
    side="altered",
    group="parts",
    after=("spoilt", "other_run", "repeated_routes"),
    what="some samples have the log-probs of another text: of another sample, or of an earlier attempt",
    asks="samples of 12 tokens",
    title="""
        {{ count }} of {{ samples }} samples {% if places %}have their log-probs at other places of their own
        list, {{ places }} tokens away.{% else %}{% if end %}{{ "end" if end == "last" else "begin" }} with{%
        else %}have{% endif %} the log-probs of another text: {% if end or place %}of another sample{{
        place }}.{% else %}of an earlier attempt, or of a sample that the dump lacks. {%- endif %}{% endif %}
    """,
    evidence="""
        {% if places -%} Of {{ tried }} far samples that were compared, {{ fits }} fit another place of their
        own list: k3 is {{ after | nats }} there, instead of {{ before | nats }}. {%- elif end -%} Of {{
        far }} samples whose {{ end }} three tokens are far off, the {{ end }} {{ borrowed }} log-probs of {{
        count }} are those of another sample of their rollout, bit by bit. {%- else -%} In
        these samples the sampler's log-probs do not follow the trainer's token by token
        (correlation below 0.3; it is above 0.7 in {{ related }} others). {%- if place %} {{ fits | int }} of
        {{ tried }} that were compared fit the tokens of another sample: k3 is {{ after | nats }} there,
        instead of {{ before | nats }}. {%- else %} None of {{ tried }} that were compared fits
        the tokens of another sample of its rollout.{% endif %} {%- endif %}
    """,
    threshold="""
        3 samples and 1.5% of all with a correlation below 0.3 and a mean |l| of 0.4 nats, while most
        others are above 0.7 and agree (k3 up to 5e-3 nats, or hardly any sample between both kinds, and half
        of the far ones or of their k3 is theirs); or
        their log-probs, put back to another sample or place, agree as the nearest quarter of the run does
    """,
    ruled_out="""
        Old or rounded weights, because they change every sample a little, and likely tokens stay
        likely. Another prompt on one side, because all samples of a prompt would be far off. {%- if not
        places %} A shift of the list (off_by_one), because no nearby position fits.{% endif %}
    """,
    remedy="look for retries and separate sorting that give a sample the log-probs of another",
    fix="""
        {%- if places %} Look for a list to which a retried request appends (reset sample.rollout_log_probs
        before each attempt), and for values that are cut from the end of padded rows. {%- elif end %} Look
        for offsets into a batch of log-probs that ignore discarded tokens
        (speculative decoding, chunked prefill), and mask these tokens until then. {%- elif place %}
        Look for lists that are sorted or gathered separately from their tokens (asyncio results, a reorder by
        length, a zip of two lists){% if "micro-batch" in place %}, and for the order in which samples are put
        into micro-batches and taken out again{% endif %}. {%- else %} Look at
        retries: if a request is sent again, the log-probs must belong to the answer that is kept.
        Reset sample.rollout_log_probs before each attempt. {%- endif %} Append log-probs and tokens
        from the same response of the engine, in one place.
    """,
)
REPEATS, MATTERS = 40, 0.01  # tokens after equal texts; nats by which the trainer's log-probs of these differ
EVEN = 0.01  # smallest k3 of a rollout over the largest
NOISY, LEVEL = 0.05, 3.0  # nats, median |l| that two bfloat16 engines stay below; over the smallest median
CERTAIN = 3.0  # standard errors of the mean ratio above 1
AGREES = HEALTHY["k3_kl"][1] or 0.0  # nats of k3 of all other samples
WHOLLY = 0.8  # share of unrelated samples in far prompts, if the cause is the log-probs of another text
BETWEEN = 1.0  # samples with a correlation between both limits, for each unrelated sample
FIT, USUAL = 0.5, 0.8  # share of the compared samples; share that has one place or one number
# The nearest samples with NEAREST of the tokens show how well the run agrees. Log-probs that are put back
# agree if they leave AS_NEAR times that, and less than CHANCE of k3, which the best fit of many by chance
# leaves.
NEAREST, AS_NEAR, CHANCE = 0.25, 3.0, 0.1
# Share of the far samples that agree with another place of their list. In runs of benchmarks/faults (4 to 151
# far samples) 41% and more do if lists are moved, and 5% at most by chance, but 23% in one of 158.
EXACT = 0.25
FEWEST, SHARE, MOST = 3, 0.015, 0.5  # samples; share of all; unrelated samples for each related one


def look(d: Diagnosis) -> Figures | None:
    """Finds samples that have, or begin with, the log-probs of another text."""
    if (
        d.of(Layouts).fit is not None or d.of(Padded).fit is not None
    ):  # they are in another order, as permuted_log_probs says
        return None
    if moved := _moved(d):
        return moved
    borrowed = d.of(BorrowedEnds)
    for at, (end, counts) in enumerate({"first": borrowed.starts, "last": borrowed.ends}.items()):
        far = float(borrowed.far[at])
        if counts.total() >= max(FEWEST, MOST * far):
            return {
                "end": end,
                "places": "",
                "place": "",
                "far": int(far),
                "count": counts.total(),
                "samples": int(d.sums.sequences),
                "borrowed": _interval(counts),
                "is_proven": True,
                "explains": _explained(d, borrowed.sums),
            }
    need(
        d.of(Unrelated).unrelated + d.of(Unrelated).related >= FEWEST,
        "samples of 12 tokens with log-probs of both sides",
    )
    if d.of(Unrelated).unrelated < max(FEWEST, SHARE * d.of(Unrelated).correlated):
        return None
    return _exchanged(d) or _unrelated(d)


def _interval(counts: Counter[int]) -> str:
    """Returns the number that most samples share, or the range of nine in ten of them, as text."""
    (usual, most), *_ = counts.most_common(1)
    if most >= USUAL * counts.total():
        return f"{usual}"
    numbers = sorted(counts.elements())
    low, high = (numbers[round((len(numbers) - 1) * share)] for share in (0.05, 0.95))
    return f"{low} to {high}"


def _explained(d: Diagnosis, far: Tensor) -> Explained:
    """Returns how much of k3 goes if some tokens become like all others, from their count, k3 and squares."""
    count, distance, square = far.tolist()
    rest = max(d.sums.finite - count, 1)
    whole = sum(s.tokens * s.k3 for s in d.rollouts)
    others = K3(int(rest), max(whole - distance, 0.0) / rest, 0.0)
    unrelated = K3(int(count), distance / max(count, 1), math.sqrt(square) / max(count, 1))
    return explained(unrelated, others).of_chosen()


def _is_drawn(d: Diagnosis) -> bool:
    """Returns whether tokens may be drawn from the recorded policy, as another prompt or weights leave them.

    The mean ratio is then 1. Log-probs of another text bring it above 1.
    """
    ratio = d.means.ratio_minus_one
    return ratio.value <= CERTAIN * ratio.error


def _unrelated(d: Diagnosis) -> Figures | None:
    """Returns the figures if some samples' log-probs are unrelated on both sides, and others' are not."""
    by_sample, exchanged = d.of(Unrelated), d.of(Exchanged)
    between = by_sample.correlated - by_sample.unrelated - by_sample.related
    if by_sample.unrelated > MOST * by_sample.related:
        return None
    count, sampler, trainer, *_ = d.of(Twice).sums.tolist()
    if count >= REPEATS and trainer > max(
        MATTERS * count, sampler
    ):  # the trainer scores the same text differently each time
        return None
    medians = [s.median for s in d.rollouts]
    if max(medians) > max(NOISY, LEVEL * min(medians)):  # the other samples do not agree in every rollout
        return None
    rollouts = [s.k3 for s in d.rollouts]
    if min(rollouts) < EVEN * max(rollouts):  # other weights in a few rollouts look the same
        return None
    is_mixed = between > BETWEEN * by_sample.unrelated + FEWEST
    others = d.of(Sizes).sums.sum(0)[1:] - exchanged.far[:2]
    is_far = float(others[1]) > AGREES * float(others[0])  # what moves these may move the unrelated ones, too
    kinds = two_kinds(d)
    if (is_mixed or is_far) and (kinds is None or (_is_drawn(d) and not have_another_text(d, kinds))):
        return None
    if older_are_far(d):
        return None
    prompts = whole_prompts(d)
    if (
        prompts and by_sample.unrelated < WHOLLY * prompts.kinds.far[0]
    ):  # other samples of these prompts are related
        return None
    return _figures(d) | {"place": "", "explains": _explained(d, exchanged.far)}


def _exchanged(d: Diagnosis) -> Figures | None:
    """Returns the figures if unrelated samples fit other samples' tokens, as nothing else makes them."""
    exchanged = d.of(Exchanged)
    fits = float(exchanged.places.sum())
    if fits < max(FEWEST, FIT * exchanged.tried):
        return None
    of = ("of the same micro-batch", "of another micro-batch", "of their rollout")
    place = next(
        (text for text, n in zip(of, exchanged.places.tolist(), strict=True) if n > USUAL * fits), ""
    )
    _, tokens, before, gone, _ = exchanged.sums.tolist()
    if before - gone > _agreed(d, before / tokens) * tokens:  # they fit better than in place, by chance
        return None
    far = exchanged.apart * fits / exchanged.tried
    return _figures(d) | {
        "place": f" {place or 'of the same or another micro-batch'}",
        "fits": fits,
        "before": before / tokens,
        "after": (before - gone) / tokens,
        "is_proven": True,
        "explains": explained_by_order(exchanged.sums, far, d.rollouts),
    }


def _moved(d: Diagnosis) -> Figures | None:
    """Returns the figures if far samples agree with other places of their own list."""
    moved = d.of(Moved)
    fits = moved.places.total()
    is_beside = sum(n for places, n in moved.places.items() if places <= BESIDE) > FIT * fits
    # If most samples are moved, the whole list is in another order, as permuted_log_probs says.
    is_most = d.of(Unrelated).unrelated > MOST * d.of(Unrelated).related
    if fits < max(FEWEST, EXACT * moved.tried) or is_beside or is_most:
        return None
    _, tokens, before, gone, _ = moved.sums.tolist()
    if before - gone > _agreed(d, before / tokens) * tokens:
        return None
    return _figures(d) | {
        "places": _interval(moved.places),
        "place": "",
        "count": fits,
        "tried": moved.tried,
        "fits": fits,
        "before": before / tokens,
        "after": (before - gone) / tokens,
        "is_proven": True,
        "explains": explained_by_order(moved.sums, moved.apart * fits / moved.tried, d.rollouts),
    }


def _agreed(d: Diagnosis, before: float) -> float:
    """Returns the mean k3 up to which log-probs that were put back agree.

    Args:
        before: their mean k3 as recorded, nats.
    """
    sizes = d.of(Sizes).sums
    until = sizes.cumsum(0)
    at = int((until[:, 1] < NEAREST * until[-1, 1]).sum())
    _, tokens, k3 = until[min(at, len(until) - 1)].tolist()
    return max(AGREES, min(float(AS_NEAR * k3 / max(tokens, 1.0)), CHANCE * before))


def _figures(d: Diagnosis) -> dict[str, Any]:
    by_sample = d.of(Unrelated)
    return {
        "end": "",
        "places": "",
        "count": by_sample.unrelated,
        "related": by_sample.related,
        "samples": int(d.sums.sequences),
        "tried": d.of(Exchanged).tried,
    }
