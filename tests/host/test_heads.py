"""The sampler's head from the engine's answer to the trainer, on a stand-in for a host's rollout."""

from __future__ import annotations

import asyncio
import base64
import copy
import math
import struct
import sys
from dataclasses import dataclass, field
from itertools import accumulate
from types import ModuleType, SimpleNamespace

import numpy
import pytest
import torch

from slime_ext import host
from slime_ext.errors import ConfigError, DataError
from slime_ext.host import heads, rollout_heads, wrapping
from slime_ext.host.heads import HEADS
from slime_ext.host.rollout_data import Samples
from tests.host import trees

K, VOCABULARY = 3, 5
IDS, LOG_PROBS = "rollout_topk_token_ids", "rollout_topk_log_probs"
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
    wrapping.unwrap(host, "log_rollout")


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


def test_a_request_that_draws_no_sample_is_left_alone(rollout):
    """Such as one to a reward model, before and after a sample is generated."""
    payload = {"text": "x", "sampling_params": {"max_new_tokens": 0}}

    async def asked():
        await host.generate(arguments(), Sample(), {})
        await rollout.post("http://reward", payload)
        return rollout.asked

    for _ in range(2):
        assert asyncio.run(asked())[-1] == payload


def test_a_log_function_of_the_users_own_is_called_all_the_same(rollout, monkeypatch):
    own = ModuleType("own_log")
    own.log = lambda rollout_id, args, samples, *more: "logged"
    monkeypatch.setitem(sys.modules, "own_log", own)
    args = arguments(custom_rollout_log_function_path="own_log.log")
    made = [generated(args, Sample())]
    assert own.log(0, args, made, None, 1.0) == "logged" and HEADS.value[0].keys() == {0}


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
        (drops, "output_top_logprobs, sample 0: expected the head of each of 2 sampled tokens, got 0"),
        (hides, "output_top_logprobs, sample 0: expected the head of each of 2 sampled tokens, got 1"),
        (shortens, "rollout_topk_log_probs, sample 0: expected the heads of 1 new tokens, got 2"),
        (
            ragged,
            "output_top_logprobs, sample 0: expected the same number of pairs (log-prob, id) at every token",
        ),
        (
            widens,
            "output_top_logprobs, sample 0: expected the same number of pairs (log-prob, id) at every token",
        ),
        (
            nulls,
            "output_top_logprobs, sample 0: expected the same number of pairs (log-prob, id) at every token",
        ),
    ],
)
def test_an_answer_that_does_not_fit_is_refused_in_one_line(rollout, fault, line):
    fault(rollout)
    with pytest.raises(DataError) as caught:
        generated(arguments(), Sample())
    assert line in str(caught.value) and "\n" not in str(caught.value)


# ---- binary answers: slime's build of SGLang, and SGLang itself where it is asked for flat arrays ----

ASKED = ("return_flat_raw_output_top_logprobs", "return_flat_raw_top_logprobs_b64")
FORMS = {  # name -> ids, log-probs, shape, and what else stands in the answer
    "slime": ("output_topk_token_ids", "output_topk_log_probs", "output_topk_shape", {}),
    "flat": (
        "output_top_logprobs_idx_flat_b64",
        "output_top_logprobs_val_flat_b64",
        "output_top_logprobs_shape",
        {
            "output_top_logprobs_null_prefix": 0,
            "output_top_logprobs_idx_flat_b64_dtype": "int32",
            "output_top_logprobs_val_flat_b64_dtype": "float32",
        },
    ),
}


def packed(kind, values):
    """Base64 of little-endian numbers of 4 bytes."""
    flat = [x for row in values for x in row] if values and isinstance(values[0], list) else values
    return base64.b64encode(struct.pack(f"<{len(flat)}{kind}", *flat)).decode()


def binary(form, begin, count, **changes):
    """The answer of ``answer`` in base64."""
    ids, log_probs, shape, more = FORMS[form]
    listed = answer(begin, count)["meta_info"]
    tops = listed.pop("output_top_logprobs")
    listed[ids] = packed("i", [[entry[1] for entry in head] for head in tops])
    listed[log_probs] = packed("f", [[entry[0] for entry in head] for head in tops])
    return {"meta_info": listed | more | {shape: [count, K]} | changes}


