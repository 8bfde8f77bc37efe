"""The finding ``stale_prefix``."""

from __future__ import annotations

import math
from dataclasses import field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.cached import CachedShares
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, Untold, need
from slime_ext.tools.analysis.detectors.shared.explained import (
    BFLOAT16_K3,
    K3,
    explained,
    explained_by_tokens,
)
from slime_ext.tools.analysis.detectors.shared.kinds import SIZES, bins_of_samples, two_kinds
from slime_ext.tools.analysis.detectors.shared.twice import FEWEST, Twice, differs, twice, unrepeated
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.measures.rollouts import mean_k3
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import zeros

BOTH_CACHED = 50  # least tokens of a version in a rollout, with and without a cached prefix


class Cached(Measure):
    """Samples without and with a cached prefix: their number, tokens, sum k3, and its squares over samples.

    Samples of one version of the weights are compared, because a cached prefix and old weights may come
    together. ``by_version`` is of the rollout that is being read. ``sums`` is of all versions with both
    kinds, weighed so that both kinds have as many tokens.
    """

    version: ClassVar[int] = 2

    by_version: dict[float, Tensor] = field(default_factory=dict)
    sums: Tensor = field(default_factory=lambda: zeros(2, 4))

    def add(self, part: DumpedRollout) -> None:
        if part.cached is None:
            return
        count, *_, near = part.sample_sums
        rows = torch.stack([torch.ones_like(near), count, near, near.square()], 1)
        is_cached, there = torch.tensor(part.cached) > 0, count > 0
        versions = torch.zeros(part.count) if part.versions is None else part.oldest_versions().nan_to_num(-1)
        for version in versions.unique().tolist():
            same = there & (versions == version)
            table = torch.stack([rows[same & ~is_cached].sum(0), rows[same & is_cached].sum(0)])
            self.by_version[version] = self.by_version.get(version, zeros(2, 4)) + table

    def close(self, rollout: DumpedRollout) -> None:
        tables, self.by_version = self.by_version, {}
        for table in tables.values():
            tokens = table[:, 1]
            if tokens.min() >= BOTH_CACHED:
                table[0, 1:] *= tokens[1] / tokens[0]
                self.sums += table


class CachedTwice(Measure):
    """The sums of ``Twice`` over samples with a cached prefix, [7]."""

    sums: Tensor = field(default_factory=lambda: zeros(7))

    def add(self, part: DumpedRollout) -> None:
        if part.size and part.tokens is not None and any(part.cached or ()):
            self.sums += twice(part, torch.tensor(part.cached) > 0)


class CachedBins(NamedTuple):
    """Numbers of a rollout's samples with a cached prefix, by bin of ``Sizes.sums``."""

    rollout_id: int
    samples: tuple[int, ...]


class CachedSizes(Measure):
    """How far off samples with a cached prefix are; ``open`` is of the rollout that is being read."""

    rollouts: list[CachedBins] = field(default_factory=list)
    open: Tensor = field(default_factory=lambda: zeros(SIZES))

    def add(self, part: DumpedRollout) -> None:
        if part.size and any(part.cached or ()):
            at = bins_of_samples(part)[torch.tensor(part.cached) > 0]
            self.open += torch.bincount(at, minlength=SIZES + 1)[:SIZES]

    def close(self, rollout: DumpedRollout) -> None:
        if self.open.any():
            self.rollouts.append(CachedBins(rollout.rollout_id, tuple(map(int, self.open.tolist()))))
        self.open = zeros(SIZES)


DETECTOR = Detector(
    severity="error",
    side="honest",
    group="prefixes",
    after=("spoilt", "other_log_probs", "packing_leak", "part_of_run"),
    what="the engine reuses keys and values of old weights: only responses after a cached prefix are far off",
    asks="`prefix_cache_info`",
    title="""
        Responses after a cached prefix are far off {%- if or_else is defined %}. {%- else %}: the engine
        reuses keys and values of old weights. {%- endif %}
    """,
    evidence="""
        {% if samples -%} k3 is {{ cached | nats }} in {{ samples }} of {{ of }} samples whose prompt
        begins in the engine's prefix cache, and {{ fresh | nats }} in the others of the same weights: {{
        (cached / [fresh, 1e-12] | max) | factor }}. {%- else -%} k3 is {{ cached | nats }} in the {{
        with | length }} rollouts whose prompts begin in the engine's prefix cache, and {{ fresh | nats }}
        in the rollouts {{ without | join(", ") }} without a cached prefix: {{ (cached / [fresh, 1e-12] |
        max) | factor }}.{% endif %}
    """,
    threshold="""
        k3 after a cached prefix is 3 times that without one and 1e-3 nats, by 3 standard errors over
        sequences; or so it is between rollouts with a cached prefix and two or more without, the last of
        which comes after one with it; and after a cached prefix, equal text is scored alike by the engine,
        and hardly any sample of the same rollout agrees
    """,
    ruled_out="""
        {% if samples -%} Old weights in the sampler, because samples of the same rollouts without a cached
        prefix come from the same weights. {%- else -%} A lag that begins during the run, because rollout
        {{ without[-1] }} has no cached prefix and agrees again.{% endif %}
    """,
    remedy="flush the prefix cache at every push",
    fix="""
        Flush the prefix cache at every push (SGLang: flush_cache after update_weights). As a test,
        sample with the prefix cache off (--sglang-disable-radix-cache), or restart the engine and see
        whether the distance disappears.
    """,
)

