"""Starts sglang-router before two workers that answer at once and note what they receive."""

import http.server
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request


class Worker(http.server.ThreadingHTTPServer):
    """Answers each request as an engine would.

    Args:
        failures: number of next requests for /generate that get the status 500.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.received: list[dict] = []
        self.failures = 0
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer(200, {"status": "ok", "model_path": "model"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.received.append(json.loads(body))
        if self.server.failures:
            self.server.failures -= 1
            self._answer(500, {"error": "the engine has failed"})
        else:
            self._answer(200, {"text": "a", "meta_info": {"output_token_logprobs": [[-0.5, 7, None]]}})

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, status: int, content: dict) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Router:
    """A router with the default policy before two workers. Use it in a `with` statement."""

    def __enter__(self) -> "Router":
        self.workers = [Worker(), Worker()]
        self._url = f"http://127.0.0.1:{(port := _free_port())}"
        urls = [worker.url for worker in self.workers]
        listen = {"--host": "127.0.0.1", "--port": port}
        listen |= {"--prometheus-host": "127.0.0.1", "--prometheus-port": _free_port()}
        words = [str(word) for flag in listen.items() for word in flag]
        command = [sys.executable, "-m", "sglang_router.launch_router", *words, "--worker-urls", *urls]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.time() + 120
        while self._is_down():
            if time.time() > deadline or self._process.poll() is not None:
                sys.exit("the router has not started")
            time.sleep(0.5)
        for worker in self.workers:
            worker.received.clear()
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait()

    def generate(self, **request: object) -> int:
        """Sends a request to /generate and returns the status of the answer."""
        body, kind = json.dumps(request).encode(), {"content-type": "application/json"}
        try:
            with urllib.request.urlopen(
                urllib.request.Request(f"{self._url}/generate", body, kind)
            ) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    def received(self) -> list[dict]:
        """Returns the requests that reached the workers."""
        return [request for worker in self.workers for request in worker.received]

    def _is_down(self) -> bool:
        try:
            return self.generate(input_ids=[1], sampling_params={"max_new_tokens": 1}) != 200
        except OSError:
            return True


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
