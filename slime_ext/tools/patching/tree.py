"""A checkout of the host: read once, edited in memory, written so that a crash in between loses nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from slime_ext.errors import ConfigError, DataError

HOSTS = ("slime", "miles")
BESIDE = ".slime-ext-new"


class Tree:
    """The files of one checkout as they were read and as they shall become.

    Raises:
        ConfigError: the folder holds neither slime nor miles.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.host = next((name for name in HOSTS if (self.root / name / "backends").is_dir()), "")
        if not self.host:
            raise ConfigError(
                f"{self.root}: expected a checkout of slime or miles, got no slime/backends: "
                "name the folder that has the host's setup.py"
            )
        self.before: dict[str, bytes | None] = {}
        self.after: dict[str, bytes] = {}

    def read(self, file: str) -> bytes | None:
        """The file as edited so far; None where this host has no such file."""
        if not file.startswith(f"{self.host}/"):
            return None
        if file not in self.before:
            self.before[file] = self._on_disk(file)
        return self.after.get(file, self.before[file])

    def edit(self, file: str, source: bytes) -> None:
        """Takes a new text of a file; commit replaces files in the order of their first edit."""
        self.after[file] = source

    def changed(self) -> list[str]:
        return [file for file, source in self.after.items() if source != self.before[file]]

    def commit(self) -> list[str]:
        """Writes every changed file, or none.

        All new texts are on disk beside the old ones before the first old one is replaced; a failure puts
        back what was replaced. A process killed between two renames leaves whole files, which apply and
        revert both understand.

        Raises:
            DataError: a file changed under us, or cannot be written.
        """
        files = self.changed()
        for file in files:
            if self._on_disk(file) != self.before[file]:
                raise DataError(f"{file}: expected the file as read, got a newer one: run again")
        try:
            for file in files:
                self._write_beside(file, self.after[file])
            self._replace(files)
        except OSError as error:
            raise DataError(
                f"{error.filename or self.root}: expected a writable file, got '{error.strerror}': "
                "nothing was changed"
            ) from error
        finally:
            for file in files:
                self._beside(file).unlink(missing_ok=True)
        return files

    def _replace(self, files: list[str]) -> None:
        done: list[str] = []
        try:
            for file in files:
                self._beside(file).replace(self._target(file))
                done.append(file)
        except BaseException:  # an interrupt too must not leave half a patch
            for file in done:
                self._write_beside(file, self.before[file] or b"")
                self._beside(file).replace(self._target(file))
            raise

    def _target(self, file: str) -> Path:
        return (self.root / file).resolve()  # a rename must not turn a link into a file

    def _beside(self, file: str) -> Path:
        target = self._target(file)
        return target.with_name(target.name + BESIDE)

    def _write_beside(self, file: str, source: bytes) -> None:
        with self._beside(file).open("wb") as out:
            out.write(source)
            out.flush()
            os.fsync(out.fileno())
        shutil.copymode(self._target(file), self._beside(file))

    def _on_disk(self, file: str) -> bytes | None:
        path = self.root / file
        try:
            return path.read_bytes() if path.exists() else None
        except OSError as error:
            raise DataError(
                f"{path}: expected a readable file, got '{error.strerror}': check its permissions"
            ) from error


def is_dirty(root: Path, file: str, source: bytes) -> bool:
    """Whether git knows this file with another content than ``source``. Without git, or for a file that git
    does not know, there is nothing to compare with and the answer is no."""
    committed = _git(root, ["rev-parse", "--verify", "--quiet", f"HEAD:./{file}"])
    if committed is None:
        return False
    return _git(root, ["hash-object", "--stdin", f"--path={file}"], source) != committed


def _git(root: Path, words: list[str], stdin: bytes = b"") -> bytes | None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        run = subprocess.run(
            ["git", "-C", str(root), *words], input=stdin, capture_output=True, env=clean, check=False
        )
    except OSError:
        return None
    return run.stdout.strip() if run.returncode == 0 else None
