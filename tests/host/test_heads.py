"""The sampler's head from the engine's answer to the trainer, on a stand-in for a host's rollout."""

from __future__ import annotations

import asyncio
import copy
import math
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import pytest
import torch

from slime_ext import host
from slime_ext.errors import ConfigError, DataError
from slime_ext.host import heads, hosts, rollout_heads, staleness
from slime_ext.host.rollout_data import Samples
from tests.host import trees

K, VOCABULARY = 3, 5
CENTERED = {"numerator": "target", "surrogate": "reinforce", "center": {"top_k": K}}


@dataclass
class Sample:
    index: int | None = 0
    tokens: list = field(default_factory=lambda: [9, 9])
    response_length: int = 0
    rollout_log_probs: list = field(default_factory=list)
    loss_mask: list | None = None


Sample.__module__ = "standin.types"


def head_of(position):
    """(log-prob, id, text) of the K most likely tokens, as SGLang has them."""
    return [[-0.5 - position / 8, position, None], [-1.5, 30, None], [-2.5, 40, None]]


def answer(begin, count, heads_of=head_of):
    sampled = [[head_of(begin + i)[0][0], begin + i, None] for i in range(count)]
    tops = [heads_of(begin + i) for i in range(count)]
    return {"meta_info": {"output_token_logprobs": sampled, "output_top_logprobs": tops}}


@pytest.fixture
def rollout(monkeypatch):
    """A host's module that generates: two tokens at a time, the ids of which count up."""
    asked, module = [], ModuleType("standin.rollout.sglang_rollout")

    async def post(url, payload, headers=None):
        asked.append(payload)
        return module.answered

    async def generate(args, sample, sampling_params):
        output = await module.post("http://engine/generate", {"sampling_params": sampling_params})
        for log_prob, token, _ in output["meta_info"].get("output_token_logprobs", ()):
            sample.tokens = [*sample.tokens, token]
            sample.rollout_log_probs = [*sample.rollout_log_probs, log_prob]
            sample.response_length += 1
        return sample

    module.post, module.generate, module.asked = post, generate, asked
    module.answered = answer(0, 2)
    module.GenerateState = lambda args: SimpleNamespace(tokenizer=range(VOCABULARY))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    heads.held.clear()
    monkeypatch.setattr(staleness, "_published", {})
    yield module
    hosts.unwrap(host, "log_rollout")


def arguments(mapping=CENTERED, **more):
    return SimpleNamespace(
        **{"use_tis": True, "custom_tis_function_path": "slime_ext.tis.correct", "slime_ext": mapping} | more
    )


def generated(args, sample, **more):
    return asyncio.run(host.generate(args, sample, {}, **more))


def test_the_head_reaches_the_step_by_way_of_the_rollouts_log(rollout):
    args = arguments()
    made = []
    for index, begin in ((7, 0), (4, 2)):
        rollout.answered = answer(begin, 2)
        made.append(generated(args, Sample(index)))
    assert [asked["top_logprobs_num"] for asked in rollout.asked] == [K, K]
    module, _, name = args.custom_rollout_log_function_path.rpartition(".")
    log = getattr(sys.modules[module], name)
    for one in made:
        one.weight_versions = []
    assert log(3, args, [[made[0]], [made[1]]], {}) is False
    found = heads.of_step(3, Samples(indices=[4, 7]), K)
    assert [ids.tolist() for ids, _ in found] == [[[2, 30, 40], [3, 30, 40]], [[0, 30, 40], [1, 30, 40]]]
    assert found[1][1].tolist() == [[-0.5, -1.5, -2.5], [-0.625, -1.5, -2.5]]


def test_a_log_function_of_the_users_own_is_called_all_the_same(rollout, monkeypatch):
    own = ModuleType("own_log")
    own.log = lambda rollout_id, args, samples, *more: "logged"
    monkeypatch.setitem(sys.modules, "own_log", own)
    args = arguments(custom_rollout_log_function_path="own_log.log")
    made = [generated(args, Sample())]
    assert own.log(0, args, made, None, 1.0) == "logged" and heads.held[0].keys() == {0}


@pytest.mark.parametrize(
    ("args", "more"), [(arguments({"steps": []}), {}), (arguments(), {"evaluation": True})]
)
def test_nothing_is_asked_where_nothing_centers(rollout, args, more):
    assert generated(args, Sample(), **more).response_length == 2
    assert "top_logprobs_num" not in rollout.asked[0]


def test_no_more_is_asked_than_there_are_tokens(rollout):
    mapping = CENTERED | {"center": {"top_k": 8}}
    made = generated(arguments(mapping), Sample())
    assert rollout.asked[0]["top_logprobs_num"] == VOCABULARY
    assert made.rollout_topk_log_probs.shape == (2, 8) and made.rollout_topk_log_probs[0, 3] == -math.inf


def test_a_sample_that_goes_on_has_no_head_where_others_wrote(rollout):
    args, sample = arguments(), Sample()
    generated(args, sample)
    sample.tokens += [8]  # a tool's
    sample.response_length += 1
    sample.rollout_log_probs += [0.0]
    rollout.answered = {"meta_info": {}}  # aborted before the first token
    generated(args, sample)
    rollout.answered = answer(2, 1)
    generated(args, sample)
    sample.loss_mask = [1, 1, 0, 1]
    rollout_heads.publish(0, [sample], K)
    ((ids, log_probs),) = heads.of_step(0, Samples(indices=[0]), K)
    assert log_probs[:, 0].tolist() == [-0.5, -0.625, -math.inf, -0.75] and ids[3].tolist() == [2, 30, 40]


