"""The trainer's side of SGLang's HTTP interface: sampling, and handing over new weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from slime_ext.errors import EngineError
from slime_ext.launcher.rollout.dispatch import PROBE_S, Rollout, RolloutStats, refusal
from slime_ext.launcher.rollout.protocol import GenerateRequest, SamplingParams, check_prompts, n_dropped
from slime_ext.launcher.rollout.sample import Sample

__all__ = ["EngineClient", "GenerateRequest", "RolloutStats", "SamplingParams", "n_dropped"]


class EngineClient:
    """Asks one rollout engine for samples and hands it new weights.

    Args:
        url: of an SGLang server.
        concurrency: requests under way at once; one request is one prompt with all its responses.
        timeout: seconds for one request.
        retries: how often one request is repeated after a connection error, a 5xx answer or a timeout.
        backoff: seconds before the first repetition; doubles each time, at most 30.
        recovery_timeout: seconds that a server which went away has to come back.
        ensure_weights: pushes the trainer's weights; called once per outage, in the calling thread: when the
            server was away, or does not report the version that was last pushed through this client.
        vocab_size: prompts with ids beyond it are refused.
        decode: ids to text, for a server that runs without a tokenizer.
    """

    def __init__(
        self,
        url: str,
        *,
        concurrency: int = 64,
        timeout: float = 120.0,
        retries: int = 4,
        backoff: float = 0.5,
        recovery_timeout: float = 300.0,
        ensure_weights: Callable[[], None] | None = None,
        vocab_size: int | None = None,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        self.url, self.concurrency, self.timeout = url.rstrip("/"), concurrency, timeout
        self.retries, self.backoff, self.recovery_timeout = retries, backoff, recovery_timeout
        self.ensure_weights, self.vocab_size, self.decode = ensure_weights, vocab_size, decode
        self.last_stats = RolloutStats()
        self.pushed_version: str | None = None
        self.pushed_versions: set[str] = set()

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        sampling: SamplingParams,
        *,
        rollout_id: int | None = None,
        on_finish: Callable[[int, int], None] | None = None,
    ) -> list[list[Sample]]:
        """Samples `request.n` responses to every prompt; blocks until all are there.

        A sample that came back damaged keeps its place with `remove_sample` set, its mask 0 and the reason in
        `metadata["dropped"]`. When the server dies, it is waited for, gets its weights again, and only the
        requests without an answer are repeated.

        Args:
            on_finish: called with (finished, all) after each request.

        Returns:
            One list per request, in their order, of exactly `request.n` samples.

        Raises:
            DataError: a prompt that the server must not see; nothing was sent.
            EngineError: the server refused a request (4xx), kept failing, or did not come back.
        """
        check_prompts(requests, self.vocab_size)
        rollout = Rollout(self, sampling, rollout_id, on_finish)
        self.last_stats = rollout.stats
        return asyncio.run(rollout.run(requests))

    def health(self) -> bool:
        """Whether the server answers its health check with 200."""
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_healthy(self, timeout: float) -> None:
        """Waits for the server.

        Raises:
            EngineError: it was not healthy within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not self.health():
            if time.monotonic() > deadline:
                raise EngineError(
                    f"rollout engine: expected an answer from {self.url}/health within {timeout:.0f} s, "
                    "got none: see sglang.log"
                )
            time.sleep(PROBE_S)

    def model_info(self) -> dict[str, Any]:
        """What the server says of its model."""
        return self._call("GET", "/model_info")

    def weight_version(self) -> str:
        """Version of the weights that the server samples with."""
        return str(self.model_info().get("weight_version"))

    def update_weights_from_disk(self, path: str | Path, version: int | str) -> None:
        """Makes the server load the weights in `path` under the name `version`, and checks that it did.

        Raises:
            EngineError: it refused, or reports another version afterwards.
        """
        body = {
            "model_path": str(Path(path).resolve()),
            "load_format": "auto",
            "weight_version": str(version),
            "flush_cache": True,
        }
        self._call("POST", "/update_weights_from_disk", body)
        self.pushed_version = str(version)
        self.pushed_versions.add(str(version))
        if (reported := self.weight_version()) != str(version):
            raise EngineError(
                f"rollout engine: expected weight version {version} after the update, got {reported}: "
                "does something else push weights to this server?"
            )

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer to one request; a server that is away is waited for, as it is in `generate`."""
        reply = self._reply(method, path, body)
        if reply.status_code >= 400:
            raise refusal(path, reply)
        is_json = reply.headers.get("content-type", "").startswith("application/json")
        return reply.json() if is_json else {}

    def _reply(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.backoff)
                self.wait_healthy(self.recovery_timeout)
            try:
                reply = httpx.request(method, self.url + path, json=body, timeout=self.timeout)
            except httpx.HTTPError as error:
                reason: Exception = error
            else:
                if reply.status_code < 500 or attempt == self.retries:
                    return reply
        raise EngineError(
            f"rollout engine: expected an answer from {self.url}{path}, got {type(reason).__name__} "
            f"{self.retries + 1} times: see sglang.log"
        ) from reason
