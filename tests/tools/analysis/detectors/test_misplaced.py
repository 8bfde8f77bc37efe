"""Log-probs that belong to other tokens: the place that they come from is named, with its share of k3."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
import torch

from tests.tools.analysis.detectors.toys import edited, findings, run

SAMPLES, LENGTH, PROMPT = 64, 48, 8


NAMES = ("tokens", "behavior", "proximal")


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
    found = findings(edited(run(2), lambda r: disordered(r, cp, is_contiguous, pack)))
    assert set(found) == {"permuted_log_probs"}
    text = found["permuted_log_probs"].evidence
    assert f"context-parallel size {cp}" in text
    first, second = ("contiguous", "zigzag") if is_contiguous else ("zigzag", "contiguous")
    assert text.index(first) < text.index(second)
    assert ("over each micro-batch" in text) == (pack > 1)
    assert found["permuted_log_probs"].explains > 0.99


BATCHES = tuple(i // 4 for i in range(SAMPLES))
PLACES = tuple(i % 4 for i in range(SAMPLES))


def exchanged(source, count=SAMPLES):
    """The sampler's log-probs of the first samples come from the samples that ``source`` names."""

    def edit(r):
        taken = torch.tensor([source(i) if i < count else i for i in range(SAMPLES)])
        rows = r.behavior.view(SAMPLES, LENGTH)
        return {"behavior": rows[taken].flatten(), "batches": BATCHES, "places": PLACES}

    return edit


@pytest.mark.parametrize("count", [12, SAMPLES])
@pytest.mark.parametrize(
    ("source", "said"),
    [(lambda i: i ^ 1, "of the same micro-batch"), (lambda i: (i + 24) % SAMPLES, "of another micro-batch")],
)
def test_log_probs_of_another_sample_are_put_back_and_its_micro_batch_is_said(source, said, count):
    (finding,) = findings(edited(run(2), exchanged(source, count))).values()
    assert finding.name == "other_log_probs" and finding.severity == "error"
    assert said in finding.title and finding.explains > 0.98


def with_lengths(r, lengths):
    """The rollout with responses that are cut to some lengths."""
    kept = torch.cat([torch.arange(LENGTH) < length for length in lengths])
    names = ("behavior", "proximal", "mask", "tokens", "versions", "advantages")
    return replace(r, lengths=lengths, **{name: getattr(r, name)[kept] for name in names})


