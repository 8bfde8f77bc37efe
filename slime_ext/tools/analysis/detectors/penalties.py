"""The finding ``penalties``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need_tokens
from slime_ext.tools.analysis.detectors.shared.kinds import two_kinds
from slime_ext.tools.analysis.detectors.shared.repeats import rise
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    group="other_policy",
    after=("spoilt", "kept_mass", "other_log_probs", "logit_bias", "minimum_length", "prefix_mismatch"),
    what="a repetition, presence or frequency penalty acts in the sampler alone",
    asks="token ids, 300 tokens",
    title="""
        The sampler {{ "holds back" if is_less else "prefers" }} tokens that came before: a repetition,
        presence or frequency penalty that the trainer does not know.
    """,
    evidence="""
        Of tokens of which the sampler was as sure, those that came before in the response have a
        log-ratio {{ "%+.3g" | format(rise) }} nats from that of new ones ({{ "%.0f" | format(z | abs)
        }} standard errors): {{ means | join(", ") }} at tokens seen 0, 1, 2 and more times. Mean
        |log-ratio| {{ absolute | nats }}.
    """,
    threshold="""
        30% of the mean |log-ratio|, 0.01 nats, by 8 standard errors, with one sign at every count, and
        tokens that came twice on the other side of 0 than new ones
    """,
    ruled_out="""
        Old weights, precision, temperature: they do not know what a response holds already, and as
        likely tokens are compared.
    """,
    fix="""
        Remove repetition_penalty, presence_penalty and frequency_penalty from sampling_params and from
        the model's generation_config.json, which an engine reads by itself; or have the engine return
        log-probs from before the penalties and accept that another policy samples.
    """,
)
LASTS = 0.3  # of it at tokens that came twice or more
FEWEST, HELD, MATTERS, SURE = 300, 0.3, 0.01, 8.0


def look(d: Diagnosis) -> Figures | None:
    """Finds a log-ratio that depends on whether a token came before."""
    need_tokens(d, FEWEST)
    apart, error = rise(d)
    absolute = d.sums.mean("absolute") or 0.0
    samples = d.statistics.samples
    if two_kinds(d) or 2 * samples.related < samples.correlated:  # the log-probs of another text
        return None
    if not error or abs(apart) < max(MATTERS, HELD * absolute) or abs(apart) < SURE * error:
        return None
    often, _ = rise(d, 2)
    if often * apart < 0 or abs(often) < LASTS * abs(apart):
        return None
    table = d.statistics.shared.seen.sum(1)
    new, again = (float(table[part, 1].sum()) for part in (slice(1), slice(2, None)))
    if new * again > 0:  # what is held back raises the rest; another prompt moves all tokens one way
        return None
    means = [f"{row[1] / max(row[0], 1):+.3g}" for row in table.tolist()]
    return {"rise": apart, "z": apart / error, "means": means, "absolute": absolute, "is_less": apart > 0}
