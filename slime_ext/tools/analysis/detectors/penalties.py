"""The finding ``penalties``."""

from __future__ import annotations

import math
from dataclasses import field
from typing import ClassVar

import torch
from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.clipped import COLUMNS
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need_tokens
from slime_ext.tools.analysis.detectors.shared.explained import VALUES, explained_by_values
from slime_ext.tools.analysis.detectors.shared.kinds import two_kinds
from slime_ext.tools.analysis.detectors.shared.repeats import Repeats, by_repetition, rise
from slime_ext.tools.analysis.detectors.shared.unrelated import Unrelated
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import SURPRISES, DumpedRollout
from slime_ext.tools.analysis.tables import zeros

NEW, JUST, ONCE = range(3)  # never before in its response; only at the token before; once, and earlier


class Newest(Measure):
    """Sums of ``clipped`` by whether a token came only just before, and by bin of -log behavior.

    The table is [3, SURPRISES, COLUMNS], with the rows NEW, JUST and ONCE.
    """

    takes_joined: ClassVar[bool] = True

    sums: Tensor = field(default_factory=lambda: zeros(3, SURPRISES, COLUMNS))

    def add(self, part: DumpedRollout) -> None:
        if part.size and part.tokens is not None:
            for just, new, once, *_ in by_repetition(part):
                self.sums += torch.stack([new, just, once])


DETECTOR = Detector(
    severity="error",
    side="honest",
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
        |log-ratio| {{ absolute | nats }}. {%- if is_late is true %} Tokens that came only just before are
        treated as new, so the penalty counts one token late, as SGLang's does. {%- elif is_late is false %}
        Tokens that came only just before are penalised, so it counts in time, as vLLM's does, and not one
        token late as SGLang's.{% endif %}
    """,
    threshold="""
        30% of the mean |log-ratio| and 0.01 nats, by 8 standard errors, with the same sign at every
        count; tokens that came twice are on the other side of 0 than new ones; the certainty of tokens alone
        explains at most half as much of k3
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
# Tokens of a bin; tokens that came only just before; standard errors between both explanations.
TELL, JUST_SEEN, CERTAIN = 10, 30, 4.0
FEWEST, HELD, MATTERS, SURE = 300, 0.3, 0.01, 8.0
ALONE = 0.5  # share of what certainty and repeats explain together that certainty may explain alone


def look(d: Diagnosis) -> Figures | None:
    """Finds a log-ratio that depends on whether the token came before.

    Another policy's values also differ at repeated tokens, but mostly by how certain the sampler was of them.
    """
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
    kinds = d.of(Repeats).sums[..., VALUES]
    explains = explained_by_values(d, kinds.flatten(0, 1))
    if explained_by_values(d, kinds.sum(0)).share > ALONE * explains.share:
        return None
    means = [f"{row[1] / max(row[0], 1):+.3g}" for row in table.tolist()]
    return {
        "rise": rise_of_repeats,
        "z": rise_of_repeats / error,
        "means": means,
        "absolute": absolute,
        "is_less": rise_of_repeats > 0,
        "is_late": _is_late(d),
        "explains": explains,
    }


def _is_late(d: Diagnosis) -> bool | None:
    """Returns whether tokens that came only just before count as new; None if too few tell.

    Their mean l, among equally certain tokens, is compared with that of new tokens and that of repeated ones.
    """
    new, just, once = d.of(Newest).sums
    known = (new[:, 0] >= TELL) & (just[:, 0] >= 1) & (once[:, 0] >= TELL)
    n = just[known, 0]
    if float(n.sum()) < JUST_SEEN:
        return None
    as_new, as_once = (float((n * rows[known, 1] / rows[known, 0]).sum() / n.sum()) for rows in (new, once))
    mean = float(just[known, 1].sum() / n.sum())
    variance = float(just[known, 3].sum() / n.sum()) - mean**2
    error = math.sqrt(max(variance, 0.0) / float(n.sum()))
    nearer = abs(mean - as_once) - abs(mean - as_new)
    return nearer > 0 if abs(nearer) > CERTAIN * error else None