def test_a_micro_batch_that_is_split_by_other_lengths_is_named():
    """The values of a micro-batch lie in another order of its samples, and are split by their lengths."""
    g = torch.Generator().manual_seed(3)
    lengths = tuple(torch.randint(30, LENGTH + 1, (SAMPLES,), generator=g).tolist())

    def edit(r):
        rows = r.behavior.split(lengths)
        order = [4 * (i // 4) + (2, 0, 3, 1)[i % 4] for i in range(SAMPLES)]
        return {"behavior": torch.cat([rows[i] for i in order]), "batches": BATCHES, "places": PLACES}

    rollouts = [with_lengths(r, lengths) for r in run()]
    assert findings(rollouts) == {}
    (finding,) = findings(edited(rollouts, edit)).values()
    assert finding.name == "other_log_probs" and "of the same micro-batch" in finding.title


@pytest.mark.parametrize("count", [3, 6, 14])
@pytest.mark.parametrize("is_end", [False, True])
def test_the_number_of_borrowed_log_probs_is_estimated(count, is_end):
    """The first or the last numbers of one answer in eight are those of another answer."""

    def edit(r):
        behavior = r.behavior.clone().view(SAMPLES, LENGTH)
        at = slice(LENGTH - count, LENGTH) if is_end else slice(count)
        behavior[::8, at] = r.behavior.view(SAMPLES, LENGTH)[3::8, 20 : 20 + count]
        return {"behavior": behavior.flatten()}

    (finding,) = findings(edited(run(2), edit)).values()
    assert finding.name == "other_log_probs"
    assert f"{'last' if is_end else 'first'} {count} log-probs" in finding.evidence


@pytest.mark.parametrize("shared", [0, 3, 5])
@pytest.mark.parametrize("count", [16, 32])
def test_starts_of_the_request_before_are_named_though_its_text_begins_alike(shared, count):
    """Every third answer begins with the log-probs of the answer before, which may be to the same prompt."""

    def edit(r):
        rows = {name: getattr(r, name).clone().view(SAMPLES, LENGTH) for name in NAMES}
        for row in rows.values():
            row[:, :shared] = row[::8, :shared].repeat_interleave(8, 0)  # answers to a prompt begin alike
        rows["behavior"][3::3, :count] = rows["behavior"][2:-1:3, :count].clone()
        return {name: row.flatten() for name, row in rows.items()}

    (finding,) = findings(edited(run(2), edit)).values()
    assert finding.name == "other_log_probs" and finding.explains > 0.9
    assert f"the first {count} log-probs" in finding.evidence


def test_answers_that_begin_with_the_same_text_borrow_nothing():
    def edit(r):
        rows = {name: getattr(r, name).clone().view(SAMPLES, LENGTH) for name in NAMES}
        for row in rows.values():
            row[:, :30] = row[::8, :30].repeat_interleave(8, 0)
        return {name: row.flatten() for name, row in rows.items()}

    assert findings(edited(run(), edit)) == {}


@pytest.mark.parametrize("count", [1, 2, 5, 12])
@pytest.mark.parametrize("is_end", [False, True])
def test_the_number_of_far_tokens_at_one_end_is_estimated(count, is_end):
    def edit(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        place = LENGTH - 1 - r.segments.within if is_end else r.segments.within
        far = (place < count) & (r.segments.ids % 8 == 0)
        return {"behavior": torch.where(far, r.behavior - 1 - torch.rand(r.size, generator=g), r.behavior)}

    (finding,) = findings(edited(run(2), edit)).values()
    place = f"{'last' if is_end else 'first'}{f' {count}' if count > 1 else ''} token"
    assert finding.name == "shared_place" and place in finding.title


@pytest.mark.parametrize("begin", [2, 6, 14])
def test_a_stretch_that_begins_after_the_first_token_is_no_shared_place_and_no_window(begin):
    """From the third sample of each eight on, some log-probs are those of the request before in the batch."""

    def edit(r):
        rows = r.behavior.view(SAMPLES, LENGTH).clone()
        is_after = torch.arange(SAMPLES) % 8 > 2
        rows[is_after, begin : begin + 10] = rows.roll(1, 0)[is_after, begin : begin + 10]
        return {"behavior": rows.flatten()}

    found = findings(edited(run(), edit))
    assert found and not {"shared_place", "kv_precision", "position_drift"} & set(found)
    assert not any(finding.severity == "error" for finding in found.values())


def padded(values, lengths, of, generator):
    """Values that were cut from the end of rows, which are padded to the longest of ``of`` samples."""
    rows, cut = values.split(lengths), []
    for begin in range(0, len(rows), of):
        longest = max(lengths[begin : begin + of])
        for row in rows[begin : begin + of]:
            padding = -8 - 4 * torch.rand(longest - len(row), generator=generator)
            cut.append(torch.cat([row, padding])[longest - len(row) :])
    return torch.cat(cut)


@pytest.mark.parametrize("side", ["proximal", "behavior"])
@pytest.mark.parametrize("of", [2, 4, 16])
@pytest.mark.parametrize("shortest", [4, 20, 44])
def test_values_that_were_cut_from_the_end_of_padded_rows_are_put_back(side, of, shortest):
    """Some responses are so short that they have padding alone, or nearly as long as the longest."""

    def edit(r):
        g = torch.Generator().manual_seed(r.rollout_id)
        lengths = torch.randint(shortest, LENGTH + 1, (SAMPLES,), generator=g).tolist()
        shorter = with_lengths(r, tuple(lengths))
        return replace(shorter, **{side: padded(getattr(shorter, side), lengths, of, g)})

    (finding,) = findings([edit(r) for r in run(2)]).values()
    assert finding.name == "permuted_log_probs" and "cut from the end" in finding.title
    if of < 16 and shortest < 44:  # the longest of 16 is nearly as long as that of all
        assert f"of {of} neighbouring samples" in finding.title
    assert finding.severity == "error" and finding.explains > 0.9
    assert ("trainer" if side == "proximal" else "sampler") in finding.title


def test_a_rollout_whose_order_is_right_is_no_copy_where_both_sides_compute_alike():
    """Outputs that are sorted by length are not sorted back; in one rollout they were sorted already."""
    rollouts = []
    for r in run(noise=0.0):
        g = torch.Generator().manual_seed(r.rollout_id)
        drawn = torch.randint(20, LENGTH + 1, (SAMPLES,), generator=g)
        lengths = tuple((drawn.sort().values if r.rollout_id == 2 else drawn).tolist())
        cut = with_lengths(r, lengths)
        rows, values = cut.behavior.split(lengths), []
        for begin in range(0, SAMPLES, 8):
            order = sorted(range(begin, begin + 8), key=lengths.__getitem__)
            packed = [torch.cat([rows[i], torch.zeros(LENGTH)]) for i in order]
            values += [row[:size] for row, size in zip(packed, lengths[begin : begin + 8], strict=True)]
        rollouts.append(replace(cut, proximal=torch.cat(values)))
    assert set(findings(rollouts)) == {"other_log_probs"}


def of_lengths(rollouts, length_of, limit):
    """The rollouts with shorter responses, of which those of ``limit`` tokens were cut."""
    lengths = tuple(map(length_of, range(SAMPLES)))
    keep = torch.cat([torch.arange(LENGTH) < n for n in lengths])
    names = ("behavior", "proximal", "mask", "tokens", "advantages", "versions")
    statuses = tuple("truncated" if n == limit else "completed" for n in lengths)
    kept = {"lengths": lengths, "statuses": statuses}
    return edited(rollouts, lambda r: kept | {name: getattr(r, name)[keep] for name in names})


def far_off(rollouts, is_far):
    """Tokens of which the trainer's log-prob is 0.4 nats off, to both sides, with a mean ratio of 1."""

    def edit(r):
        noise = (
            0.8 * torch.randint(2, (r.size,), generator=torch.Generator().manual_seed(r.rollout_id)) - 0.478
        )
        from_end = r.segments.expand(r.response_lengths) - 1 - r.segments.within
        moved = (r.behavior + noise).clamp(max=-1e-5)
        return {"proximal": torch.where(is_far(r.segments.within, from_end), moved, r.proximal)}

    return edited(rollouts, edit)


def test_tokens_from_a_place_on_are_not_the_last_ones():
    """A quarter of the responses was cut at 48 tokens, and others reach place 36 with 4 to 11 tokens."""
    rollouts = of_lengths(run(), lambda i: LENGTH if i % 4 == 0 else 24 + i % 24, LENGTH)
    for finding in findings(far_off(rollouts, lambda within, from_end: within >= 36)).values():
        assert finding.name not in ("shared_place", "part_of_run")


def test_last_tokens_at_every_place_are_named():
    rollouts = of_lengths(run(2), lambda i: LENGTH if i % 4 == 0 else 24 + i % 24, LENGTH)
    found = findings(far_off(rollouts, lambda within, from_end: from_end < 10))
    assert set(found) == {"shared_place"} and not found["shared_place"].or_else


def test_last_tokens_of_responses_of_one_length_may_be_those_from_a_place_on():
    """Responses end at 48 tokens or by 30, so nothing else is at the places of the last 10."""
    rollouts = of_lengths(run(2), lambda i: LENGTH if i % 4 == 0 else 18 + i % 12, LENGTH)
    (finding,) = findings(far_off(rollouts, lambda within, from_end: within >= 38)).values()
    assert finding.name == "shared_place" and finding.severity == "warning"
    assert finding.or_else == ("position_drift", "kv_precision")


@pytest.mark.parametrize(("begins", "is_named"), [(0, True), (36, False)])
def test_cut_responses_are_a_part_only_if_they_begin_far_off(begins, is_named):
    rollouts = of_lengths(run(), lambda i: LENGTH if i % 4 == 0 else 24, LENGTH)
    far = far_off(rollouts, lambda within, from_end: (within >= begins) & (within + from_end == LENGTH - 1))
    assert ("part_of_run" in findings(far)) == is_named


@pytest.mark.parametrize("short", [12, 24])
def test_many_short_responses_do_not_hide_that_cut_ones_begin_near(short):
    """Every eighth response was cut, and the others end before the place from which on tokens are far off."""
    rollouts = of_lengths(run(6, noise=0.02), lambda i: LENGTH if i % 8 == 0 else short - i % 4, LENGTH)
    assert "part_of_run" not in findings(far_off(rollouts, lambda within, from_end: within >= 24))
    (finding,) = findings(
        far_off(rollouts, lambda within, from_end: within + from_end == LENGTH - 1)
    ).values()
    assert finding.name == "part_of_run" and "status truncated" in finding.title
