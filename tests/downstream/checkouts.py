"""Checkouts of real hosts that the environment names: SLIME_GIT and MILES_GIT are repositories (bare or not),
SLIME_DIR and MILES_DIR folders."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

REPOSITORIES = {"slime": os.environ.get("SLIME_GIT"), "miles": os.environ.get("MILES_GIT")}
FOLDERS = {"slime": os.environ.get("SLIME_DIR"), "miles": os.environ.get("MILES_DIR")}
RELEASES = {"slime": ("v0.2.0", "v0.2.4", "v0.3.0", "v0.3.1", "HEAD"), "miles": ("HEAD",)}


def git(repository: str, *words: str) -> bytes:
    """What a git command writes."""
    return subprocess.run(["git", "-C", repository, *words], check=True, capture_output=True).stdout


def extract(name: str, release: str, folder: Path, *more: str) -> Path:
    """The host's package at a release, and `more` of its files, below `folder`."""
    written = git(REPOSITORIES[name], "archive", release, name, *more)
    with tarfile.open(fileobj=io.BytesIO(written)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def named() -> list:
    """One parameter (host, release) for each checkout that is named; else one that is skipped."""
    found = [(name, r) for name, repository in REPOSITORIES.items() if repository for r in RELEASES[name]]
    found += [(name, "") for name, folder in FOLDERS.items() if folder and not REPOSITORIES[name]]
    if found:
        return [pytest.param(pair, id="-".join(filter(None, pair))) for pair in found]
    return [
        pytest.param(
            None, id="none", marks=pytest.mark.skip("SLIME_GIT, SLIME_DIR, MILES_DIR name no checkout")
        )
    ]


def of_host(name: str) -> list:
    """Those of ``named`` that are this host's, or the one that is skipped."""
    return [param for param in named() if param.values[0] is None or param.values[0][0] == name]


def folder_of(pair: tuple[str, str], place: Path, *more: str) -> Path:
    """Where the checkout lies; a release, and `more` of its files, is extracted to `place`."""
    name, release = pair
    return extract(name, release, place, *more) if release else Path(FOLDERS[name]).resolve()
