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
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from slime_ext.errors import ConfigError, DataError, SlimeExtError
from slime_ext.folders import make_folder
from slime_ext.launcher.arguments import parse_args
from slime_ext.launcher.output.metrics_log import read_metrics
from slime_ext.launcher.rollout.processes import spawn_bound
from slime_ext.launcher.rollout.server import EngineProcess
from slime_ext.launcher.validation import validate
from slime_ext.launcher.validation.places import check_run, has_cuda
from slime_ext.launcher.worker import disk_full, how_to_go_on

LOCK_FILE = ".lock"
POLL_SECONDS = 0.1
GRACE_SECONDS = 10.0
GONE_SECONDS = 60.0
# SGLang's flags that have one of ours, --sglang-NAME.
OF_ENGINE = (
    *("dtype", "kv-cache-dtype", "attention-backend", "context-length", "max-running-requests"),
    *("max-total-tokens", "mem-fraction-static"),
)


def main(argv: Sequence[str]) -> int:
    """``slime-ext train``: returns 0 when the run is complete.

    Raises:
        SlimeExtError: one line that says what is wrong, before anything is started where that is possible.
    """
    # Validation imports the user's functions and with them torch, whose import swallows a KeyboardInterrupt.
    # Nothing has been started that would have to be ended.
    before = signal.signal(signal.SIGINT, lambda number, frame: os._exit(128 + number))
    try:
        args = parse_args(list(argv))
        validate(args)
    finally:
        signal.signal(signal.SIGINT, before)
    return run(args)


def run(args: argparse.Namespace) -> int:
    """Runs validated arguments: engine and ranks side by side until the ranks are done or something fails."""
    try:
        return _run(args)
    except KeyboardInterrupt:
        print(f"slime-ext: interrupted: {how_to_go_on(args.save)}", file=sys.stderr)
        raise
    except OSError as error:
        if disk_full(error) is None:
            raise
        raise DataError(
            f"--run-dir {args.run_path}: expected room on the disk, got {error.strerror}: make some"
        ) from error


def _run(args: argparse.Namespace) -> int:
    directory = Path(args.run_path)
    make_directories(args)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a KeyboardInterrupt
    started = time.monotonic()
    with ExitStack() as stack:
        claim(directory, "--run-name", stack)
        if Path(args.save).resolve() != directory.resolve():
            claim(Path(args.save), "--save", stack)
        check_run(args)  # once more: a run that ended meanwhile may have left something
        engine, args.engine_patience = None, patience(args)
        if args.sglang_server_url is None:
            engine = stack.enter_context(start_engine(args))
            args.sglang_server_url = engine.url
        text = json.dumps(vars(args), indent=1, sort_keys=True, default=str)
        (directory / "args.json").write_text(text + "\n")
        ranks = "a rank" if args.world_size == 1 else f"{args.world_size} ranks"
        print(
            f"slime-ext: run {args.run_name} in {directory}: starting {ranks}, engine at "
            f"{args.sglang_server_url}",
            flush=True,
        )
        for note in args.notes:
            print(f"slime-ext: {note}", flush=True)
        store = stack.enter_context(tempfile.TemporaryDirectory(prefix="slime-ext-"))
        reader, writer = (
            stack.enter_context(os.fdopen(end, mode)) for end, mode in zip(os.pipe(), "rw", strict=True)
        )
        os.set_blocking(reader.fileno(), False)
        ranks = start_ranks(args, directory, f"file://{store}/ranks", writer.fileno())
        stack.callback(stop_ranks, ranks)
        watch(ranks, engine, reader, args)
    minutes = (time.monotonic() - started) / 60
    print(f"slime-ext: done in {minutes:.1f} min{_reward(directory)}; results in {directory}: report.png")
    print(
        f"slime-ext: next: slime-ext {'analyze' if args.dump_details else 'report'} {directory}", flush=True
    )
    return 0


def _reward(directory: Path) -> str:
    """The run's first and last held-out reward; the training reward where none was held out."""
    rows = read_metrics(directory)
    name = next((name for row in rows for name in row if name.startswith("eval/")), "rollout/raw_reward")
    rewards = [row[name] for row in rows if row.get(name) is not None]
    return f": {name} {rewards[0]:.3f} -> {rewards[-1]:.3f}" if rewards else ""


