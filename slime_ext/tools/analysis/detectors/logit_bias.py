"""The finding ``logit_bias``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.detectors.shared.kinds import two_kinds
from slime_ext.tools.analysis.detectors.shared.repeats import rise
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    group="other_policy",
    after=(
        "spoilt",
        "kept_mass",
        "constrained_decoding",
        "shared_place",
        "other_log_probs",
        "minimum_length",
        "prefix_mismatch",
        "part_of_run",
    ),
    what="a few token ids are far off wherever they stand: a logit bias",
    asks="token ids, 300 tokens",
    title="""
        {{ ids | length }} token id{{ 's' if ids | length > 1 }} {{ 'are' if ids | length > 1 else 'is'
        }} off wherever {{ 'they stand' if ids | length > 1 else 'it stands' }}: a logit bias in the
        sampler.
    """,
    evidence="""
        Id {{ ids[:5] | join(", ") }}{{ ", ..." if ids | length > 5 }} (modulo 4096): mean log-ratio {{
        "%+.3g" | format(mean) }} nats at {{ count | int }} tokens, {{ lean | share(1) }} of it in one
        direction. They hold {{ held | share(1) }} of the squared log-ratio; all other tokens are {{
        rest | nats }} off.
    """,
    threshold="""
        at most 10 ids with 70% of the squared log-ratio, 90% of it in one direction, 0.1 nats, 10
        tokens
    """,
    ruled_out="Noise, routing, old weights: they do not choose a token id, and have no direction.",
    fix="""
        Look for logit_bias, banned or forced tokens (bad_words, stop and end tokens) in sampling_params
        and in generation_config.json; a row of the output layer that the push leaves out looks the
        same.
    """,
)
SPREAD, SURE, BANNED = 0.2, 8.0, 3
EVEN = 0.05  # k3 of the least rollout over that of the largest
MOST, HELD, LEANS, MATTERS, FEWEST, TIMES = 10, 0.7, 0.9, 0.1, 10, 5.0


def look(d: Diagnosis) -> Figures | None:
    """Finds the fewest ids that hold most of sum l^2, in one direction."""
    table = d.statistics.shared.ids
    need(float(table[:, 0].sum()) >= 300, "token ids, 300 tokens")
    whole, order = table.sum(0), table[:, 3].argsort(descending=True)
    until = table[order].cumsum(0)
    enough = (until[:MOST, 3] >= HELD * whole[3]).nonzero()
    if not len(enough) or not whole[3]:
        return None
    chosen = order[: int(enough[0, 0]) + 1]
    count, signed, absolute, squared = table[chosen].sum(0).tolist()
    is_one = absolute * absolute < SPREAD * count * squared  # a few tokens of it hold all
    apart, error = rise(d)
    is_history = abs(apart) >= SURE * error > 0 and len(chosen) > BANNED  # a penalty on frequent ids
    rollouts = [s.k3 for s in d.statistics.rollouts]
    is_part = min(rollouts) < EVEN * max(rollouts) or two_kinds(d) is not None
    if is_one or is_history or is_part:
        return None
    leans = float(table[chosen, 1].abs().sum()) / absolute
    rest = float(whole[2] - absolute) / max(float(whole[0]) - count, 1)
    few = count < 0.2 * float(whole[0])
    if not few or count < FEWEST or leans < LEANS or absolute / count < max(MATTERS, TIMES * rest):
        return None
    names = [f"{i}" for i in chosen.tolist()]
    return {
        "ids": names,
        "mean": signed / count,
        "count": count,
        "lean": leans,
        "held": squared / float(whole[3]),
        "rest": rest,
    }
