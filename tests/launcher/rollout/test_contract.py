"""What the client relies on, asked of the stand-in and of a real SGLang server, so that they stay alike."""

from __future__ import annotations

from dataclasses import asdict

import httpx
import pytest

from slime_ext.errors import EngineError
from slime_ext.launcher.rollout.client import EngineClient
from slime_ext.launcher.rollout.protocol import SamplingParams
from slime_ext.launcher.task.prompts import Prompt
from tests.launcher.engine import SERVED, VOCAB, make_tiny_qwen3

SERVERS = ["stand_in", pytest.param("sglang_engine", marks=SERVED)]
PROMPT = [5, 9, 14, 23]
ONE = Prompt("", group_index=0, ids=tuple(PROMPT))


@pytest.fixture(params=SERVERS)
def client(request):
    return EngineClient(request.getfixturevalue(request.param).url, vocab_size=VOCAB, backoff=0.05)


def raw(client, n=1, ids=PROMPT, **sampling):
    body = {"input_ids": ids, "return_logprob": True}
    params = asdict(SamplingParams(6, n, **sampling))
    return httpx.post(f"{client.url}/generate", json={**body, "sampling_params": params}, timeout=60)


def test_one_response_is_an_object_and_several_are_a_list(client):
    assert isinstance(raw(client).json(), dict)
    assert [type(one) for one in raw(client, n=3).json()] == [dict] * 3


def test_a_response_has_the_fields_that_are_read(client):
    answer = raw(client, ignore_eos=True).json()
    meta = answer["meta_info"]
    assert isinstance(answer["text"], str) and len(answer["output_ids"]) == 6
    assert [token for _, token, *_ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(isinstance(value, float) and value <= 0 for value, *_ in meta["output_token_logprobs"])
    assert meta["finish_reason"]["type"] == "length" and isinstance(meta["cached_tokens"], int)
    assert meta["weight_versions"] == [{"version": meta["weight_version"], "start": 0, "end": 6}]


def test_groups_are_whole_and_in_order(client):
    requests = [Prompt("", group_index=g, ids=(3 + g, 7, 9)) for g in range(5)]
    groups = client.generate(requests, SamplingParams(6, n=3, ignore_eos=True))
    assert [sample.index for group in groups for sample in group] == list(range(15))
    assert {(s.response_length, s.status, s.dropped) for g in groups for s in g} == {(6, "truncated", None)}


def test_a_stop_token_ends_the_response_and_belongs_to_it(client):
    stops = list(range(0, VOCAB, 2))
    (sample,) = client.generate([ONE], SamplingParams(40, stop_token_ids=stops))[0]
    assert sample.status == "completed" and sample.response_tokens[-1] in stops
    assert not set(sample.response_tokens[:-1]) & set(stops)


def test_new_weights_carry_their_version(client, tmp_path):
    client.update_weights_from_disk(make_tiny_qwen3(tmp_path / "model", seed=3), 41)
    (sample,) = client.generate([ONE], SamplingParams(6, ignore_eos=True))[0]
    assert sample.weight_versions == ["41"] and sample.token_weight_versions == ["41"] * 6


def test_weights_that_are_not_there_are_refused_and_the_server_goes_on(client, tmp_path):
    before = client.weight_version()
    with pytest.raises(EngineError, match=r"status 400"):
        client.update_weights_from_disk(tmp_path / "absent", 9)
    assert client.weight_version() == before and client.health()


@pytest.mark.parametrize("wrong", [{"ids": []}, {"top_p": 7.0}])
def test_what_cannot_be_sampled_is_a_400_with_a_message(client, wrong):
    reply = raw(client, **wrong)
    assert reply.status_code == 400 and reply.json()["error"]["message"]


def test_a_refusal_reaches_the_caller_in_the_servers_words(client):
    with pytest.raises(EngineError, match=r"prompt of group 0: .*top_p must be in \(0, 1\]"):
        client.generate([ONE], SamplingParams(6, top_p=7.0))