def patience(args: argparse.Namespace) -> float:
    """Seconds that an engine which went away has to come back; one of another's nobody starts again here."""
    own = args.sglang_server_url is None
    return args.sglang_start_timeout if own else min(args.sglang_start_timeout, GONE_SECONDS)


def make_directories(args: argparse.Namespace) -> None:
    """Makes the directories that the run writes to.

    Raises:
        ConfigError: one that cannot be made or written.
    """
    for flag, path in {"--run-dir": args.run_path, "--save": args.save}.items():
        try:
            make_folder(Path(path))
            if not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise ConfigError(
                f"{flag} {path}: expected a directory that can be written, got {error.strerror}"
            ) from error


def claim(directory: Path, flag: str, stack: ExitStack) -> None:
    """Locks a directory of the run until `stack` is left or this process ends, however it ends.

    Raises:
        ConfigError: another run holds it.
    """
    lock = stack.enter_context((directory / LOCK_FILE).open("w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(
            f"{flag}: expected no other run in {directory}, got one that is under way: choose another"
        ) from error


def start_engine(args: argparse.Namespace) -> EngineProcess:
    """Launches SGLang with dummy weights; the trainer pushes its own before the first prompt.

    Returns at once: the model is built while the server starts.
    """
    # SGLang warms up with an English sentence, which a character tokenizer cannot read.
    extra = ["--load-format", "dummy", "--log-level", "warning", "--skip-server-warmup"]
    given = {name: getattr(args, f"sglang_{name.replace('-', '_')}") for name in OF_ENGINE}
    engine = EngineProcess(
        args.hf_checkpoint,
        log_path=Path(args.run_path) / "sglang.log",
        python=args.sglang_python,
        flags={**given, "random-seed": args.rollout_seed},
        switches=extra,
        device="cuda" if has_cuda() else "cpu",
        max_restarts=args.sglang_max_restarts,
        on_restart=lambda e: print(f"slime-ext: rollout engine restarted ({e.restarts})", flush=True),
    )
    return engine.launch()


def start_ranks(args: argparse.Namespace, directory: Path, store: str, errors: int) -> list[subprocess.Popen]:
    """One process per rank, which meet at `store` and write why they end to the pipe `errors`.

    Rank 0 keeps the terminal; what else ranks have to say goes to rank_N.log.
    """
    arguments = [str(directory / "args.json"), store, str(errors)]
    ranks = []
    for rank in range(args.world_size):
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(args.world_size),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        with _log(directory, rank).open("wb") as log:
            command = [sys.executable, "-m", "slime_ext.launcher.worker", *arguments]
            output = sys.stdout if rank == 0 else log
            ranks.append(spawn_bound(command, env, output, errors=log, pass_fds=[errors]))
    return ranks


def watch(
    ranks: Sequence[subprocess.Popen], engine: EngineProcess | None, errors: TextIO, args: argparse.Namespace
) -> None:
    """Waits until every rank has ended with status 0.

    Raises:
        SlimeExtError: the first line that a rank wrote to `errors`, or what is known of its end; or the
            engine gave up.
    """
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks):
            break
        if engine is not None and engine.failure is not None:
            raise engine.failure
        time.sleep(POLL_SECONDS)
    failed = [i for i, rank in enumerate(ranks) if rank.poll()]
    if failed:
        if line := errors.readline().strip():
            raise SlimeExtError(line)
        raise _killed(failed[0], ranks[failed[0]].returncode, args)


def _killed(rank: int, status: int, args: argparse.Namespace) -> SlimeExtError:
    end = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
    log = _log(Path(args.run_path), rank)
    return SlimeExtError(
        f"rank {rank}: expected to finish, got {end}: see {log}, then {how_to_go_on(args.save)}"
    )


def _log(directory: Path, rank: int) -> Path:
    return directory / f"rank_{rank}.log"


def stop_ranks(ranks: Sequence[subprocess.Popen]) -> None:
    """Terminates the ranks that still run, and kills those that do not end within ten seconds."""
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
