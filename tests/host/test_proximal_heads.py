"""The proximal policy's log-probs at the head, out of the log-prob pass of a host that has slime's two
functions, on logits instead of a model."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace

import pytest
import torch

from slime_ext import host
from slime_ext.errors import ConfigError, DataError
from slime_ext.host import heads, proximal_heads, wrapping
from slime_ext.host.heads import HEADS, SCORED
from slime_ext.host.rollout_data import Samples
from slime_ext.hosts import running
from slime_ext.hosts.code import SCORE
from tests.host import trees

K, VOCABULARY = 3, 6
LENGTHS = [(5, 3), (4, 1), (6, 2), (3, 2)]  # (total, response)
STEPS = [[[0, 2], [1]], [[3]]]  # of two optimizer steps, the samples of each micro-batch
HOST = """
from {loss} import *
from {loss} import get_log_probs_and_entropy
from functools import partial
import torch

class DataIterator:
    def __init__(self, rollout_data, micro_batch_indices):
        self.rollout_data, self.micro_batch_indices, self.offset = rollout_data, micro_batch_indices, 0
    def get_next(self, keys):
        indices = self.micro_batch_indices[self.offset]
        self.offset += 1
        return {{key: [self.rollout_data[key][i] for i in indices] for key in keys}}
    def reset(self):
        self.offset = 0

def forward_only(f, args, model, data_iterator, num_microbatches, store_prefix=""):
    store = []
    for iterator in data_iterator:
        iterator.reset()
    for _ in range(sum(num_microbatches)):
        batch = data_iterator[0].get_next(("tokens", "total_lengths", "response_lengths"))
        logits = torch.cat([model(tokens) for tokens in batch["tokens"]])[None]
        lengths = {{key: batch[key] for key in ("total_lengths", "response_lengths")}}
        store.append(partial(f, args=args, unconcat_tokens=batch["tokens"], **lengths)(logits)[1])
    found = {{}}
    for key in store[0]:
        values = [value for made in store for value in made[key]]
        order = sum(data_iterator[0].micro_batch_indices, [])
        found[store_prefix + key] = [values[order.index(i)] for i in range(len(values))]
    return found

class Actor:
    def __init__(self, args, model, reference):
        self.args, self.model, self.reference = args, model, reference
    def train_actor(self, rollout_id, rollout_data, external_data=None):
        iterator = DataIterator(rollout_data, self.args.indices)
        for prefix, model in (("ref_", self.reference), ("", self.model)):
            found = forward_only(get_log_probs_and_entropy, self.args, model, [iterator],
                                 self.args.num_microbatches, store_prefix=prefix)
            rollout_data.update(found)
        return self.args.then(rollout_data)

def train_one_step(args, rollout_id, step_id, data_iterator, model):
    pass
"""
LOSS = """
import torch

def get_responses(logits, *, args, unconcat_tokens, total_lengths, response_lengths):
    logits, end = logits.squeeze(0), 0
    for tokens, total, response in zip(unconcat_tokens, total_lengths, response_lengths):
        end += total
        yield logits[end - response - 1 : end - 1], tokens[-response:]

def get_log_probs_and_entropy(logits, **named):
    parts = get_responses(logits, **named)
    scored = [rows.log_softmax(-1).gather(1, tokens[:, None])[:, 0] for rows, tokens in parts]
    return torch.empty(0), {"log_probs": scored}

def policy_loss_function(args, batch, logits, sum_of_sample_mean):
    pass
