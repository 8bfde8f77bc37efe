"""``python -m benchmarks.speed``: times the hook against other systems (``against``), and against tokens,
sequences and ranks (``scale``). Arguments are checked before torch is imported.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.speed.request import BACKENDS, CONFIGS, WORKLOADS, Scale, Speed, again, settled_allocator
from slime_ext.errors import ConfigError

OTHERS = "--others"
LEAST = 10**5  # tokens of the largest batch: a slope needs two sizes
SHORTEST = 4096  # tokens that are cut into as many sequences
NEEDED = ("torch", "numpy", "rich")
# Asked of another Python.
LACKING = f"import importlib.util as u; print(*(n for n in {NEEDED!r} if not u.find_spec(n)))"


def main(argv: Sequence[str]) -> int:
    """Runs one of the two benchmarks; 2 for a mistake in the arguments."""
    words = list(argv)
    given = _parser().parse_args(words, argparse.Namespace(words=words))
    try:
        return _speed(given) if given.command == "against" else _scale(given)
    except ConfigError as error:
        print(f"benchmarks.speed: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_speed(commands.add_parser("against", help="time against other systems", allow_abbrev=False))
    _add_scale(
        commands.add_parser("scale", help="time against tokens, sequences and ranks", allow_abbrev=False)
    )
    return parser


def _speed(given: argparse.Namespace) -> int:
    if given.slime_dir and not Path(given.slime_dir, "slime").is_dir():
        raise ConfigError(
            f"--slime-dir: expected a checkout of slime, got {given.slime_dir}: name what holds slime/"
        )
    if given.others:
        return again(_without(given.words, OTHERS), _python(given.others))
    if not settled_allocator():
        return again(given.words)

    from benchmarks.speed import run

    backends = tuple(given.backends)
    run.run(Speed(given.workloads, given.configs, backends, given.repeat, given.slime_dir))
    return 0


def _scale(given: argparse.Namespace) -> int:
    if not settled_allocator():
        return again(given.words)

    from benchmarks.speed import scale

    scale.run(Scale(given.backend, given.most, given.tokens, given.repeat))
    return 0


def _add_speed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--repeat", type=_at_least(1), default=Speed.repeat, help="runs, of which the median counts"
    )
    parser.add_argument(
        "--workloads", type=_letters(WORKLOADS), default=Speed.workloads, help=_texts(WORKLOADS)
    )
    parser.add_argument("--configs", type=_letters(CONFIGS), default=Speed.configs, help=_texts(CONFIGS))
    parser.add_argument(
        "--backends", nargs="*", default=BACKENDS, choices=BACKENDS, help="of ours; default: both"
    )
    parser.add_argument("--slime-dir", help="a slime checkout, for its mis.py and vanilla_tis")
    parser.add_argument(OTHERS, help="python of an environment with benchmarks/requirements.txt installed")


def _add_scale(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default=Scale.backend, choices=BACKENDS)
    parser.add_argument(
        "--most", type=_at_least(LEAST), default=Scale.most, help="tokens of the largest batch, up to 10^8"
    )
    parser.add_argument(
        "--tokens", type=_at_least(SHORTEST), default=Scale.tokens, help="of the batch that is cut up"
    )
    parser.add_argument(
        "--repeat", type=_at_least(1), default=Scale.repeat, help="runs, of which the median counts"
    )


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


def _without(words: Sequence[str], flag: str) -> list[str]:
    """The words without a flag and its value."""
    pairs = zip(words, ["", *words], strict=False)
    return [word for word, before in pairs if word.split("=")[0] != flag and before != flag]


def _python(path: str) -> str:
    """The Python at a path, that it has what a measurement needs."""
    found = shutil.which(path)
    if found is None:
        raise ConfigError(
            f"{OTHERS}: expected a Python, got {path}: name one with benchmarks/requirements.txt"
        )
    asked = subprocess.run([found, "-c", LACKING], capture_output=True, text=True, check=False)
    if asked.returncode or asked.stdout.strip():
        lacks = ", ".join(asked.stdout.split()) or "an answer"
        raise ConfigError(
            f"{OTHERS}: expected a Python with {', '.join(NEEDED)}, got {path} without {lacks}: "
            "install benchmarks/requirements.txt there"
        )
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
