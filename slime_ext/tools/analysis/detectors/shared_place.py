"""The finding ``shared_place``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need_tokens
from slime_ext.tools.analysis.detectors.shared.ends import Ends
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    group="parts",
    after=("spoilt", "kept_mass"),
    what="only the last tokens of responses are far off",
    asks="300 tokens",
    title="""
        Only the last {{ places if places > 1 else "" }} token{{ "s" if places > 1 }} of {{ "responses
        that were cut at the limit" if is_cut else "responses" }} {{ "are" if places > 1 else "is" }}
        far off.
    """,
    evidence="""
        {{ held | share(1) }} of the squared log-ratio lies at {{ tokens | share(of) }} of the tokens:
        mean |log-ratio| {{ near | nats }} there, {{ rest | nats }} at all others. {%- if is_cut %}
        Responses that ended by themselves agree at the end.{% endif %}
    """,
    threshold="""
        the last 1 to 8 tokens are at most half of all tokens, hold 80% of the squared log-ratio, are
        5 times as far off as the others, and are 0.2 nats off
    """,
    ruled_out="""
        Routing or noise, because they do not depend on where a response ends. A shift of the whole
        response, because the tokens before agree.
    """,
    fix="""
        {%- if is_cut %} Drop these tokens' log-probs, or turn speculative decoding off, because
        engines with multi-token prediction have returned wrong log-probs for the last tokens before
        max_model_len (vllm-project/vllm#38711). {%- else %} Check what ends a response: an end or
        stop token that is appended by hand, stop strings that are trimmed, the last chunk of a
        stream. Mask what the engine did not sample. {%- endif %} As a test, sample one rollout with a
        higher limit of length and without speculative decoding.
    """,
)
FEWEST, TOKENS, HELD, TIMES, MATTERS = 300, 4, 0.8, 5.0, 0.2
MOST, MOST_SHARE = 8, 0.5  # tokens at the end, and their share of all tokens


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
                "held": squared / whole[3],
                "tokens": count,
                "of": whole[0],
                "near": absolute / count,
                "rest": rest,
            }
    return None
