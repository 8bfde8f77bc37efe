"""Logits of every layout against transformers on the same weights, and what the builder refuses."""

from __future__ import annotations

import itertools

import pytest
import torch

from slime_ext.launcher.megatron import model, parallel, weights
from tests.launcher.distributed import each, run_ranks
from tests.launcher.megatron import tiny_model as tiny

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


def _logits(layout, tied, dtype, experts):
    """{(dp, cp, tp rank): ([T, V/tp] of each micro-batch, its sequences)} where the last stage is."""
    chunks = tiny.start(layout, tied, dtype, experts)
    out = tiny.run_schedule(chunks, lambda x, s: (x.sum(), {"logits": x.clone(), "sequences": s}), True)
    return (parallel.dp_group().rank(), parallel.cp_group().rank(), parallel.tp_group().rank()), out


def _assemble(results):
    """{tuple(sequence): [R, V] logits}: vocabulary parts side by side, zig-zag chunks back in order."""
    ranks = {where: batches for where, batches in results if batches}
    found, cp = {}, 1 + max(where[1] for where in ranks)
    for dp, batch in {(where[0], i) for where, batches in ranks.items() for i in range(len(batches))}:
        rows = [
            torch.cat([b[batch]["logits"] for w, b in sorted(ranks.items()) if w[:2] == (dp, r)], -1)
            for r in range(cp)
        ]
        at = 0
        for sequence in ranks[dp, 0, 0][batch]["sequences"]:
            where = [tiny.slice_for_rank(list(range(1, len(sequence) + 1)), r, cp) for r in range(cp)]
            full = torch.zeros(
                len(sequence) + 1, rows[0].size(1), dtype=rows[0].dtype
            )  # row 0 takes the padding
            for r in range(cp):
                full[torch.tensor(where[r])] = rows[r][at : at + len(where[r])]
            found[tuple(sequence)] = full[1:]
            at += len(where[0])
    return found


@pytest.mark.parametrize(
    "layout",
    [x if x in ("cp2", "tp2pp2") else pytest.param(x, marks=pytest.mark.slow) for x in tiny.LAYOUTS],
)
def test_logits_are_those_of_transformers(layout):
    kinds = list(itertools.product((False, True), TOLERANCE, tiny.mixtures(layout)))
    ranks = run_ranks(each, tiny.LAYOUTS[layout][0], _logits, [(layout, *kind) for kind in kinds])
    for kind, of_ranks in zip(kinds, zip(*ranks, strict=True), strict=True):
        found, oracle = _assemble(of_ranks), tiny.hf_model(*kind)
        assert len(found) == len(tiny.SEQUENCES)
        for sequence, logits in found.items():
            expected = oracle(torch.tensor([sequence])).logits[0]
            bound = TOLERANCE[kind[1]] * expected.abs().max().item()
            torch.testing.assert_close(logits, expected, rtol=0, atol=bound)


def _initial(layout, seed):
    args = tiny.tiny_args(*tiny.LAYOUTS[layout][1:], torch.float32, init_method_std=0.05, seed=seed)
    parallel.initialize(args)
    return weights.gather_hf_state(model.build_model(args, tiny.tiny_config()), tiny.tiny_config())


def test_initial_weights_do_not_depend_on_the_layout():
    one = run_ranks(_initial, 1, "one", 7)[0]
    four = run_ranks(_initial, 4, "tp2pp2", 7)[0]
    other = run_ranks(_initial, 1, "one", 8)[0]
    assert one.keys() == four.keys()
    assert all(torch.equal(one[name], four[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


def test_initial_weights_have_megatrons_scale():
    draw = model.random_weights(tiny.tiny_args(init_method_std=0.05), tiny.tiny_config())
    assert draw("model.layers.0.mlp.up_proj.weight").std().item() == pytest.approx(0.05, rel=0.05)
    assert draw("model.layers.0.mlp.down_proj.weight").std().item() == pytest.approx(0.05 / 2, rel=0.05)
    assert draw("model.layers.1.self_attn.q_norm.weight").tolist() == [1.0] * 16


def test_initial_weights_of_a_mixture_have_the_shapes_of_its_files():
    draw = model.random_weights(tiny.tiny_args(), tiny.tiny_config(experts=tiny.MIXTURE))
    files = tiny.hf_state(tiny.hf_model(experts=tiny.MIXTURE))
    assert {name: draw(name).shape for name in files} == {name: t.shape for name, t in files.items()}
    first, second = (draw(f"model.layers.0.mlp.experts.{i}.up_proj.weight") for i in (0, 1))
    assert not torch.equal(first, second)
