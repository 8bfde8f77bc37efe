"""Left-out log-prob passes, on a host of a few lines that calls its functions in miles' order."""

from __future__ import annotations

import math
from argparse import Namespace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from slime_ext_cpu import shortcuts

LOSS = """
def get_log_probs_and_entropy(logits, **named):
    return {"log_probs": list(logits)}

def get_responses(logits, *, args, unconcat_tokens, total_lengths, response_lengths):
    sliced.append(logits.requires_grad)
    logits = logits.squeeze(0).div(args.rollout_temperature)
    end = 0
    for tokens, total, response in zip(unconcat_tokens, total_lengths, response_lengths):
        end += total
        yield logits[end - response - 1 : end - 1], tokens[-response:]

def policy_loss_function(args, batch, logits, reduce):
    proximal = batch["log_probs"]
    target = get_log_probs_and_entropy(logits)["log_probs"]
    read.append([values.tolist() for values in proximal])
    return sum(((t - p) * t).sum() for t, p in zip(target, proximal))
"""
ACTOR = """
class MegatronTrainRayActor:
    def __init__(self, args, logits):
        self.args, self.logits = args, logits

    def compute_log_prob(self, data_iterator, num_microbatches, store_prefix=""):
        events.append(f"{store_prefix}pass")
        return {f"{store_prefix}log_probs": [values.detach() * 1 for values in self.logits]}

    def train_actor(self, steps, prefix=""):
        rollout = {"response_lengths": [len(values) for values in self.logits]}
        iterator = [Namespace(rollout_data=rollout)]
        rollout.update(self.compute_log_prob(iterator, [2] * steps, store_prefix=prefix))
        log_rollout_data(0, self.args, rollout)
        train(self.args, rollout, self.logits)
        return rollout

def log_rollout_data(number, args, rollout):
    events.append("log")
    logged.append([values.tolist() for values in rollout.get("log_probs", [])])

def train(args, rollout, logits):
    events.append("train")
    for at in range(0, len(logits), 2):
        batch = {"log_probs": rollout.get("log_probs", [None] * len(logits))[at : at + 2]}
        if "log_probs" in rollout:
            loss.policy_loss_function(args, batch, logits[at : at + 2], None).backward()
"""
SAMPLES = [[-0.5, -1.25], [-3.0], [-0.125, -2.0, -0.75], [-1.5]]
AS_TRAIN_STARTS_IT = {
    **{name: value for name, value in shortcuts.NEEDLESS.items() if value is not None},
    "advantage_estimator": "grpo",
}


@pytest.fixture
def host(monkeypatch):
    monkeypatch.setattr(shortcuts, "_awaited", shortcuts.Awaited())
    events, logged, read = [], [], []
    loss, actor = ModuleType("loss"), ModuleType("actor")
    vars(loss).update(read=read, sliced=[])
    vars(actor).update(events=events, logged=logged, loss=loss, Namespace=Namespace)
    exec(LOSS, vars(loss))
    exec(ACTOR, vars(actor))
    shortcuts.fill_log_probs(loss)
    shortcuts.select_once(loss)
    shortcuts.skip_log_prob_pass(actor)
    return SimpleNamespace(actor=actor, loss=loss, events=events, logged=logged, read=read)


def trained(host, steps=1, prefix="", **options):
    logits = [torch.tensor(values, requires_grad=True) for values in SAMPLES]
    args = Namespace(**AS_TRAIN_STARTS_IT | options)
    rollout = host.actor.MegatronTrainRayActor(args, logits).train_actor(steps, prefix)
    return rollout, [values.grad for values in logits]


def test_one_step_trains_and_logs_the_log_probs_of_its_own_pass(host):
    rollout, gradients = trained(host)
    assert host.events == ["train", "log"]
    assert host.read == [SAMPLES[:2], SAMPLES[2:]] and host.logged == [SAMPLES]
    assert [values.tolist() for values in rollout["log_probs"]] == SAMPLES
    # d/dt (t - p) t at t = p is t: nothing is derived through p
    assert [values.tolist() for values in gradients] == SAMPLES


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 2},
        {"prefix": "ref_"},
        {"advantage_estimator": "reinforce_plus_plus"},
        *({name: "other"} for name in shortcuts.NEEDLESS),
    ],
    ids=lambda options: next(iter(options)),
)
def test_the_host_makes_its_pass_where_it_is_needed(host, options):
    trained(host, **options)
    assert host.events == [f"{options.get('prefix', '')}pass", "log", "train"]


def test_a_rollout_after_one_without_a_pass_gets_its_own(host):
    trained(host)
    del host.events[:], host.read[:]
    trained(host, steps=2)
    assert host.events == ["pass", "log", "train"] and host.read == [SAMPLES[:2], SAMPLES[2:]]


def test_log_probs_that_no_loss_fills_are_not_numbers(host):
    args = Namespace(**AS_TRAIN_STARTS_IT)
    iterator = [Namespace(rollout_data={"response_lengths": [2, 1]})]
    found = host.actor.MegatronTrainRayActor(args, []).compute_log_prob(iterator, [1])["log_probs"]
    assert [len(values) for values in found] == [2, 1]
    assert all(math.isnan(value) for values in found for value in values.tolist())
    assert not host.events


@pytest.mark.parametrize(("temperature", "on_policy"), [(1.0, False), (0.5, False), (1.0, True)])
def test_rows_of_samples_and_their_gradients_are_the_hosts(host, temperature, on_policy):
    logits = torch.tensor(
        [[[row + column / 8 for column in range(3)] for row in range(9)]], requires_grad=True
    )
    args = Namespace(rollout_temperature=temperature, true_on_policy_mode=on_policy)
    batch = {
        "unconcat_tokens": [torch.tensor([7, 8, 9, 10]), torch.tensor([11, 12, 13])],
        "total_lengths": [4, 3],
        "response_lengths": [2, 1],
    }
    parts = list(host.loss.get_responses(logits, args=args, **batch))
    rows = [[1, 2], [5]]  # predict the tokens 9 and 10, and 13
    assert [chunk.tolist() for chunk, _ in parts] == [
        [[(row + column / 8) / temperature for column in range(3)] for row in each] for each in rows
    ]
    assert [tokens.tolist() for _, tokens in parts] == [[9, 10], [13]]
    sum((chunk * chunk).sum() for chunk, _ in parts).backward()
    assert logits.grad.tolist() == [
        [
            [2 * (row + column / 8) / temperature**2 if row in {1, 2, 5} else 0 for column in range(3)]
            for row in range(9)
        ]
    ]
    assert host.loss.sliced == [on_policy]  # whether the host has sliced the logits, or row numbers
