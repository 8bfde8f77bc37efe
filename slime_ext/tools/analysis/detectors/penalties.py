"""The finding ``penalties``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need_tokens
from slime_ext.tools.analysis.detectors.shared.kinds import two_kinds
from slime_ext.tools.analysis.detectors.shared.repeats import Repeats, rise
from slime_ext.tools.analysis.detectors.shared.unrelated import Unrelated
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    group="other_policy",
    after=("spoilt", "kept_mass", "other_log_probs", "logit_bias", "minimum_length", "prefix_mismatch"),
    what="a repetition, presence or frequency penalty acts only in the sampler",
    asks="token ids, 300 tokens",
    title="""
        The sampler {{ "holds back" if is_less else "prefers" }} tokens that came before: a
        repetition, presence or frequency penalty that the trainer does not know.
    """,
    evidence="""
        Among equally certain tokens, those that came before in the response have a log-ratio {{
        "%+.3g" | format(rise) }} nats from that of new ones ({{ "%.0f" | format(z | abs) }} standard
        errors). It is {{ means | join(", ") }} at tokens seen 0, 1, 2 and more times. Mean
        |log-ratio| {{ absolute | nats }}.
    """,
    threshold="""
        30% of the mean |log-ratio| and 0.01 nats, by 8 standard errors, with the same sign at every
        count; tokens that came twice are on the other side of 0 than new ones
    """,
    ruled_out="""
        Old weights, precision or temperature, because they do not depend on what a response holds
        already, and equally likely tokens are compared.
    """,
    fix="""
        Remove repetition_penalty, presence_penalty and frequency_penalty from sampling_params. If you
        sample through chat completions, also remove them from the model's generation_config.json
        (SGLang's /generate does not read them there). SGLang always records log-probs with the
        penalties in them.
    """,
)
LASTS = 0.3  # share of the difference that remains at tokens that came twice or more
FEWEST, HELD, MATTERS, SURE = 300, 0.3, 0.01, 8.0


def look(d: Diagnosis) -> Figures | None:
    """Finds a log-ratio that depends on whether the token came before."""
    need_tokens(d, FEWEST)
    rise_of_repeats, error = rise(d)
    absolute = d.sums.mean_absolute or 0.0
    samples = d.of(Unrelated)
    if two_kinds(d) or 2 * samples.related < samples.correlated:  # the log-probs of another text
        return None
    if (
        not error
        or abs(rise_of_repeats) < max(MATTERS, HELD * absolute)
        or abs(rise_of_repeats) < SURE * error
    ):
        return None
    often, _ = rise(d, 2)
    if often * rise_of_repeats < 0 or abs(often) < LASTS * abs(rise_of_repeats):
        return None
    table = d.of(Repeats).sums.sum(1)
    new, repeated = (float(table[part, 1].sum()) for part in (slice(1), slice(2, None)))
    if new * repeated > 0:  # a penalty raises all other tokens; another prompt moves all tokens one way
        return None
    means = [f"{row[1] / max(row[0], 1):+.3g}" for row in table.tolist()]
    return {
        "rise": rise_of_repeats,
        "z": rise_of_repeats / error,
        "means": means,
        "absolute": absolute,
        "is_less": rise_of_repeats > 0,
    }
