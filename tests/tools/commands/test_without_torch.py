"""``check`` answers without loading torch where no step of a correction has to be tried on numbers."""

from __future__ import annotations

import subprocess
import sys

import pytest

OURS = "--custom-megatron-init-path slime_ext.host.init"
RAN = """
import sys
from slime_ext.tools.commands import cli
status = cli.main(sys.argv[1:])
print(status, "torch.nn" in sys.modules)
"""


def answered(tmp_path, flags):
    script = tmp_path / "run.sh"
    script.write_text(f"python3 train.py --eps-clip 0.2 {flags}\n")
    words = [sys.executable, "-c", RAN, "check", str(script)]
    ran = subprocess.run(words, capture_output=True, text=True, check=True)
    *said, last = ran.stdout.splitlines()
    return "\n".join(said), last


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "then       --use-tis"),
        (OURS, "measures; no correction"),
        (f"{OURS} --use-tis --custom-tis-function-path slime_ext.tis.seq_is_rs", "truncate(high 2)"),
    ],
)
def test_a_usual_launch_is_checked_without_torch(tmp_path, flags, said):
    answer, last = answered(tmp_path, flags)
    assert said in answer and last == "0 False"


def test_torch_is_there_as_soon_as_steps_are_tried(tmp_path):
    answer, last = answered(tmp_path, f"{OURS} --use-tis --custom-tis-function-path slime_ext.tis.topr")
    assert "steps" in answer and last == "0 True"
