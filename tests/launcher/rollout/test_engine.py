"""A real SGLang server: right log-probs, and nothing lost when it is killed."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import httpx
import pytest
import torch
from transformers import DynamicCache

from slime_ext.launcher.rollout.client import EngineClient
from slime_ext.launcher.rollout.protocol import SamplingParams
from slime_ext.launcher.rollout.weight_sync import push_weights
from slime_ext.launcher.task.prompts import Prompt
from tests.launcher.engine import SERVED, VOCAB, make_tiny_qwen3, started, tiny_engine
from tests.launcher.rollout.test_processes import wait_for

pytestmark = SERVED


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    return {seed: make_tiny_qwen3(directory / str(seed), seed) for seed in (1, 2)}


@pytest.fixture
def client(sglang_engine):
    return EngineClient(sglang_engine.url, concurrency=8, vocab_size=VOCAB, timeout=60)


def prompts(count=8):
    draw = random.Random(0)
    ids = [tuple(draw.randrange(3, VOCAB) for _ in range(12)) for _ in range(count)]
    return [Prompt("", group_index=g, ids=one) for g, one in enumerate(ids)]


def mean_difference(model_dir, samples, temperature=1.0, cache=None):
    """Mean over all sampled tokens of |log-prob of the server − log-prob of transformers in fp32|.

    `cache`: class of the keys and values of transformers; None: not rounded.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for sample in samples:
        ids = torch.tensor([sample.tokens])
        with torch.no_grad():
            logits = (
                model(ids, past_key_values=cache and cache()).logits[0, sample.prompt_length - 1 : -1]
                / temperature
            )
        response = ids[0, sample.prompt_length :, None]
        expected = torch.log_softmax(logits.double(), -1).gather(1, response)[:, 0]
        total += (expected - torch.tensor(sample.rollout_log_probs).double()).abs().sum().item()
        count += sample.response_length
    return total / count


def flat(groups):
    return [sample for group in groups for sample in group]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_transformers(client, models, temperature):
    client.update_weights_from_disk(models[1], 1)
    samples = flat(
        client.generate(prompts(), SamplingParams(16, n=2, temperature=temperature, ignore_eos=True))
    )
    assert len(samples) == 16 and not any(sample.dropped for sample in samples)
    assert mean_difference(models[1], samples, temperature) < 1e-5
    assert mean_difference(models[2], samples, temperature) > 1e-2  # the comparison can fail


class EightBits(DynamicCache):
    """Keys and values rounded to e4m3, those of the present token too: SGLang reads all from its cache."""

    def update(self, keys, values, *rest, **more):
        rounded = [x.to(torch.float8_e4m3fn).to(x.dtype) for x in (keys, values)]
        return super().update(*rounded, *rest, **more)


def test_an_fp8_cache_holds_keys_and_values_rounded_to_e4m3(models, tmp_path):
    with started(tiny_engine(tmp_path, switches=["--kv-cache-dtype", "fp8_e4m3"])) as engine:
        client = EngineClient(engine.url, concurrency=8, vocab_size=VOCAB, timeout=60)
        client.update_weights_from_disk(models[1], 1)
        samples = flat(client.generate(prompts(), SamplingParams(16, n=2, ignore_eos=True)))
    assert mean_difference(models[1], samples, cache=EightBits) < 1e-5
    assert mean_difference(models[1], samples) > 1e-4  # the comparison can fail


def test_new_weights_change_what_is_sampled(client, models):
    greedy = SamplingParams(12, n=2, temperature=0.0, ignore_eos=True)
    responses = []
    for seed in (1, 2, 1):
        client.update_weights_from_disk(models[seed], 10 + len(responses))
        responses.append([sample.response_tokens for sample in flat(client.generate(prompts(), greedy))])
    assert responses[0] == responses[2] != responses[1]


def tell(client, path, **body):
    """A request to the engine that the launcher itself never makes."""
    assert httpx.post(client.url + path, json=body, timeout=30).status_code == 200


def running(client):
    """How many answers the engine is in the middle of."""
    (load,) = httpx.get(client.url + "/v1/loads", timeout=30).json()["loads"]
    return load["num_running_reqs"]


def test_weights_changed_in_the_middle_leave_two_spans(client, models):
    client.update_weights_from_disk(models[1], 1)
    sampled = []
    sampling = SamplingParams(400, n=2, ignore_eos=True)
    asking = threading.Thread(target=lambda: sampled.extend(flat(client.generate(prompts(1), sampling))))
    asking.start()
    assert wait_for(lambda: running(client) == 2)
    tell(client, "/pause_generation", mode="retract")
    client.update_weights_from_disk(models[2], 2)
    tell(client, "/continue_generation")
    asking.join()
    assert len(sampled) == 2 and all(sample.weight_versions == ["1", "2"] for sample in sampled)
    assert all(s.token_weight_versions == sorted(s.token_weight_versions) for s in sampled)
    assert all(len(s.token_weight_versions) == s.response_length == 400 for s in sampled)


def process_named(engine, name):
    return next(pid for pid in engine.pids if name in Path(f"/proc/{pid}/comm").read_text())


def test_a_scheduler_killed_in_the_middle_loses_nothing(sglang_engine, client, models, tmp_path):
    """Its first process is killed in tests/launcher/test_run.py."""
    from safetensors.torch import load_file

    push_weights(client, load_file(models[2] / "model.safetensors"), models[2], tmp_path / "weights", 7)
    restarts, sampled, sampling = sglang_engine.restarts, [], SamplingParams(60, n=2, ignore_eos=True)
    asking = threading.Thread(target=lambda: sampled.extend(flat(client.generate(prompts(24), sampling))))
    asking.start()
    assert wait_for(lambda: running(client) >= 8)
    os.kill(process_named(sglang_engine, "sglang::schedul"), signal.SIGKILL)
    asking.join()
    assert [sample.index for sample in sampled] == list(range(48)) and sglang_engine.restarts == restarts + 1
    assert {tuple(sample.weight_versions) for sample in sampled} == {("7",)}
    assert (
        mean_difference(models[2], sampled[-4:]) < 1e-5
    )  # after the restart: the pushed weights, not the first
