"""One training rank: ``python -m slime_ext.launcher.worker ARGS.json STORE PIPE``, started by the supervisor.

What stops it goes as one line to the file descriptor PIPE, which no full disk closes; an error that is not
the user's leaves its traceback on standard error too, which the supervisor keeps in ``rank_N.log``.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import logging
import os
import sys
import traceback
import warnings
from pathlib import Path

from slime_ext.errors import SlimeExtError
from slime_ext.launcher.output.checkpoint import iterations

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def main(argv: list[str]) -> int:
    """Reads the resolved arguments and runs the loop; the exit status."""
    args = argparse.Namespace(**json.loads(Path(argv[0]).read_text()))
    warnings.filterwarnings("ignore", module="megatron|torch|transformers")
    # What our modules warn of (a correction that counts a ratio twice, say) belongs before the user's eyes.
    logging.basicConfig(format="slime-ext: %(message)s", stream=sys.stdout)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from slime_ext.launcher import loop

        loop.run(args, store=argv[1])
    except BaseException as error:
        os.write(int(argv[2]), f"{last_words(error, args)}\n".encode())
        if isinstance(error, SlimeExtError):
            return 2
        with contextlib.suppress(OSError):
            traceback.print_exc()
        return 1
    return 0


def last_words(error: BaseException, args: argparse.Namespace) -> str:
    """Why the rank ends, in one line."""
    if full := disk_full(error):
        return (
            f"--run-dir {args.run_path}: expected room on the disk, got {full}: make some, then "
            f"{how_to_go_on(args.save)}"
        )
    if isinstance(error, SlimeExtError):
        return str(error)
    rank = os.environ.get("RANK", "0")
    reason = (str(error).splitlines() or [""])[0][:300]
    return (
        f"rank {rank}: expected to finish, got {type(error).__name__}: {reason}: see "
        f"{Path(args.run_path) / f'rank_{rank}.log'}, then {how_to_go_on(args.save)}"
    )


def how_to_go_on(save: str) -> str:
    """What to do next: continue from the newest checkpoint, where there is one."""
    return f"continue with the same command and --load {save}" if iterations(save) else "start again"


def disk_full(error: BaseException | None) -> str | None:
    """What the system said of a full disk; None where that is not what happened."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return f"{os.strerror(error.errno)} ({error.filename or 'while writing'})"
        for said in map(os.strerror, FULL):
            if said in str(error):  # safetensors has an error class of its own
                return said
        error = error.__cause__ or error.__context__
    return None


if __name__ == "__main__":
    status = main(sys.argv[1:])
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Not sys.exit: after an error the other ranks never arrive where the process group would wait for them.
    os._exit(status)
