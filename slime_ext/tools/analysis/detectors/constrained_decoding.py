"""The finding ``constrained_decoding``."""

from __future__ import annotations

from collections import Counter
from dataclasses import field

import torch

from slime_ext.tools.analysis.detectors.shared.bends import same_text_factor
from slime_ext.tools.analysis.detectors.shared.chunk_edges import chunk_edges
from slime_ext.tools.analysis.detectors.shared.detector import Detector, Figures, Untold, need_tokens
from slime_ext.tools.analysis.detectors.shared.explained import explained_by_tokens
from slime_ext.tools.analysis.detectors.shared.filled import Beside, Filled, filled
from slime_ext.tools.analysis.detectors.shared.identities import one_sided_rollouts
from slime_ext.tools.analysis.detectors.shared.kinds import two_kinds
from slime_ext.tools.analysis.detectors.shared.minimum import minimum
from slime_ext.tools.analysis.detectors.shared.same_text import is_not_renormalised
from slime_ext.tools.analysis.detectors.shared.signs import FAR, Signs
from slime_ext.tools.analysis.measures.diagnosis import Diagnosis
from slime_ext.tools.analysis.measures.measure import Measure
from slime_ext.tools.analysis.records import DumpedRollout
from slime_ext.tools.analysis.tables import any_true, count_true, is_above, is_below, selection


class OneSided(Measure):
    """Far tokens whose recorded log-prob is not 0: numbers with l below and above 0, and sum l below 0."""

    below: int = 0
    above: int = 0
    sum_below: float = 0.0

    def add(self, part: DumpedRollout) -> None:
        is_recorded = part.finite & is_below(part.behavior, -EXACT)
        below = is_recorded & is_below(part.log_ratio, -FAR)
        above = is_recorded & is_above(part.log_ratio, FAR)
        self.below += count_true(below)
        self.above += count_true(above)
        self.sum_below += float(selection(part.log_ratio, below).double().sum())


class Forced(Measure):
    """Filled zeros that are the only such token of their response, but not its last token.

    Args:
        ids: token id -> number of them.
        places: place in the response -> number of them.
    """

    ids: Counter[int] = field(default_factory=Counter)
    places: Counter[int] = field(default_factory=Counter)

    def add(self, part: DumpedRollout) -> None:
        forced = filled(part)
        if part.tokens is None or not any_true(forced):
            return
        segments = part.segments
        (number, length) = segments.local_sums([forced.double(), torch.ones_like(part.behavior).double()])
        is_last = segments.within + 1 >= segments.expand(length)
        alone = forced & (segments.expand(number) == 1) & ~is_last
        self.ids.update(part.tokens[alone].tolist())
        self.places.update(segments.within[alone].long().tolist())


