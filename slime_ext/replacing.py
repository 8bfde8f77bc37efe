"""Replaces a whole file at once."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file that takes the place of ``path`` when the block ends.

    Until then ``path`` stays as it is, even if this process is killed. If the block raises, the new file is
    removed. The new file gets the mode of ``path``, and also its owner if this user may change owners. If
    ``path`` is a link, the file that it leads to is replaced.
    """
    target = path.resolve()
    beside = target.with_name(f".{secrets.token_hex(8)}.tmp")  # random, so that nobody can put a link there
    with beside.open("xb") as file:
        try:
            with suppress(FileNotFoundError):
                replaced = target.stat()
                with suppress(PermissionError):
                    os.fchown(file.fileno(), replaced.st_uid, replaced.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(replaced.st_mode))  # last, because chown clears bits
            yield file
            file.flush()
            beside.replace(target)
        except BaseException:
            beside.unlink()
            raise
