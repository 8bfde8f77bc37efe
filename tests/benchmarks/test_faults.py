"""The benchmark of faults: its model is Qwen3, and what it plants is named."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.faults.__main__ import analysed
from benchmarks.faults.cases import ALSO, FAULTS, healthy
from benchmarks.faults.model import Cache, Model, Shape, random
from slime_ext.tools.analysis.findings import DETECTORS

# The others are planted in tests/tools/analysis/test_findings.py too, in a smaller model.
STRUCTURAL = (
    "retokenised prefix_mismatch kept_mass frozen_sampler partial_push growing_mismatch layer kv_precision "
    "expert_routing selection_bias no_response_tokens left_out other_run repeated_rollouts duplicate_samples "
    "outside_vocabulary reward_collapse stale_prefix batch_shape"
).split()


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


@pytest.mark.parametrize("name", STRUCTURAL)
def test_a_fault_is_named_alone(name):
    document = analysed(FAULTS[name])
    assert [finding.name for finding in document.findings] == [name]
    (finding,) = document.findings
    assert finding.threshold and finding.ruled_out and finding.evidence


PAGE = (Path(__file__).parents[2] / "docs/analyze.md").read_text()
ALIKE_ROWS = PAGE.partition("| look alike |")[2].partition("\n\n")[0].splitlines()[2:]
PAIRS = {tuple(n for n in re.findall(r"`(\w+)`", row.split("|")[1]) if n in DETECTORS) for row in ALIKE_ROWS}


@cache
def named(name):
    return {finding.name for finding in analysed(FAULTS[name]).findings}


@pytest.mark.slow
@pytest.mark.parametrize("names", sorted(pair for pair in PAIRS if len(pair) > 1), ids=" ".join)
def test_detectors_that_look_alike_are_told_apart(names):
    """Of each planted fault its own detector and none of those that share its symptom is named."""
    for name in names:
        assert name in named(name) and named(name) & set(names) <= {name, *ALSO.get(name, ())}


def test_nothing_is_found_in_a_healthy_run():
    assert analysed(replace(healthy(7), rollouts=2)).findings == ()


@pytest.mark.slow
def test_the_whole_toy_set():
    """On other seeds than those of the tests above."""
    said = {name: analysed(replace(world, seed=100)).findings for name, world in FAULTS.items()}
    names = {name: {finding.name for finding in findings} for name, findings in said.items()}
    assert [name for name in names if not {name} <= names[name] <= {name, *ALSO.get(name, ())}] == []
    for number in range(100, 120):
        findings = analysed(healthy(number)).findings
        assert [finding.name for finding in findings if finding.severity != "note"] == [], number
