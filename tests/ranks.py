"""Runs one function on several real gloo processes and returns what each rank returned."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

GROUP = "miles-wheel"  # of xdist: one worker has the server of all ranks, and the tests of that host


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    before: Callable[[], Any] | None = None,
) -> list[Any]:
    """``[function(*args) on rank 0, on rank 1, …]``, in an initialised gloo group, one thread per rank.

    Args:
        function: importable by name (module level).
        args: picklable.
        timeout: seconds for all ranks together; they are killed after it.
        before: called once, in the process that is then forked into the ranks; for what they all import.

    Raises:
        AssertionError: a rank raised, died or did not end in time, with that rank's traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = server().Process(target=_fork, args=(function, world_size, folder, args, before))
        ranks.start()
        try:
            ranks.join(timeout)
            errors = _errors(Path(folder))
            if ranks.is_alive():
                raise AssertionError(f"ranks still running after {timeout} s: {errors or 'no error so far'}")
            if ranks.exitcode:
                raise AssertionError(errors or f"exit code {ranks.exitcode}")
            return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]
        finally:
            if ranks.is_alive():
                os.killpg(ranks.pid, signal.SIGKILL)
                ranks.join()


def server() -> multiprocessing.context.ForkServerContext:
    """Returns the context whose processes are forks of the server, which has imported what ranks need."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the server when it starts
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


def each(function: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """``[function(*case), ...]`` on a rank, with Megatron's groups made anew: one start serves many cases."""
    from megatron.core import parallel_state

    out = []
    for case in cases:
        out.append(function(*case))
        parallel_state.destroy_model_parallel()
    return out


def _fork(
    function: Callable[..., Any],
    world_size: int,
    folder: str,
    args: tuple[Any, ...],
    before: Callable[[], Any] | None,
) -> None:
    """Forks the ranks from this process, which has imported the function's module, and waits for them."""
    os.setpgid(0, 0)
    if before:
        before()
    for rank in range(world_size):
        if os.fork() == 0:
            _rank(function, rank, world_size, folder, args)
    for _ in range(world_size):
        if os.wait()[1]:
            time.sleep(0.5)  # the first failure makes others fail: let them write why
            os.killpg(0, signal.SIGKILL)


def _rank(
    function: Callable[..., Any], rank: int, world_size: int, folder: str, args: tuple[Any, ...]
) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    try:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
        )
        result = function(*args)
        torch.save(result, Path(folder) / f"{rank}.pt")
        torch.distributed.barrier()  # none leaves while another still talks to it
    except BaseException:
        (Path(folder) / f"{rank}.error").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)  # gloo threads may hang in the interpreter's shutdown


def _errors(folder: Path) -> str:
    """Tracebacks, the one that failed first on top."""
    files = sorted(folder.glob("*.error"), key=lambda file: file.stat().st_mtime)
    return "\n".join(f"rank {file.stem}:\n{file.read_text()}" for file in files)
