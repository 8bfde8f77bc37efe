"""Kept sets, experts, dropped samples and tokens that differ, as slime's dumps hold them."""

from __future__ import annotations

import pytest
import torch

from slime_ext.tools.analysis.fields import Record, kept_sizes
from slime_ext.tools.analysis.readers.dumps import read_job
from slime_ext.tools.analysis.readers.find import find
from slime_ext.tools.analysis.readers.topk import head_kl
from slime_ext.tools.analysis.request import Request
from slime_ext.tools.analysis.run import analyse
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
    found = kept_sizes(Record(sample, 4, [0, 0, 4, 9, 5, 3]))
    assert found.tolist()[:2] == [1, 2] and found[2].isnan() and found[3] == -2
    for changed in [
        {"rollout_top_p_token_offsets": [0, 1, 3, 3]},
        {"rollout_top_p_token_offsets": [0, 3, 1, 3, 5]},
        {"rollout_top_p_token_ids": [4]},
        {"rollout_top_p_token_ids": "x"},
        {"rollout_top_p_token_ids": None},
    ]:
        assert kept_sizes(Record(sample | changed, 4, [0, 0, 4, 9, 5, 3])) is None


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


def with_heads(folder, top_k, vocabulary=40):
    """Dumps with the heads of both sides; returns the log-probs of both over the vocabulary, [T, V] each."""
    write_run(folder, [ROLLOUT])
    generator, whole = torch.Generator().manual_seed(0), []

    def sampler(samples):
        for sample in samples:
            logits = 2 * torch.randn(sample["response_length"], vocabulary, generator=generator)
            other = logits + 0.3 * torch.randn(logits.shape, generator=generator)
            whole.append([x.double().log_softmax(-1) for x in (logits, other)])
            sample["rollout_topk_log_probs"] = whole[-1][0].topk(top_k).values.float()

    def trainer(samples):
        for sample, (theirs, mine) in zip(samples, whole, strict=True):
            sample["topk_log_probs"] = mine.gather(1, theirs.topk(top_k).indices).float()

    rewritten(folder, "rollout_data", sampler)
    rewritten(folder, "train_data", trainer)
    return (torch.cat(side) for side in zip(*whole, strict=True))


def test_heads_of_both_sides_give_the_kl_of_each_token(tmp_path):
    q, p = with_heads(tmp_path / "whole", 40)
    exact = (q.exp() * (q - p)).sum(1)
    found = read(tmp_path / "whole")
    assert torch.allclose(found.kl.double(), exact, atol=1e-5) and found.tail.abs().max() < 1e-5
    with_heads(tmp_path / "part", 12)
    part = read(tmp_path / "part")
    head, ids = q.topk(12)
    gone = [1 - x.exp().sum(1) for x in (head, p.gather(1, ids))]
    by_hand = (head.exp() * (head - p.gather(1, ids))).sum(1) + gone[0] * (gone[0] / gone[1]).log()
    assert torch.allclose(part.kl.double(), by_hand, atol=1e-5) and (by_hand <= exact).all()
    assert torch.allclose(part.tail.double(), gone[0], atol=1e-5)
    request = Request((str(tmp_path / "part"),), presets=("metrics_only",))
    numbers = analyse(request, request.files()).total
    mask = part.mask
    assert numbers.kl == pytest.approx(float(by_hand[mask].mean()), abs=1e-5)
    assert numbers.tail == pytest.approx(float(gone[0][mask].mean()), abs=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [None, "x", [[0.0]], torch.zeros(3), torch.zeros(1, 5)],
    ids=["none", "text", "short", "flat", "other"],
)
def test_heads_that_do_not_fit_are_left_alone(tmp_path, wrong):
    with_heads(tmp_path, 5)
    rewritten(tmp_path, "train_data", lambda samples: [s.update(topk_log_probs=wrong) for s in samples])
    assert read(tmp_path).kl is None


def test_a_token_without_a_head_has_no_kl():
    none, some = torch.full((1, 3), -torch.inf), torch.tensor([[-0.5, -2.0, -torch.inf]])
    kl, tail = head_kl(torch.cat([none, some]), torch.cat([none, some]))
    assert kl.isnan().tolist() == [True, False] and kl[1] == 0 and tail.isnan().tolist() == [True, False]
