"""A SGLang server as a child process that never outlives its parent and comes back when it dies."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slime_ext.errors import EngineError
from slime_ext.launcher.rollout.client import EngineClient
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
HOST = "127.0.0.1"
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

    The server runs in a session of its own, appends its output to `log_path` and dies with this process, even
    when that is killed with -9. Every process it spawns carries one mark in its environment, by which `stop`
    finds them all. A thread starts it again when it dies after it was ready once; a server that was never
    ready has a fault that a restart does not mend.

    Args:
        model_path: directory in Hugging Face format.
        python: interpreter of the environment that SGLang is installed in.
        flags: SGLang's by name without dashes, {"context-length": 64}; one that is None is left out.
        switches: further words of the command line.
        device: "cpu" runs the entry of this package, "cuda" `python -m sglang.launch_server`.
        program: words that replace interpreter and entry.
        max_restarts: afterwards the reason of the last end is left in `failure`.
        on_restart: called in the watching thread each time the server is ready again.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        log_path: str | Path = "sglang.log",
        python: str | Path = sys.executable,
        flags: Mapping[str, object] | None = None,
        switches: Sequence[str] = (),
        device: str = "cpu",
        program: Sequence[str] | None = None,
        max_restarts: int = 3,
        on_restart: Callable[[EngineProcess], None] = lambda engine: None,
    ) -> None:
        self._held = hold_port(HOST)  # until `stop`, also between two starts
        self.port = self._held.getsockname()[1]
        self.url = f"http://{HOST}:{self.port}"
        self._client = EngineClient(self.url)
        self.log_path, self.device = Path(log_path), device
        self.restarts, self.failure = 0, None
        entry = ["-m", "sglang.launch_server"] if device == "cuda" else [str(CPU_ENTRY)]
        given = {"model-path": model_path, "host": HOST, "port": self.port, **(flags or {})}
        pairs = [(f"--{name}", str(value)) for name, value in given.items() if value is not None]
        words = [word for pair in pairs for word in pair]
        self.command = [*(program or [str(python), *entry]), *_DEVICE_FLAGS[device], *words, *switches]
        self._max_restarts, self._on_restart = max_restarts, on_restart
        self._process: subprocess.Popen | None = None
        self._mark, self._scratch, self._shared = "", "", set()
        self.ready = threading.Event()  # as long as the server answers
        self._stopping = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """Id of the server's first process, None where none was started."""
        return self._process.pid if self._process else None

    @property
    def pids(self) -> list[int]:
        """Ids of all living processes of this server."""
        return marked_processes(self._mark) if self._mark else []

    def alive(self) -> bool:
        """Whether the server's first process runs; SGLang ends it when one of its others dies."""
        return self._process is not None and self._process.poll() is None

    def healthy(self) -> bool:
        """Whether the server answers its health check with 200."""
        return self._client.health()

    def launch(self) -> EngineProcess:
        """Starts the server and returns at once; it is ready 15 s later on two idle cores."""
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def stop(self) -> None:
        """Ends the server, all its processes and the watcher; the port is free when it returns."""
        self._stopping.set()
        if self._watcher is not None:
            self._watcher.join()
        self._held.close()

    def _watch(self) -> None:
        """Starts the server, waits for its end, clears up after it, and again."""
        try:
            while True:
                self._spawn()
                self._wait_for_its_end()
                status, was_ready = self._process.poll(), self.ready.is_set() or self.restarts > 0
                self._clear()
                if self._stopping.is_set():
                    return
                if not was_ready or self.restarts >= self._max_restarts:
                    raise self._ended(f"exit status {status}, restarted {self.restarts} times")
                self.restarts += 1
        except (OSError, EngineError) as error:
            self.failure = error if isinstance(error, EngineError) else self._ended(str(error))

    def _wait_for_its_end(self) -> None:
        looked_at = 0.0
        while self.alive() and not self._stopping.wait(_POLL_S):
            if time.monotonic() - looked_at > 1:  # one that died has no names left
                self._shared |= shared_memory_of(self.pids)
                looked_at = time.monotonic()
            if not self.ready.is_set() and self.healthy():
                self.ready.set()
                if self.restarts:
                    self._on_restart(self)

    def _ended(self, how: str) -> EngineError:
        tail = last_lines(self.log_path, START_LINE)
        return EngineError(
            f"rollout engine: expected a server at {self.url}, got {how}: {self.log_path}: {tail}"
        )

    def _spawn(self) -> None:
        self._mark = uuid.uuid4().hex
        self._scratch = tempfile.mkdtemp(prefix="slime-ext-")  # SGLang leaves its sockets where TMPDIR points
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            log.write(f"{START_LINE} ({time.strftime('%F %T')}): {' '.join(self.command)}\n".encode())
            log.flush()
            self._process = spawn_bound(self.command, self._environment(), log)

    def _environment(self) -> dict[str, str]:
        ours = {
            "HF_HUB_OFFLINE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONSAFEPATH": "1",  # the directory of the entry holds modules with common names
            "PYTHONUNBUFFERED": "1",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # generating makes a check take 1 s
            "SPT_NOENV": "1",  # setproctitle leaves the environment, and with it our mark, readable
            "TMPDIR": self._scratch,
            MARK: self._mark,
        }
        inherited = {k: v for k, v in os.environ.items() if k not in _RANK_VARIABLES}
        return {**inherited, **ours, **_DEVICE_VARIABLES[self.device]}

    def _clear(self) -> None:
        """Ends what is left of the server, of all its processes and files."""
        self.ready.clear()
        if left := kill_marked(self._mark):
            raise EngineError(
                f"rollout engine: expected its processes to end, got {left} alive: kill them by hand"
            )
        self._process.wait()
        self._process = None
        shutil.rmtree(self._scratch, ignore_errors=True)
        for file in self._shared:
            file.unlink(missing_ok=True)
        self._shared = set()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
