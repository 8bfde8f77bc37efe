"""Hugging Face -> Megatron -> Hugging Face is the identity, in every layout."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from slime_ext.errors import DataError
from slime_ext.launcher.megatron import weights
from tests.launcher.distributed import each, run_ranks
from tests.launcher.megatron import tiny_model as tiny

pytestmark = pytest.mark.slow  # processes of their own


def _round_trip(layout, tied, dtype, experts):
    chunks = tiny.start(layout, tied, dtype, experts)
    return weights.gather_hf_state(chunks, tiny.tiny_config(tied, experts))


@pytest.mark.parametrize("layout", tiny.LAYOUTS)
def test_round_trip_is_exact(layout):
    kinds = list(itertools.product((False, True), (torch.float64, torch.float32), (None, tiny.MIXTURE)))
    ranks = run_ranks(each, tiny.LAYOUTS[layout][0], _round_trip, [(layout, *kind) for kind in kinds])
    for kind, (state, *others) in zip(kinds, zip(*ranks, strict=True), strict=True):
        expected = tiny.hf_state(tiny.hf_model(*kind))
        assert state.keys() == expected.keys(), kind
        assert all(torch.equal(state[name], expected[name]) for name in expected), kind
        assert others == [None] * len(others)


def test_join_interleaves_per_group():
    part = weights.Part(("q", "k", "v"), groups=2, dim=0, rows=(4, 2, 2))
    full = part.join([torch.tensor([0, 1, 2, 3]), torch.tensor([10, 11]), torch.tensor([20, 21])])
    assert full.tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert part.shard(full, 1, 2).tolist() == [2, 3, 11, 21]


def test_a_qwen2s_biases_are_interleaved_as_their_weights():
    weight, bias = (
        weights.part_of(f"decoder.layers.0.self_attention.linear_qkv.{kind}", tiny.tiny_config(), 2)
        for kind in ("weight", "bias")
    )
    assert bias.names == tuple(name.replace("weight", "bias") for name in weight.names)
    assert replace(bias, names=weight.names) == weight


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_split_undoes_join(groups):
    tensors = [torch.randn(rows, 3) for rows in (8, 4, 4)]
    part = weights.Part(("q", "k", "v"), groups=groups, dim=0, rows=(8, 4, 4))
    assert all(
        torch.equal(t, back) for t, back in zip(tensors, part.split(part.join(tensors)).values(), strict=True)
    )


def test_transformer_engine_names_mean_the_same_tensors():
    config = tiny.tiny_config()
    for local, engine in [
        ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
        ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    ]:
        parts = [weights.part_of(f"decoder.layers.3.{name}", config, 2) for name in (local, engine)]
        assert parts[0] == parts[1]


@pytest.mark.parametrize("name", ["decoder.layers.0.mlp.shared_experts.linear_fc1.weight", "mtp.weight"])
def test_refuses_parameters_of_other_models(name):
    with pytest.raises(DataError, match=f"expected a parameter of Qwen3, got '{name}'"):
        weights.part_of(name, tiny.tiny_config(), 1)


def _load_of_another_shape():
    chunks = tiny.start("one")
    state = tiny.hf_state(tiny.hf_model())
    state["model.norm.weight"] = torch.ones(33)
    weights.load_hf_state(chunks, state.__getitem__, tiny.tiny_config())


def test_refuses_a_tensor_of_another_shape():
    with pytest.raises(
        AssertionError, match=r"expected model.norm.weight to give \(32,\) per rank, got \(33,\)"
    ):
        run_ranks(_load_of_another_shape, 1)


@pytest.mark.parametrize("indexed", [False, True])
def test_reads_a_checkpoint_by_name(tmp_path, indexed):
    oracle = tiny.hf_model(dtype=torch.float32)
    oracle.save_pretrained(tmp_path, max_shard_size="20KB" if indexed else "1GB")
    get_tensor = weights.read_hf_checkpoint(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists() == indexed
    for name, tensor in tiny.hf_state(oracle).items():
        assert torch.equal(get_tensor(name), tensor)


def test_says_which_tensor_a_checkpoint_lacks(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match="expected the tensor 'b', got none"):
        weights.read_hf_checkpoint(tmp_path)("b")


def test_says_that_a_directory_holds_no_checkpoint(tmp_path):
    with pytest.raises(DataError, match="expected safetensors files, got none"):
        weights.read_hf_checkpoint(tmp_path)


def test_a_part_is_a_value():
    part = weights.Part(("a",), dim=0)
    assert replace(part, dim=None) != part
