"""Times the hook.

    python -m benchmarks.speed against     # beside other systems
    python -m benchmarks.speed scale       # over tokens, sequences and ranks
    python -m benchmarks.speed overhead    # the fixed cost of a call
    python -m benchmarks.speed center      # score centering beside slime's own

Arguments are checked before torch is imported.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from benchmarks.speed.request import CONFIGS, WORKLOADS, again, settled_allocator

OTHERS = "--others"
LEAST = 10**5  # least tokens of the largest batch, because a slope needs two sizes
SHORTEST = 4096  # least tokens to cut into sequences, of which there are as many
MODULES = {"against": "run", "scale": "scale", "center": "center", "overhead": "overhead"}


def main(argv: Sequence[str]) -> int:
    """Runs one of the benchmarks. Returns 2 for a mistake in the arguments."""
    words = list(argv)
    options = _parser().parse_args(words)
    if python := getattr(options, "others", None):
        return again(_without(words, OTHERS), python)
    if not settled_allocator():
        return again(words)
    import_module(f"benchmarks.speed.{MODULES[options.command]}").run(options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    against = commands.add_parser("against", help="time the hook beside other systems", allow_abbrev=False)
    add = against.add_argument
    add("--workloads", type=_letters(WORKLOADS), default="abcd", help=_texts(WORKLOADS))
    add("--configs", type=_letters(CONFIGS), default="TS", help=_texts(CONFIGS))
    slime = {"type": _slime, "help": "a checkout of slime, to time slime's own corrections"}
    add("--slime-dir", **slime)
    others = {"type": _python, "help": "python of an environment with benchmarks/requirements.txt installed"}
    add(OTHERS, **others)
    scale = commands.add_parser(
        "scale", help="time the hook over tokens, sequences and ranks", allow_abbrev=False
    )
    add = scale.add_argument
    add("--most", type=_at_least(LEAST), default=10**7, help="tokens of the largest batch, up to 10^8")
    add(
        "--tokens",
        type=_at_least(SHORTEST),
        default=1 << 20,
        help="tokens of the batch that is cut into sequences",
    )
    center = commands.add_parser("center", help="time score centering", allow_abbrev=False)
    center.add_argument("--slime-dir", **slime)
    what = "time the fixed cost of a call on a few tokens"
    overhead = commands.add_parser("overhead", help=what, allow_abbrev=False)
    overhead.add_argument(OTHERS, **others)
    for command, runs in ((against, 9), (scale, 7), (center, 7)):
        command.add_argument(
            "--repeat", type=_at_least(1), default=runs, help="number of runs; the median counts"
        )
    overhead.add_argument(
        "--repeat", type=_at_least(1), default=300, help="number of runs; the fastest counts"
    )
    return parser


def _texts(named: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {text}" for name, text in named.items())


def _letters(known: Mapping[str, str]) -> Callable[[str], str]:
    def letters(text: str) -> str:
        if not text or set(text) - set(known):
            raise argparse.ArgumentTypeError(f"expected letters out of {''.join(known)}, got '{text}'")
        return text

    return letters


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not (text.isdecimal() and int(text) >= least):
            raise argparse.ArgumentTypeError(f"expected an integer of {least} or more, got '{text}'")
        return int(text)

    return number


def _slime(text: str) -> str:
    if not Path(text, "slime").is_dir():
        raise argparse.ArgumentTypeError(
            f"expected a checkout of slime, got {text}: name the folder that contains slime/"
        )
    return text


def _python(text: str) -> str:
    path = shutil.which(text)
    if path is None:
        raise argparse.ArgumentTypeError(f"expected a Python, got {text}: see benchmarks/requirements.txt")
    return path


def _without(words: Sequence[str], flag: str) -> list[str]:
    """Returns the words without a flag and its value."""
    pairs = zip(words, ["", *words], strict=False)
    return [word for word, before in pairs if word.split("=")[0] != flag and before != flag]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
