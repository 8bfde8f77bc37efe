"""Other systems' blocks: a golden text (tests/golden.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from slime_ext.config.foreign import SYSTEMS
from slime_ext.config.load import load_config
from slime_ext.errors import ConfigError
from slime_ext.tools.convert import CONVERTED, read
from tests.golden import pairs


def block_answer(line):
    """Native keys, what the host's flags must say, and notes; or the refusal, which is the loader's where the
    system's own keys are right."""
    system, _, block = line.partition(" ")
    try:
        reading = read(system, yaml.safe_load(block))
        load_config(reading.mapping)
    except ConfigError as error:
        assert str(error).startswith((f"{system}.", f"{system}:", "slime_ext."))
        return [str(error)]
    found = [reading.mapping, *([{"needs": reading.args}] if reading.args else [])]
    keys = [yaml.safe_dump(x, sort_keys=False, default_flow_style=True, width=10**6).strip() for x in found]
    return [*keys, *(f"note: {note}" for note in reading.notes)]


def test_other_systems_blocks_are_read_as_written_down():
    """A system and its block, and what both are here."""
    answers = pairs(Path(__file__).parent / "golden/blocks.txt", block_answer)
    assert len(answers) > 200


def test_the_loader_knows_the_names_of_all_systems():
    assert set(SYSTEMS) == set(CONVERTED)


WEIGHS = {"rollout_is": "token", "rollout_is_threshold": 1.5}


@pytest.mark.parametrize(
    ("block", "lacks"),
    [
        ({"bypass_mode": True}, True),
        ({"bypass_mode": True, "loss_type": "ppo_clip", **WEIGHS}, True),
        ({"bypass_mode": True, "loss_type": "reinforce"}, False),
        ({"rollout_is": "token"}, False),
    ],
    ids=str,
)
def test_the_floor_of_verls_ppo_is_no_key_of_the_block(block, lacks):
    """Its actor's clip_ratio_c; the host has a flag of its own, which dual_clip reads."""
    assert any("floor of dual clip" in note for note in read("verl", block).notes) == lacks


def test_readers_and_refusals_need_no_torch():
    code = "import sys, slime_ext.tools.convert.places; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
