"""The diffs of patches/ are those that were tried on the hosts' trees (HOSTS), by their digests; on and off.

That a patched host gives the numbers of ``init``: test_layouts.
"""

from __future__ import annotations

import ast
import hashlib

import pytest

from tests.downstream.checkouts import PATCHES, apply_patch, copied, patch_of

LINES = {"slime": 7, "miles": 4}  # that a host lacks; miles brings its versions to training itself
DIGESTS = {
    "miles-31f1ca9": "2960eb7ca31f082d",
    "miles-rl-0.0.2": "2bccd573aaf1d410",
    "slime-624b824": "331730df81d2966b",
    "slime-v0.2.0": "545ee9404d11ca55",
    "slime-v0.2.1": "4289306376470054",
    "slime-v0.2.2": "ec2d93c849f25650",
    "slime-v0.2.3": "6c4128035d069efe",
    "slime-v0.2.4": "d02ac779f1cc732f",
    "slime-v0.3.0": "2aa70423de364808",
    "slime-v0.3.1": "e84e1cec789236de",
}


def test_the_diffs_are_those_that_were_tried():
    found = {p.stem: hashlib.sha256(p.read_bytes()).hexdigest()[:16] for p in PATCHES.iterdir()}
    assert found == DIGESTS


def python_files(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*.py"))}


def test_a_diff_adds_its_lines_and_comes_off(host, tmp_path):
    if not patch_of(host.folder).is_file():
        pytest.skip("patches/ has none for this tree")
    before = python_files(copy := copied(host, tmp_path))
    apply_patch(host.folder, copy)
    patched = python_files(copy)
    changed = [path for path in before if before[path] != patched[path]]
    added = sum(len(patched[p].splitlines()) - len(before[p].splitlines()) for p in changed)
    assert added == LINES[host.name]
    for path in changed:
        ast.parse(patched[path], str(path))
    apply_patch(host.folder, copy, "-R")
    assert python_files(copy) == before
