"""What makes every other number worthless: nothing to train on, a column copied from the other, files of
another run, samples that are missing or there twice."""

from __future__ import annotations

import torch

from slime_ext.tools.analysis.findings.detector import Figures, need, need_tokens
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

LEFT_OUT = 0.01  # share of the samples
UNREAD = 0.1  # share of the rollouts
OTHERS = 0.5  # share of the samples that both dumps hold
EQUAL_TOKENS = 100  # tokens
ALIKE = 1e-6  # nats, mean |l|; engines that close have whole rollouts without a difference by chance
TWICE, TWICE_SHARE = 2, 1e-3  # samples


def no_response_tokens(d: Diagnosis) -> Figures | None:
    """Finds rollouts in which every token is masked."""
    blank = tuple(sorted(d.statistics.blank))
    return {"rollouts": blank, "blank": len(blank), "every": len(d.timeline)} if blank else None


def left_out(d: Diagnosis) -> Figures | None:
    """Finds that a part of the samples, or of the files, could not be read."""
    out, read = d.statistics.counts["left_out"], d.statistics.counts["samples"]
    is_much = out >= max(1, LEFT_OUT * (out + read)) or d.unread >= max(1, UNREAD * len(d.timeline))
    return {"out": out, "samples": out + read, "files": d.unread} if is_much else None


def other_run(d: Diagnosis) -> Figures | None:
    """Finds that the sampler's log-probs of most samples begin otherwise in the train dump than in the
    rollout dump."""
    paired, foreign = d.statistics.counts["paired"], d.statistics.counts["foreign"]
    need(paired, "rollout dumps and train dumps that both hold rollout_log_probs")
    return {"foreign": foreign, "paired": paired} if foreign > OTHERS * paired else None


def repeated_rollouts(d: Diagnosis) -> Figures | None:
    """Finds rollout numbers that come back in a file after others."""
    again = tuple(sorted(set(d.statistics.again)))
    return {"rollouts": again} if again else None


def duplicate_samples(d: Diagnosis) -> Figures | None:
    """Finds samples of the same tokens and the same log-probs, bit by bit, that are too improbable to be
    sampled twice."""
    prints = d.statistics.prints
    need(prints, "responses that chance does not repeat: of 30 nats and more")
    found = torch.cat([own for _, own in prints])
    at = torch.cat([torch.full((len(own),), rollout) for rollout, own in prints])
    _, group, counts = found.unique(return_inverse=True, return_counts=True)
    twice = int((counts - 1).sum())
    if twice < max(TWICE, TWICE_SHARE * len(found)):
        return None
    rollouts = tuple(at[(counts > 1)[group]].unique().tolist())
    order = torch.arange(len(found))
    first = torch.full_like(counts, len(found)).scatter_reduce(0, group, order, "amin")
    across = int((at[first][group] != at).sum())
    return {"twice": twice, "samples": len(found), "across": across, "rollouts": rollouts}


def outside_vocabulary(d: Diagnosis) -> Figures | None:
    """Finds token ids that the model has no row for."""
    vocabulary, counts = d.statistics.ids, d.statistics.counts
    lacks = (
        "the number of token ids: --tokenizer, the tokenizer/ of slime's dumps, or args.json with vocab_size "
        "or hf_checkpoint in the run's folder"
    )
    need(vocabulary is not None, lacks)
    if not counts["beyond"]:
        return None
    return {
        "count": counts["beyond"],
        "tokens": d.sums["tokens"],
        "samples": counts["beyond_in"],
        "sequences": d.sums["sequences"],
        "vocabulary": vocabulary,
    }


def equal_columns(d: Diagnosis) -> Figures | None:
    """Finds rollouts in which the log-probs of both sides are equal at every token, bit by bit."""
    need_tokens(d, EQUAL_TOKENS)
    equal = tuple(s.rollout_id for s in d.statistics.rollouts if not s.absolute and s.surprise)
    tokens = sum(s.tokens for s in d.statistics.rollouts if s.rollout_id in equal)
    every = len(d.statistics.rollouts)
    by_chance = len(equal) < every and max(s.absolute for s in d.statistics.rollouts) < ALIKE
    if tokens < EQUAL_TOKENS or by_chance:
        return None
    severity = "note" if len(equal) == every else "warning"  # two engines may be meant to be bitwise alike
    return {"tokens": tokens, "equal": len(equal), "every": every, "rollouts": equal, "severity": severity}
