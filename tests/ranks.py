"""Runs one function on several real gloo processes and returns what each rank returned."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

GROUP = "miles-wheel"  # of xdist: one worker has the server of all ranks, and the tests of that host


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """``[function(*args) on rank 0, on rank 1, …]``, in an initialised gloo group, one thread per rank.

    Args:
        function: importable by name (module level).
        args: picklable.
        timeout: seconds for all ranks together; they are killed after it.

    Raises:
        AssertionError: a rank raised, died or did not end in time, with that rank's traceback.
    """
    context = server()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(function, rank, world_size, folder, args))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            _wait(ranks, Path(folder), timeout)
            return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]
        finally:
            for process in ranks:
                process.kill()
                process.join()


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


def _wait(ranks: list[Any], folder: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while any(process.is_alive() for process in ranks):
        if any(process.exitcode for process in ranks):
            time.sleep(0.5)  # the first failure makes others fail: let them write why
            break
        if time.monotonic() > deadline:
            raise AssertionError(
                f"ranks still running after {timeout} s: {_errors(folder) or 'no error so far'}"
            )
        time.sleep(0.01)
    if any(process.exitcode for process in ranks):
        raise AssertionError(_errors(folder) or f"exit codes {[process.exitcode for process in ranks]}")


def _errors(folder: Path) -> str:
    """Tracebacks, the one that failed first on top."""
    files = sorted(folder.glob("*.error"), key=lambda file: file.stat().st_mtime)
    return "\n".join(f"rank {file.stem}:\n{file.read_text()}" for file in files)
