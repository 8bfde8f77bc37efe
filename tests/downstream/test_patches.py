"""The diffs of patches/ are those that were tried on the hosts' trees (HOSTS), by their digests."""

from __future__ import annotations

import hashlib

import pytest

from tests.downstream.checkouts import PATCHES, apply_patch, named, patch_of

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


@pytest.mark.parametrize("host", named())
def test_a_diff_applies_to_its_host(host):
    assert patch_of(host.folder).is_file()
    apply_patch(host.folder, host.folder, "--check")