def drops(rollout):
    del rollout.answered["meta_info"]["output_top_logprobs"]


def hides(rollout):
    rollout.answered["meta_info"]["output_top_logprobs"][1] = None


def shortens(rollout):
    whole = rollout.generate

    async def generate(args, sample, sampling_params):
        sample = await whole(args, sample, sampling_params)
        sample.response_length -= 1
        return sample

    rollout.generate = generate


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (drops, "output_top_logprobs: expected the head of each of 2 sampled tokens, got 0"),
        (hides, "output_top_logprobs: expected the head of each of 2 sampled tokens, got 1"),
        (shortens, "rollout_topk_log_probs, sample 0: expected the heads of 1 new tokens, got 2"),
    ],
)
def test_an_answer_that_does_not_fit_is_refused_in_one_line(rollout, fault, line):
    fault(rollout)
    with pytest.raises(DataError) as caught:
        generated(arguments(), Sample())
    assert line in str(caught.value) and "\n" not in str(caught.value)


def twice(samples):
    samples[1].index = samples[0].index


def of_another_pass(samples):
    samples[1].rollout_log_probs[1] -= 0.01


def without(samples):
    del samples[1].rollout_topk_log_probs


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (twice, "Sample.index: expected one of its own for every sample beside center, got 0 again"),
        (of_another_pass, "rollout_log_probs, sample 1, response token 1: expected the log-prob that the sa"),
        (without, "rollout_topk_log_probs, sample 1: expected a head at each response token that counts, g"),
    ],
)
def test_what_a_rollout_must_not_hold(rollout, fault, line):
    samples = [copy.deepcopy(generated(arguments(), Sample(index))) for index in (0, 1)]
    rollout_heads.publish(0, samples, K)
    fault(samples)
    with pytest.raises(DataError) as caught:
        rollout_heads.publish(1, samples, K)
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_heads_that_the_trainer_cannot_use(rollout):
    rollout_heads.publish(0, [generated(arguments(), Sample(5))], K)
    with pytest.raises(DataError, match="expected the sampler's head of every sample of rollout 0, got none"):
        heads.of_step(0, Samples(indices=[5, 6]), K)
    with pytest.raises(DataError, match=r"center.top_k: expected 3, as in the rollout, got 4"):
        heads.of_step(0, Samples(indices=[5]), 4)


def test_heads_of_rollouts_that_were_trained_long_ago_are_forgotten(rollout):
    sample = generated(arguments(), Sample())
    for rollout_id in range(9):
        rollout_heads.publish(rollout_id, [sample], K)
    assert list(heads.held) == [5, 6, 7, 8]


HAS = {"custom_rollout_log_function_path": None, "sglang_router_ip": "127.0.0.1"}


@pytest.mark.parametrize(
    ("lacks", "line"),
    [
        ("step", "expected a host with train_one_step (Megatron's trainer), got slime without"),
        ("get_responses", "expected a host with get_responses among its modules, got slime without"),
        ("custom_rollout_log_function_path", "with --custom-rollout-log-function-path (slime since v0.2.2)"),
        ("sglang_router_ip", "expected a host with SGLang as its engine, got slime without"),
    ],
)
def test_a_host_whose_heads_do_not_arrive_is_refused_at_start_up(tmp_path, monkeypatch, lacks, line):
    responses = "" if lacks == "get_responses" else "def get_responses(): pass\n"
    step = {"step": ""} if lacks == "step" else {}
    trees.made(tmp_path, monkeypatch, loss=trees.TARGET + trees.LOSS + responses, **step)
    has = {name: value for name, value in HAS.items() if name != lacks}
    ours = {"use_tis": True, "custom_generate_function_path": "slime_ext.host.generate"}
    with pytest.raises(ConfigError) as caught:
        host.init(SimpleNamespace(**vars(arguments()) | ours | has))
    assert line in str(caught.value) and "\n" not in str(caught.value)


def test_ray_carries_them_between_processes(rollout, monkeypatch):
    objects, stored = {}, {}
    ray = SimpleNamespace(
        put=lambda value: objects.setdefault(len(objects), value) is None or len(objects) - 1,
        get=lambda references: [objects[reference] for reference in references],
        cloudpickle=SimpleNamespace(dumps=lambda value: repr(value).encode(), loads=eval),
        get_runtime_context=lambda: SimpleNamespace(get_job_id=lambda: "01000000"),
    )
    kv = SimpleNamespace(
        _internal_kv_initialized=lambda: True,
        _internal_kv_put=lambda key, value, namespace: stored.update({key: value}),
        _internal_kv_get=lambda key, namespace: stored.get(key),
    )
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.experimental.internal_kv", kv)
    made = [generated(arguments(), Sample(index)) for index in (0, 1)]
    for rollout_id in range(9):
        rollout_heads.publish(rollout_id, made, K)
    assert len(stored) == 4
    heads.held.clear()  # of another process
    found = heads.of_step(8, Samples(indices=[1, 0]), K)
    assert len(found) == 2 and torch.equal(found[0][1], made[1].rollout_topk_log_probs)
