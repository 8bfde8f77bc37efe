"""What is asked of the rollout engine, what it answers, and the checks. Opens no connection."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from slime_ext.launcher.rollout.sample import ABORTED, COMPLETED, TRUNCATED, RolloutSample
from slime_ext.launcher.task.prompts import Prompt

ROUNDING = 1e-5  # nats; the log of a probability that rounding lifted above 1
_STATUS = {"stop": COMPLETED, "length": TRUNCATED, "abort": ABORTED}


class BadAnswer(Exception):
    """A sample that the engine answered wrongly; its text is the reason under which it is counted."""


@dataclass(frozen=True)
class SamplingParams:
    """SGLang's `sampling_params`: `n` responses to a prompt; log-probs come back after the temperature."""

    max_new_tokens: int
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False


def words_of(answer: Any) -> str:
    """What the server says of an error, in one line; it has been seen in four shapes."""
    said = answer.get("error", answer.get("message", answer)) if isinstance(answer, dict) else answer
    said = said.get("message", said) if isinstance(said, dict) else said
    return " ".join(str(said).split())[:500]


def error_in(answer: Any) -> str | None:
    """What the server says instead of responses; None where at least one response is there.

    SGLang sends some of its errors with status 200.
    """
    answers = answer if isinstance(answer, list) else [answer]
    if any(isinstance(one, dict) and "output_ids" in one for one in answers):
        return None
    return words_of(answers[0] if answers else "an empty list")


def read_group(
    prompt: Prompt,
    answer: Any,
    sampling: SamplingParams,
    vocab_size: int | None = None,
) -> list[RolloutSample]:
    """Turns the answer to one prompt into exactly `sampling.n` samples, bad ones dropped in place.

    Args:
        vocab_size: ids beyond it cannot be trained on.
    """
    n, answers = sampling.n, answer if isinstance(answer, list) else [answer]
    group = []
    for k, one in enumerate([*answers[:n], *[None] * (n - len(answers))]):
        blank = RolloutSample(
            group_index=prompt.group_index,
            index=prompt.group_index * n + k,
            prompt=prompt.text,
            tokens=list(prompt.ids),
            label=prompt.label,
            metadata=dict(prompt.metadata),
        )
        group.append(read_sample(blank, one, sampling.max_new_tokens, vocab_size))
    return group


def read_sample(
    sample: RolloutSample, answer: Any, longest: int, vocab_size: int | None = None
) -> RolloutSample:
    """Fills a blank sample from one answer of `/generate`; one that fails a check is dropped."""
    try:
        _check_ids(answer, longest, vocab_size)
        _fill_tokens(sample, answer)
        sample.rollout_log_probs = _log_probs(sample.response_tokens, answer["meta_info"])
        _fill_status(sample, answer["meta_info"])
    except BadAnswer as reason:
        return sample.drop(str(reason))
    except (TypeError, ValueError, LookupError, AttributeError):
        return sample.drop("malformed answer")
    return sample.drop("aborted by the engine", ABORTED) if sample.status == ABORTED else sample


def _check_ids(answer: Any, longest: int, vocab_size: int | None) -> None:
    """A response that fails here leaves no token behind: the model could not even be asked about it."""
    ids = answer.get("output_ids") if isinstance(answer, dict) else None
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise BadAnswer("no output ids in the answer")
    if len(ids) > longest:
        raise BadAnswer("more tokens than were asked for")
    if any(i < 0 or (vocab_size is not None and i >= vocab_size) for i in ids):
        raise BadAnswer("token outside of the vocabulary")


def _fill_tokens(sample: RolloutSample, answer: Any) -> None:
    ids = answer["output_ids"]
    sample.tokens, sample.response_length = sample.tokens + ids, len(ids)
    sample.loss_mask = [1] * len(ids)
    if not isinstance(answer.get("meta_info"), dict):
        raise BadAnswer("no meta_info in the answer")
    sample.response = answer["text"]
    sample.weight_versions, sample.token_weight_versions = _versions(answer["meta_info"], len(ids))
    sample.cached_tokens = int(answer["meta_info"].get("cached_tokens") or 0)


def _versions(meta: dict[str, Any], length: int) -> tuple[list[str], list[str]]:
    """Versions of the weights, per span and per token; a server without spans tells the last one only."""
    latest = str(meta.get("weight_version", "unknown"))
    spans = meta.get("weight_versions") or [{"version": latest, "start": 0, "end": length}]
    per_token = [latest] * length
    for span in spans:
        start, end = max(span["start"], 0), min(span["end"], length)
        per_token[start:end] = [str(span["version"])] * max(end - start, 0)
    return [str(span["version"]) for span in spans], per_token


def _log_probs(ids: list[int], meta: dict[str, Any]) -> list[float]:
    """[R] log-probs of the sampled tokens, one for each, of the token that is in `output_ids`, finite,
    at most 0."""
    entries = meta.get("output_token_logprobs")
    if not entries and ids:
        raise BadAnswer("no log-probs in the answer")
    entries = entries or []
    if len(entries) != len(ids):
        raise BadAnswer("as many log-probs as tokens expected")
    if any(entry[1] != token for entry, token in zip(entries, ids, strict=True)):
        raise BadAnswer("log-prob of another token")
    values = [entry[0] for entry in entries]
    if any(value is None or not math.isfinite(value) for value in values):  # NaN arrives as null or as NaN
        raise BadAnswer("non-finite log-prob")
    if any(value > ROUNDING for value in values):
        raise BadAnswer("log-prob above 0")
    return [float(value) for value in values]


def _fill_status(sample: RolloutSample, meta: dict[str, Any]) -> None:
    kind = (meta.get("finish_reason") or {}).get("type")
    if kind not in _STATUS:
        raise BadAnswer("no finish reason in the answer")
    sample.status = _STATUS[kind]
    if not sample.response_length and sample.status != ABORTED:
        raise BadAnswer("empty response")


def answered_versions(answer: Any) -> set[str]:
    """The weight versions that an answer of `/generate` names, per sample the last one."""
    answers = answer if isinstance(answer, list) else [answer]
    metas = [one.get("meta_info") for one in answers if isinstance(one, dict)]
    return {
        str(meta["weight_version"]) for meta in metas if isinstance(meta, dict) and "weight_version" in meta
    }


def n_dropped(samples: Iterable[RolloutSample]) -> Counter[str]:
    """How many samples were dropped, by reason."""
    return Counter(sample.dropped for sample in samples if sample.dropped)