@pytest.mark.parametrize("form", FORMS)
def test_a_binary_head_is_the_head_of_the_lists(rollout, form):
    made = []
    for answered in (answer(0, 2), binary(form, 0, 2)):
        rollout.answered = answered
        made.append(generated(arguments(), Sample()))
    assert all(rollout.asked[0][flag] is True for flag in ASKED)
    for name in (IDS, LOG_PROBS):
        one, other = (getattr(sample, name) for sample in made)
        assert torch.equal(one, other) and one.dtype == other.dtype and one.shape == (2, K)
    rollout_heads.publish(0, made[1:], K, 50)
    rollout.answered = {"meta_info": {"output_token_logprobs": [], FORMS[form][2]: [0, K]}}  # aborted
    assert generated(arguments(), made[1]).rollout_topk_log_probs.shape == (2, K)


def test_a_binary_head_that_is_shorter_is_filled_up(rollout):
    rollout.answered = binary("slime", 0, 2)
    made = generated(arguments(CENTERED | {"center": {"top_k": 8}}), Sample())
    assert made.rollout_topk_log_probs[0].tolist() == [-0.5, -1.5, -2.5, *[-math.inf] * 5]


TO_SGLANG, SIX = (
    "send requests to SGLang itself",
    "expected 6 numbers of 4 bytes in base64, got ",
)
SHAPE = "output_topk_shape, sample 7: expected [2, 3 or fewer], the sampled tokens and center.top_k, got "
UNFIT = [  # the form, what is changed, the line
    ("slime", "output_topk_shape", [3, 3], f"{SHAPE}[3, 3]: "),
    ("slime", "output_topk_shape", [2, 4], f"{SHAPE}[2, 4]: "),
    ("slime", "output_topk_shape", None, f"{SHAPE}NoneType: {TO_SGLANG}"),
    ("slime", "output_topk_token_ids", "%%", f"{SIX}something else: {TO_SGLANG}"),
    ("slime", "output_topk_log_probs", packed("f", [0.0]), f"{SIX}1: "),
    ("slime", "output_topk_log_probs", "AAAA", SIX),
    ("flat", "output_top_logprobs_val_flat_b64", None, f"{SIX}something else"),
    ("flat", "output_top_logprobs_val_flat_b64_dtype", "float16", "expected float32, got str: "),
    (
        "flat",
        "output_top_logprobs_null_prefix",
        1,
        "the head of each of 2 sampled tokens, got none of the fi",
    ),
]


@pytest.mark.parametrize(("form", "name", "value", "line"), UNFIT)
def test_a_binary_answer_that_does_not_fit_is_refused_in_one_line(rollout, form, name, value, line):
    rollout.answered = binary(form, 0, 2, **{name: value})
    with pytest.raises(DataError) as caught:
        generated(arguments(), Sample(7))
    assert line in str(caught.value) and ", sample 7: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([[-0.5, -1.5, math.nan]] * 2, "response token 0: expected numbers in the sampler's head, got NaN"),
        ([[-0.5, -1.5, 0.3]] * 2, "response token 0: expected log-probs of at most 0 in the sampler's head"),
        ([[-0.5, -0.7, -2.5]] * 2, "response token 0: expected probabilities that add up to at most 1"),
    ],
)
def test_what_binary_heads_hold_is_checked_as_lists_are(rollout, values, line):
    rollout.answered = binary("slime", 0, 2, output_topk_log_probs=packed("f", values))
    sample = generated(arguments(), Sample(7))
    with pytest.raises(DataError) as caught:
        rollout_heads.publish(0, [sample], K, 50)
    assert str(caught.value).startswith(f"{LOG_PROBS}, sample 7, {line}")


