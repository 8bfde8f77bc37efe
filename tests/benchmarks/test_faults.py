"""The benchmark of faults: its model is Qwen3, and what it plants is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.faults.__main__ import analysed
from benchmarks.faults.cases import ALSO, FAULTS, healthy
from benchmarks.faults.model import Cache, Model, Shape, random
from slime_ext.tools.analysis.findings import DETECTORS


@pytest.mark.parametrize("shape", [Shape(), Shape(experts=8)], ids=["dense", "mixture"])
def test_the_model_is_that_of_transformers(shape):
    import transformers

    generator = torch.Generator().manual_seed(0)
    weights = random(shape, generator)
    given = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.shared,
        "head_dim": shape.head,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
        "attn_implementation": "eager",
    }
    if shape.experts:
        given |= {"moe_intermediate_size": shape.inner, "num_experts": shape.experts, "norm_topk_prob": True}
        config = transformers.Qwen3MoeConfig(**given, num_experts_per_tok=shape.active)
        theirs = transformers.Qwen3MoeForCausalLM(config)
    else:
        theirs = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**given))
    theirs.load_state_dict(weights)
    tokens = torch.randint(shape.vocabulary, (3, 20), generator=generator)
    model, cache = Model(shape), Cache()
    with torch.no_grad():
        wanted = theirs.eval()(tokens).logits
        steps = [tokens[:, :7], *tokens[:, 7:].split(1, 1)]
        decoded = torch.cat([model(weights, step, cache).logits for step in steps], 1)
        # float32 over sums of 96 products of size 1
        assert torch.allclose(model(weights, tokens).logits, wanted, atol=1e-4)
        assert torch.allclose(decoded, wanted, atol=1e-4)


def test_every_detector_has_a_planted_fault():
    assert set(FAULTS) == set(DETECTORS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_and_nothing_else(name):
    findings = {finding.name: finding for finding in analysed(replace(FAULTS[name], seed=100)).findings}
    assert {name} <= findings.keys() <= {name, *ALSO.get(name, ())}
    assert findings[name].threshold and findings[name].ruled_out and findings[name].evidence


def test_nothing_is_found_in_a_healthy_run():
    assert analysed(replace(healthy(7), rollouts=2)).findings == ()


@pytest.mark.slow
def test_nothing_is_found_in_healthy_runs_of_other_seeds():
    for number in range(100, 108):
        findings = analysed(healthy(number)).findings
        assert [finding.name for finding in findings if finding.severity != "note"] == [], number
