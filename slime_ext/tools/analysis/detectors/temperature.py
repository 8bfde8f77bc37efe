"""The finding ``temperature``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.ages import UNTOLD, Lag, lag
from slime_ext.tools.analysis.detectors.shared.bends import bend
from slime_ext.tools.analysis.detectors.shared.contexts import Contexts
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need_tokens
from slime_ext.tools.analysis.detectors.shared.explained import VALUES
from slime_ext.tools.analysis.detectors.shared.same_text import explained_by_temperature
from slime_ext.tools.analysis.detectors.shared.sampling import (
    FEWEST,
    by_probability,
    implied_temperature,
    is_scaled,
)
from slime_ext.tools.analysis.detectors.shared.surprise import BySurprise
from slime_ext.tools.analysis.detectors.shared.twice import Twice
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    side="honest",
    group="other_policy",
    after=(
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
        The sampler runs at a {{ "lower" if scale < 1 else "higher" }} temperature than the trainer
        scores with.
    """,
    evidence="""
        {{ explained | share(1) }} of the variance of the log-ratio follows from the probability of
        the token alone, as if the sampler ran at about {{ "%.2g" | format(scale) }} times the
        trainer's temperature. Mean |log-ratio| {{ absolute | nats }}.
    """,
    threshold="""
        the probability explains 35% of the variance of the log-ratio, and the log-ratio has one sign
        at likely tokens
    """,
    ruled_out="""
        Rounding or old weights, because they have no preferred sign at likely tokens. A lag that
        begins during the run, because no rollout is ten times as far off as an earlier one.
    """,
    fix="""
        Use one temperature for both. The trainer divides its logits by --rollout-temperature. A
        temperature in sampling_params of a custom generate function reaches only the sampler. So does
        one in the model's generation_config.json if you sample through chat completions.
    """,
)

TEXTS = (
    "whether the log-ratio bends with the logit, as under a soft cap (final_logit_softcapping); to decide, "
    "record several samples of each prompt with their group and token ids"
)


def look(d: Diagnosis) -> Figures | None:
    """Finds log-ratios that depend on the probability, with the means that sampling gives.

    Old weights look the same, so they are ruled out first.
    """
    need_tokens(d, FEWEST)
    if not is_scaled(d) or (lag_verdict := lag(d)) is Lag.EXPLAINS:
        return None
    absolute = d.sums.mean_absolute
    figures = {
        "scale": implied_temperature(d),
        "explained": by_probability(d),
        "absolute": absolute,
        "explains": explained_by_temperature(d, d.of(BySurprise).sums[:, VALUES]),
    }
    others = {} if lag_verdict is Lag.RULED_OUT else {"stale_weights": UNTOLD}
    if not _has_shared_texts(d):
        others["soft_cap"] = TEXTS
    if not others:
        return figures
    return figures | {"or_else": tuple(others), "untold": ". Nor does it tell ".join(others.values())}


def _has_shared_texts(d: Diagnosis) -> bool:
    """Returns whether tokens after the same text tell a temperature from a soft cap."""
    return bend(d) is not None or (not d.of(Contexts).rows and float(d.of(Twice).sums[0]) > 0)
