"""One rollout's requests: bounded in number, repeated when they fail, held back while the server is away."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from slime_ext.errors import EngineError
from slime_ext.launcher.rollout.protocol import (
    GenerateRequest,
    SamplingParams,
    answered_versions,
    n_dropped,
    read_group,
)
from slime_ext.launcher.rollout.sample import Sample

if TYPE_CHECKING:
    from slime_ext.launcher.rollout.client import EngineClient

T = TypeVar("T")

PROBE_S = 0.25  # between two looks at a server that is away
_MAX_BACKOFF_S = 30.0
_TRY_AGAIN = {408, 429}  # the only 4xx that do not say that the request itself is wrong


@dataclass
class RolloutStats:
    """What one call of `generate` did.

    `retried` counts answers that were asked for again, `outages` how often the server was away or came back
    with other weights, `dropped` samples by reason.
    """

    requests: int = 0
    samples: int = 0
    tokens: int = 0
    retried: int = 0
    outages: int = 0
    seconds: float = 0.0
    dropped: Counter[str] = field(default_factory=Counter)


class _Again(Exception):
    """No usable answer came, for a reason that may pass."""


class Rollout:
    """The state that the requests of one `generate` share."""

    def __init__(
        self,
        client: EngineClient,
        sampling: SamplingParams,
        rollout_id: int | None,
        on_finish: Callable[[int, int], None] | None,
    ) -> None:
        self.client, self.sampling, self.rollout_id, self.on_finish = client, sampling, rollout_id, on_finish
        self.stats = RolloutStats()
        self.finished = 0
        self.places = asyncio.Semaphore(client.concurrency)
        self.recovering = asyncio.Lock()

    async def run(self, requests: Sequence[GenerateRequest]) -> list[list[Sample]]:
        """Asks for all of them; the first error that is final ends the others."""
        begin = time.monotonic()
        self.stats.requests = len(requests)
        limits = httpx.Limits(max_connections=self.client.concurrency + 1)  # one more for the probes
        async with httpx.AsyncClient(timeout=self.client.timeout, limits=limits) as self.http:
            await self._recover()
            groups = await _all_or_error([self._group(request) for request in requests])
        samples = [sample for group in groups for sample in group]
        self.stats.samples = len(samples)
        self.stats.tokens = sum(sample.response_length for sample in samples)
        self.stats.dropped = n_dropped(groups)
        self.stats.seconds = time.monotonic() - begin
        return groups

    async def _group(self, request: GenerateRequest) -> list[Sample]:
        async with self.places:
            answer = await self._answer(request)
        group = read_group(request, answer, self.rollout_id, self.client.decode)
        self.finished += 1
        if self.on_finish:
            self.on_finish(self.finished, self.stats.requests)
        return group

    async def _answer(self, request: GenerateRequest) -> Any:
        """The answer to one request, however often it must be asked for."""
        attempt = 0
        while True:
            try:
                return await self._ask(request)
            except _Again as reason:
                if attempt >= self.client.retries:
                    raise EngineError(
                        f"prompt of group {request.group_index}: expected an answer from "
                        f"{self.client.url}/generate, got {reason} {attempt + 1} times: see sglang.log"
                    ) from reason
            self.stats.retried += 1
            await asyncio.sleep(min(self.client.backoff * 2**attempt, _MAX_BACKOFF_S))
            await self._recover()
            attempt += 1

    async def _ask(self, request: GenerateRequest) -> Any:
        body = {
            "input_ids": list(request.prompt_ids),
            "sampling_params": self.sampling.payload(request.n),
            "return_logprob": True,
        }
        url = f"{self.client.url}/generate"
        try:
            reply = await asyncio.wait_for(self.http.post(url, json=body), self.client.timeout)
        except (httpx.HTTPError, asyncio.TimeoutError) as error:
            raise _Again(_name(error)) from error
        if reply.status_code >= 500 or reply.status_code in _TRY_AGAIN:
            raise _Again(f"status {reply.status_code}")
        if reply.status_code >= 400:
            raise refusal(f"prompt of group {request.group_index}", reply)
        return self._with_known_weights(_parsed(reply))

    def _with_known_weights(self, answer: Any) -> Any:
        """Refuses what a server sampled that was restarted so quickly that no request noticed."""
        known, versions = self.client.pushed_versions, answered_versions(answer)
        if known and not versions <= known:
            raise _Again(f"samples of weight version {min(versions - known)}")
        return answer

    async def _recover(self) -> None:
        """Waits until the server answers with the right weights.

        Every failed request comes here, one after the other: the first finds the outage, the others nothing.
        """
        async with self.recovering:
            was_away = await self._wait_back()
            if was_away or not await self._has_our_weights():
                self.stats.outages += 1
                await self._push_weights()

    async def _wait_back(self) -> bool:
        """Whether the server was away; returns when it is back."""
        deadline, was_away = time.monotonic() + self.client.recovery_timeout, False
        while not await self._healthy():
            was_away = True
            if time.monotonic() > deadline:
                raise EngineError(
                    f"rollout engine: expected an answer from {self.client.url}/health within "
                    f"{self.client.recovery_timeout:.0f} s, got none: see sglang.log"
                )
            await asyncio.sleep(PROBE_S)
        return was_away

    async def _healthy(self) -> bool:
        try:
            return (await self.http.get(f"{self.client.url}/health", timeout=5.0)).status_code == 200
        except httpx.HTTPError:
            return False

    async def _has_our_weights(self) -> bool:
        expected = self.client.pushed_version
        return expected is None or await self._reported_version() == expected

    async def _reported_version(self) -> str:
        try:
            return str((await self.http.get(f"{self.client.url}/model_info")).json().get("weight_version"))
        except (httpx.HTTPError, ValueError):
            return "unknown"

    async def _push_weights(self) -> None:
        # In this thread on purpose: pushing may use collectives or CUDA, and nothing else can go on anyway.
        if self.client.ensure_weights:
            self.client.ensure_weights()
        if not await self._has_our_weights():
            raise EngineError(
                f"rollout engine: expected weight version {self.client.pushed_version}, got "
                f"{await self._reported_version()}: it was restarted; push the weights again before sampling"
            )


async def _all_or_error(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; at the first exception the rest is cancelled and waited for."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _parsed(reply: httpx.Response) -> Any:
    try:
        return reply.json()
    except ValueError as error:
        raise _Again("an answer that is not JSON") from error


def _name(error: BaseException) -> str:
    return (
        "no answer in time"
        if isinstance(error, (httpx.TimeoutException, asyncio.TimeoutError))
        else type(error).__name__
    )


def refusal(where: str, reply: httpx.Response) -> EngineError:
    """The server's own words about a request that it will not serve, as one line."""
    try:
        said = reply.json()
        said = said.get("error", said.get("message", said)) if isinstance(said, dict) else said
        said = said.get("message", said) if isinstance(said, dict) else said
    except ValueError:
        said = reply.text
    words = " ".join(str(said).split())[:500]
    return EngineError(
        f"{where}: expected the rollout engine to accept it, got status {reply.status_code}: {words}"
    )
