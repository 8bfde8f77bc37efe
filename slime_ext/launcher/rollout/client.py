"""The trainer's side of SGLang's HTTP interface: sampling, and handing over new weights."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from slime_ext.errors import EngineError
from slime_ext.launcher.rollout.protocol import (
    SamplingParams,
    answered_versions,
    error_in,
    read_group,
    words_of,
)
from slime_ext.launcher.rollout.sample import RolloutSample
from slime_ext.launcher.task.prompts import Prompt

PROBE_S = 0.25  # between two looks at a server that is away
SAY_S = 10.0  # between two lines about it
_MAX_BACKOFF_S = 30.0
_TRY_AGAIN = {408, 429}  # the only 4xx that do not say that the request itself is wrong


class _Again(Exception):
    """No usable answer came, for a reason that may pass."""


class EngineClient:
    """Asks one rollout engine for samples and hands it new weights.

    A server that dies is waited for as often as it dies; when it is back it gets the weights again that were
    pushed last, and only the requests without an answer are repeated.

    Args:
        url: of an SGLang server.
        concurrency: requests under way at once; one request is one prompt with all its responses.
        timeout: seconds for one request.
        retries: how often one request is repeated after a connection error, a 5xx answer or a timeout.
        backoff: seconds before the first repetition; doubles each time, at most 30.
        recovery_timeout: seconds that a server which went away has to come back.
        vocab_size: responses with ids beyond it are dropped.
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
        vocab_size: int | None = None,
    ) -> None:
        self.url, self.concurrency = url.rstrip("/"), concurrency
        self.retries, self.backoff, self.recovery_timeout = retries, backoff, recovery_timeout
        self.vocab_size = vocab_size
        limits = httpx.Limits(max_connections=concurrency + 1, max_keepalive_connections=concurrency + 1)
        self._http = httpx.Client(base_url=self.url, timeout=timeout, limits=limits)
        self._recovering = threading.Lock()
        self.pushed: tuple[str, str] | None = None  # path and version of the latest weights
        self._versions: set[str] = set()

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[list[RolloutSample]]:
        """Samples `sampling.n` responses to every prompt; blocks until all are there.

        A sample that came back damaged keeps its place with `remove_sample` set, its mask 0 and the reason in
        `metadata["dropped"]`.

        Returns:
            One list per prompt, in their order, of exactly `sampling.n` samples.

        Raises:
            EngineError: the server refused a request (4xx), kept failing, or did not come back.
        """
        self._recover()
        ended = threading.Event()
        pool = ThreadPoolExecutor(self.concurrency)
        try:
            groups = [pool.submit(self._group, one, sampling, ended) for one in prompts]
            for group in as_completed(groups):
                group.result()  # raises what the first that failed has raised
            return [group.result() for group in groups]
        finally:
            ended.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def health(self) -> bool:
        """Whether the server answers its health check with 200."""
        with contextlib.suppress(httpx.HTTPError):
            return self._http.get("/health", timeout=5.0).status_code == 200
        return False

    def wait_healthy(self, timeout: float, say: Callable[[str], None] = lambda text: None) -> bool:
        """Waits for the server; whether there was anything to wait for.

        Args:
            timeout: seconds.
            say: shows, every ten seconds, what is waited for.

        Raises:
            EngineError: it was not healthy within `timeout` seconds.
        """
        start = said = time.monotonic()
        was_away = False
        while not self.health():
            was_away, now = True, time.monotonic()
            if now - said > SAY_S:
                said = now
                say(f"waiting for the rollout engine, {now - start:.0f} s of {timeout:.0f} s (sglang.log)")
            if now > start + timeout:
                raise EngineError(
                    f"rollout engine: expected an answer from {self.url}/health within {timeout:.0f} s, "
                    "got none: see sglang.log"
                )
            time.sleep(PROBE_S)
        return was_away

    def weight_version(self) -> str:
        """Version of the weights that the server samples with."""
        return str(self._call("/model_info").get("weight_version"))

    def update_weights_from_disk(self, path: str | Path, version: int | str) -> None:
        """Makes the server load the weights in `path` under the name `version`, and checks that it did.

        Raises:
            EngineError: it refused, or reports another version afterwards.
        """
        self.pushed = str(Path(path).resolve()), str(version)
        self._versions.add(str(version))
        self._push()

    def _push(self) -> None:
        """The latest weights to the server, once more where it was restarted before it reported them."""
        path, version = self.pushed
        body = {"model_path": path, "load_format": "auto", "weight_version": version, "flush_cache": True}
        for _ in range(self.retries + 1):
            self._call("/update_weights_from_disk", body)
            if (reported := self.weight_version()) == version:
                return
        raise EngineError(
            f"rollout engine: expected weight version {version} after the update, got {reported}: "
            "does something else push weights to this server?"
        )

    def _recover(self) -> None:
        """Waits until the server answers and has the latest weights.

        Every failed request comes here, one after the other: the first finds the outage, the others nothing.
        """
        with self._recovering:
            was_away = self.wait_healthy(self.recovery_timeout)
            if self.pushed and (was_away or self.weight_version() != self.pushed[1]):
                self._push()

    def _group(self, prompt: Prompt, sampling: SamplingParams, ended: threading.Event) -> list[RolloutSample]:
        """The samples of one prompt, however often they must be asked for."""
        body = {
            "input_ids": list(prompt.ids),
            "sampling_params": asdict(sampling),
            "return_logprob": True,
        }
        where = f"prompt of group {prompt.group_index}"
        ask = partial(self._samples, where, body)
        answer = self._repeated(where, ask, "/generate", self._recover, ended)
        return read_group(prompt, answer, sampling, self.vocab_size)

    def _samples(self, where: str, body: dict[str, Any]) -> Any:
        """The answer to `generate`, unless it is an error under status 200, or of a server that lost our
        weights."""
        answer = self._send(where, "/generate", body)
        if said := error_in(answer):
            raise _Again(f"status 200 without a response ({said})")
        # A server that was restarted so quickly that no request noticed samples with other weights.
        if self._versions and (unknown := answered_versions(answer) - self._versions):
            raise _Again(f"samples of weight version {min(unknown)}")
        return answer

    def _call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer to a request other than `generate`; a server that is away is waited for."""
        ask, recover = (
            partial(self._send, path, path, body),
            partial(self.wait_healthy, self.recovery_timeout),
        )
        return self._repeated("rollout engine", ask, path, recover, threading.Event())

    def _repeated(
        self,
        who: str,
        ask: Callable[[], Any],
        path: str,
        recover: Callable[[], object],
        ended: threading.Event,
    ) -> Any:
        """What ``ask`` returns, asked again with backoff while it raises _Again, after ``recover``."""
        for attempt in range(self.retries + 1):
            try:
                return ask()
            except _Again as error:
                reason = error
            if attempt == self.retries or ended.wait(min(self.backoff * 2**attempt, _MAX_BACKOFF_S)):
                break
            recover()
        raise EngineError(
            f"{who}: expected an answer from {self.url}{path}, got {reason} {attempt + 1} times: see "
            "sglang.log"
        ) from reason

    def _send(self, where: str, path: str, body: dict[str, Any] | None) -> Any:
        """The JSON of one answer; `where` is named where the server refuses the request."""
        try:
            reply = self._http.request("POST" if body else "GET", path, json=body)
            answer = reply.json()
        except httpx.HTTPError as error:
            raise _Again(type(error).__name__) from error
        except ValueError as error:
            if reply.is_success:
                raise _Again("an answer that is not JSON") from error
            answer = reply.text
        if reply.status_code >= 500 or reply.status_code in _TRY_AGAIN:
            raise _Again(f"status {reply.status_code} ({words_of(answer)})")
        if reply.status_code >= 400:
            raise EngineError(
                f"{where}: expected the rollout engine to accept it, got status {reply.status_code}: "
                f"{words_of(answer)}"
            )
        return answer
