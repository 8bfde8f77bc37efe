"""The recorded values are not the log-probs of the sampled tokens: NaN, another token's, filled in with 0."""

from __future__ import annotations

from slime_ext.analysis.detector_statistics import DOUBTED
from slime_ext.analysis.diagnosis import Diagnosis
from slime_ext.analysis.findings.detector import Detected, detector, nats, share, tokens
from slime_ext.analysis.shifts import CLOSER, SHIFTS

MOVED, MOVED_SHARE = 3, 0.02  # turns of which the later part is shifted
SHIFT_TOKENS = 50  # tokens
SHIFTED_SEQUENCES, SHIFTED_SHARE = 2, 0.02  # sequences that are shifted when others are not, and their share
GREEDY_TOKENS = 100  # tokens
NEARLY_ALL = 0.95  # tokens with a behavior log-prob of 0
DOUBTED_SHARE = 0.05  # tokens of which the trainer is not sure; flipped experts and tool output are rarer
FILLED_TOKENS, FILLED_SHARE = 4, 5e-4  # tokens in runs, and their share
# Zeros that stand alone are filled in if they are this share of the tokens, and nearly all of the tokens of
# which the sampler is sure and the trainer is not: an engine that errs is mostly nearly sure, not exactly.
ALONE_SHARE, EXACT_SHARE = 5e-3, 0.9


@detector(
    "error",
    needs=tokens(0),
    threshold="one token: no healthy engine writes one",
    ruled_out="Masked tokens: tool output and padding are not counted.",
)
def nan_log_probs(d: Diagnosis) -> Detected | None:
    """Finds log-probs of the sampler that are NaN or infinite at some tokens of a response, and any of the
    trainer."""
    sums, counts = d.sums, d.statistics.counts
    if not counts["partial"] and not sums["no_proximal"]:
        return None
    side = "trainer" if sums["no_proximal"] else "sampler"
    return Detected(
        title=f"Some log-probs of the {side} are NaN or infinite.",
        evidence=(
            f"{counts['partial']} sequences lack a finite log-prob of the sampler at some of their tokens; "
            f"{int(sums['no_proximal'])} tokens lack one of the trainer. In all "
            f"{share(sums['tokens'] - sums['finite'], sums['tokens'])} of the response tokens."
        ),
        fix=(
            "A log-prob of -inf comes from top-k or top-p masking of a token that was drawn all the same; "
            "NaN from an overflow in the engine. Corrections reject such a token (on_nonfinite: reject); "
            "of the trainer it stops the run. Sample with top-p 1 and top-k -1, or find the request that "
            "made it."
        ),
    )


@detector(
    "error",
    needs=tokens(0),
    threshold="one response without any",
    ruled_out="A response in which some are missing is another finding, nan_log_probs.",
)
def missing_log_probs(d: Diagnosis) -> Detected | None:
    """Finds responses without any log-prob of the sampler."""
    silent = d.statistics.counts["silent"]
    if not silent:
        return None
    return Detected(
        title="Some responses have no log-probs of the sampler at all.",
        evidence=f"{silent} of {int(d.sums['sequences'])} sequences.",
        fix=(
            "A custom generate function that does not copy output_token_logprobs into "
            "sample.rollout_log_probs, or a request without return_logprob. Without them these samples "
            "cannot be corrected."
        ),
    )


@detector(
    "error",
    needs=tokens(0),
    threshold="one value above 1e-4, which arithmetic alone does not reach",
    ruled_out="Rounding: a log-softmax in any dtype stays below 1e-4.",
)
def positive_log_probs(d: Diagnosis) -> Detected | None:
    """Finds behavior log-probs above 0."""
    count = d.statistics.counts["positive"]
    if not count:
        return None
    return Detected(
        title="Some values recorded as the sampler's log-probs are above 0.",
        evidence=f"{count} response tokens ({share(count, d.sums['tokens'])}).",
        fix=(
            "Log-probs cannot be positive: probabilities, logits or negated log-probs were recorded. "
            "Record the log-softmax at the sampled token."
        ),
    )


def _some_turns(d: Diagnosis) -> str:
    return "" if d.statistics.counts["turns"] >= MOVED else f"{MOVED} turns of responses"


@detector(
    "error",
    needs=_some_turns,
    threshold=(
        f"{MOVED} turns and {share(MOVED_SHARE, 1)} of all; in each, a part of at least 6 tokens by 5 "
        "standard errors"
    ),
    ruled_out=(
        "A wrong slice of the engine's lists (off_by_one) shifts a response from its first token on; here "
        "an earlier part of the same sample fits its own log-probs."
    ),
)
def retokenised(d: Diagnosis) -> Detected | None:
    """Finds turns whose log-probs fit their tokens up to some place, and tokens one or two places away from
    there on; or samples whose tokens differ between the rollout dump and the train dump."""
    counts = d.statistics.counts
    turns, moved, retold = counts["turns"], counts["moved"], counts["retold"]
    if moved < max(MOVED, MOVED_SHARE * turns) and not retold:
        return None
    differ = (
        f" {retold} samples have other tokens in the train dump than in the rollout dump." if retold else ""
    )
    return Detected(
        title="The tokens that are trained on are not those that were sampled: text was tokenised again.",
        evidence=(
            f"In {moved} of {turns} turns ({share(moved, turns)}) the log-probs fit the tokens up to a "
            f"place, and from there on those one or two places away.{differ}"
        ),
        fix=(
            "Do not decode a turn and encode its text again: append the ids that the engine returned "
            "(SGLang: output_ids or output_token_logprobs; vLLM: return_token_ids), and join prompts of "
            "later turns from ids."
        ),
    )


