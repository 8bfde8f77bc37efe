"""A small server that speaks SGLang's dialect and breaks on request; also a program for EngineProcess.

`/generate` answers (sum of the prompt + k) mod 64 as token k with log-prob −(k + 1)/10.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import socket
import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

VOCAB = 64


class StandIn(ThreadingHTTPServer):
    """Serves in a thread until `close`.

    Each request to `/generate` takes one of `faults`, or else `always`: a name of FAULTS, "hang", "drop",
    "text", or a status.
    """

    daemon_threads = True
    request_queue_size = 128
    refuse_weights = False
    always: str | int | None = None

    def __init__(self, port: int = 0, faults: tuple[str | int, ...] = (), version: str = "default") -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.faults, self.version = deque(faults), version
        self.prompts: list[list[int]] = []
        self.connections: list[socket.socket] = []
        self.running = self.most_running = 0
        self.pause_s, self.lock, self.open = 0.0, threading.Lock(), threading.Event()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def close(self) -> None:
        self.open.set()  # lets go of the requests that hang
        self.shutdown()
        self.server_close()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: socket.socket, client_address: object) -> None:
        self.connections.append(request)
        super().process_request(request, client_address)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no news."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: StandIn

    def log_message(self, *args: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        answers = {"/health": {}, "/model_info": {"weight_version": self.server.version}}
        self.answer(answers.get(self.path, {"error": "unknown path"}), 200 if self.path in answers else 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        {"/generate": self.generate, "/update_weights_from_disk": self.update}.get(self.path, self.accept)(
            body
        )

    def accept(self, body: dict) -> None:
        self.answer({"success": True})

    def update(self, body: dict) -> None:
        found = Path(body["model_path"]).exists() and not self.server.refuse_weights
        self.server.version = body["weight_version"] if found else self.server.version
        self.answer(
            {"success": found, "message": "" if found else "no such directory"}, 200 if found else 400
        )

    def generate(self, body: dict) -> None:
        with self.server.lock:
            self.server.prompts.append(body["input_ids"])
            self.server.running += 1
            self.server.most_running = max(self.server.most_running, self.server.running)
            fault = self.server.faults.popleft() if self.server.faults else self.server.always
        try:
            time.sleep(self.server.pause_s)
            self.generate_with(fault, body)
        finally:
            with self.server.lock:
                self.server.running -= 1

    def generate_with(self, fault: str | int | None, body: dict) -> None:
        if fault == "hang":
            self.server.open.wait(10)
        samples = [one_sample(body, self.server.version) for _ in range(body["sampling_params"]["n"])]
        if refused := refusal_of(body):
            return self.answer({"error": {"message": refused}}, 400)
        if isinstance(fault, int):
            return self.answer({"error": {"message": f"asked to fail with {fault}"}}, fault)
        if fault in FAULTS | FAULTS_OF_ALL:
            samples = (FAULTS | FAULTS_OF_ALL)[fault](samples)
        self.answer(samples if len(samples) != 1 else samples[0], cut=fault == "drop", text=fault == "text")

    def answer(self, value: object, status: int = 200, cut: bool = False, text: bool = False) -> None:
        data = b"no JSON" if text else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)
        self.close_connection = cut


def refusal_of(body: dict) -> str | None:
    """Why SGLang would answer 400."""
    top_p = body["sampling_params"].get("top_p", 1.0)
    if not body["input_ids"]:
        return "input_ids cannot be empty."
    return None if 0 < top_p <= 1 else f"top_p must be in (0, 1], got {top_p}."


def one_sample(body: dict, version: str) -> dict:
    """What a healthy server says of one response."""
    length, prompt = body["sampling_params"]["max_new_tokens"], body["input_ids"]
    ids = [(sum(prompt) + k) % VOCAB for k in range(length)]
    stops = [k for k, token in enumerate(ids) if token in body["sampling_params"].get("stop_token_ids", ())]
    ids = ids[: stops[0] + 1] if stops else ids
    stop, length = {"type": "stop", "matched": ids[-1] if ids else None}, len(ids)
    meta = {
        "finish_reason": stop if stops else {"type": "length", "length": length},
        "output_token_logprobs": [[-(k + 1) / 10, token, None] for k, token in enumerate(ids)],
        "weight_version": version,
        "weight_versions": [{"version": version, "start": 0, "end": length}],
        "cached_tokens": 0,
    }
    return {"text": " ".join(map(str, ids)), "output_ids": ids, "meta_info": meta}


def _in_meta(**changes: object):
    def damage(samples: list[dict]) -> list[dict]:
        samples[0]["meta_info"].update(changes)
        return samples

    return damage


def _in_log_probs(edit):
    def damage(samples: list[dict]) -> list[dict]:
        edit(samples[0]["meta_info"]["output_token_logprobs"])
        return samples

    return damage


def _renamed(sample: dict, at: int, token: int) -> dict:
    """With another id, in both places that name it."""
    sample["output_ids"][at] = sample["meta_info"]["output_token_logprobs"][at][1] = token
    return sample


def _extended(sample: dict) -> dict:
    """With one token more than was asked for."""
    sample["output_ids"].append(5)
    sample["meta_info"]["output_token_logprobs"].append([-1.0, 5, None])
    return sample


def _every(damage):
    """The same damage to all samples of an answer."""
    return lambda samples: [damage([sample])[0] for sample in samples]


FAULTS = {
    "nan": _in_log_probs(lambda entries: entries[1].__setitem__(0, math.nan)),
    "null": _in_log_probs(lambda entries: entries[1].__setitem__(0, None)),
    "infinite": _in_log_probs(lambda entries: entries[1].__setitem__(0, -math.inf)),
    "short": _in_log_probs(lambda entries: entries.pop()),
    "long": _in_log_probs(lambda entries: entries.append([-1.0, 5, None])),
    "other token": _in_log_probs(lambda entries: entries[1].__setitem__(1, 63 - entries[1][1])),
    "not pairs": _in_log_probs(lambda entries: entries.__setitem__(0, 3)),
    "missing": _in_meta(output_token_logprobs=None),
    "abort": _in_meta(finish_reason={"type": "abort", "message": "asked to"}),
    "no reason": _in_meta(finish_reason=None),
    "positive": _in_log_probs(lambda entries: entries[1].__setitem__(0, 0.5)),
    "outside": lambda samples: [_renamed(samples[0], 1, VOCAB), *samples[1:]],
    "negative": lambda samples: [_renamed(samples[0], 1, -1), *samples[1:]],
    "too long": lambda samples: [_extended(samples[0]), *samples[1:]],
    "too few": lambda samples: samples[1:],
    "no ids": lambda samples: [{**samples[0], "output_ids": None}, *samples[1:]],
    "no meta": lambda samples: [{**samples[0], "meta_info": None}, *samples[1:]],
}


FAULTS_OF_ALL = {
    "all nan": _every(FAULTS["nan"]),
    "error": lambda samples: [{"error": {"message": "out of memory"}}],
    "errors": lambda samples: [{"message": "out of memory"}] * len(samples),
    "nothing": lambda samples: [],
}


def main() -> None:
    """Serves on `--port` until killed; `--exit-with` ends it at once, as a broken server would."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--exit-with", type=int)
    options, _ = parser.parse_known_args()
    if options.exit_with is not None:
        raise SystemExit(print("RuntimeError: asked to fail", flush=True) or options.exit_with)
    StandIn(options.port).open.wait()


if __name__ == "__main__":
    main()