EMPTY = Untold(
    "whether the engine was restarted before the rollouts without a cached prefix",
    "flush the cache before a push",
)
# Tokens; times k3; nats of k3; standard errors.
MOSTLY = 0.9  # share of samples; share of rollouts
BOTH = 0.2  # samples beside one of the other kind in their rollout, over far ones with a cached prefix
PREFIX_TOKENS, PREFIX_TIMES, PREFIX_MATTERS, PREFIX_SURE = 100, 3.0, 1e-3, 3.0


def look(d: Diagnosis) -> Figures | None:
    """Finds that responses after a cached prefix are several times as far off as others."""
    twice = d.of(CachedTwice).sums
    if float(twice[0]) >= FEWEST and differs(twice, "sampler", BFLOAT16_K3):
        return None  # answers after the same cached prefix differ, so something else separates them
    # A trainer that scores equal text otherwise each time packs samples wrongly, or has dropout. The first
    # sample of a pack may be the first of its prompt, too, which alone has no cached prefix.
    if float(d.of(Twice).sums[0]) >= FEWEST and unrepeated(d, "trainer"):
        return None
    if _are_both(d):
        return None
    sums = d.of(Cached).sums
    (n, near, _), (m, other, square) = (row[1:] for row in sums.tolist())
    is_enough = min(n, m) >= PREFIX_TOKENS
    if not is_enough and (figures := _between_rollouts(d)):
        return figures
    need(is_enough, "prefix_cache_info of samples of one version, some with and some without a cached prefix")
    cached, fresh = other / m, near / n
    error = math.sqrt(square) / m  # over sequences
    if cached < max(PREFIX_TIMES * fresh, PREFIX_MATTERS) or cached - fresh < PREFIX_SURE * error:
        return None
    samples, of = int(sums[1, 0]), int(sums[:, 0].sum())
    explains = explained_by_tokens(d, m, other)
    return {"cached": cached, "fresh": fresh, "samples": samples, "of": of, "explains": explains}


def _are_both(d: Diagnosis) -> bool:
    """Returns whether samples after a cached prefix agree beside others of their rollout that are far off.

    Old keys and values act on every answer after them.
    """
    kinds, rows = two_kinds(d), [one.samples for one in d.of(CachedSizes).rollouts]
    if kinds is None:
        return False
    return kinds.beside(rows) > BOTH * sum(sum(row[kinds.cut :]) for row in rows)


def _between_rollouts(d: Diagnosis) -> Figures | None:
    """Returns the figures if all rollouts with a cached prefix are far off, and those without one agree."""
    shares = {one.rollout_id: one.share for one in d.of(CachedShares).rollouts}
    rollouts = [s for s in d.rollouts if s.tokens >= PREFIX_TOKENS and s.rollout_id in shares]
    cached = [s for s in rollouts if shares[s.rollout_id] >= MOSTLY]
    fresh = [s for s in rollouts if shares[s.rollout_id] <= 1 - MOSTLY]
    if len(fresh) < 2 or len(cached) < 2 or fresh[-1].rollout_id < cached[0].rollout_id:
        return None
    if mean_k3(cached) < max(PREFIX_TIMES * mean_k3(fresh), PREFIX_MATTERS):
        return None
    by_chance = max(s.k3 * math.exp(PREFIX_SURE * s.k3_error) for s in fresh)
    later = [s for s in cached if s.k3 > by_chance]
    if len(later) < MOSTLY * (len(cached) - 1):  # just after a start, the cache holds current values
        return None
    return {
        "samples": 0,
        "cached": mean_k3(cached),
        "fresh": mean_k3(fresh),
        "with": cached,
        "explains": explained(K3.of_rollouts(cached), K3.of_rollouts(fresh)),
        "without": [s.rollout_id for s in fresh],
        "rollouts": tuple(s.rollout_id for s in later),
        "or_else": ("stale_weights",),
        "untold": (EMPTY,),
    }
