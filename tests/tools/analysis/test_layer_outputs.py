"""Layer outputs of both sides: slime's, SGLang's and its dumper's files."""

from __future__ import annotations

import pytest
import torch

from slime_ext.tools.analysis.measures.layer_outputs import layer_distances

IDS = [torch.tensor([5, 6, 7]), torch.tensor([8, 9])]
WIDTH = 4


def save(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)


def outputs(factors, dtype=torch.float32):
    """One output [5, WIDTH] for each layer; the factor scales it."""
    base = torch.arange(1.0, 5 * WIDTH + 1).view(5, WIDTH)
    return [(factor * (i + 1) * base).to(dtype) for i, factor in enumerate(factors)]


def write_slime(folder, layers):
    content = {
        "store_prefix": "actor",
        "input_ids": torch.cat(IDS)[None],
        "cu_seqlens": torch.tensor([0, 3, 5]),
        "layers": {i: x[:, None] for i, x in enumerate(layers)},
        "modules": {},
    }
    save(folder / "rank00000" / "actor_Pass00000.pt", content)


def write_sglang(folder, layers, decode=False):
    names = [f"model.layers.{i}.input_layernorm" for i in range(1, len(layers))] + ["model.norm"]
    found = {
        "model.forward_batch_info.input_ids": torch.cat(IDS),
        "model.forward_batch_info.seq_lens": torch.tensor([30, 20] if decode else [3, 2]),
        "model.layers.0.input_layernorm": layers[0],
    }
    residuals = {name: [torch.zeros_like(x), x] for name, x in zip(names, layers, strict=True)}
    save(folder / "TP0_PP0_Rank0_pid7" / f"Pass0000{int(decode)}.pt", found | residuals)


def write_dumper(folder, layers):
    named = {"non_intrusive__inputs.input_ids": torch.cat(IDS)}
    named |= {f"non_intrusive__model.layers.{i}.output": x[None] for i, x in enumerate(layers)}
    for index, (name, value) in enumerate(named.items()):
        path = folder / f"step=0___rank=0___dump_index={index}___name={name}.pt"
        save(path, {"value": value, "meta": {"name": name}})


def test_the_distance_after_each_layer_is_relative(tmp_path):
    write_slime(tmp_path / "layers/trainer", outputs([1, 1, 1]))
    write_sglang(tmp_path / "layers/sampler", outputs([1, 1.1, 1], torch.bfloat16))
    write_sglang(tmp_path / "layers/sampler", outputs([9, 9, 9]), decode=True)  # passes that decode
    found = layer_distances(tmp_path)
    assert [d.layer for d in found] == [0, 1, 2]
    assert [d.distance for d in found] == pytest.approx([0, 0.1, 0], abs=4e-3)  # rounding of bfloat16
    assert all(d.roundoff == 2.0**-8 for d in found)


def test_files_of_the_dumper_that_miles_uses(tmp_path):
    write_dumper(tmp_path / "layers/trainer/fwd_only", outputs([1, 1]))
    write_dumper(tmp_path / "layers/sampler/engines", outputs([1, 1.5]))
    assert [round(d.distance, 6) for d in layer_distances(tmp_path)] == [0, 0.5]


def test_what_cannot_be_compared_is_left_out(tmp_path):
    assert layer_distances(tmp_path) == ()
    write_slime(tmp_path / "layers/trainer", outputs([1]))
    assert layer_distances(tmp_path) == ()
    save(tmp_path / "layers/sampler/a.pt", {"something": 1})
    (tmp_path / "layers/sampler/b.pt").write_bytes(b"no torch file")
    assert layer_distances(tmp_path) == ()
    narrow = [x[:, :2] for x in outputs([1])]
    write_sglang(tmp_path / "layers/sampler", narrow)
    assert layer_distances(tmp_path) == ()


def test_a_layer_of_whole_numbers_is_left_out(tmp_path):
    for side in ("trainer", "sampler"):
        write_slime(tmp_path / "layers" / side, [outputs([1], torch.int8)[0], outputs([1])[0]])
    assert [d.layer for d in layer_distances(tmp_path)] == [1]