@pytest.mark.parametrize(
    ("sampling", "line"),
    [
        ({"top_p": 0.9}, "sampling_params.top_p, sample 0: expected 1.0 beside center, got 0.9: "),
        ({"top_k": 20}, "sampling_params.top_k, sample 0: expected -1 beside center, got 20: "),
        ({"min_p": 0.1}, "sampling_params.min_p, sample 0: expected 0.0 beside center, got 0.1: "),
        ({"top_p": 1, "top_k": -1, "min_p": 0, "temperature": 0.7}, None),
    ],
)
def test_a_request_that_samples_from_other_tokens_is_refused(rollout, sampling, line):
    if line is None:
        assert asyncio.run(host.generate(arguments(), Sample(), sampling)).response_length == 2
        return
    with pytest.raises(DataError) as caught:
        asyncio.run(host.generate(arguments(), Sample(), sampling))
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value) and not rollout.asked


# ---- supports: --rollout-top-p on a host that keeps what top-p left ----

P_IDS, P_OFFSETS, P_LOG_PROBS = rollout_heads.SUPPORT
SUPPORTS = {0: ([0, 7], [0.75, 0.25]), 1: ([1, 7, 8], [0.5, 0.3, 0.2]), 2: ([2], [1.0])}


def support_answer(begin, count, **changes):
    """What slime's build of SGLang answers under top-p; each id is the first of its support."""
    rows = [SUPPORTS[begin + i] for i in range(count)]
    offsets = [0, *accumulate(len(ids) for ids, _ in rows)]
    log_probs = [math.log(p) for _, row in rows for p in row]
    return {
        "meta_info": {
            "output_token_logprobs": [[math.log(p[0]), ids[0], None] for ids, p in rows],
            "top_p_token_ids": packed("i", [i for ids, _ in rows for i in ids]),
            "top_p_token_offsets": packed("i", offsets),
            "top_p_log_probs": packed("f", log_probs),
        }
        | changes
    }


@pytest.fixture
def keeping(rollout):
    """The same host, which keeps ids and offsets as slime's samples do."""
    plain = rollout.generate

    def numbers(text):
        return list(struct.unpack(f"<{len(base64.b64decode(text)) // 4}i", base64.b64decode(text)))

    async def generate(args, sample, sampling_params):
        sample = await plain(args, sample, sampling_params)
        meta_info = rollout.answered["meta_info"]
        if "top_p_token_ids" in meta_info:
            ids, offsets = getattr(sample, P_IDS, []), getattr(sample, P_OFFSETS, [0])
            setattr(sample, P_IDS, ids + numbers(meta_info["top_p_token_ids"]))
            new = numbers(meta_info["top_p_token_offsets"])[1:]
            setattr(sample, P_OFFSETS, offsets + [offsets[-1] + i for i in new])
        return sample

    rollout.generate = generate
    return rollout


def drawn(keeping, index=0):
    """A sample of two tokens, a tool's and one more."""
    sample, args = Sample(index), arguments(rollout_top_p=0.9)
    keeping.answered = support_answer(0, 2)
    generated(args, sample)
    sample.tokens += [8]
    sample.response_length += 1
    sample.rollout_log_probs += [0.0]
    setattr(sample, P_OFFSETS, [*getattr(sample, P_OFFSETS), 5])
    keeping.answered = support_answer(2, 1)
    generated(args, sample)
    sample.loss_mask = [1, 1, 0, 1]
    return sample


def test_a_support_reaches_the_step(keeping):
    sample = drawn(keeping)
    asked = keeping.asked[0]
    assert asked["sampling_params"]["custom_params"] == {
        "return_top_p_token_ids": True,
        "return_top_p_log_probs": True,
    }
    assert "top_logprobs_num" not in asked
    rollout_heads.publish(0, [sample], K, 50, is_exact=True)
    ((ids, offsets, log_probs),) = heads.of_step(0, Samples(indices=[0]), K)
    assert ids.tolist() == [0, 7, 1, 7, 8, 2] and offsets.tolist() == [0, 2, 5, 5, 6]
    assert log_probs.exp().tolist() == pytest.approx([0.75, 0.25, 0.5, 0.3, 0.2, 1.0])
    assert (ids.dtype, offsets.dtype, log_probs.dtype) == (torch.int32, torch.int64, torch.float32)


