"""The finding ``retokenised``."""

from __future__ import annotations

from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, need
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis

DETECTOR = Detector(
    severity="error",
    group="spoilt",
    after=("other_run",),
    what="""
        a turn was decoded and encoded again; from some point on, log-probs belong to neighbouring tokens
    """,
    asks="3 turns",
    title="The tokens that are trained on are not those that were sampled: text was tokenised again.",
    evidence="""
        In {{ moved }} of {{ turns }} turns ({{ moved | share(turns) }}) the log-probs match their tokens
        at first, then match tokens one or two positions away.{% if retold %} {{ retold }} samples have
        other tokens in the train dump than in the rollout dump.{% endif %}
    """,
    threshold="3 turns and 2% of all; in each, a part of at least 6 tokens by 5 standard errors",
    ruled_out="""
        A wrong slice of the engine's lists (off_by_one) shifts a response from its first token on; here
        an earlier part of the same sample fits its own log-probs.
    """,
    fix="""
        Do not decode a turn and encode its text again: append the ids that the engine returned (SGLang:
        output_ids or output_token_logprobs; vLLM: return_token_ids), and join prompts of later turns from
        ids.
    """,
)

MOVED, MOVED_SHARE = 3, 0.02  # turns of which the later part is shifted


def look(d: Diagnosis) -> Figures | None:
    """Finds turns whose log-probs fit their tokens up to some place, and tokens one or two places away from
    there on; or samples whose tokens differ between the rollout dump and the train dump."""
    turns, moved, retold = (d.statistics.counts[name] for name in ("turns", "moved", "retold"))
    need(turns >= MOVED, f"{MOVED} turns of responses")
    if moved < max(MOVED, MOVED_SHARE * turns) and not retold:
        return None
    return {"turns": turns, "moved": moved, "retold": retold}