DETECTOR = Detector(
    severity="error",
    side="altered",
    group="spoilt",
    after=(
        "positive_log_probs",
        "retokenised",
        "off_by_one",
        "first_entry",
        "greedy_sampling",
        "constant_offset",
    ),
    what="a grammar, a JSON schema or a list of choices restricts the sampler at some tokens",
    asks="20 tokens next to forced ones",
    title="""
        {% if or_else is defined -%} {% if id is defined %}Token {{ id }} has a log-prob of 0 in the
        sampler at places where the trainer was unsure. {%- else %}At some tokens the sampler was far
        surer than the trainer, as if it had few tokens to choose from. {%- endif %} {%- elif id is
        defined -%} A budget forces token {{ id }} in the sampler: it had no other choice there. {%- else
        -%} Constrained decoding: at some tokens the sampler may choose among few tokens, and its
        log-probs are normalised over these few.{% endif %}
    """,
    evidence="""
        {% if id is defined -%} In {{ count }} responses one token has a probability of exactly 1 where the
        trainer is below 0.14. It is token {{ id }} in {{ same | share(count) }} of them, {{ there |
        share(count) }} at place {{ place }} of the response, and the tokens around it agree with the trainer.
        {%- elif forced -%} {{ forced }} tokens have a probability of exactly 1 where the trainer is below
        0.14. Near them (3 tokens) the sampler is also surer than the trainer at {{ count | int }} other
        tokens: their mean log-ratio is {{ near | nats }}; elsewhere the mean |log-ratio| is {{ rest |
        nats }}. {%- else -%} At {{ count }} tokens the sampler is surer than the trainer by more than
        0.5 nats (mean log-ratio {{ near | nats }}), and the trainer is surer at {{ above }}. The mean
        ratio is {{ "%.3f" | format(ratio) }} ± {{ "%.1g" | format(error) }}, but it would be 1 if the
        sampler had drawn from the distribution whose log-probs it recorded over all tokens. Elsewhere
        the mean |log-ratio| is {{ rest | nats }}.{% endif %}
    """,
    threshold="""
        beside forced tokens, mean |l| is 0.3 nats and 5 times that elsewhere, and mean l is below
        -0.8 times mean |l|; or, in every rollout, 100 tokens beyond 0.5 nats are below 0 with a mean of
        -2 nats, at most one in 1,000 is above, l is alike after the same text, and the mean ratio is below 1
        by 6 standard errors; or 20
        responses have one forced token each, before their last token, of which 95% are one id
    """,
    ruled_out="""
        {% if id is defined -%} Lost log-probs, because they would be of different tokens. {%- elif forced -%}
        Tool output or filled-in values, because the sampled tokens beside those agree with the trainer, and
        here they do not. {%- else -%} Lower precision, old weights and other weights, because they leave the
        mean ratio at 1. A masked end token (min_new_tokens), because {% if is_some %}it acts on every
        sample.{% else %}these tokens do not all come before the first end of a response.{% endif %}{% endif
        %}
    """,
    remedy="mask the tokens that were forced (loss_mask 0)",
    fix="""
        Mask the tokens that {{ "were" if id is defined else "a grammar" }} forced (loss_mask 0). {%- if id is
        defined %} Look for a thinking budget, for a logit processor that ends a thought, and for code that
        appends this token.{% else %} Otherwise the policy trains on choices
        that it did not make, and no engine records log-probs from before the grammar's mask. To be
        sure, sample one rollout without the grammar (response_format, json_schema, regex, tool_choice
        in sampling_params).{% endif %}
    """,
)
# Tokens; nats; over mean |l| elsewhere; -mean l over mean |l|.
FEWEST, MATTERS, TIMES, LEANS = 20, 0.3, 5.0, 0.8
EXACT = 1e-6  # nats; a larger log-prob counts as 0
# Far tokens below 0; their mean l, nats; those above 0, for each below; standard errors of the mean ratio.
MANY, DEEP, ABOVE, SURE = 100, -2.0, 1e-3, 6.0
ALWAYS = 0.1  # least k3 of a rollout over the largest, unless mass is missing in the rollout
# nats, mean |l| of all other tokens that two engines in bfloat16 stay below; else the share of far tokens.
AGREES, MOST, LEAST = 0.05, 0.1, 0.01
ONE_ID = 0.95  # share of lone forced tokens with the commonest id, and of all filled zeros that are alone
APPENDED = Untold(
    "whether the engine forced this token or your code appended it with a log-prob of 0",
    "look for the token in the engine's raw answer",
)
BANNED = Untold(
    "whether more than the end token was banned before the first response ends",
    "sample one rollout without min_new_tokens",
)
ALLOWED = Untold("which tokens were allowed", "sample one rollout without the grammar and without top-p")