def test_the_hosts_log_publishes_supports_where_the_flags_say_top_p(keeping):
    args = arguments(rollout_top_p=0.9)
    sample = drawn(keeping, 7)
    sample.weight_versions = []
    generated(args, copy.deepcopy(sample))
    module, _, name = args.custom_rollout_log_function_path.rpartition(".")
    getattr(sys.modules[module], name)(3, args, [sample], {})
    assert len(HEADS.value[3][7]) == 3


def test_a_replay_publishes_the_heads_of_its_dump(keeping):
    """slime's --load-debug-rollout-data calls no generate, and gives the samples with their fields."""
    args = arguments(rollout_top_p=0.9, load_debug_rollout_data="dump/{rollout_id}.pt")
    sample = drawn(keeping, 7)
    sample.weight_versions, HEADS.value = [], {}
    host.log_rollout.__wrapped__(3, args, [sample], {})  # generate, which drew the sample, wrapped it
    assert len(HEADS.value[3][7]) == 3
    host.log_rollout.__wrapped__(4, arguments(rollout_top_p=0.9), [sample], {})
    assert 4 not in HEADS.value


def test_parameters_of_the_users_own_stay_in_the_request(keeping):
    keeping.answered = support_answer(0, 1)
    sampling = {"top_p": 0.9, "custom_params": {"mine": 1}}
    asyncio.run(host.generate(arguments(rollout_top_p=0.9), Sample(), sampling))
    assert keeping.asked[0]["sampling_params"]["custom_params"]["mine"] == 1
    assert sampling == {"top_p": 0.9, "custom_params": {"mine": 1}}


class Stored:
    """A field that slime keeps in its store of tensors."""

    def __init__(self, values):
        self.values = values

    def load(self):
        return torch.tensor(self.values)


@pytest.mark.parametrize("written", [list, torch.tensor, numpy.array, Stored])
def test_supports_may_be_lists_tensors_arrays_or_stored(keeping, written):
    sample = drawn(keeping)
    for name in rollout_heads.SUPPORT:
        values = getattr(sample, name)
        setattr(sample, name, written(values.tolist() if hasattr(values, "tolist") else values))
    rollout_heads.publish(0, [sample], K, 50, is_exact=True)
    assert heads.of_step(0, Samples(indices=[0]), K)[0][1].tolist() == [0, 2, 5, 5, 6]


def test_a_large_support_is_checked_in_parts(keeping, monkeypatch):
    monkeypatch.setattr(rollout_heads, "BLOCK", 3)
    sample = drawn(keeping)
    assert [(r.start, r.stop) for r in rollout_heads._blocks([2, 3, 0, 1])] == [(0, 1), (1, 2), (2, 4)]
    rollout_heads.publish(0, [sample], K, 50, is_exact=True)
    getattr(sample, P_LOG_PROBS)[5] = -0.2
    with pytest.raises(
        DataError, match="sample 0, response token 3: expected probabilities that add up to 1"
    ):
        rollout_heads.publish(1, [sample], K, 50, is_exact=True)


WRONG_SUPPORTS = {  # what is wrong with the sample -> the line that names it
    f"{P_LOG_PROBS}, sample 0, response token 1: expected probabilities that add up to at most 1 in the sampl"
    "er's support, got more: normalise them over the support": (P_LOG_PROBS, 3, -0.4),
    f"{P_LOG_PROBS}, sample 0, response token 1: expected probabilities that add up to 1 in the sampler's sup"
    "port, got less: normalise them over the support": (P_LOG_PROBS, 3, -4.0),
    f"{P_LOG_PROBS}, sample 0, response token 0: expected numbers in the sampler's support, got NaN": (
        P_LOG_PROBS,
        1,
        math.nan,
    ),
    f"{P_IDS}, sample 0, response token 1: expected each id once in the sampler's support": (P_IDS, 3, 8),
    f"{P_IDS}, sample 0, response token 3: expected ids from 0 to 49 in the sampler's support": (
        P_IDS,
        5,
        50,
    ),
    f"{P_IDS}, sample 0, response token 0: expected the sampled token in the sampler's support, got only": (
        P_IDS,
        0,
        9,
    ),
    "rollout_log_probs, sample 0, response token 1: expected the token's log-prob in the sampler's "
    "support, got one 0.1 nats away": ("rollout_log_probs", 1, math.log(0.5) - 0.1),
    f"{P_OFFSETS}, sample 0: expected 5 whole numbers that rise from 0 to the length of the other two": (
        P_OFFSETS,
        1,
        6,
    ),
    f"{P_LOG_PROBS}, sample 0: expected a support at each response token in the loss mask, got none at": (
        "loss_mask",
        2,
        1,
    ),
}


