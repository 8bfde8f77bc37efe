"""The finding ``shared_place``."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from slime_ext.tools.analysis.detectors.shared.ages import Lag, lag
from slime_ext.tools.analysis.detectors.shared.clipped import COLUMNS, clipped
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need_tokens
from slime_ext.tools.analysis.detectors.shared.ends import Ends
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import tabulated, zeros

FEWEST, TOKENS, HELD, TIMES, MATTERS = 300, 4, 0.8, 5.0, 0.2
MOST, MOST_SHARE = 8, 0.5  # tokens at one end, and their share of all tokens
FIRST = 2  # tokens at the start; more of them are far off after another prompt


@dataclass
class Begins(Measure):
    """Sums of ``clipped`` by place from the start of the response, up to MOST, [MOST, COLUMNS]."""

    sums: Tensor = field(default_factory=lambda: zeros(MOST, COLUMNS))

    def add(self, part: DumpedRollout) -> None:
        if part.size:
            place = part.segments.within.long().clamp(max=MOST)
            self.sums += tabulated(place, clipped(part), MOST)


DETECTOR = Detector(
    severity="error",
    group="parts",
    after=("spoilt", "kept_mass"),
    what="only the first or the last tokens of responses are far off",
    asks="300 tokens",
    title="""
        Only the {{ "first" if is_first else "last" }} {{ places if places > 1 else "" }} token{{ "s" if
        places > 1 }} of {{ "responses that were cut at the limit" if is_cut else "responses" }} {{ "are" if
        places > 1 else "is" }} far off.
    """,
    evidence="""
        {{ held | share(1) }} of the squared log-ratio lies at {{ tokens | share(of) }} of the tokens:
        mean |log-ratio| {{ near | nats }} there, {{ rest | nats }} at all others. {%- if is_cut %}
        Responses that ended by themselves agree at the end.{% endif %}
    """,
    threshold="""
        the last 1 to 8 tokens, or the first 1 or 2, are at most half of all tokens, hold 80% of the squared
        log-ratio, are 5 times as far off as the others, and are 0.2 nats off
    """,
    ruled_out="""
        Routing or noise, because they do not depend on where a response ends. A shift of the whole
        response, because the tokens before agree.
    """,
    fix="""
        {%- if is_first %} Compare the first id of a few answers with the engine's output, and the number of
        log-probs with completion_tokens: a list that begins one place late, after a retract or a chunked
        prefill, lacks its first entry. {%- elif is_cut %} Drop these tokens' log-probs, or turn
        speculative decoding off, because engines with multi-token prediction have returned wrong
        log-probs for the last tokens before max_model_len (vllm-project/vllm#38711). {%- else %} Check
        what ends a response: an end or stop token that is appended by hand, stop strings that are
        trimmed, the last chunk of a stream. Mask what the engine did not sample. {%- endif %} {%- if not
        is_first %} As a test, sample one rollout with a higher limit of length and without speculative
        decoding.{% endif %}
    """,
)


def look(d: Diagnosis) -> Figures | None:
    """Finds the fewest last tokens that hold most of the squared log-ratio."""
    need_tokens(d, FEWEST)
    ends = d.of(Ends).sums
    every, whole = ends.sum(0), ends.sum((0, 1)).tolist()
    if not whole[3]:
        return None
    for table, is_cut in ((ends[1], True), (every, False)):
        until = table.cumsum(0).tolist()
        least = HELD * whole[3]
        places = next((i for i in range(MOST) if until[i][3] >= least), None)
        if places is None or (is_cut and not float(ends[0, :, 0].sum())):
            continue
        count, _, absolute, squared = until[places]
        rest = (whole[2] - absolute) / max(whole[0] - count, 1)
        # Of responses of eight tokens or fewer, every token is one of the last.
        is_place = TOKENS <= count <= MOST_SHARE * whole[0]
        if is_place and absolute / count >= max(MATTERS, TIMES * rest):
            return {
                "places": places + 1,
                "is_cut": is_cut,
                "is_first": False,
                "held": squared / whole[3],
                "tokens": count,
                "of": whole[0],
                "near": absolute / count,
                "rest": rest,
            }
    return _first(d, whole)


def _first(d: Diagnosis, whole: list[float]) -> Figures | None:
    """Returns the figures if the first token or two of responses hold most of the squared log-ratio."""
    until = d.of(Begins).sums[:FIRST].cumsum(0).tolist()
    places = next((i for i, sums in enumerate(until) if sums[3] >= HELD * whole[3]), None)
    if places is None or lag(d) is Lag.EXPLAINS:  # the first tokens may change most
        return None
    count, _, absolute, squared = until[places]
    rest = (whole[2] - absolute) / max(whole[0] - count, 1)
    if not TOKENS <= count <= MOST_SHARE * whole[0] or absolute / count < max(MATTERS, TIMES * rest):
        return None
    return {
        "places": places + 1,
        "is_cut": False,
        "is_first": True,
        "held": squared / whole[3],
        "tokens": count,
        "of": whole[0],
        "near": absolute / count,
        "rest": rest,
    }
