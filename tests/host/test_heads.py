"""The sampler's head from the engine's answer to the trainer, on a stand-in for a host's rollout."""

from __future__ import annotations

import asyncio
import copy
import math
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import numpy
import pytest
import torch

from slime_ext import host
from slime_ext.errors import ConfigError, DataError
from slime_ext.host import heads, hosts, rollout_heads
from slime_ext.host.rollout_data import Samples
from slime_ext.host.session import session
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
    assert own.log(0, args, made, None, 1.0) == "logged" and session.heads[0].keys() == {0}


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


def ragged(rollout):
    rollout.answered["meta_info"]["output_top_logprobs"][1].pop()


def widens(rollout):
    for head in rollout.answered["meta_info"]["output_top_logprobs"]:
        head.append([-3.0, 50, None])


def nulls(rollout):
    rollout.answered["meta_info"]["output_top_logprobs"][1][2] = [None, 40, None]


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
        (ragged, "output_top_logprobs: expected as many pairs of a log-prob and an id at every token, at mo"),
        (widens, "output_top_logprobs: expected as many pairs of a log-prob and an id at every token, at mo"),
        (nulls, "output_top_logprobs: expected as many pairs of a log-prob and an id at every token, at mo"),
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


def spoiled(field, entry, value):
    """Writes one entry, or a row, of a field of the second sample."""

    def spoil(samples):
        getattr(samples[1], field)[entry] = value

    return spoil


def replaced(field, change):
    return lambda samples: setattr(samples[1], field, change(getattr(samples[1], field)))


IDS, LOG_PROBS = "rollout_topk_token_ids", "rollout_topk_log_probs"
OTHERS = [[0.5, 0.5, 0.1], [0.5, 0.3, 0.1]]
TABLE = "sample 1: expected a table of [2 or fewer, 3], its response tokens and center.top_k, got "
SPOILED = {  # what is wrong with sample 1 -> the line that names it
    f"{LOG_PROBS}, sample 1, response token 1: expected numbers in the sampler's head, got NaN: ": spoiled(
        LOG_PROBS, (1, 2), math.nan
    ),
    f"{LOG_PROBS}, sample 1, response token 0: expected numbers in the sampler's head, got NaN": spoiled(
        LOG_PROBS, 0, math.nan
    ),
    f"{LOG_PROBS}, sample 1, response token 1: expected log-probs of at most 0 in the sampler's h": spoiled(
        LOG_PROBS, (1, 1), 0.7
    ),
    f"{LOG_PROBS}, sample 1, response token 0: expected probabilities that add up to at most 1 in": replaced(
        LOG_PROBS, lambda rows: torch.tensor(OTHERS).log()
    ),
    f"{IDS}, sample 1, response token 1: expected each id once in the sampler's head, got one twice": spoiled(
        IDS, (1, 1), 40
    ),
    f"{IDS}, sample 1, response token 0: expected ids from 0 to 49 in the sampler": spoiled(IDS, (0, 2), -3),
    f"{IDS}, sample 1, response token 1: expected ids from 0 to 49 in the sampler": spoiled(IDS, (1, 2), 50),
    f"{IDS}, sample 1, response token 0: expected ids from 0 to 49 in": replaced(
        IDS,
        lambda ids: ids + 2**32,  # the same numbers in 32 bits
    ),
    f"{LOG_PROBS}, sample 1: expected a head at each response token that counts, got none at": spoiled(
        LOG_PROBS, 1, -9999.0
    ),
    f"{IDS}, {TABLE}[3, 3]": (replaced(IDS, lambda ids: torch.cat([ids, ids[:1]]))),
    f"{LOG_PROBS}, {TABLE}[1": (replaced(LOG_PROBS, lambda rows: rows[:1])),
    f"{IDS}, {TABLE}[2, 2]": (replaced(IDS, lambda ids: ids[:, :2].tolist())),
    f"{IDS}, {TABLE}[6]": (replaced(IDS, lambda ids: ids.reshape(-1))),
    f"{IDS}, sample 1: expected numbers, one row or one number per response token, got something else": (
        replaced(IDS, lambda ids: [[1, 2, 3], [1, 2]])
    ),
    f"{IDS}, sample 1: expected whole numbers, got torch.float32: write ids": replaced(
        IDS, lambda ids: ids.float()
    ),
    "rollout_log_probs, sample 1: expected 2 numbers, one per response token, got a shape of [1]": replaced(
        "rollout_log_probs", lambda values: values[:1]
    ),
    "loss_mask, sample 1: expected 2 numbers, one per response token, got a shape of [3]": replaced(
        "loss_mask", lambda mask: [1, 1, 1]
    ),
    "tokens, sample 1: expected 2 numbers, one per response token, got a shape of [1]": replaced(
        "tokens", lambda tokens: tokens[-1:]
    ),
}