"""
ON_HOST = {"steps": ["reweight", {"truncate": {"high": 2.0}}], "center": {"top_k": K}}


def arguments(mapping=ON_HOST, **more):
    common = {
        "use_tis": True,
        "custom_tis_function_path": "slime_ext.tis.correct",
        "custom_megatron_init_path": "slime_ext.host.init",
        "custom_generate_function_path": "slime_ext.host.generate",
        "custom_rollout_log_function_path": None,
        "sglang_router_ip": "127.0.0.1",
        "num_steps_per_rollout": 2,
        "num_microbatches": [len(step) for step in STEPS],
        "indices": [batch for step in STEPS for batch in step],
        "then": lambda rollout_data: rollout_data,
    }
    return SimpleNamespace(**common | {"slime_ext": mapping} | more)


def scores(seed):
    """A policy: logits of each token from a table."""
    table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    return lambda tokens: table[tokens]


@pytest.fixture
def actor(tmp_path, monkeypatch):
    """Makes an actor of a host that ``init`` has wrapped, and its rollout."""

    def make(**more):
        step = HOST.format(loss="slime.backends.megatron_utils.loss")
        found = trees.made(tmp_path, monkeypatch, target=LOSS, loss=LOSS, step=step)
        args = arguments(**more)
        host.init(args)
        draw = torch.Generator().manual_seed(0)
        rollout = {
            "tokens": [torch.randint(0, VOCABULARY, (total,), generator=draw) for total, _ in LENGTHS],
            "total_lengths": [total for total, _ in LENGTHS],
            "response_lengths": [response for _, response in LENGTHS],
            "loss_masks": [torch.ones(response) for _, response in LENGTHS],
            "sample_indices": [7, 3, 9, 4],
        }
        HEADS.value[5] = {
            index: (torch.arange(n * K, dtype=torch.int32).view(n, K) % VOCABULARY, torch.full((n, K), -2.0))
            for index, (_, n) in zip(rollout["sample_indices"], LENGTHS, strict=True)
        }
        return found.step.Actor(args, scores(1), scores(2)), rollout

    return make


def seen(rollout_data):
    """What an optimizer step gets of the samples 4 and 7, and the columns that the host stores."""
    return heads.proximal_of(Samples(indices=[4, 7]), is_moved=True), set(rollout_data)


def test_the_pass_of_the_actor_gives_the_log_probs_at_the_head(actor):
    made, rollout = actor(then=seen)
    columns = {*rollout, "log_probs", "ref_log_probs"}
    found, stored = made.train_actor(5, rollout)
    for index, values in zip((4, 7), found, strict=True):
        place = rollout["sample_indices"].index(index)
        total, n = LENGTHS[place]
        rows = scores(1)(rollout["tokens"][place])[total - n - 1 : total - 1].log_softmax(-1)
        torch.testing.assert_close(values, rows.gather(1, HEADS.value[5][index][0].long()))
    assert stored == columns  # the host logs the mean of each
    assert SCORED.value is None


def test_a_class_that_ray_makes_of_the_actors_is_found(actor):
    """It has a wrapper of its own of each method, made before ``init`` runs."""
    made, rollout = actor(then=seen)
    cls = type(made)
    plain = getattr(cls.train_actor, wrapping.MARK)

    class Derived(cls):
        def train_actor(self, *given, _ray_trace_ctx=None, **named):
            return plain(self, *given, **named)

    class Calling(cls):
        def train_actor(self, rollout_id, rollout_data):
            super().train_actor(rollout_id, rollout_data=rollout_data)
            return seen(rollout_data)

    Derived.train_actor.__signature__ = inspect.signature(plain)
    proximal_heads.install(running.current())
    for derived in (Derived, Calling):
        found, _ = derived(made.args, made.model, made.reference).train_actor(5, dict(rollout))
        assert [len(values) for values in found] == [2, 3]


def test_the_private_method_of_later_miles_is_found(actor):
    made, rollout = actor(then=seen)
    cls = type(made)
    plain = getattr(cls.train_actor, wrapping.MARK)

    class Later(cls):
        def _train_actor(self, rollout_id, rollout_data):
            return plain(self, rollout_id, rollout_data)

    proximal_heads.install(running.current())
    found, _ = Later(made.args, made.model, made.reference)._train_actor(5, rollout)
    assert [len(values) for values in found] == [2, 3] and SCORED.value is None


@pytest.mark.parametrize(
    "more",
    [
        {"num_microbatches": [3], "num_steps_per_rollout": 1},
        {"mapping": {"preset": "cispo", "center": {"top_k": K}}},
        {"mapping": {"preset": "token_tis"}},
        {"pg_loss_type": "reinforce"},
    ],
    ids=["one step", "REINFORCE", "no center", "the host's REINFORCE"],
)
def test_where_nothing_reads_them_they_are_not_gathered(actor, monkeypatch, more):
    made, rollout = actor(then=lambda _: SCORED.value.by_index, **more)
    monkeypatch.setattr(heads, "of_step", None)
    assert made.train_actor(5, rollout) is None


def test_an_older_actor_is_gathered_for_one_step_too(actor):
    more = {"num_microbatches": [4], "indices": [[0], [3], [1], [2]], "num_steps_per_rollout": 1}
    made, rollout = actor(then=seen, keep_old_actor=True, **more)
    found, _ = made.train_actor(5, rollout)
    assert [len(values) for values in found] == [2, 3]


def test_what_is_not_known_is_said(actor):
    made, rollout = actor()
    with pytest.raises(
        ConfigError, match="expected the proximal policy's log-probs at the head from the hos"
    ):
        heads.proximal_of(Samples(indices=[4]), is_moved=True)
    assert heads.proximal_of(Samples(indices=[4]), is_moved=False) is None
    with pytest.raises(DataError, match="expected the sampler's head of every sample of rollout 6, got none"):
        made.train_actor(6, rollout)
    with pytest.raises(ConfigError, match="expected a data_iterator with the rollout's data"):
        pass_over(made, SimpleNamespace(reset=lambda: None))
    with pytest.raises(ConfigError, match="expected a data_iterator with the rollout's data"):
        pass_over(made)


def pass_over(actor, *iterators):
    module = sys.modules[type(actor).__module__]
    SCORED.value = proximal_heads.ScoredRollout(5)
    args = actor.args, actor.model, [*iterators], actor.args.num_microbatches
    return module.forward_only(module.get_log_probs_and_entropy, *args)


def test_a_pass_that_scores_no_tokens_of_the_actor_is_left_alone(actor):
    """Such as a critic's, or of a caller that has no arguments."""
    made, rollout = actor()
    module = sys.modules[type(made).__module__]

    def get_values(logits, *, unconcat_tokens, **named):
        return None, {"values": [torch.zeros(len(tokens)) for tokens in unconcat_tokens]}

    for args in (made.args, None):
        SCORED.value = proximal_heads.ScoredRollout(5)
        iterator = module.DataIterator(rollout, made.args.indices)
        found = module.forward_only(get_values, args, made.model, [iterator], made.args.num_microbatches)
        assert set(found) == {"values"} and SCORED.value.by_index is None


