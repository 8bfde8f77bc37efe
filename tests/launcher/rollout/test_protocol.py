"""What is asked and what is accepted as an answer."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from slime_ext.launcher.rollout.protocol import SamplingParams, n_dropped, read_group
from slime_ext.launcher.task.prompts import Prompt
from tests.launcher.rollout.stand_in import FAULTS, VOCAB, one_sample

PROMPT = [5, 6, 7]
REASONS = {
    "nan": "non-finite log-prob",
    "null": "non-finite log-prob",
    "infinite": "non-finite log-prob",
    "short": "as many log-probs as tokens expected",
    "long": "as many log-probs as tokens expected",
    "positive": "log-prob above 0",
    "outside": "token outside of the vocabulary",
    "negative": "token outside of the vocabulary",
    "too long": "more tokens than were asked for",
    "other token": "log-prob of another token",
    "not pairs": "malformed answer",
    "missing": "no log-probs in the answer",
    "abort": "aborted by the engine",
    "no reason": "no finish reason in the answer",
    "too few": "no output ids in the answer",
    "no ids": "no output ids in the answer",
    "no meta": "no meta_info in the answer",
}


def answers(fault=None, n=2, length=4):
    body = {"input_ids": PROMPT, "sampling_params": asdict(SamplingParams(length, n))}
    samples = [one_sample(body, "7") for _ in range(n)]
    return FAULTS[fault](samples) if fault else samples


def read(answer, **prompt):
    asked = Prompt("abc", group_index=3, ids=PROMPT, **prompt)
    return read_group(asked, answer, SamplingParams(4, n=2), vocab_size=VOCAB)


def test_a_good_answer_becomes_trainable_samples():
    first, second = read(answers(), label="x", metadata={"source_name": "y"})
    assert (first.index, second.index, first.group_index) == (6, 7, 3)
    assert first.tokens == [*PROMPT, 18, 19, 20, 21] and first.response == "18 19 20 21"
    assert first.rollout_log_probs == [-0.1, -0.2, -0.3, -0.4] and first.loss_mask == [1, 1, 1, 1]
    assert (first.status, first.label, first.metadata) == ("truncated", "x", {"source_name": "y"})


def test_every_fault_of_the_stand_in_has_its_reason():
    assert set(REASONS) == set(FAULTS)


@pytest.mark.parametrize("fault", REASONS)
def test_a_damaged_sample_is_dropped_in_place(fault):
    group = read(answers(fault))
    bad, good = sorted(group, key=lambda sample: not sample.remove_sample)
    assert bad.dropped == REASONS[fault] and not any(bad.loss_mask)
    assert len(bad.rollout_log_probs) == len(bad.token_weight_versions) == bad.response_length
    assert good.dropped is None and all(good.loss_mask)


@pytest.mark.parametrize("fault", ["outside", "negative", "too long"])
def test_what_the_model_cannot_be_asked_about_leaves_no_token(fault):
    bad = read(answers(fault))[0]
    assert (bad.tokens, bad.response_length, bad.rollout_log_probs) == (PROMPT, 0, [])


def test_rounding_above_probability_1_is_no_fault():
    answer = answers()
    answer[0]["meta_info"]["output_token_logprobs"][1][0] = 2e-7
    assert read(answer)[0].dropped is None


def test_dropped_samples_are_counted_by_reason():
    assert n_dropped([*read(answers("nan")), *read(answers())]) == {"non-finite log-prob": 1}


@pytest.mark.parametrize("answer", [None, [], "text", [None, 3], {"error": "x"}])
def test_an_answer_of_another_kind_drops_the_group(answer):
    assert [sample.status for sample in read(answer)] == ["failed", "failed"]


def test_extra_samples_are_not_taken():
    assert len(read(answers(n=3))) == 2


@pytest.mark.parametrize(
    ("kind", "status"), [("stop", "completed"), ("length", "truncated"), ("abort", "aborted")]
)
def test_finish_reason_becomes_status(kind, status):
    answer = answers()
    answer[0]["meta_info"]["finish_reason"] = {"type": kind}
    assert read(answer)[0].status == status


def test_an_empty_response_cannot_be_trained_on():
    assert read(answers(length=0))[0].dropped == "empty response"


def test_spans_give_every_token_its_version():
    answer = answers()
    spans = [{"version": "6", "start": 0, "end": 3}, {"version": "7", "start": 3, "end": 4}]
    answer[0]["meta_info"]["weight_versions"] = spans
    sample = read(answer)[0]
    assert (sample.weight_versions, sample.token_weight_versions) == (["6", "7"], ["6", "6", "6", "7"])


def test_without_spans_the_last_version_holds_for_all():
    answer = answers()
    del answer[0]["meta_info"]["weight_versions"]
    sample = read(answer)[0]
    assert (sample.weight_versions, sample.token_weight_versions) == (["7"], ["7"] * 4)
