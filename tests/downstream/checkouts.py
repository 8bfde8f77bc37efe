"""Real hosts: the wheel of miles, where it is installed, and the checkouts that the environment names.

HOSTS is a folder of them, called slime-RELEASE and miles-RELEASE; SLIME_DIR and MILES_DIR name one more each.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

from slime_ext.config.files import ROOTS
from tests.downstream.drift import Tree

PATCHES = ROOTS[0] / "patches"
WHEEL = "wheel"  # its release: miles and Megatron-LM, without train.py and scripts


@dataclass(frozen=True)
class Checkout:
    """A host's tree, as it is; tests never write to it.

    Args:
        name: slime or miles.
        release: what follows the name in its folder's.
    """

    name: str
    release: str
    folder: Path

    @classmethod
    def at(cls, folder: Path) -> Checkout:
        """The one in a folder that is called slime-RELEASE or miles-RELEASE."""
        name, _, release = folder.name.partition("-")
        return cls(name, release, folder.resolve())

    def __str__(self) -> str:
        return f"{self.name} {self.release or self.folder}"

    @cached_property
    def tree(self) -> Tree:
        """Its source."""
        return Tree(self.folder)

    def module(self, name: str) -> str:
        """The text of one of its modules; empty where it has none."""
        path = (self.folder / name.replace(".", "/")).with_suffix(".py")
        return path.read_text() if path.is_file() else ""


def checkouts(*names: str) -> list[Checkout]:
    """The wheel and those that the environment names, of all hosts or of the named ones."""
    found = [Checkout("miles", WHEEL, Path(sys.prefix, "miles"))]
    if place := os.environ.get("HOSTS"):
        found += map(Checkout.at, sorted(Path(place).resolve().iterdir()))
    for name in ("slime", "miles"):
        if folder := os.environ.get(f"{name.upper()}_DIR"):
            found.append(Checkout(name, "", Path(folder).resolve()))
    return [
        one for one in found if one.name in (names or ("slime", "miles")) and (one.folder / one.name).is_dir()
    ]


def named(*names: str) -> list:
    """One parameter for each of ``checkouts``; else one that is skipped."""
    ids = {one: f"{one.name}-{one.release or 'dir'}" for one in checkouts(*names)}
    together = pytest.mark.xdist_group  # what a host's tests share is made by one worker
    found = [pytest.param(one, id=key, marks=together(key)) for one, key in ids.items()]
    skipped = pytest.mark.skip("no wheel of miles, and HOSTS, SLIME_DIR and MILES_DIR name no checkout")
    return found or [pytest.param(None, id="none", marks=skipped)]


def copied(checkout: Checkout, into: Path) -> Path:
    """A copy of the host's package below `into`, to be patched."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(checkout.folder / checkout.name, into / checkout.name, ignore=ignore)
    return into


def patch_of(folder: Path) -> Path:
    """The diff of ``patches/`` for a host's tree."""
    name = "miles-rl-0.0.2" if folder == Path(sys.prefix, "miles") else folder.name
    return PATCHES / f"{name}.patch"


def apply_patch(folder: Path, copy: Path, *flags: str) -> None:
    """Applies the diff of a host's tree to a copy of it."""
    alone = os.environ | {"GIT_CEILING_DIRECTORIES": str(copy.parent)}  # no checkout around it counts
    command = ["git", "apply", *flags, str(patch_of(folder))]
    subprocess.run(command, cwd=copy, env=alone, check=True, capture_output=True)
