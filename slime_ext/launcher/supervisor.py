"""The parent of a run: checks the arguments, starts the rollout engine and the ranks, and ends them all.

Imports no torch. Engine and ranks run in sessions of their own and die with this process, also by kill -9.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from slime_ext.errors import ConfigError, SlimeExtError
from slime_ext.launcher.arguments import parse_args
from slime_ext.launcher.rollout.processes import hold_port, spawn_bound
from slime_ext.launcher.rollout.server import EngineProcess
from slime_ext.launcher.validation import validate
from slime_ext.launcher.validation.places import has_cuda
from slime_ext.launcher.worker import ERROR_FILE

LOCK_FILE = ".lock"
POLL_SECONDS = 0.1
GRACE_SECONDS = 10.0


def main(argv: Sequence[str]) -> int:
    """``slime-ext train``: returns 0 when the run is complete.

    Raises:
        SlimeExtError: one line that says what is wrong, before anything is started where that is possible.
    """
    # Validation imports the user's functions and with them torch, whose import swallows a KeyboardInterrupt.
    before = signal.signal(signal.SIGINT, _leave)
    try:
        args = parse_args(list(argv))
        validate(args)
    finally:
        signal.signal(signal.SIGINT, before)
    return run(args)


def run(args: argparse.Namespace) -> int:
    """Runs validated arguments: engine and ranks side by side until the ranks are done or something fails."""
    directory = Path(args.run_path)
    make_directories(args)
    signal.signal(signal.SIGTERM, _interrupt)
    started = time.monotonic()
    with ExitStack() as stack:
        claim(directory, stack)
        (directory / ERROR_FILE).unlink(missing_ok=True)
        engine = None
        if args.sglang_server_url is None:
            engine = start_engine(args)
            stack.callback(engine.stop)
            args.sglang_server_url = engine.url
        _write_args(args, directory / "args.json")
        print(
            f"slime-ext: run {args.run_name} in {directory}, engine at {args.sglang_server_url}", flush=True
        )
        for note in args.notes:
            print(f"slime-ext: {note}", flush=True)
        rendezvous = stack.enter_context(hold_port())
        ranks = start_ranks(args, directory, rendezvous.getsockname()[1])
        stack.callback(stop_ranks, ranks)
        watch(ranks, engine, directory)
    minutes = (time.monotonic() - started) / 60
    print(
        f"slime-ext: done in {minutes:.1f} min; results in {directory} (report.png, metrics.jsonl)",
        flush=True,
    )
    return 0


def make_directories(args: argparse.Namespace) -> None:
    """Those that the run writes to, before anything is started.

    Raises:
        ConfigError: one that cannot be made or written.
    """
    wanted = {"--run-dir": args.run_path, "--save": args.save, "--tb-project-name": args.tensorboard_dir}
    for dest in ("save_debug_rollout_data", "save_debug_train_data"):
        if template := getattr(args, dest):
            wanted["--" + dest.replace("_", "-")] = template.partition("{")[0].rpartition("/")[0] or "."
    for flag, path in wanted.items():
        try:
            Path(path).mkdir(parents=True, exist_ok=True)
            if not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise ConfigError(
                f"{flag} {path}: expected a directory that can be written, got {error.strerror}"
            ) from error


def claim(directory: Path, stack: ExitStack) -> None:
    """Holds the run's directory until `stack` is left or this process ends, however it ends.

    Raises:
        ConfigError: another run holds it.
    """
    lock = stack.enter_context((directory / LOCK_FILE).open("w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(
            f"--run-name {directory.name}: expected no other run in {directory}, got one that is under way: "
            "choose another name"
        ) from error


def start_engine(args: argparse.Namespace) -> EngineProcess:
    """Launches SGLang with dummy weights; the trainer pushes its own before the first prompt.

    Returns at once: the model is built while the server starts.
    """
    # SGLang warms up with an English sentence, which a character tokenizer cannot read.
    extra = ["--load-format", "dummy", "--log-level", "warning", "--skip-server-warmup"]
    if args.sglang_attention_backend:
        extra += ["--attention-backend", args.sglang_attention_backend]
    engine = EngineProcess(
        args.hf_checkpoint,
        port=args.sglang_port,
        dtype=args.sglang_dtype,
        log_path=Path(args.run_path) / "sglang.log",
        python=args.sglang_python,
        extra_args=extra,
        context_length=args.sglang_context_length,
        max_running_requests=args.sglang_max_running_requests,
        max_total_tokens=args.sglang_max_total_tokens,
        mem_fraction=args.sglang_mem_fraction_static,
        seed=args.rollout_seed,
        device="cuda" if has_cuda() else "cpu",
    )
    engine.launch()
    return engine.supervise(
        max_restarts=args.sglang_max_restarts,
        timeout=args.sglang_start_timeout,
        on_restart=lambda e: print(f"slime-ext: rollout engine restarted ({e.restarts})", flush=True),
    )


def start_ranks(args: argparse.Namespace, directory: Path, port: int) -> list[subprocess.Popen]:
    """One process per rank, which meet at `port`; rank 0 keeps the terminal, errors go to rank_N.log."""
    command = [sys.executable, "-m", "slime_ext.launcher.worker", str(directory / "args.json")]
    ranks = []
    for rank in range(args.world_size):
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(args.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        with _log(directory, rank).open("wb") as log:
            ranks.append(spawn_bound(command, env, sys.stdout if rank == 0 else log, errors=log))
    return ranks


def watch(ranks: Sequence[subprocess.Popen], engine: EngineProcess | None, directory: Path) -> None:
    """Until every rank has ended well.

    Raises:
        SlimeExtError: the line that a rank left, or what is known of its end; or the engine gave up.
    """
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks):
            break
        if engine is not None and engine.failure is not None:
            raise engine.failure
        time.sleep(POLL_SECONDS)
    failed = [i for i, rank in enumerate(ranks) if rank.poll()]
    if failed:  # others fail because one did, and write that later than it wrote why
        first = min(failed, key=lambda i: _log(directory, i).stat().st_mtime_ns)
        raise _failure(first, ranks[first].returncode, directory)


def _failure(rank: int, status: int, directory: Path) -> SlimeExtError:
    time.sleep(2 * POLL_SECONDS)  # another rank may have the line that explains it
    message = directory / ERROR_FILE
    if message.is_file():
        return SlimeExtError(message.read_text().strip())
    log = _log(directory, rank)
    end = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
    return SlimeExtError(
        f"rank {rank}: expected to finish, got {end} ({_last_line(log)}): see {log}; "
        f"continue with --load {directory / 'checkpoints'}"
    )


def _log(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank}.log"


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][-300:] if lines else "nothing logged"


def stop_ranks(ranks: Sequence[subprocess.Popen]) -> None:
    """Ends what still runs, first asking, then by force."""
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def _write_args(args: argparse.Namespace, path: Path) -> None:
    path.write_text(json.dumps(vars(args), indent=1, sort_keys=True, default=str) + "\n")


def _leave(signum: int, frame: FrameType | None) -> None:
    os._exit(128 + signum)  # nothing has been started


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