@detector(
    "error",
    after=(positive_log_probs, retokenised),
    needs=tokens(SHIFT_TOKENS),
    threshold="less than half the distance at another place as at its own",
    ruled_out="Other weights or another text: those are no closer at any other place.",
)
def off_by_one(d: Diagnosis) -> Detected | None:
    """Finds behavior log-probs that fit the token one or two places away better than their own, over all
    tokens or in some of the sequences."""
    found = [
        (shifted / count, min(at, beside) / count, shift)
        for shift, (count, shifted, at, beside) in zip(SHIFTS, d.statistics.shifts.tolist(), strict=True)
        if count >= SHIFT_TOKENS
    ]
    distance, here, best = min(found, default=(0.0, 0.0, 0))
    if distance >= CLOSER * here:
        return _in_some(d)
    side = "before" if best < 0 else "after"
    return _shifted(
        f"The sampler's log-probs are shifted by {_tokens(best)}.",
        f"The trainer's log-prob of a token differs by {nats(here)} from the one recorded for it, by only "
        f"{nats(distance)} from the one recorded {abs(best)} {side} it.",
    )


def _in_some(d: Diagnosis) -> Detected | None:
    """The finding where only some sequences are shifted, each looked at by itself."""
    count, best = max(zip(d.statistics.shifted.tolist(), SHIFTS, strict=True))
    every = d.sums["sequences"]
    if count < max(SHIFTED_SEQUENCES, SHIFTED_SHARE * every):
        return None
    return _shifted(
        f"In some responses the sampler's log-probs are shifted by {_tokens(best)}.",
        f"In {count:.0f} of {every:.0f} sequences ({share(count, every)}), each looked at by itself, the "
        f"trainer's log-probs are less than half as far from those recorded {abs(best)} "
        f"{'before' if best < 0 else 'after'} their token as from those recorded for it.",
    )


def _shifted(title: str, evidence: str) -> Detected:
    return Detected(
        title=title,
        evidence=evidence,
        fix=(
            "Check what is cut off where prompt and response meet: the log-prob of token t is made by the "
            "logits at t - 1. In a custom generate function, take output_token_logprobs as it comes and "
            "append it in the order of the tokens, tool tokens included (as 0). Where only some responses "
            "are shifted: continued, aborted and multi-turn ones."
        ),
    )


def _tokens(shift: int) -> str:
    return f"{abs(shift)} token{'s' * (abs(shift) > 1)}"


@detector(
    "error",
    after=(positive_log_probs,),
    needs=tokens(GREEDY_TOKENS),
    threshold="95% of the log-probs exactly 0, and 5% of the tokens at which the trainer is not sure",
    ruled_out="A policy that is sure: there the trainer is sure too.",
)
def greedy_sampling(d: Diagnosis) -> Detected | None:
    """Finds behavior log-probs that are nearly all exactly 0 where the trainer is often unsure."""
    count, zeros, doubted = d.sums["finite"], d.statistics.counts["zeros"], d.statistics.counts["doubted"]
    if zeros < NEARLY_ALL * count or doubted < DOUBTED_SHARE * count:
        return None
    return Detected(
        title="The sampler is sure of every token: greedy sampling, or log-probs that were filled in with 0.",
        evidence=(
            f"{share(zeros, count)} of the recorded log-probs are exactly 0; at {share(doubted, count)} of "
            f"the tokens the trainer's is below {DOUBTED}, {nats(d.sums.mean('proximal'))} on average."
        ),
        fix=(
            "Sample with --rollout-temperature 1, --rollout-top-p 1 and --rollout-top-k -1: temperature 0 "
            "and top-k 1 take the likeliest token, from which nothing is learnt. If the responses of a "
            "prompt differ, sampling is right and the log-probs are missing: copy output_token_logprobs "
            "in the custom generate function."
        ),
    )


def _are_filled_in(d: Diagnosis) -> bool:
    """Whether log-probs of exactly 0 stand in runs, which sampling does not make, or alone but often, with
    hardly any that are nearly 0."""
    counts, tokens = d.statistics.counts, d.sums["tokens"]
    if counts["padded"] >= max(FILLED_TOKENS, FILLED_SHARE * tokens):
        return True
    is_exact = counts["filled"] >= EXACT_SHARE * (counts["filled"] + counts["sure"])
    return is_exact and counts["filled"] >= max(FILLED_TOKENS, ALONE_SHARE * tokens)


# A shift puts the zeros of sure tokens on others, and code that makes one fills the gap with zeros.
@detector(
    "error",
    after=(positive_log_probs, retokenised, off_by_one, greedy_sampling),
    needs=tokens(0),
    threshold="4 tokens and 0.05% in runs, or 0.5% that stand alone",
    ruled_out=(
        "An engine that errs is nearly sure, not exactly: hardly any of these log-probs lie between -0.01 "
        "and 0."
    ),
)
def tool_tokens(d: Diagnosis) -> Detected | None:
    """Finds response tokens whose log-prob was filled in with 0."""
    if not _are_filled_in(d):
        return None
    filled = d.statistics.counts["filled"]
    return Detected(
        title="Tokens that the policy did not sample are trained on.",
        evidence=(
            f"The recorded log-prob of {filled} response tokens ({share(filled, d.sums['tokens'])}) is "
            "exactly 0 while the trainer finds them unlikely: filled in, not sampled."
        ),
        fix=(
            "Tool output and environment turns belong outside the loss: set sample.loss_mask to 0 at "
            "these tokens in the custom generate function."
        ),
    )


# Nothing else can be concluded from log-probs in which one of these was found.
SPOILT = (positive_log_probs, retokenised, off_by_one, greedy_sampling, tool_tokens)
DETECTORS = (nan_log_probs, missing_log_probs, *SPOILT)
