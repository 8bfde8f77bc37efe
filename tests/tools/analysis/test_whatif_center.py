"""What centering would add to the loss, from heads and supports in a dump, against loops over floats."""

from __future__ import annotations

import json
import math
import random

import pytest

from slime_ext import load_config, presets
from slime_ext.tools.analysis.measures.planned import NO_HEADS
from slime_ext.tools.analysis.measures.tally import Tally
from slime_ext.tools.analysis.measures.whatif import WhatIf
from tests.tools.analysis.in_process import read

CAP = 2.0


def policy(rng, size):
    values = [rng.gauss(0, 1.5) for _ in range(size)]
    total = math.log(math.fsum(map(math.exp, values)))
    return [value - total for value in values]


def near(rng, log_p):
    moved = [value + rng.gauss(0, 0.6) for value in log_p]
    total = math.log(math.fsum(map(math.exp, moved)))
    return [value - total for value in moved]


def sample(rng, length, top_k):
    """A sample, and per token both policies over the candidates; ``top_k``: None for whole supports."""
    places = []
    for _ in range(length):
        q = policy(rng, rng.randint(3, 9) if top_k is None else 20)
        p = near(rng, q)
        order = sorted(range(len(q)), key=q.__getitem__, reverse=True)[:top_k]
        places.append(([q[v] for v in order], [p[v] for v in order]))
    row = {
        "rollout_log_probs": [q[0] for q, _ in places],
        "log_probs": [p[0] for _, p in places],
        "advantages": [rng.choice([-1.0, 0.5])] * length,
        "prompt_length": 3,
    }
    if top_k is None:
        ends = [0]
        for q, _ in places:
            ends.append(ends[-1] + len(q))
        row |= {
            "rollout_top_p_log_probs": [x for q, _ in places for x in q],
            "top_p_log_probs": [x for _, p in places for x in p],
            "rollout_top_p_token_offsets": ends,
        }
    else:
        row |= {
            "rollout_topk_log_probs": [q for q, _ in places],
            "topk_log_probs": [p for _, p in places],
        }
    return row, places


def term(log_q, log_p, has_tail):
    """C of one token: f = min(p / q, 2), the tail as one token with q = rho p."""
    q, p = [math.exp(x) for x in log_q], [math.exp(x) for x in log_p]
    alpha = 0.0
    if has_tail:
        rho = max(1 - math.fsum(q), 1e-6) / max(1 - math.fsum(p), 1e-6)
        alpha = rho * min(1 / rho, CAP)
    return math.fsum((a * min(b / a, CAP) - alpha * b) * x for a, b, x in zip(q, p, log_p, strict=True))


def effect(tmp_path, rows, correction):
    path = tmp_path / "dump.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (rollout,) = read([path])
    found = WhatIf({"it": Tally(correction)})
    found.add(rollout)
    return found.effects()[0]


@pytest.mark.parametrize("top_k", [6, None], ids=["head", "support"])
def test_what_center_adds_is_that_of_the_equation(tmp_path, top_k):
    rng = random.Random(7)
    samples = [sample(rng, length, top_k) for length in (4, 1, 7)]
    found = effect(tmp_path, [row for row, _ in samples], presets.get("score_centering"))
    advantages = [abs(row["advantages"][0]) for row, places in samples for _ in places]
    terms = [abs(term(q, p, top_k is not None)) for _, places in samples for q, p in places]
    added = math.fsum(a * c for a, c in zip(advantages, terms, strict=True)) / math.fsum(advantages)
    assert found.unavailable is None and found.tokens == 12
    assert found.centering == pytest.approx(added, rel=1e-5) and added > 0.01


def test_without_center_nothing_is_added_and_without_heads_it_says_so(tmp_path):
    rows = [sample(random.Random(1), 5, 6)[0]]
    assert effect(tmp_path, rows, presets.get("token_tis")).centering is None
    for name in ("rollout_topk_log_probs", "topk_log_probs"):
        bare = [{key: value for key, value in row.items() if key != name} for row in rows]
        assert effect(tmp_path, bare, presets.get("score_centering")).unavailable == NO_HEADS


def test_offsets_that_do_not_fit_are_no_support(tmp_path):
    row = sample(random.Random(2), 4, None)[0]
    for offsets in ([0, 1, 2, 3], [0, 9, 3, 4, 5], [1, 2, 3, 4, 5], "x"):
        found = effect(
            tmp_path,
            [row | {"rollout_top_p_token_offsets": offsets}],
            load_config({"preset": "score_centering"}),
        )
        assert found.unavailable == NO_HEADS