@pytest.mark.parametrize("line", WRONG_SUPPORTS)
def test_a_support_that_is_no_distribution_is_refused(keeping, line):
    sample = drawn(keeping)
    name, at, value = WRONG_SUPPORTS[line]
    getattr(sample, name)[at] = value
    with pytest.raises(DataError) as caught:
        rollout_heads.publish(0, [sample], K, 50, is_exact=True)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "change"),
    [
        ([P_IDS], lambda ids: [float(i) for i in ids]),
        ([P_IDS, P_LOG_PROBS], lambda values: [[x] for x in values]),
        ([P_OFFSETS], lambda offsets: [float(i) for i in offsets]),
        ([P_OFFSETS], lambda offsets: offsets[:1] + offsets[2:]),
        ([P_OFFSETS], lambda offsets: [1, *offsets[1:]]),
        ([P_LOG_PROBS], lambda log_probs: [*log_probs, -1.0]),
        ([P_IDS, P_LOG_PROBS], lambda values: [*values, values[-1]]),
    ],
)
def test_supports_whose_fields_do_not_fit_each_other_are_refused(keeping, names, change):
    sample = drawn(keeping)
    for name in names:
        setattr(sample, name, change(list(getattr(sample, name))))
    with pytest.raises(DataError) as caught:
        rollout_heads.publish(0, [sample], K, 50, is_exact=True)
    assert str(caught.value).startswith(f"{P_OFFSETS}, sample 0: expected 5 whole numbers that rise")


@pytest.mark.parametrize("name", rollout_heads.SUPPORT)
def test_a_sample_without_its_support_is_refused(keeping, name):
    sample = drawn(keeping)
    delattr(sample, name)
    with pytest.raises(DataError) as caught:
        rollout_heads.publish(0, [sample], K, 50, is_exact=True)
    assert str(caught.value).startswith(
        f"{name}, sample 0: expected the tokens that --rollout-top-p leaves at"
    )
    sample.response_length = 0  # aborted before its first token
    sample.loss_mask, sample.tokens, sample.rollout_log_probs = [], [9, 9], []
    rollout_heads.publish(1, [sample], K, 50, is_exact=True)


@pytest.mark.parametrize("name", ["top_p_token_ids", "top_p_log_probs"])
def test_an_engine_that_answers_no_support_is_refused(keeping, name):
    keeping.answered = support_answer(0, 2)
    del keeping.answered["meta_info"][name]
    with pytest.raises(
        DataError, match=f"{name}, sample 4: expected it in the engine's answer beside center"
    ):
        generated(arguments(rollout_top_p=0.9), Sample(4))


def twice(samples):
    samples[1].index = samples[0].index


def without_number(samples):
    samples[1].index = None


def of_another_pass(samples):
    samples[1].rollout_log_probs[1] -= 0.01


