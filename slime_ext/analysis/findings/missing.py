"""Log-probs that are no log-probs: NaN, none at all, above 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime_ext.analysis.document import Finding
from slime_ext.analysis.findings import Detector
from slime_ext.analysis.findings.words import share

if TYPE_CHECKING:
    from slime_ext.analysis.diagnosis import Diagnosis


def nan_log_probs(d: Diagnosis) -> Finding | None:
    """NaN or infinite log-probs at some tokens of a response, or of the trainer."""
    sums, counts = d.sums, d.evidence.counts
    if not counts["partial"] and not sums["no_proximal"]:
        return None
    side = "trainer" if sums["no_proximal"] else "sampler"
    return Finding(
        name="nan_log_probs",
        severity="error",
        title=f"Some log-probs of the {side} are NaN or infinite.",
        evidence=(
            f"{counts['partial']} sequences lack a finite log-prob of the sampler at some of their tokens; "
            f"{int(sums['no_proximal'])} tokens lack one of the trainer. In all "
            f"{share(sums['tokens'] - sums['finite'], sums['tokens'])} of the response tokens."
        ),
        fix=(
            "A log-prob of -inf comes from top-k or top-p masking of a token that was drawn all the same; "
            "NaN from an overflow in the engine. Corrections reject such a token (on_nonfinite: reject); of "
            "the trainer it stops the run. Sample with top-p 1 and top-k -1, or find the request that made "
            "it."
        ),
    )


def missing_log_probs(d: Diagnosis) -> Finding | None:
    """Responses without any log-prob of the sampler."""
    silent = d.evidence.counts["silent"]
    if not silent:
        return None
    return Finding(
        name="missing_log_probs",
        severity="error",
        title="Some responses have no log-probs of the sampler at all.",
        evidence=f"{silent} of {int(d.sums['sequences'])} sequences.",
        fix=(
            "A custom generate function that does not copy output_token_logprobs into "
            "sample.rollout_log_probs, or a request without return_logprob. Without them these samples "
            "cannot be corrected."
        ),
    )


def positive_log_probs(d: Diagnosis) -> Finding | None:
    """Behavior log-probs above 0."""
    count = d.evidence.counts["positive"]
    if not count:
        return None
    return Finding(
        name="positive_log_probs",
        severity="error",
        title="Some values recorded as the sampler's log-probs are above 0.",
        evidence=f"{count} response tokens ({share(count, d.sums['tokens'])}).",
        fix=(
            "Log-probs cannot be positive: probabilities, logits or negated log-probs were recorded. Record "
            "the log-softmax at the sampled token."
        ),
    )


DETECTORS = (
    Detector("nan_log_probs", nan_log_probs),
    Detector("missing_log_probs", missing_log_probs),
    Detector("positive_log_probs", positive_log_probs),
)
