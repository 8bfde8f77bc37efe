"""The finding ``temperature``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.ages import UNTOLD, Lag, lag
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need_tokens
from slime_ext.tools.analysis.detectors.shared.sampling import (
    FEWEST,
    by_probability,
    implied_temperature,
    is_scaled,
)
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    group="other_policy",
    after=(
        "spoilt",
        "kept_mass",
        "scaled_log_probs",
        "truncated_sampling",
        "before_temperature",
        "penalties",
    ),
    what="the engine samples at another temperature than the trainer scores with",
    asks="300 tokens",
    title="""
        The sampler runs at a {{ "lower" if scale < 1 else "higher" }} temperature than the trainer scores
        with.
    """,
    evidence="""
        {{ explained | share(1) }} of the variance of the log-ratio follows from the probability of the
        token alone, as at about {{ "%.2g" | format(scale) }} times the trainer's temperature. Mean
        |log-ratio| {{ absolute | nats }}.
    """,
    threshold="""
        35% of the variance of the log-ratio explained by the probability, one sign at likely tokens
    """,
    ruled_out="""
        Rounding and staleness have no preferred sign at likely tokens, and no rollout is ten times as far
        off as an earlier one.
    """,
    fix="""
        Use one temperature for both: the trainer divides its logits by --rollout-temperature; a
        temperature in sampling_params of a custom generate function, or in the model's
        generation_config.json, reaches the sampler alone.
    """,
)


def look(d: Diagnosis) -> Figures | None:
    """Finds log-ratios that are a function of the probability, with the means that sampling gives. Old
    weights look so too: they are looked at first."""
    need_tokens(d, FEWEST)
    if not is_scaled(d) or (why := lag(d)) is Lag.EXPLAINS:
        return None
    absolute = d.sums.mean("absolute")
    found = {"scale": implied_temperature(d), "explained": by_probability(d), "absolute": absolute}
    return found if why is Lag.RULED_OUT else found | {"or_else": ("stale_weights",), "untold": UNTOLD}
