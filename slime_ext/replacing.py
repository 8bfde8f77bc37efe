"""Replaces a file whole."""

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
    """Opens a new file, which takes the place of ``path`` when the block ends.

    Until then ``path`` stays as it is, also if this process is killed. If the block raises, the new file is
    removed. It gets the mode of ``path``, and its owner where this user may give files away. If ``path`` is a
    link, the file that it leads to is replaced.
    """
    target = path.resolve()
    beside = target.with_name(f".{secrets.token_hex(8)}.tmp")  # a name that nobody can have made a link of
    with beside.open("xb") as file:
        try:
            with suppress(FileNotFoundError):
                replaced = target.stat()
                with suppress(PermissionError):
                    os.fchown(file.fileno(), replaced.st_uid, replaced.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(replaced.st_mode))  # last: chown takes bits away
            yield file
            file.flush()
            beside.replace(target)
        except BaseException:
            beside.unlink()
            raise
