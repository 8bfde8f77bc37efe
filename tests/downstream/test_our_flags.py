"""Our flags are found in every launch script of the hosts (HOSTS), wherever else its flags come from."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime_ext.errors import ConfigError
from slime_ext.rules.judge import RULES
from slime_ext.rules.setup import Setup
from slime_ext.tools.checkout import checkout_in
from slime_ext.tools.launch.read import read_script

HOSTS = Path(os.environ.get("HOSTS", "absent"))
OURS = {
    "--custom-megatron-init-path": ("slime_ext.host.init",),
    "--use-tis": (),
    "--custom-tis-function-path": ("slime_ext.tis.token_tis",),
}
# What the scripts ask for: nothing; a mode, a rank and an address; or a model before those.
ARGUMENTS = ((), ("broadcast", "0", "10.0.0.1"), ("GLM-5", "broadcast", "0", "10.0.0.1"))
PROGRAM = re.compile(r"(\btrain(?:_async|_multi_lora_async)?\.py)(?=[ \t\n\\])")
BROKEN = ("run-kimi-k2-Instruct.sh", "run-kimi-k2-Thinking.sh")  # lack a backslash


def scripts():
    return [path for path in sorted(HOSTS.glob("*-*/**/*.sh")) if PROGRAM.search(path.read_text())]


@pytest.mark.skipif(not HOSTS.is_dir(), reason="HOSTS names no folder of hosts")
@pytest.mark.slow
@pytest.mark.parametrize("path", scripts(), ids=lambda path: str(path.relative_to(HOSTS)))
def test_our_flags_are_found_in_a_script_of_a_host(path, in_process, tmp_path, monkeypatch):
    words = " ".join(" ".join((name, *values)) for name, values in OURS.items())
    copy = path.with_name(f".{os.getpid()}-{path.name}")  # beside what it sources
    copy.write_text(PROGRAM.sub(rf"\1 {words}", path.read_text()))
    try:
        launches = (read_script(str(copy), arguments) for arguments in ARGUMENTS)
        launch = next((each for each in launches if each.program), None)
    except ConfigError as error:
        bash = subprocess.run(["/bin/bash", "-n", str(path)], check=False, capture_output=True)
        if bash.returncode:
            assert "expected a script that bash can read" in str(error)
        else:
            assert path.name in BROKEN and "lacks the backslash" in str(error)
        return
    finally:
        copy.unlink()
    assert launch is not None
    host = checkout_in(HOSTS / path.relative_to(HOSTS).parts[0])
    names = tuple(flag.name for flag in launch.flags)
    assert RULES["misspelt_host_flag"].judge(Setup(SimpleNamespace(), host=host, flag_names=names)) is None
    functions = [flag for flag in launch.flags if flag.name == "--custom-tis-function-path"]
    found = {name: launch.flag(name).values for name in OURS}
    if functions[-1].values != OURS["--custom-tis-function-path"]:  # the script's own comes later
        found["--custom-tis-function-path"] = functions[0].values
    assert found == OURS and all(map(launch.is_known, OURS))
