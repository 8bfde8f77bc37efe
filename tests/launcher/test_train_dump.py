"""The train dump of a rollout, as slime's readers get it, from every layout."""

from __future__ import annotations

import math

import pytest
import torch

from slime_ext.launcher.megatron import parallel
from slime_ext.launcher.megatron.batching import micro_batches, pack_micro_batch, step_slices
from slime_ext.launcher.megatron.step import layout_of
from slime_ext.launcher.output.dumps import train_dump
from slime_ext.launcher.postprocess import rollout_data
from tests.launcher.distributed import run_ranks
from tests.launcher.megatron.tiny_model import LAYOUTS
from tests.launcher.megatron.tiny_rollout import arguments, rollout

pytestmark = pytest.mark.slow  # processes of their own


def dump(layout, template):
    """Writes the dump of a rollout on one rank of a layout; some values were replaced before training."""
    args = arguments(layout, global_batch_size=4)
    parallel.initialize(args)
    place, samples = layout_of(args), rollout(8)
    samples[2].reward, samples[2].relative_reward = None, math.nan
    for sample in samples:
        sample.index = 10 + sample.position
    steps = [
        [
            [pack_micro_batch([samples[p] for p in positions], place) for positions in minibatch]
            for minibatch in micro_batches(args, step, place.dp_rank, place.dp_size)
        ]
        for step in step_slices(8, args.global_batch_size)
    ]
    batches = [batch for step in steps for minibatch in step for batch in minibatch]
    log_probs = {}
    for batch in batches:
        fulls = [
            torch.arange(float(n)) - p for p, n in zip(batch.positions, batch.response_lengths, strict=True)
        ]
        log_probs.update(zip(batch.positions, batch.split(batch.local(fulls)), strict=True))
        for i, position in enumerate(batch.positions):
            batch.advantages[i] = batch.advantages[i] + 100
            if position == 5:
                batch.loss_masks[i][0] = 0
    data = rollout_data(args, steps, log_probs if parallel.is_last_stage() else {}, samples)
    train_dump(template, 3, data, "prompts")()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dump_holds_what_was_trained_on(layout, tmp_path):
    run_ranks(dump, LAYOUTS[layout][0], layout, str(tmp_path / "{rollout_id}.pt"))
    found, expected = torch.load(tmp_path / "3.pt", weights_only=True), rollout(8)
    ranks = 2 if layout == "dp2" else 1
    assert [s["sample_index"] for s in found["samples"]] == list(range(10, 18))
    assert [s["data_parallel_rank"] for s in found["samples"]] == [i % ranks for i in range(8)]
    for position, (row, sample) in enumerate(zip(found["samples"], expected, strict=True)):
        length = sample.response_length
        assert row["log_probs"].tolist() == [t - position for t in range(length)]
        assert row["tokens"].tolist() == sample.tokens
        assert row["advantages"].tolist() == pytest.approx([sample.advantage + 100] * length)
        assert row["returns"].tolist() == row["advantages"].tolist()
        assert row["rollout_log_probs"].tolist() == pytest.approx(sample.rollout_log_probs)
        first = [0] if position == 5 else sample.loss_mask[:1]
        assert row["loss_masks"].tolist() == first + sample.loss_mask[1:]
    assert [math.isnan(s["rewards"]) for s in found["samples"]] == [i == 2 for i in range(8)]
    assert [math.isnan(r) for r in found["raw_reward"]] == [i == 2 for i in range(8)]
    places = [shard["partition"] for shard in found["dp_shards"]]
    assert places == [list(range(rank, 8, ranks)) for rank in range(ranks)]
    for shard, place in zip(found["dp_shards"], places, strict=True):
        assert shard["sample_indices"] == [10 + p for p in place]
        assert [i for batch in shard["micro_batch_indices"] for i in batch] == list(range(len(place)))
        assert sum(shard["num_microbatches"]) == len(shard["micro_batch_indices"])
