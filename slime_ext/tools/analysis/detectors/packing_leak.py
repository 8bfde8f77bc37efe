"""The finding ``packing_leak``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures
from slime_ext.tools.analysis.detectors.shared.explained import K3, explained, explained_by_tokens
from slime_ext.tools.analysis.detectors.shared.kinds import two_kinds, whole_prompts
from slime_ext.tools.analysis.detectors.shared.parts import AGREES, FarValue, mean_of
from slime_ext.tools.analysis.detectors.shared.twice import repeats, unrepeated
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    side="honest",
    group="parts",
    after=(
        "spoilt",
        "other_log_probs",
        "permuted_log_probs",
        "part_of_run",
        "repeated_routes",
        "shared_place",
    ),
    what="samples that come after another in their micro-batch are far off, because they see it",
    asks="micro-batches of several samples (dp_shards)",
    title="""
        Packed samples see each other: {%- if first %} only the first of each micro-batch agrees with
        the engine. {%- else %} some samples agree with the engine, and the trainer scores the others
        differently each time.{% endif %}
    """,
    evidence="""
        {%- if first %} k3 is {{ first.k3 | nats }} in the {{ first.samples }} samples that come first
        in their micro-batch, and {{ later.k3 | nats }} in the {{ later.samples }} later ones ({{
        "%.0f" | format([z, 999] | min) }} standard errors of log k3). {%- else %} k3 is {{ (near[2] /
        near[1]) | nats }} in {{ near[0] | int }} samples and {{ (far[2] / far[1]) | nats }} in the other {{
        far[0] | int }}, with hardly any between. After the same text, the trainer's log-probs differ
        by {{ spread | nats }} between samples of one prompt, the sampler's by {{ other | nats }}.{%
        endif %}
    """,
    threshold="""
        k3 3 times that of first samples, and 1e-3 nats, by 4 standard errors of log k3, while first
        samples are healthy and the trainer does not score the same text alike each time; or two kinds of
        samples, while after the same text the trainer's log-probs differ by 40% of the mean |l|, and
        the sampler's do not
    """,
    ruled_out="""
        A cause that acts on every sample, because the first of each micro-batch goes through the same
        weights and kernels.
    """,
    fix="""
        Compare one sample alone (--micro-batch-size 1, no --use-dynamic-batch-size) with the same
        sample in a pack. Usual causes are the attention mask or cu_seqlens, position ids that do not
        restart, and a recurrent state or convolution that is not reset between samples.
    """,
)
TIMES, MATTERS, SURE, FEWEST = 3.0, 1e-3, 4.0, 4


def look(d: Diagnosis) -> Figures | None:
    """Finds that samples after the first of their micro-batch are far off."""
    places = [p for p in d.samples.parts if p.label == "place in the micro-batch"]
    first = mean_of([p for p in places if p.value == "0"])
    later = mean_of([p for p in places if p.value != "0"])
    z = FarValue("place", "later", later, first, (), 1.0).z if first.tokens and later.tokens else 0.0
    prefixes = [p for p in d.samples.parts if p.label == "prefix"]
    cached, fresh = (mean_of([p for p in prefixes if p.value == kind]) for kind in ("cached", "fresh"))
    # A stale prefix explains the distance.
    is_cache = fresh.k3 * first.k3 > 0 and cached.k3 / fresh.k3 >= later.k3 / first.k3
    # At least so many tokens without a cached prefix are behind others of their pack, and would be far off.
    behind = fresh.tokens - first.tokens
    is_cache |= cached.tokens > 0 and TIMES * fresh.k3 * fresh.tokens < later.k3 * behind
    is_far = later.k3 >= max(MATTERS, TIMES * first.k3) and z >= SURE and first.k3 <= AGREES
    is_many = min(first.samples, later.samples) >= FEWEST
    # Far prompts may come later in every micro-batch. Then the trainer scores their text alike each time.
    is_prompt = whole_prompts(d) is not None or repeats(d, "trainer")
    if is_far and not is_cache and is_many and not is_prompt:
        figures = {"first": first, "later": later, "z": z}
        return figures | {"explains": explained(K3(*later[1:]), K3(*first[1:]))}
    spread, kinds = unrepeated(d, "trainer"), two_kinds(d)
    if spread is None or kinds is None:
        return None
    explains = explained_by_tokens(d, *kinds.far[1:])
    figures = {**spread, **kinds._asdict(), "explains": explains}
    return figures | {"first": None, "margin": None}  # the gap between both kinds of samples decides
