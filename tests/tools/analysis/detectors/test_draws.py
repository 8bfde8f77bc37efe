"""Values of another token than the drawn one, and tokens that nobody drew, by texts that samples share."""

from __future__ import annotations

from dataclasses import replace

import torch

from tests.tools.analysis.detectors.toys import Policy, findings, sampled

SAMPLES = 128


def runs(draw, count=4):
    """A run whose tokens, and their recorded values, follow from the engine's log-probs."""
    policy, rollouts = Policy(), []
    for number in range(count):
        rollouts.append(sampled(policy, number, samples=SAMPLES, draw=draw))
        policy.step()
    return rollouts


def test_the_first_entry_of_the_list_in_place_of_the_sampled_token_is_named():
    def first_entry(logits, generator):
        log_probs = logits.log_softmax(1)
        drawn = torch.multinomial(log_probs.exp(), 1, generator=generator)
        return drawn, log_probs.amax(1)

    (finding,) = findings(runs(first_entry)).values()
    assert finding.name == "first_entry" and finding.severity == "error" and finding.explains > 0.98


def greedy(recorded):
    """Top-k 1: the likeliest token, recorded at a temperature as SGLang does."""

    def draw(logits, generator):
        drawn = logits.argmax(1, keepdim=True)
        return drawn, (logits / recorded).log_softmax(1).gather(1, drawn)[:, 0]

    return draw


def test_greedy_tokens_with_log_probs_of_a_softmax_are_named():
    for recorded in (1.0, 0.7):
        named = findings(runs(greedy(recorded)))
        assert "greedy_sampling" in named and "top-k 1" in named["greedy_sampling"].title, recorded
        assert "temperature" not in named and "duplicate_samples" not in named


def test_a_greedy_value_that_depends_on_the_batch_is_no_reason_to_be_silent():
    """SGLang's top-k 1 at a temperature: its value beside a random request, and at 1 in other batches."""

    def by_batch(logits, generator):
        drawn = logits.argmax(1, keepdim=True)
        temperature = torch.where(torch.arange(SAMPLES) % 2 == 0, 1.0, 0.7)[:, None]
        return drawn, (logits / temperature).log_softmax(1).gather(1, drawn)[:, 0]

    named = findings(runs(by_batch))
    assert "greedy_sampling" in named and "depends on the batch" in named["greedy_sampling"].fix


def test_copies_of_drawn_samples_are_not_greedy():
    rollouts = []
    for r in runs(None):
        rows = torch.arange(SAMPLES) // 16 * 16
        taken = {
            name: getattr(r, name).view(SAMPLES, -1)[rows].flatten()
            for name in ("tokens", "behavior", "proximal")
        }
        rollouts.append(replace(r, **taken))
    named = findings(rollouts)
    assert "greedy_sampling" not in named and "duplicate_samples" in named


END, LEAST = 3, 16  # token that ends a response; the minimum of tokens


def ended(rollout, stops=6):
    """Responses up to their end token, or up to a stop string: every sixth, after 6 to 11 tokens."""
    length = rollout.lengths[0]
    rows, lengths = rollout.tokens.view(SAMPLES, length), []
    for i, row in enumerate(rows):
        at = (row == END).nonzero()[:, 0]
        whole = int(at[0]) + 1 if len(at) else length
        lengths.append(min(6 + i % 6, whole) if stops and i % stops == 0 else whole)
    kept = (torch.arange(length) < torch.tensor(lengths)[:, None]).flatten()
    names = ("behavior", "proximal", "mask", "tokens", "versions", "advantages")
    return replace(rollout, lengths=tuple(lengths), **{name: getattr(rollout, name)[kept] for name in names})


def with_minimum(minimum):
    policy, rollouts = Policy(), []
    policy.table[:, END] += 3.0
    end = torch.arange(60) == END

    def no_end(logits, seen, at):
        return torch.where(end & (at < minimum), -1e9, logits)

    for number in range(6):
        rollouts.append(ended(sampled(policy, number, samples=SAMPLES, warp=no_end)))
        policy.step()
    return rollouts


def test_a_minimum_of_tokens_is_named_beside_responses_that_a_stop_string_ended():
    (finding,) = findings(with_minimum(LEAST)).values()
    assert finding.name == "minimum_length" and "stop string" in finding.evidence
    assert findings(with_minimum(0)) == {}


def test_the_lowest_float_is_said_to_be_an_underflow_of_sglang():
    """SGLang takes the log of a softmax, which is 0 in float32 below about -103 nats."""

    def edit(r):
        return {"behavior": torch.where(torch.arange(r.size) % 997 == 5, -3.4e38, r.behavior)}

    (finding,) = findings([replace(r, **edit(r)) for r in runs(None)]).values()
    assert finding.name == "nan_log_probs" and "-103 nats" in finding.fix


def late(penalty):
    """SGLang's penalties: they count all answer tokens but the newest, and the prompt's last token."""
    newest = []

    def warp(logits, seen, at):
        if at == 0:
            newest.clear()
        counted = newest[-1] if newest else torch.zeros_like(seen)
        newest.append(seen.clone())
        return penalty(logits, counted)

    return warp


def repetition(logits, counted):
    scaled = torch.where(logits > 0, logits / 1.3, logits * 1.3)
    return torch.where(counted > 0, scaled, logits)


def test_penalties_one_step_late_are_named_as_late():
    for penalty in (
        lambda logits, counted: logits - 1.0 * (counted > 0),
        lambda logits, counted: logits - 0.5 * counted,
        repetition,
    ):
        policy, rollouts = Policy(), []
        for number in range(6):
            rollouts.append(sampled(policy, number, samples=SAMPLES, warp=late(penalty)))
            policy.step()
        (finding,) = findings(rollouts).values()
        assert finding.name == "penalties" and "counts one token late" in finding.evidence
    (finding,) = findings(
        [sampled(policy, n, samples=SAMPLES, warp=lambda z, seen, at: repetition(z, seen)) for n in range(6)]
    ).values()
    assert finding.name == "penalties" and "counts in time" in finding.evidence
