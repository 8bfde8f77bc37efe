"""The finding ``mixed_policies``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, Untold, need_tokens
from slime_ext.tools.analysis.detectors.shared.experts import has_experts
from slime_ext.tools.analysis.detectors.shared.explained import explained_by_tokens
from slime_ext.tools.analysis.detectors.shared.mixed import FEWEST, mixed
from slime_ext.tools.analysis.detectors.shared.sparse import sparse
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="warning",
    side="either",  # other routing at some tokens is honest; the log-probs of a draft model are not
    after=(
        "spoilt",
        "kept_mass",
        "truncated_sampling",
        "constrained_decoding",
        "penalties",
        "minimum_length",
        "logit_bias",
        "before_temperature",
        "soft_cap",
        "other_log_probs",
        "permuted_log_probs",
        "prefixes",
        "experts",
        "shared_place",
    ),
    what="""
        tokens that agree and tokens that are far off are mixed in every sample, as by chance: the
        log-probs come from two models
    """,
    asks="300 tokens",
    title="""
        Tokens that agree and tokens that are far off are mixed in every sample, as by chance {%- if
        or_else is defined %}. {%- else %}: the sampler's log-probs come from two models, such as a draft
        model and its target. {%- endif %}
    """,
    evidence="""
        Of the tokens with a sampler log-prob below -0.5, {{ agree | share(1) }} agree (|log-ratio|
        below {{ end | nats }}), and sizes around that are rare: |log-ratio| has two peaks. The share
        varies from sample to sample {{ "%.2g" | format(spread) }} times as much as that of
        independent tokens. Mean ratio minus 1: {{ "%+.2g" | format(ratio) }} ± {{ "%.1g" |
        format(error) }}.
    """,
    threshold="""
        |log-ratio| has two peaks, counted by octave, with 10% of the tokens on either side; the share
        of a sample varies at most twice as much as that of independent tokens, and no place of the
        responses agrees as a whole; the far ones have a mean |l| of 0.25 nats, which rounding does not
        make; the mean ratio is not below 1
    """,
    ruled_out="""
        Old weights, precision and other weights, because they move all tokens, and |log-ratio| then
        has one peak. A part of the run, because the share then varies from sample to sample at least 3
        times as much as that of independent tokens.{% if is_above
        %} Other routing at some tokens, because it leaves the mean ratio at 1.{% endif %}
    """,
    remedy="sample without speculative decoding, or score the responses again with the target model",
    fix="""
        If the engine decodes speculatively (--speculative-algorithm, --speculative-config), sample
        one rollout without it. If all tokens then agree, it returns the draft model's log-prob of
        each accepted token: upgrade it, or score the responses again with the target model.
    """,
)
SURE = 3.0  # standard errors of the mean ratio from 1
UNTOLD_EXPERTS = Untold(
    "whether other experts were chosen at the far tokens",
    "record the sampler's experts (--use-rollout-routing-replay)",
)
UNTOLD_KERNEL = Untold(
    "whether another kernel scored the far tokens", "score one rollout again in the engine"
)


def look(d: Diagnosis) -> Figures | None:
    """Finds log-probs of two models.

    Speculative decoding draws from the target p. It accepts a token of the draft q with probability
    min(1, q / p). If the engine records q at accepted tokens, the mean ratio is the sum of p^2 / q over the
    tokens with q > p, and of p + (1 - q / p) p = 2 p - q over the others. This is 1 plus the sum of
    (q - p)^2 / q over the tokens with q > p.
    """
    need_tokens(d, FEWEST)
    kinds, ratio = mixed(d), d.means.ratio_minus_one
    if kinds is None or ratio.value < -SURE * ratio.error or sparse(d):
        return None
    count, *_, k3 = kinds.far.tolist()
    is_above = ratio.value > SURE * ratio.error
    figures = {
        "agree": kinds.agree,
        "end": kinds.end,
        "spread": kinds.spread,
        "ratio": ratio.value,
        "error": ratio.error,
        "is_above": is_above,
        "explains": explained_by_tokens(d, count, k3),
    }
    if is_above:
        return figures
    if has_experts(d) is False:
        return figures | {"or_else": ("quantised",), "untold": (UNTOLD_KERNEL,)}
    return figures | {"or_else": ("routing_flips",), "untold": (UNTOLD_EXPERTS,)}