def test_a_pass_over_other_samples_is_refused(actor):
    made, rollout = actor()
    iterator = sys.modules[type(made).__module__].DataIterator(rollout, made.args.indices)
    copies = rollout | {"tokens": [tokens.clone() for tokens in rollout["tokens"]]}
    iterator.get_next = lambda keys: {key: copies[key] for key in keys}
    with pytest.raises(DataError, match="expected a log-prob pass over the rollout's own samples"):
        pass_over(made, iterator)


def other_parameters(made, monkeypatch):
    module = sys.modules[type(made).__module__]

    def forward_only(f, args, model, data_iterator, num_microbatches):
        return {}

    forward_only.__module__ = module.__name__
    monkeypatch.setattr(module, SCORE, forward_only)
    proximal_heads.install(running.current())


def test_a_release_with_other_parameters_is_refused(actor, monkeypatch):
    made, _ = actor()
    other_parameters(made, monkeypatch)
    with pytest.raises(ConfigError, match=r"expected forward_only\(.*got none of store_prefix: this release"):
        pass_over(made, None)


def test_what_nothing_reads_may_have_any_parameters(actor, monkeypatch):
    made, _ = actor(mapping={"preset": "token_tis"})
    other_parameters(made, monkeypatch)
    assert pass_over(made, None) == {}
    cls = type(made)
    monkeypatch.setattr(cls, "train_actor", lambda self, number: (number, SCORED.value))
    SCORED.value = None
    proximal_heads.install(running.current())
    assert made.train_actor(3) == (3, None)
