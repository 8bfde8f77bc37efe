"""The finding ``batch_shape``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="warning",
    explains=False,
    what="the trainer scores the same tokens differently in training and in the log-prob pass",
    asks="`policy_loss_debug/` (miles)",
    title="The trainer scores the same tokens differently in training and in the log-prob pass.",
    evidence="""
        Before the first optimizer step, the log-probs of {{ tokens }} tokens differ by {{ trained |
        nats }} between the log-prob pass and training. Trainer and sampler differ by {{ sampled |
        nats }}.
    """,
    threshold="the two passes differ by 1e-3 nats, and by 20% of the distance between trainer and sampler",
    ruled_out="""
        Other weights, because both passes come before the first optimizer step. Other text, because
        both score the same batch.
    """,
    fix="""
        Give both passes the same micro-batches and kernels (the same --micro-batch-size or
        --max-tokens-per-gpu, the same attention backend, dropout 0), or let training use its own
        log-probs as the proximal ones. Otherwise the ratio of the first step is not 1, and PPO clips
        it.
    """,
)

FEWEST = 100  # tokens
# nats between the two passes; share of the distance between trainer and sampler. Equal passes give 0.
TWICE_MATTERS, TWICE_SHARE = 1e-3, 0.2


def look(d: Diagnosis) -> Figures | None:
    """Finds that training and the log-prob pass score the same tokens differently."""
    lacks = "the first call of policy_loss_debug/ in the run's folder (miles: --dump-details)"
    need(d.calls, lacks)
    (call,) = d.calls
    need(call.tokens >= FEWEST, f"{FEWEST} response tokens in the first call of policy_loss_debug/")
    is_apart = call.trained >= max(TWICE_MATTERS, TWICE_SHARE * call.sampled)
    return call._asdict() if is_apart else None
