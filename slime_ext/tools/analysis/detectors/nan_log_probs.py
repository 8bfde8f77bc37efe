"""The finding ``nan_log_probs``."""

from __future__ import annotations

from typing import ClassVar

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures
from slime_ext.tools.analysis.detectors.shared.log_probs import Recorded, sentinels
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import count_true, is_finite


class Unscored(Measure):
    """The number of response tokens whose log-prob of the trainer is not finite."""

    takes_joined: ClassVar[bool] = True

    tokens: int = 0

    def add(self, part: DumpedRollout) -> None:
        self.tokens += count_true(part.mask & ~is_finite(part.proximal))


DETECTOR = Detector(
    severity="error",
    explains=False,
    what="log-probs are not finite, or are the number that an engine writes for minus infinity (-9999)",
    asks="",
    title="""
        {{ "All" if is_all else "Some" }} log-probs of the {% if of_trainer %}trainer are NaN or infinite.
        {%- elif sentinels %}sampler are {{ "%g" | format(sentinel) }}, which the engine
        writes for minus infinity.
        {%- else %}sampler are NaN or infinite.{% endif %}
    """,
    evidence="""
        {{ lacking }} response tokens ({{ lacking | share(tokens) }}) lack a log-prob. {{ sequences }}
        sequences lack some of the sampler's, and {{ of_trainer }} of the tokens lack the trainer's.
        {%- if sentinels %} {{ sentinels }} tokens have a number of -1000 or less, mostly {{
        "%g" | format(sentinel) }}.{% endif %}
    """,
    threshold="one token, because no healthy engine writes such a value",
    ruled_out="Masked tokens, because tool output and padding are not counted.",
    fix="""
        Top-k or top-p gives -inf to a token that was drawn all the same, which some servers write as
        a number (vLLM: -9999.0). {%- if sentinels and sentinel < -1e38 %} SGLang writes -3.4e38 for a token
        whose probability is 0 in float32, below about -103 nats. It cannot have been drawn from the recorded
        distribution: look for a token that was forced or appended, and for log-probs of another request.{%-
        endif %} NaN comes from an overflow in the engine. Corrections reject such a
        token of the sampler (on_nonfinite: reject); a token of the trainer stops the run. Sample with
        top-p 1 and top-k -1, or find the request that made the value.
    """,
)


def look(d: Diagnosis) -> Figures | None:
    """Finds response tokens without a finite log-prob of the sampler or the trainer.

    NaN, infinite values and the numbers written for minus infinity are not log-probs of the sampler.
    """
    tokens, of_trainer = d.sums.tokens, d.of(Unscored).tokens
    sequences = d.of(Recorded).partial
    if not sequences and not of_trainer:
        return None
    lacking = tokens - d.sums.finite
    return {
        "sequences": sequences,
        "of_trainer": of_trainer,
        "is_all": of_trainer == tokens,
        "lacking": lacking,
        "tokens": tokens,
        **sentinels(d),
    }
