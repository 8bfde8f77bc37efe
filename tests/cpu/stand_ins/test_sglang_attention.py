"""Batched attention of the engine against sums over single tokens in float64."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
import torch

from slime_ext_cpu.stand_ins import bfloat16, sglang_attention

HEADS, KEY_HEADS, WIDTH, PLACES = 4, 2, 8, 64


def oracle(query, keys, values, seen, scale):
    """One query's attention over the places that it sees, in plain Python."""
    scores = [scale * math.fsum(a * b for a, b in zip(query, keys[k], strict=True)) for k in seen]
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    total = math.fsum(weights)
    return [
        math.fsum(w * values[k][d] for w, k in zip(weights, seen, strict=True)) / total
        for d in range(len(query))
    ]


@pytest.fixture
def backend():
    class Backend:
        """SGLang's class, as far as its attention goes."""

    sglang_attention.attend_batched(SimpleNamespace(TorchNativeAttnBackend=Backend))
    return Backend()


def case(prefixes, queries, seed=0):
    """A cache, where each sequence's tokens lie in it, and the packed queries."""
    random.seed(seed)
    torch.manual_seed(seed)
    k_cache, v_cache = (torch.randn(PLACES, KEY_HEADS, WIDTH, dtype=torch.float64) for _ in "kv")
    v_cache[0] = math.pi  # of padding: may not be mixed in
    lengths = [p + q for p, q in zip(prefixes, queries, strict=True)]
    table = torch.full((len(lengths) + 1, 16), PLACES - 1)
    for row, length in enumerate(lengths, 1):
        table[row, :length] = torch.tensor(random.sample(range(1, PLACES - 1), length))
    query = torch.randn(sum(queries), HEADS, WIDTH, dtype=torch.float64)
    return query, k_cache, v_cache, table, torch.arange(1, len(lengths) + 1), torch.tensor(lengths)


def expected(query, k_cache, v_cache, table, lengths, queries):
    out, at = torch.zeros_like(query), 0
    for row, (length, count) in enumerate(zip(lengths.tolist(), queries, strict=True), 1):
        places = table[row, :length].tolist()
        for position in range(length - count, length):
            for head in range(HEADS):
                group = head // (HEADS // KEY_HEADS)
                given = (query[at, head].tolist(), k_cache[:, group].tolist(), v_cache[:, group].tolist())
                out[at, head] = torch.tensor(
                    oracle(*given, places[: position + 1], WIDTH**-0.5), dtype=out.dtype
                )
            at += 1
    return out


@pytest.mark.parametrize(
    ("prefixes", "queries"), [((0, 0, 0), (3, 1, 5)), ((4, 0, 7), (2, 6, 1)), ((3,), (4,))]
)
def test_prompts_with_and_without_a_cached_prefix(backend, prefixes, queries):
    query, k_cache, v_cache, table, rows, lengths = case(prefixes, queries)
    output = torch.empty_like(query)
    given = (query, output, k_cache, v_cache, table, rows, lengths, torch.tensor(prefixes))
    backend._run_sdpa_forward_extend(*given, torch.tensor(queries), None, enable_gqa=True, causal=True)
    # float64 on both sides: what is left is the order of the sums
    wanted = expected(query, k_cache, v_cache, table, lengths, queries)
    torch.testing.assert_close(output, wanted, rtol=1e-12, atol=1e-12)


def test_one_token_of_each_request(backend):
    query, k_cache, v_cache, table, rows, lengths = case((5, 0, 2), (1, 1, 1))
    output = torch.empty_like(query)
    backend._run_sdpa_forward_decode(
        query, output, k_cache, v_cache, table, rows, lengths, enable_gqa=True, causal=False
    )
    torch.testing.assert_close(
        output, expected(query, k_cache, v_cache, table, lengths, (1, 1, 1)), rtol=1e-12, atol=1e-12
    )


def test_what_lies_in_the_cache_behind_a_sequence_is_never_read(backend):
    query, k_cache, v_cache, table, rows, lengths = case((5, 0), (1, 1))
    k_cache[PLACES - 1] = v_cache[PLACES - 1] = math.nan
    output = torch.empty_like(query)
    backend._run_sdpa_forward_decode(query, output, k_cache, v_cache, table, rows, lengths, enable_gqa=True)
    assert output.isfinite().all()


@pytest.mark.parametrize("is_widened", [True, False])
def test_bfloat16_is_attended_in_float32_where_a_run_computes_so(backend, monkeypatch, is_widened):
    attend, seen = torch.nn.functional.scaled_dot_product_attention, []

    def attended(query, keys, values, **options):
        seen.extend(each.dtype for each in (query, keys, values))
        return attend(query, keys, values, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attended)
    monkeypatch.setattr(bfloat16, "is_widened", lambda: is_widened)
    query, k_cache, v_cache, table, requests, lengths = case([3], [1])
    query, k_cache, v_cache = (each.bfloat16() for each in (query, k_cache, v_cache))
    out = torch.zeros_like(query)
    backend._run_sdpa_forward_decode(query, out, k_cache, v_cache, table, requests, lengths, enable_gqa=True)
    assert seen == [torch.float32 if is_widened else torch.bfloat16] * 3
    assert out.dtype == torch.bfloat16 and out.abs().sum() > 0
