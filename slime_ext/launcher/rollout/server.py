"""A SGLang server as a child process that never outlives its parent and comes back when it dies."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx

from slime_ext.errors import ConfigError, EngineError
from slime_ext.launcher.rollout.processes import (
    MARK,
    hold_port,
    kill_marked,
    last_lines,
    marked_processes,
    shared_memory_of,
    spawn_bound,
)

CPU_ENTRY = Path(__file__).with_name("sglang_cpu.py")
START_LINE = "=== slime_ext starts the server"
_POLL_S = 0.1
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

_DEVICE_FLAGS = {
    "cpu": (
        *("--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph"),
        "--sleep-on-idle",  # the scheduler otherwise polls without pause and takes a core from the trainer
        *("--log-level-http", "warning"),  # one line per request otherwise
    ),
    "cuda": ("--sleep-on-idle", "--log-level-http", "warning"),
}
_DEVICE_VARIABLES = {
    # More threads than one make tiny matrix products fifty times slower.
    "cpu": {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    "cuda": {},
}


class EngineProcess:
    """Starts, watches, restarts and stops one SGLang server.

    The server runs in a session of its own, appends its output to `log_path` and dies with the thread that
    started it, even when the process is killed with -9. Every process it spawns carries one mark in its
    environment, by which `stop` finds them all.

    Args:
        model_path: directory in Hugging Face format.
        port: TCP port, None for a free one.
        python: interpreter of the environment that SGLang is installed in.
        extra_args: appended to the command line, so they win over ours.
        mem_fraction: share of the memory for weights and KV cache.
        device: "cpu" runs the entry of this package, "cuda" `python -m sglang.launch_server`.
        program: words that replace interpreter and entry.

    Raises:
        ConfigError: `device` is neither "cpu" nor "cuda".
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        port: int | None = None,
        host: str = "127.0.0.1",
        dtype: str = "float32",
        log_path: str | Path = "sglang.log",
        python: str | Path = sys.executable,
        extra_args: Sequence[str] = (),
        context_length: int | None = None,
        max_running_requests: int | None = None,
        max_total_tokens: int | None = None,
        mem_fraction: float | None = None,
        seed: int | None = None,
        device: str = "cpu",
        program: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        if device not in _DEVICE_FLAGS:
            raise ConfigError(f"rollout engine device: expected cpu or cuda, got {device!r}: choose one")
        self._held = hold_port(host) if port is None else None  # until `stop`, also between two starts
        self.host, self.port = host, self._held.getsockname()[1] if self._held else port
        self.log_path, self.python, self.device = Path(log_path), str(python), device
        self.restarts, self.failure = 0, None
        self._options = {
            "--model-path": model_path,
            "--host": host,
            "--port": self.port,
            "--dtype": dtype,
            "--context-length": context_length,
            "--max-running-requests": max_running_requests,
            "--max-total-tokens": max_total_tokens,
            "--mem-fraction-static": mem_fraction,
            "--random-seed": seed,
        }
        self._extra, self._program, self._env = tuple(extra_args), program, dict(env or {})
        self._process: subprocess.Popen | None = None
        self._mark, self._scratch, self._shared = "", "", set()
        self._stopping, self._lock = threading.Event(), threading.RLock()
        self._watcher: threading.Thread | None = None
        self._started_at = 0.0

    @property
    def url(self) -> str:
        """Where the server answers."""
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Id of the server's first process, None before the start."""
        return self._process.pid if self._process else None

    @property
    def pids(self) -> list[int]:
        """Ids of all living processes of this server."""
        return marked_processes(self._mark) if self._mark else []

    @property
    def command(self) -> list[str]:
        """The command line of the next (re)start."""
        entry = ["-m", "sglang.launch_server"] if self.device == "cuda" else [str(CPU_ENTRY)]
        given = {flag: value for flag, value in self._options.items() if value is not None}
        words = [str(word) for pair in given.items() for word in pair]
        return [*(self._program or [self.python, *entry]), *words, *_DEVICE_FLAGS[self.device], *self._extra]

    def alive(self) -> bool:
        """Whether the server's first process runs; SGLang ends it when one of its others dies."""
        return self._process is not None and self._process.poll() is None

    def healthy(self) -> bool:
        """Whether the server answers its health check with 200."""
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def start(self, timeout: float = 300.0) -> EngineProcess:
        """Launches the server and waits until it is ready.

        Raises:
            ConfigError: the interpreter does not exist, or the port is taken; nothing was started.
            EngineError: the server ended or was not ready in time; nothing of it is left.
        """
        self.launch()
        return self.wait_ready(timeout)

    def launch(self) -> EngineProcess:
        """`start` without the waiting, 15 s on two idle cores; raises ConfigError as `start` does."""
        self._stopping.clear()
        return self._launch()

    def _launch(self) -> EngineProcess:
        if shutil.which(self.command[0]) is None:
            raise ConfigError(
                f"rollout engine: expected the Python of the SGLang environment, got {self.command[0]!r}: "
                "create it with `make install` or name another one"
            )
        self._hold(hold_port(self.host, self.port))
        with self._lock:
            self._spawn()
        return self

    def _hold(self, port: socket.socket | None) -> None:
        if self._held is not None:
            self._held.close()
        self._held = port

    def _spawn(self) -> None:
        self._mark, self._started_at = uuid.uuid4().hex, time.monotonic()
        self._scratch = tempfile.mkdtemp(prefix="slime-ext-")  # SGLang leaves its sockets where TMPDIR points
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            log.write(f"{START_LINE} ({time.strftime('%F %T')}): {' '.join(self.command)}\n".encode())
            log.flush()
            self._process = spawn_bound(self.command, self._environment(), log)

    def _environment(self) -> dict[str, str]:
        ours = {
            "HF_HUB_OFFLINE": "1",
            "PYTHONSAFEPATH": "1",  # the directory of the entry holds modules with common names
            "PYTHONUNBUFFERED": "1",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # generating makes a check take 1 s
            "SPT_NOENV": "1",  # setproctitle leaves the environment, and with it our mark, readable
            "TMPDIR": self._scratch,
            MARK: self._mark,
        }
        inherited = {k: v for k, v in os.environ.items() if k not in _RANK_VARIABLES}
        return {**inherited, **ours, **_DEVICE_VARIABLES[self.device], **self._env}

    def wait_ready(self, timeout: float = 300.0) -> EngineProcess:
        """The waiting of `start`; raises EngineError as `start` does."""
        deadline = time.monotonic() + timeout
        while not self.healthy():
            if not self.alive() or time.monotonic() > deadline or self._stopping.is_set():
                raise self._start_failure()
            time.sleep(_POLL_S)
        self._shared = shared_memory_of(self.pids)
        return self

    def _start_failure(self) -> EngineError:
        seconds, code = time.monotonic() - self._started_at, self._process.poll() if self._process else None
        got = f"none after {seconds:.0f} s" if code is None else f"exit status {code} after {seconds:.0f} s"
        tail = last_lines(self.log_path, START_LINE)
        self._clear()
        return EngineError(
            f"rollout engine: expected a server at {self.url}, got {got}: {self.log_path}: {tail}"
        )

    def restart(self, timeout: float = 300.0) -> EngineProcess:
        """Ends what is left of the server and starts it again with the same flags; weights that were pushed
        have to be pushed again.

        Raises:
            ConfigError, EngineError: as for `start`.
        """
        with self._lock:
            self._clear()
            self.restarts += 1
            if self._stopping.is_set():
                raise EngineError(
                    f"rollout engine: expected no restart of {self.url} while it stops, got one"
                )
            self._launch()
        return self.wait_ready(timeout)

    def stop(self) -> None:
        """Ends the server, all its processes and the watcher; the port is free when it returns."""
        self._stopping.set()
        with self._lock:
            self._clear()
        if self._watcher and self._watcher is not threading.current_thread():
            self._watcher.join()
        with self._lock:
            self._clear()  # the watcher may have been in the middle of a restart
        self._hold(None)

    def _clear(self) -> None:
        if self._process is None:
            return
        self._shared |= shared_memory_of(self.pids)
        left = kill_marked(self._mark)
        if left:
            raise EngineError(
                f"rollout engine: expected its processes to end, got {left} alive: kill them by hand"
            )
        self._process.wait()
        self._process = None
        shutil.rmtree(self._scratch, ignore_errors=True)
        for file in self._shared:
            file.unlink(missing_ok=True)
        self._shared = set()

    def supervise(
        self,
        on_restart: Callable[[EngineProcess], None] | None = None,
        max_restarts: int = 3,
        timeout: float = 300.0,
    ) -> EngineProcess:
        """Watches the server in a thread and restarts it when it dies; call it after `start` or `launch`.

        Args:
            on_restart: called in the watcher's thread each time the server is ready again.
            max_restarts: afterwards the watcher gives up and leaves the reason in `failure`.
            timeout: seconds for one restart.
        """
        watch = threading.Thread(target=self._watch, args=(on_restart, max_restarts, timeout), daemon=True)
        self._watcher = watch
        watch.start()
        return self

    def _watch(self, on_restart: Callable[[EngineProcess], None] | None, limit: int, timeout: float) -> None:
        looked_at = 0.0
        while not self._stopping.wait(_POLL_S):
            if self.alive():
                if not self._shared and time.monotonic() - looked_at > 1:  # one that died has no names left
                    self._shared, looked_at = shared_memory_of(self.pids), time.monotonic()
                continue
            if self.restarts >= limit:
                self.failure = self.failure or self._start_failure()
                return
            self._try_restart(on_restart, timeout)

    def _try_restart(self, on_restart: Callable[[EngineProcess], None] | None, timeout: float) -> None:
        try:
            self.restart(timeout)
            self.failure = None
        except (ConfigError, EngineError) as error:
            self.failure = error
        else:
            if on_restart:
                on_restart(self)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
