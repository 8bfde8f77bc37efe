"""Makes the environment of the real hosts: the wheel of miles, its Megatron-LM, Ray and SGLang, on a CPU.

    python -m slime_ext.without_cuda.environment [FOLDER]

Needs no other package, so that it also runs as a file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

FOLDER = ".venv-host"
TORCH = "torch==2.13.0"  # the build that is tested; TORCH in the environment names another
LISTS = Path(__file__).parent
SGLANG_LISTS = LISTS.parent / "launcher/rollout"
SIZE = "3.3 GB, some minutes"
# miles' wheel has a folder of its own behind site-packages: it also holds an sglang, which is not to be used.
PATH_FILE = (
    "import sys, sysconfig; from pathlib import Path; "
    "Path(sysconfig.get_path('purelib'), 'miles.pth').write_text(sys.argv[1] + '\\n')"
)


def lines(folder: Path, torch: str = TORCH) -> Iterator[list[str]]:
    """The commands that make it, each as its words."""
    pip = [str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
    wheel = folder / "miles"
    sglang, sglang_alone = (SGLANG_LISTS / f"requirements-sglang-cpu{end}.txt" for end in ("", "-nodeps"))
    host, host_alone = (LISTS / f"requirements-host{end}.txt" for end in ("", "-nodeps"))
    yield [sys.executable, "-m", "venv", str(folder)]
    yield [*pip, torch]
    yield [
        *pip,
        torch,
        *_lists(sglang, host),
    ]
    yield [*pip, "--no-deps", *_lists(sglang_alone)]
    yield [
        *pip,
        "--no-deps",
        "--upgrade",
        "--target",
        str(wheel),
        *_lists(host_alone),
    ]
    yield [str(folder / "bin/python"), "-c", PATH_FILE, str(wheel)]


def _lists(*files: Path) -> list[str]:
    return [word for file in files for word in ("-r", str(file))]


def how_to_make(folder: str = FOLDER) -> str:
    """What a message says where there is none."""
    if (LISTS.parents[1] / "Makefile").is_file():
        return "run `make host`"
    return f"run `{sys.executable} -m slime_ext.without_cuda.environment {folder}` ({SIZE})"


def main(argv: Sequence[str]) -> int:
    """Runs every command, after printing it; returns the status of the first that fails."""
    folder = Path(argv[0] if argv else FOLDER).absolute()
    for words in lines(folder, os.environ.get("TORCH", TORCH)):
        print(*words, flush=True)
        if status := subprocess.run(words, check=False).returncode:
            return status
    print(f"slime-ext: SLIME_EXT_HOST_PYTHON={folder / 'bin/python'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
