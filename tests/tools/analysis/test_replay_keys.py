"""Kept sets, experts, dropped samples and tokens that differ, as slime's dumps hold them."""

from __future__ import annotations

import torch

from slime_ext.tools.analysis.readers.dumps import read_job
from slime_ext.tools.analysis.readers.find import find
from slime_ext.tools.analysis.readers.samples import kept_sizes
from tests.tools.analysis.dumps import write_run
from tests.tools.analysis.synthetic import World, run

ROLLOUT = run(World(rollouts=1, samples=6, length=12))[0]


def rewritten(folder, kind, change):
    """The dump of rollout 0 with its samples changed."""
    path = folder / kind / "0.pt"
    content = torch.load(path, weights_only=False)
    change(content["samples"])
    torch.save(content, path)


def read(folder):
    (job,) = find([folder]).jobs
    (found,) = read_job(job)
    return found


def test_kept_sets_become_their_size_negative_where_the_token_is_none_of_them():
    sample = {
        "rollout_top_p_token_ids": torch.tensor([4, 7, 9, 1, 2], dtype=torch.int32),
        "rollout_top_p_token_offsets": [0, 1, 3, 3, 5],
    }
    found = kept_sizes(sample, 4, [0, 0, 4, 9, 5, 3])
    assert found.tolist()[:2] == [1, 2] and found[2].isnan() and found[3] == -2
    for changed in [
        {"rollout_top_p_token_offsets": [0, 1, 3, 3]},
        {"rollout_top_p_token_offsets": [0, 3, 1, 3, 5]},
        {"rollout_top_p_token_ids": [4]},
        {"rollout_top_p_token_ids": "x"},
        {"rollout_top_p_token_ids": None},
    ]:
        assert kept_sizes(sample | changed, 4, [0, 0, 4, 9, 5, 3]) is None


def test_overlap_of_experts_by_token_layer_and_expert(tmp_path):
    write_run(tmp_path, [ROLLOUT])
    generator = torch.Generator().manual_seed(0)
    theirs, mine = [], []

    def draw(samples, into, length):
        for sample in samples:
            size = len(sample["tokens"]) - 1
            sample[length] = torch.stack(
                [torch.randperm(6, generator=generator)[:2] for _ in range(size * 3)]
            ).view(size, 3, 2)
            into.append(sample[length])

    rewritten(tmp_path, "rollout_data", lambda samples: draw(samples, theirs, "rollout_routed_experts"))
    rewritten(tmp_path, "train_data", lambda samples: draw(samples, mine, "routed_experts"))
    found = read(tmp_path)
    layers, experts, tokens = [[0.0, 0] for _ in range(3)], [[0, 0] for _ in range(6)], []
    for i, length in enumerate(found.lengths):
        first = found.prompt_lengths[i] - 1
        for at in range(first, first + length):
            shares = []
            for layer in range(3):
                a, b = theirs[i][at, layer].tolist(), mine[i][at, layer].tolist()
                shares.append(sum(x in b for x in a) / 2)
                layers[layer] = [layers[layer][0] + shares[-1], layers[layer][1] + 1]
                for x in a:
                    experts[x] = [experts[x][0] + 1, experts[x][1] + (x not in b)]
            tokens.append(sum(shares) / 3)
    assert torch.allclose(found.routes.double(), torch.tensor(layers, dtype=torch.float64))
    assert found.experts.tolist() == experts
    assert torch.allclose(found.overlap, torch.tensor(tokens))


def test_samples_that_are_not_trained_on_are_counted_with_length_reward_and_position(tmp_path):
    write_run(tmp_path, [ROLLOUT])
    rewritten(tmp_path, "train_data", lambda samples: [samples.pop(4), samples.pop(1)])

    def change(samples):
        samples[1] |= {"weight_versions": ["8", "7"], "status": "truncated"}
        samples[4] |= {"weight_versions": ["3"], "status": "aborted"}

    rewritten(tmp_path, "rollout_data", change)
    found = read(tmp_path)
    assert found.dropped[:, 2].tolist() == [1, 4]
    assert found.why_dropped == ["truncated", "aborted"]
    assert found.dropped[:, 3].tolist() == [7, 3]
    assert found.dropped[:, 0].tolist() == [ROLLOUT.lengths[1], ROLLOUT.lengths[4]]
    assert found.dropped[:, 1].tolist() == [float(ROLLOUT.rewards[1]), float(ROLLOUT.rewards[4])]


def test_other_tokens_in_the_two_dumps_are_counted(tmp_path):
    write_run(tmp_path, [ROLLOUT])
    assert read(tmp_path).retold == 0

    def change(samples):
        samples[2]["tokens"][-1] += 1
        samples[3]["tokens"].insert(0, samples[3]["tokens"].pop())  # in another order
        samples[4]["tokens"] = None

    rewritten(tmp_path, "rollout_data", change)
    assert read(tmp_path).retold == 2
