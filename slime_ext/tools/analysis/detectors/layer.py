"""The finding ``layer``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, Margin, Untold, need
from slime_ext.tools.analysis.detectors.shared.explained import explained_by_noise
from slime_ext.tools.analysis.detectors.shared.layers import layer_apart
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    side="honest",
    after=("spoilt", "other_policy", "prefixes", "pushes", "parts", "experts"),
    what="the first layer whose output differs by more than rounding",
    asks="layer outputs",
    title="Layer {{ layer }} is the first whose output differs between trainer and sampler.",
    evidence="""
        The median relative distance is {{ "%.2g" | format(distance) }} after layer {{ layer }}{% if
        before is none %}, which is the first layer of the dump {%- else %}, and {{ "%.2g" |
        format(before) }} after the layer before it{% endif %}. Rounding makes at most {{ "%.2g" |
        format(limit) }}, and weights in 4 bits at most {{ "%.2g" | format(most) }}.
    """,
    threshold="""
        16 unit roundoffs of the coarser side's dtype, times the square root of the number of layers
        so far; 4 if numbers are not healthy or |l| falls along the response. Up to 64, or within 3 standard
        errors of that, weights in 8 or 4 bits may make it
    """,
    ruled_out="""
        Rounding, because it grows only with the square root of the number of layers, in units of the
        dtype, and weights in 4 bits make less.
    """,
    remedy="compare rotary settings, norms and attention backend of the first layer that differs",
    fix="""
        Compare layer {{ layer }} on both sides: its weights after a push, norm epsilon and dtype,
        rotary settings, attention backend, and quantisation. Later layers only pass the difference
        on.
    """,
)

UNTOLD = Untold(
    "whether the sampler's weights are only rounded",
    "compare its weights with the trainer's, tensor by tensor",
)


def look(d: Diagnosis) -> Figures | None:
    """Finds the first layer whose output differs by more than rounding."""
    need(d.layers, "layer outputs of both sides in layers/trainer and layers/sampler of the run's folder")
    apart = layer_apart(d)
    if apart is None:
        return None
    figures = {**apart._asdict(), "explains": explained_by_noise(d, d.rollouts)}
    is_near = not Margin(apart.distance, apart.error, apart.most).is_sure
    return figures | {"or_else": ("quantised",), "untold": (UNTOLD,)} if is_near else figures
