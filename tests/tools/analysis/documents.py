"""A document with something in every place, made from a random rollout."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import pairwise

from slime_ext.tools.analysis import document as d
from slime_ext.tools.analysis.findings.recommend import recommend
from tests.tools.analysis.in_process import suggest, whatif
from tests.tools.analysis.rollouts import rollout

EVIL = "<script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\">"


def document(name="healthy", noise=0.02, rollouts=6, **changes):
    """What the analysis would hand to the page."""
    measured = _measured(noise, rollouts)
    fields = measured | {
        "name": name,
        "paths": ("runs/x/dumps",),
        "made_with": "slime-ext analyze",
        "skipped": (d.Skipped(path="3.pt", reason="the file is truncated"),),
        "notes": ("0.pt: no text",),
        "findings": (
            d.Finding(
                name="stale_weights",
                severity="warning",
                title="The sampler's weights lag",
                evidence="k3 is 5 times as large at age 3 as at age 0",
                fix="push weights more often",
                rollouts=(3, 4),
            ),
        ),
        "worst": (
            d.Worst(kind="sequence", rollout_id=1, position=2, log_ratio=-3.0, tokens=4, text=EVIL),
            d.Worst(
                kind="token",
                rollout_id=1,
                position=2,
                token=1,
                log_ratio=2.0,
                tokens=4,
                spans=(
                    d.Span(text="a long "),
                    d.Span(text=EVIL, log_ratio=2.0),
                    d.Span(text=" end", log_ratio=-0.3),
                ),
            ),
        ),
        "recommendation": recommend(measured["effects"], replace(measured["total"], ess_sequence=0.5)),
    }
    return d.Document(**fields | changes)


@cache
def _measured(noise, rollouts):
    """The numbers of a document, which no test changes."""
    found = [rollout(seed=i, rollout_id=i, noise=noise, samples=24) for i in range(rollouts)]
    logs = [x for r in found for x in r.log_ratio[r.mask].tolist()]
    return {
        "total": _numbers(logs, noise, 0),
        "distribution": _bins(logs),
        "curves": tuple(_curve(n, noise) for n in ("position", "staleness", "probability", "outcome")),
        "timeline": tuple(d.Moment(rollout_id=i, numbers=_numbers(logs, noise, i)) for i in range(rollouts)),
        "effects": whatif(found),
        "suggestions": suggest(found, 0.05),
    }


def _numbers(logs, noise, i):
    return d.Numbers(
        tokens=len(logs),
        sequences=100,
        mean=sum(logs) / len(logs),
        absolute=noise,
        k3=noise**2 * (1 + i) / 2,
        ess_token=1 - noise,
        ess_sequence=0.9,
        ratio_p01=math.exp(-2 * noise),
        ratio_p50=1.0,
        ratio_p99=math.exp(2 * noise),
        reward=0.3 + 0.05 * i,
        staleness=float(i % 3),
    )


def _bins(logs):
    edges = [s * 10 ** (e / 4) for s in (-1, 1) for e in range(-24, 5)]
    edges = sorted([*edges, 0.0])
    pairs = pairwise(edges)
    found = [d.Bin(low=a, high=b, count=sum(a <= x < b for x in logs)) for a, b in pairs]
    return tuple(b for b in found if b.count)


def _curve(name, noise):
    xs = {"probability": (0.001, 0.01, 0.1, 1.0), "staleness": (0, 1, 2, 3), "outcome": (0, 1)}.get(
        name, range(20)
    )
    labels = {"outcome": ("incorrect", "correct")}.get(name, (None,) * 20)
    points = (
        d.Point(x=x, count=50, mean=noise * (i % 3 - 1) / 3, absolute=noise * (1 + 0.1 * i), label=label)
        for i, (x, label) in enumerate(zip(xs, labels, strict=False))
    )
    return d.Curve(name=name, points=tuple(points))