def look(d: Diagnosis) -> Figures | None:
    """Finds tokens beside filled zeros at which the sampler is also surer than the trainer.

    It also finds one forced token in each response, and far tokens that are nearly all surer for the sampler.
    """
    need_tokens(d, FEWEST)
    rest, near, zero = d.of(Beside).sums.tolist()
    if near[0] < FEWEST:
        return _one_sided(d)
    size, usual = near[2] / near[0], rest[2] / max(rest[0], 1)
    if size < max(MATTERS, TIMES * usual) or near[1] > -LEANS * near[2]:
        return _one_id(d) or _one_sided(d)
    return {
        "forced": d.of(Filled).unlikely,
        "count": near[0],
        "near": near[1] / near[0],
        "rest": usual,
        "explains": explained_by_tokens(d, near[0] + zero[0], near[4] + zero[4]),
    }


def _one_id(d: Diagnosis) -> Figures | None:
    """Returns the figures if the zeros of responses are one forced token each, always the same one.

    A budget leaves one token, so its recorded log-prob is 0; tokens around it are sampled as usual.
    """
    forced, every = d.of(Forced), d.of(Filled).unlikely
    count = forced.ids.total()
    if count < max(FEWEST, ONE_ID * every):
        return None
    (token, same), (place, there) = forced.ids.most_common(1)[0], forced.places.most_common(1)[0]
    if same < ONE_ID * count:
        return None
    explains = explained_by_tokens(d, *d.of(Filled).zeros.tolist())
    figures = {"id": token, "same": same, "count": count, "place": place, "there": there}
    return figures | {"explains": explains, "or_else": ("tool_tokens",), "untold": (APPENDED,)}


def _one_sided(d: Diagnosis) -> Figures | None:
    """Returns the figures if far tokens are nearly all surer for the sampler, more than sampling allows.

    Tokens that are drawn from the recorded distribution q have a mean ratio p / q of 1 whatever p is, so some
    of them are likelier for p. A grammar renormalises q over few tokens, and none of these is likelier for p.
    """
    far, ratio = d.of(OneSided), d.means.ratio_minus_one
    if far.below < MANY or far.above > ABOVE * far.below or chunk_edges(d):
        return None
    # Renormalising leaves differences of log-probs after the same text as they are.
    if is_not_renormalised(d) or same_text_factor(d):
        return None
    # A masked end token moves others by less than a grammar does unless it had nearly all of the probability,
    # and like top-p it acts on every sample.
    is_deep, is_some = far.sum_below <= DEEP * far.below, two_kinds(d) is not None
    if not (is_deep or is_some):
        return None
    if ratio.z > -SURE or not _is_in_every_rollout(d):
        return None
    tokens = d.sums.finite
    rest = (d.sums.absolute + far.sum_below) / max(tokens - far.below, 1)
    if 1 + ratio.value < LEAST or (rest >= AGREES and far.below < MOST * tokens):
        return None  # an allowed set always keeps some mass; or other tokens are off, too
    surer = d.of(Signs).far[0].tolist()  # tokens that the grammar forced are among them
    figures = {
        "forced": 0,
        "is_some": is_some,
        "count": far.below,
        "above": far.above,
        "near": far.sum_below / far.below,
        "rest": rest,
        "ratio": 1 + ratio.value,
        "error": ratio.error,
        "explains": explained_by_tokens(d, surer[0], surer[4]),
    }
    others = {} if is_deep and rest < AGREES else {"truncated_sampling": ALLOWED}
    if not is_some and minimum(d):
        others["minimum_length"] = BANNED
    return figures | {"or_else": tuple(others), "untold": tuple(others.values())} if others else figures


def _is_in_every_rollout(d: Diagnosis) -> bool:
    """Returns whether k3 of each rollout is large or mass is missing in it, as a grammar acts from the start.

    A policy that trains on allowed tokens learns to draw these, so that less and less mass is missing. Even
    then hardly any ratio is above 1. In a rollout without a grammar, ratios are on both sides of 1.
    """
    one_sided = one_sided_rollouts(d)
    others = [s.k3 for s in d.rollouts if s.rollout_id not in one_sided]
    return not others or min(others) >= ALWAYS * max(s.k3 for s in d.rollouts)