def without(samples):
    del samples[1].rollout_topk_log_probs


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (twice, "Sample.index: expected a different one for every sample beside center, got 0 again"),
        (without_number, "Sample.index: expected a different one for every sample beside center, got None"),
        (
            of_another_pass,
            "rollout_log_probs, sample 1, response token 1: expected the token's log-prob in the",
        ),
        (
            without,
            "rollout_topk_log_probs, sample 1: expected a head at each response token in the loss mask",
        ),
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
    f"{LOG_PROBS}, sample 1, response token 0: expected probabilities that add up to at most 1 in the sampl"
    "er's head, got more: normalise them over the whole vocabulary": replaced(
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
    f"{LOG_PROBS}, sample 1: expected a head at each response token in the loss mask, got": spoiled(
        LOG_PROBS, 1, -9999.0
    ),
    f"{IDS}, {TABLE}[3, 3]": (replaced(IDS, lambda ids: torch.cat([ids, ids[:1]]))),
    f"{LOG_PROBS}, {TABLE}[1": (replaced(LOG_PROBS, lambda rows: rows[:1])),
    f"{IDS}, {TABLE}[2, 2]": (replaced(IDS, lambda ids: ids[:, :2].tolist())),
    f"{IDS}, {TABLE}[6]": (replaced(IDS, lambda ids: ids.reshape(-1))),
    f"{IDS}, sample 1: expected numbers, one row or one number per response token, got something else": (
        replaced(IDS, lambda ids: [[1, 2, 3], [1, 2]])
    ),
    f"{IDS}, sample 1: expected whole numbers, got torch.float32: write token ids": replaced(
        IDS, lambda ids: ids.float()
    ),
    "rollout_log_probs, sample 1: expected 2 numbers, one per response token, got shape [1]": replaced(
        "rollout_log_probs", lambda values: values[:1]
    ),
    "loss_mask, sample 1: expected 2 numbers, one per response token, got shape [3]": replaced(
        "loss_mask", lambda mask: [1, 1, 1]
    ),
    "tokens, sample 1: expected 2 numbers, one per response token, got shape [1]": replaced(
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


@pytest.mark.parametrize("recorded", [None, []])
def test_a_sample_that_does_not_count_needs_no_log_probs(rollout, recorded):
    sample = generated(arguments(), Sample())
    sample.loss_mask, sample.rollout_log_probs = [0, 0], recorded
    rollout_heads.publish(0, [sample], K, 50)
    assert len(heads.of_step(0, Samples(indices=[0]), K)) == 1


def test_a_sampled_token_may_lie_outside_the_head(rollout):
    sample = generated(arguments(), Sample())
    sample.tokens[-1], sample.rollout_log_probs[-1] = 49, -6.0
    rollout_heads.publish(0, [sample], K, 50)
    assert 49 not in heads.of_step(0, Samples(indices=[0]), K)[0][0][-1]


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
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/config.json").write_text('{"vocab_size": 80}')
    assert of(SimpleNamespace(hf_checkpoint=tmp_path / "plain")) == 80
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
    assert list(HEADS.value) == [5, 6, 7, 8]


@pytest.mark.parametrize(("mass", "warns"), [(0.85, True), (0.95, False)])
def test_a_head_that_leaves_much_out_is_said_before_the_first_step(rollout, caplog, mass, warns):
    samples = [generated(arguments(), Sample(index)) for index in (0, 1)]
    for sample in samples:
        rows = torch.tensor([[mass / 2, mass / 4, mass / 4]] * 2).log()
        sample.rollout_topk_log_probs, sample.rollout_log_probs = rows, rows[:, 0].tolist()
    rollout_heads.publish(0, samples, K)
    rollout_heads.publish(1, samples, K)
    said = [record.message for record in caplog.records if "center.top_k" in record.message]
    assert len(said) == warns and all(
        "at least 90% of the sampler's probability, got 3 tok" in x for x in said
    )


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
    HEADS.value.clear()  # of another process
    found = heads.of_step(8, Samples(indices=[1, 0]), K)
    assert len(found) == 2 and torch.equal(found[0][1], made[1].rollout_topk_log_probs)


@pytest.mark.parametrize("nats", [-0.1, 0.1])
def test_a_recorded_log_prob_may_be_off_in_neither_direction(keeping, nats):
    sample = drawn(keeping)
    sample.rollout_log_probs[1] += nats
    with pytest.raises(DataError, match=r"response token 1: expected the token's .* got one 0\.1 nats away"):
        rollout_heads.publish(0, [sample], K, 50, is_exact=True)
