"""What is asked of the rollout engine, what it answers, and the checks. Opens no connection."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from slime_ext.errors import DataError
from slime_ext.launcher.rollout.sample import ABORTED, COMPLETED, TRUNCATED, RolloutSample

ROUNDING = 1e-5  # nats; the log of a probability that rounding lifted above 1
_STATUS = {"stop": COMPLETED, "length": TRUNCATED, "abort": ABORTED}


class BadAnswer(Exception):
    """A sample that the engine answered wrongly; its text is the reason under which it is counted."""


@dataclass(frozen=True)
class SamplingParams:
    """How responses are drawn; log-probs come back after the temperature."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def payload(self, n: int) -> dict[str, Any]:
        """SGLang's `sampling_params` for `n` responses to one prompt."""
        return {**asdict(self), "n": n}


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt and how many responses to it."""

    prompt_ids: Sequence[int]
    group_index: int
    n: int = 1
    prompt: str = ""
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    def blank(self, k: int, rollout_id: int | None) -> RolloutSample:
        """The k-th sample of the group before anything was generated."""
        return RolloutSample(
            group_index=self.group_index,
            index=self.group_index * self.n + k,
            rollout_id=rollout_id,
            prompt=self.prompt,
            tokens=list(self.prompt_ids),
            label=self.label,
            metadata=dict(self.metadata),
        )


def check_prompts(requests: Iterable[GenerateRequest], vocab_size: int | None) -> None:
    """Refuses prompts that the server must not see: an id outside of its vocabulary ends SGLang's CPU server.

    Raises:
        DataError: an empty prompt, n below 1, or an id outside [0, vocab_size).
    """
    for request in requests:
        where = f"prompt of group {request.group_index} ({request.prompt[:40]!r})"
        if not request.prompt_ids or request.n < 1:
            raise DataError(
                f"{where}: expected at least 1 token and 1 sample, got {len(request.prompt_ids)} and "
                f"{request.n}: leave it out"
            )
        wrong = [i for i in request.prompt_ids if i < 0 or (vocab_size is not None and i >= vocab_size)]
        if wrong:
            raise DataError(
                f"{where}: expected token ids in [0, {vocab_size or 'vocabulary size'}), got {wrong[0]}: "
                "use the tokenizer that belongs to the model"
            )


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
    request: GenerateRequest,
    answer: Any,
    rollout_id: int | None = None,
    decode: Callable[[list[int]], str] | None = None,
    longest: int | None = None,
    vocab_size: int | None = None,
) -> list[RolloutSample]:
    """Turns the answer to one request into exactly `request.n` samples, bad ones dropped in place.

    Args:
        longest: tokens that a response was allowed to have.
        vocab_size: ids beyond it cannot be trained on.
    """
    answers = answer if isinstance(answer, list) else [answer]
    padded = [*answers[: request.n], *[None] * (request.n - len(answers))]
    blanks = (request.blank(k, rollout_id) for k in range(request.n))
    return [
        read_sample(blank, one, decode, longest, vocab_size)
        for blank, one in zip(blanks, padded, strict=True)
    ]


def read_sample(
    sample: RolloutSample,
    answer: Any,
    decode: Callable[[list[int]], str] | None = None,
    longest: int | None = None,
    vocab_size: int | None = None,
) -> RolloutSample:
    """Fills a blank sample from one answer of `/generate`; one that fails a check is dropped."""
    try:
        _check_ids(answer, longest, vocab_size)
        _fill_tokens(sample, answer, decode)
        sample.rollout_log_probs = _log_probs(sample.response_tokens, answer["meta_info"])
        _fill_status(sample, answer["meta_info"])
    except BadAnswer as reason:
        return sample.drop(str(reason))
    except (TypeError, ValueError, LookupError, AttributeError):
        return sample.drop("malformed answer")
    return sample.drop("aborted by the engine", ABORTED) if sample.status == ABORTED else sample


def _check_ids(answer: Any, longest: int | None, vocab_size: int | None) -> None:
    """A response that fails here leaves no token behind: the model could not even be asked about it."""
    ids = answer.get("output_ids") if isinstance(answer, dict) else None
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise BadAnswer("no output ids in the answer")
    if longest is not None and len(ids) > longest:
        raise BadAnswer("more tokens than were asked for")
    if any(i < 0 or (vocab_size is not None and i >= vocab_size) for i in ids):
        raise BadAnswer("token outside of the vocabulary")


def _fill_tokens(sample: RolloutSample, answer: Any, decode: Callable[[list[int]], str] | None) -> None:
    ids = answer["output_ids"]
    sample.tokens, sample.response_length = sample.tokens + ids, len(ids)
    sample.loss_mask = [1] * len(ids)
    if not isinstance(answer.get("meta_info"), dict):
        raise BadAnswer("no meta_info in the answer")
    text = answer.get("text")
    sample.response = text if text is not None or decode is None else decode(ids)
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