@pytest.mark.parametrize(("line", "fault"), SPOILED.items(), ids=list(SPOILED))
def test_a_head_that_is_no_part_of_a_distribution_is_refused_when_it_is_published(rollout, line, fault):
    samples = [copy.deepcopy(generated(arguments(), Sample(index))) for index in (0, 1)]
    rollout_heads.publish(0, samples, K, 50)
    fault(samples)
    with pytest.raises(DataError) as caught:
        rollout_heads.publish(1, samples, K, 50)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_a_token_that_does_not_count_may_have_any_head(rollout):
    sample = generated(arguments(), Sample())
    sample.loss_mask = [1, 0]
    sample.rollout_topk_log_probs[1] = torch.tensor([math.nan, 0.7, -1.0])
    sample.rollout_topk_token_ids[1] = torch.tensor([-1, 99, 99])
    rollout_heads.publish(0, [sample], K, 50)
    ((_, log_probs),) = heads.of_step(0, Samples(indices=[0]), K)
    assert log_probs[1].tolist() == [-math.inf, -math.inf, -1.0]


def test_an_entry_that_is_no_log_prob_reads_as_absent(rollout):
    """-9999 is what some servers write for minus infinity."""
    sample = generated(arguments(), Sample())
    sample.rollout_topk_log_probs[0, 2] = -9999.0
    sample.rollout_topk_token_ids[0, 2] = 30  # an id that is absent repeats none
    rollout_heads.publish(0, [sample], K, 50)
    ((ids, log_probs),) = heads.of_step(0, Samples(indices=[0]), K)
    assert log_probs[0].tolist() == [-0.5, -1.5, -math.inf] and ids.dtype == torch.int32


@pytest.mark.parametrize("written", [list, torch.tensor, numpy.array], ids=["lists", "tensors", "arrays"])
def test_heads_may_be_lists_tensors_or_arrays(rollout, written):
    sample = generated(arguments(), Sample())
    for name in (IDS, LOG_PROBS, "rollout_log_probs"):
        values = getattr(sample, name)
        setattr(sample, name, written(values.tolist() if hasattr(values, "tolist") else values))
    rollout_heads.publish(0, [sample], K, 50)
    ((ids, log_probs),) = heads.of_step(0, Samples(indices=[0]), K)
    assert ids.tolist() == [[0, 30, 40], [1, 30, 40]] and log_probs.dtype == torch.float32


def test_how_many_ids_there_are_is_what_flags_or_the_checkpoint_say(tmp_path, caplog):
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 70}}')
    of = rollout_heads.vocabulary_of
    path = {"hf_checkpoint": str(tmp_path)}
    assert of(SimpleNamespace(padded_vocab_size=64, vocab_size=60, **path)) == 64
    assert of(SimpleNamespace(padded_vocab_size=None, vocab_size=60, **path)) == 60
    assert of(SimpleNamespace(vocab_size=None, **path)) == 70 and not caplog.records
    assert of(SimpleNamespace(hf_checkpoint="hub/name")) is None
    (record,) = caplog.records
    assert "center: expected --vocab-size, or a config.json" in record.message


def test_the_hosts_log_knows_how_many_ids_there_are(rollout):
    args = arguments(padded_vocab_size=35)
    made = generated(args, Sample(7))
    made.weight_versions = []
    module, _, name = args.custom_rollout_log_function_path.rpartition(".")
    with pytest.raises(
        DataError, match="sample 7, response token 0: expected ids from 0 to 34 in the sampler"
    ):
        getattr(sys.modules[module], name)(3, args, [made], {})


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
    assert list(session.heads) == [5, 6, 7, 8]


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
    session.heads.clear()  # of another process
    found = heads.of_step(8, Samples(indices=[1, 0]), K)
    assert len(found) == 2 and torch.equal(found[0][1], made[1].rollout_topk_log_probs)
