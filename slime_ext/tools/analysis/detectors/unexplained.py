"""The finding ``unexplained``."""

from __future__ import annotations

from torch import Tensor

from slime_ext.core.metrics.names import HEALTHY
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need_tokens
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="warning",
    side="either",  # no cause
    after=("any cause", "some_samples"),
    what="k3, chi^2 or effective sample size is outside its healthy range, and no other finding explains it",
    asks="100 tokens",
    title="Numbers are outside their healthy range, and no check found the cause.",
    evidence="""
        {{ outside | join("; ") }}. Mean |log-ratio| {{ mean | nats }} ± {{ "%.1g" | format(error) }}.
    """,
    threshold="""
        k3, chi^2 or effective sample size outside its healthy range (the evidence says "perhaps by
        chance" if 5 of 100 bootstrap draws are inside); or 0.05 nats of mean |l| by 3 standard errors
    """,
    ruled_out="""
        Every fault whose check ran, because it found nothing. The table names the checks that could
        not run, and what they need.
    """,
    fix="""
        Find the cause before you train on. The cheapest steps first: read the worst tokens; score one
        fixed text with both sides; record what the table says is missing{% if lacks %} ({{ lacks |
        join("; ") }}){% endif %}; sample one rollout with plain sampling_params (temperature 1, top-p
        1, no penalties) right after a push.
    """,
)

SURELY = 0.95  # share of the bootstrap draws
SURE = 3.0  # standard errors above UNEXPLAINED
FEWEST_TOKENS = 100  # tokens
UNEXPLAINED = 0.05  # nats, mean |l|; two bfloat16 engines and a harmless lag of weights stay below


def look(d: Diagnosis) -> Figures | None:
    """Finds numbers outside their healthy ranges, or a mean |l| that is significantly too large."""
    need_tokens(d, FEWEST_TOKENS)
    mean, error, _ = d.means.absolute
    outside = _outside(d)
    if mean - SURE * error >= UNEXPLAINED and not outside:
        outside = [f"mean |log-ratio| {mean:.3g} nats, above the 0.05 that two bfloat16 engines stay below"]
    if not outside:
        return None
    return {"mean": mean, "error": error, "outside": outside, "lacks": _lacks(d)}


def _outside(d: Diagnosis) -> list[str]:
    """Returns the numbers outside their healthy ranges, and whether that may be by chance."""
    tokens, k3, ratio, square = d.samples.replicates.unbind(1)
    known = tokens > 0
    if not known.any():
        return []
    tokens, k3, ratio, square = (x[known] for x in (tokens, k3, ratio, square))
    total, said = d.sums.numbers(), []
    for name, draws, value, range_ in (
        ("k3", k3 / tokens, total.k3, HEALTHY["k3_kl"]),
        ("chi^2 of tokens", square / tokens - 1, total.chi2_token, HEALTHY["chi2_token"]),
        (
            "effective sample size of tokens",
            ratio.square() / (tokens * square),
            total.ess_token,
            HEALTHY["ess_ratio"],
        ),
    ):
        low, high = range_
        if high is not None and value is not None and value > high:
            said.append(f"{name} {value:.3g}, healthy up to {high:g}{_by_chance(draws > high)}")
        if low is not None and value is not None and value < low:
            said.append(f"{name} {value:.3g}, healthy from {low:g}{_by_chance(draws < low)}")
    return said


def _by_chance(outside: Tensor) -> str:
    """Returns the share of bootstrap draws outside the range, as text; empty if it is nearly all."""
    share = float(outside.double().mean())
    return "" if share >= SURELY else f" (in {share:.0%} of bootstrap draws, so perhaps by chance)"


def _lacks(d: Diagnosis) -> list[str]:
    """Returns what else a dump could hold, the cheapest first."""
    labels = d.samples.by_label()
    has = {
        "weight versions (slime_ext.host.log_rollout)": d.versions,
        "the engine of each sample in sample.metadata": "engine" in labels,
        "ref_log_probs (--use-kl-loss with coefficient 0)": any(s.moved is not None for s in d.rollouts),
        "the entropy (--use-rollout-entropy)": d.means.surprise.count,
    }
    return [what for what, there in has.items() if not there]
