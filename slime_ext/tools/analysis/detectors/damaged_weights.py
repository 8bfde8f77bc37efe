"""The finding ``damaged_weights``."""

from __future__ import annotations

from itertools import pairwise

from slime_ext.core.metrics.names import HEALTHY
from slime_ext.tools.analysis.detectors.shared.ages import fresh_and_stale
from slime_ext.tools.analysis.detectors.shared.began import began_by_k3, dated
from slime_ext.tools.analysis.detectors.shared.detector import FEW, Detector, Figures, need
from slime_ext.tools.analysis.detectors.shared.explained import K3, explained
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.rollouts import mean_k3, top_share

DETECTOR = Detector(
    severity="error",
    side="either",  # in garbled text, large ratios are too rare to be drawn, so the mean ratio may be below 1
    group="pushes",
    after=("spoilt", "other_policy", "prefixes", "stale_cache", "parts", "experts", "frozen_sampler"),
    what="from a named rollout on the engine has other weights than were pushed, such as damaged ones",
    asks="4 rollouts, versions",
    title="""
        From rollout {{ first }} on the engine has other weights than the trainer pushed: damaged ones, or
        those of another model.
    """,
    evidence="""
        k3 is {{ before | nats }} in the {{ healthy }} rollouts before, of which rollout {{ last }} came
        after a push as well, and {{ k3 | nats }} from rollout {{ first }} on. It rises {{ (k3 /
        [before, 1e-12] | max) | factor }} within one rollout, and each rollout has the weight version of a
        new push.{{ dated }}
    """,
    threshold="""
        k3 rises to 30 times that of any rollout before, and 0.05 nats, within one rollout after the second
        or later, and never falls below a third of that; versions advance with every rollout
    """,
    ruled_out="""
        Old weights, because every rollout has a new version, and rollout {{ last }} shows that pushes arrive
        in time. Weights that never arrive, because their distance would grow from the first push on.
    """,
    remedy="""
        compare a checksum of every weight just after a push, and look in the log for a sleep and
        resume or another order of shards
    """,
    fix="""
        Compare a checksum of every weight on both sides just after the push before rollout {{ first }}. Look
        at the log there: a sleep and resume of the engine, a restart, memory that ran out, another dtype or
        another order of shards.
    """,
)
FEWEST, ROLLOUTS, HEALTHY_BEFORE = 100, 4, 2  # tokens of a rollout; rollouts; rollouts before the step
TIMES, MATTERS, STAYS = 30.0, 0.05, 1 / 3  # k3 over the largest before; nats; least share that remains
AGREES = HEALTHY["k3_kl"][1] or 0.0  # nats of k3 before the step


def look(d: Diagnosis) -> Figures | None:
    """Finds a rollout from which on k3 is many times as large, although new weights arrive."""
    rollouts = [s for s in d.rollouts if s.tokens >= FEWEST]
    need(len(rollouts) >= ROLLOUTS, f"{ROLLOUTS} rollouts of {FEWEST} tokens")
    need(all(s.version >= 0 for s in rollouts), "weight versions of the samples")
    for at in range(HEALTHY_BEFORE, len(rollouts)):
        before, since = rollouts[:at], rollouts[at:]
        least = max(MATTERS, TIMES * max(s.k3 for s in before))
        if since[0].k3 >= least:
            break
    else:
        return None
    is_current = all(later.version > rollout.version for rollout, later in pairwise(rollouts))
    stale = {version.rollout_id for version in fresh_and_stale(d.versions)[1]}
    is_current = is_current and stale.isdisjoint(s.rollout_id for s in since)
    is_lasting = min(s.k3 for s in since) >= STAYS * least and top_share(since) < FEW
    if not (is_current and is_lasting) or max(s.k3 for s in before) > AGREES:
        return None
    return {
        "first": since[0].rollout_id,
        "last": before[-1].rollout_id,
        "dated": dated(d, began_by_k3(rollouts)),
        "healthy": len(before),
        "before": mean_k3(before),
        "k3": mean_k3(since),
        "explains": explained(K3.of_rollouts(since), K3.of_rollouts(before)),
        "rollouts": tuple(s.rollout_id for s in since),
    }
