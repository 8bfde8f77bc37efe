"""What benchmarks.routing says of an answer, against the experts that the model's routers returned."""

from __future__ import annotations

import base64
import math
import struct

import pytest
import torch

from benchmarks import routing
from tests.launcher.megatron import tiny_model as tiny

PROMPT, RESPONSE = [5, 9, 2], [7, 30]


def answered():
    """A model, log-probs of the response, and the experts of all positions but one [4][layers][active]."""
    model = tiny.hf_model(dtype=torch.float32, experts=tiny.MIXTURE)
    chosen = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda gate, given, out: chosen.append(out[2].tolist()))
    logits = model(torch.tensor([PROMPT + RESPONSE])).logits[0].tolist()
    rows = logits[len(PROMPT) - 1 : -1]
    total = [math.log(sum(math.exp(x) for x in row)) for row in rows]
    log_probs = [row[token] - z for row, token, z in zip(rows, RESPONSE, total, strict=True)]
    return model, log_probs, [list(layers) for layers in zip(*chosen, strict=True)][:-1]


def compared(model, log_probs, experts):
    flat = [e for position in experts for layer in position for e in layer]
    answer = {
        "output_ids": RESPONSE,
        "meta_info": {
            "output_token_logprobs": [[p, t, None] for p, t in zip(log_probs, RESPONSE, strict=True)],
            "routed_experts": base64.b64encode(struct.pack(f"<{len(flat)}i", *flat)).decode(),
        },
    }
    log_ratio, flipped = routing.compare(model, PROMPT, answer)
    return log_ratio.tolist(), flipped.tolist()


def test_only_another_set_of_experts_at_a_tokens_own_position_is_a_flip():
    model, log_probs, experts = answered()
    log_ratio, flipped = compared(model, [log_probs[0] - 0.5, log_probs[1]], experts)
    assert log_ratio == pytest.approx([0.5, 0.0], abs=1e-5) and flipped == [False, False]
    reversed_order = [[layer[::-1] for layer in position] for position in experts]
    assert compared(model, log_probs, reversed_order)[1] == [False, False]
    for position, expected in ((0, [False, False]), (2, [True, False]), (3, [False, True])):
        other = [[list(layer) for layer in place] for place in experts]
        other[position][1][0] = next(e for e in range(4) if e not in other[position][1])
        assert compared(model, log_probs, other)[1] == expected, position


def test_the_table_holds_shares_and_means():
    cells = list(
        routing.summary(torch.tensor([0.1, -0.3, 0.0, 0.0]), torch.tensor([True, True, False, False]))
    )
    assert cells[:5] == ["4", "50.000%", "0.00e+00", "2.00e-01", "3.00e-01"]
    assert float(cells[5]) == pytest.approx((math.exp(0.1) - 1.1 + math.exp(-0.3) - 0.7) / 4, rel=1e-2)
