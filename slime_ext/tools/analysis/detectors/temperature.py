"""The finding ``temperature``."""

from __future__ import annotations

import math

from slime_ext.tools.analysis.detectors.shared.ages import UNTOLD, Lag, lag
from slime_ext.tools.analysis.detectors.shared.bends import Bend, bend, has_contexts
from slime_ext.tools.analysis.detectors.shared.contexts import Contexts
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, Untold, need_tokens
from slime_ext.tools.analysis.detectors.shared.explained import VALUES, explained_by_fit
from slime_ext.tools.analysis.detectors.shared.same_text import explained_by_temperature
from slime_ext.tools.analysis.detectors.shared.sampling import (
    FEWEST,
    by_probability,
    implied_temperature,
    is_scaled,
    margin,
)
from slime_ext.tools.analysis.detectors.shared.surprise import BySurprise
from slime_ext.tools.analysis.detectors.shared.twice import Twice
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    side="honest",
    group="other_policy",
    after=(
        "mixed_policies",
        "spoilt",
        "kept_mass",
        "scaled_log_probs",
        "truncated_sampling",
        "before_temperature",
        "penalties",
        "soft_cap",
    ),
    what="the engine samples at another temperature than the trainer scores with",
    asks="300 tokens",
    title="""
        {% if or_else is defined %}The log-ratio follows the probability of the token, as under another
        temperature. {%- else %}The sampler runs{% if some is defined %} {{ some | share(1) }} of the
        prompts{% endif %} at a {{ "lower" if scale < 1 else "higher" }} temperature than the trainer
        scores with. {%- endif %}
    """,
    evidence="""
        {% if some is defined -%} After the same text, the log-ratios of different tokens differ by {{ before
        | nats }}. In {{ some | share(1) }} of these contexts, the sampler's differences of log-probs fit
        about {{ "%.2g" | format(scale) }} times the trainer's temperature; in the others they agree. That
        leaves {{ mixed | nats }}, and one temperature for all leaves {{ straight | nats }}. {%- else -%} {{
        explained | share(1) }} of the variance of the log-ratio follows from the probability of the token
        alone, as if the sampler ran at about {{ "%.2g" | format(scale) }} times the trainer's temperature.
        Mean |log-ratio| {{ absolute | nats }}.{% endif %}
    """,
    threshold="""
        the probability explains 35% of the variance of the log-ratio, and the log-ratio has one sign
        at likely tokens; or, in 5% to 95% of the contexts that samples share, another factor between
        differences of log-probs leaves at most 40% of the residual of one factor for all
    """,
    ruled_out="""
        {% if some is defined -%} A soft cap, although it fits a number to each context, because it leaves {{
        bent | nats }}. Old weights or noise, because they do not scale all differences alike. {%- else -%}
        Rounding or old weights, because they have no preferred sign at likely tokens. A lag that begins
        during the run, because no rollout is ten times as far off as an earlier one.{% endif %}
    """,
    remedy="use one temperature for both sides (--rollout-temperature)",
    fix="""
        Use one temperature for both. The trainer divides its logits by --rollout-temperature. A
        temperature in sampling_params of a custom generate function reaches only the sampler. So does
        one in the model's generation_config.json if you sample through chat completions. {%- if some is
        defined %} Compare the requests of prompts that are far off with the others, and look for batches
        that training shares with an evaluation.{% endif %}
    """,
)

TEXTS = Untold(
    "whether the log-ratio bends with the logit, as under a soft cap (final_logit_softcapping)",
    "record several samples of each prompt with their group and token ids",
)


def look(d: Diagnosis) -> Figures | None:
    """Finds log-ratios that depend on the probability, with the means that sampling gives.

    Old weights look the same, so they are ruled out first. If only some prompts have another temperature,
    tokens after the same text tell.
    """
    need_tokens(d, FEWEST)
    fit = bend(d)
    if fit is not None and fit.is_mixed:
        return _of_some_prompts(fit)
    if not is_scaled(d) or (lag_verdict := lag(d)) is Lag.EXPLAINS:
        return None
    absolute = d.sums.mean_absolute
    figures = {
        "scale": implied_temperature(d),
        "explained": by_probability(d),
        "margin": margin(d),
        "absolute": absolute,
        "explains": explained_by_temperature(d, d.of(BySurprise).sums[:, VALUES]),
    }
    others = {} if lag_verdict is Lag.RULED_OUT else {"stale_weights": UNTOLD}
    if not _has_shared_texts(d):
        others["soft_cap"] = TEXTS
    if not others:
        return figures
    return figures | {"or_else": tuple(others), "untold": tuple(others.values())}


def _of_some_prompts(fit: Bend) -> Figures:
    """Returns the figures if contexts are either at the trainer's temperature or at one other."""
    share = min(max(1 - (fit.mixed / fit.before) ** 2, 0.0), 1.0)
    error = (1 - share) * math.sqrt(2 / fit.tokens)
    explains = explained_by_fit(share, error, fit.mixed**2 / 2)  # k3 of a residual in nats
    return {**fit._asdict(), "scale": fit.factor, "some": fit.share, "explains": explains}


def _has_shared_texts(d: Diagnosis) -> bool:
    """Returns whether tokens after the same text tell a temperature from a soft cap."""
    return has_contexts(d) or (not d.of(Contexts).rows and float(d.of(Twice).sums[0]) > 0)
