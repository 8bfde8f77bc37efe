"""The trainer's log-probs at the sampler's tokens, for samples in another order than their step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slime_ext.host import heads
from slime_ext.host.policy_loss import LossCall
from slime_ext.host.ranks import Parallel
from slime_ext.host.rollout_data import Samples
from slime_ext.host.step_metrics import OptimizerStep
from slime_ext.hosts import running
from tests import slices
from tests.host import trees
from tests.host.test_proximal_heads import LENGTHS, LOSS, VOCABULARY, K

# A micro-batch holds the third sample of the step before the first.
ORDER, INDICES = (2, 0), [7, 3, 9, 4]
LOCAL = """
import torch

def get_responses(logits, *, local_lengths, args):
    for rows in logits.squeeze(0).split(local_lengths):
        yield rows, None

def get_log_probs_and_entropy(logits, **named):
    pass

def policy_loss_function(args, batch, logits, sum_of_sample_mean):
    pass
"""


def scored(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def step():
    """An optimizer step whose samples have heads of the sampler and of the proximal policy."""
    masks = [torch.ones(response) for _, response in LENGTHS]
    ids = [torch.arange(n * K, dtype=torch.int32).view(n, K) % VOCABULARY for _, n in LENGTHS]
    return OptimizerStep(
        samples=Samples(masks, INDICES),
        heads=[(each, torch.full(each.shape, -2.0)) for each in ids],
        proximal_heads=[scored(place, *each.shape) for place, each in enumerate(ids)],
        rollout={"sample_indices": sorted(INDICES)},
    )


@pytest.fixture
def host(tmp_path, monkeypatch):
    trees.made(tmp_path, monkeypatch, target=LOSS, loss=LOSS)
    return running.current()


def head_of(step, host, dump="dump"):
    """The head of the micro-batch, and the log-probs of all tokens that its logits give."""
    totals = [LENGTHS[place][0] for place in ORDER]
    logits = scored(9, 1, sum(totals), VOCABULARY).requires_grad_()
    lengths = {"total_lengths": totals, "response_lengths": [LENGTHS[place][1] for place in ORDER]}
    tokens = [torch.zeros(total, dtype=torch.long) for total in totals]
    named = {"args": SimpleNamespace(save_debug_train_data=dump), "unconcat_tokens": tokens, **lengths}
    batch = {"loss_masks": [step.samples.masks[place] for place in ORDER], **lengths}
    head = heads.at_logits([logits], named, LossCall(step, batch), host)
    rows = logits[0].log_softmax(-1).split(totals)
    of_responses = [
        row[total - n - 1 : total - 1].gather(1, step.heads[place][0].long())
        for row, place, total, n in zip(rows, ORDER, totals, lengths["response_lengths"], strict=True)
        if step.heads
    ]
    return head, of_responses


def test_both_policies_log_probs_stand_in_the_order_of_the_micro_batch(step, host):
    head, of_responses = head_of(step, host)
    assert torch.equal(head.proximal, torch.cat([step.proximal_heads[place] for place in ORDER]))
    torch.testing.assert_close(head.trainer, torch.cat(of_responses))


def test_log_probs_that_are_kept_for_the_dump_hold_no_graph(step, host):
    head, of_responses = head_of(step, host)
    kept = step.rollout[heads.TRAINER]
    for place, values in zip(ORDER, of_responses, strict=True):
        torch.testing.assert_close(kept[sorted(INDICES).index(INDICES[place])], values.detach())
    assert head.trainer.requires_grad
    assert [each is None or each.requires_grad for each in kept].count(False) == len(ORDER)


@pytest.mark.parametrize(("parallel", "dump"), [(Parallel(0, 1), None), (Parallel(1, 2), "dump")])
def test_log_probs_are_kept_only_for_a_dump_of_whole_sequences(step, host, parallel, dump, monkeypatch):
    head, of_responses = head_of(step, host, dump=None)
    monkeypatch.setattr(heads, "gathered", lambda *_: (head, list(map(len, of_responses))))
    step.parallel = parallel
    head_of(step, host, dump)
    assert heads.TRAINER not in step.rollout


def test_an_optimizer_step_may_lack_heads_of_either_policy(step, host):
    step.proximal_heads = None
    head, of_responses = head_of(step, host)
    torch.testing.assert_close(head.trainer, torch.cat(of_responses))
    assert head.proximal is None
    step.heads = []
    assert head_of(step, host)[0] is None


@pytest.mark.parametrize("rank", [0, 1])
def test_supports_are_counted_on_each_rank_that_shares_their_sequences(rank, tmp_path, monkeypatch):
    trees.made(tmp_path, monkeypatch, target=LOCAL, loss=LOCAL)
    totals, responses = [9, 14], [7, 9]
    widths = [[1 + (t + s) % 3 for t in range(n)] for s, n in enumerate(responses)]
    rows = []
    for of_tokens in widths:
        offsets = torch.tensor([0, *of_tokens]).cumsum(0)
        count = int(offsets[-1])
        rows.append(
            (torch.arange(count, dtype=torch.int32) % VOCABULARY, offsets, torch.full((count,), -1.0))
        )
    batch = {
        "loss_masks": [torch.ones(n) for n in responses],
        "total_lengths": totals,
        "response_lengths": responses,
    }
    runs = [slices.zigzag(total, n, rank, 2) for total, n in zip(totals, responses, strict=True)]
    local = [sum(stop - start for start, stop in each) for each in runs]
    args = SimpleNamespace(rollout_temperature=0.8)
    named = {"args": args, "top_p_token_ids": [], "local_lengths": local}
    logits = scored(0, 1, sum(local), VOCABULARY)
    support, sizes = heads.gathered(rows, batch, logits, named, running.current(), Parallel(rank, 2))
    expected = [
        sum(sum(of_tokens[start:stop]) for start, stop in each)
        for of_tokens, each in zip(widths, runs, strict=True)
    ]
    assert sizes == expected and args.rollout_temperature == 0.8
    of_sequences = [ids.split(of_tokens) for (ids, *_), of_tokens in zip(rows, widths, strict=True)]
    places = zip(of_sequences, runs, strict=True)
    held = [ids for of_tokens, each in places for start, stop in each for ids in of_tokens[start:stop]]
    log_probs = [(row[ids.long()] / 0.8).log_softmax(0) for row, ids in zip(logits[0], held, strict=True)]
    torch.testing.assert_close(support.trainer, torch.cat(log_probs))
