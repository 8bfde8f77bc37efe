"""Real launch scripts of host trees, with and without slime_ext, as bash itself would start them.

``HOSTS=DIR python -m tests.downstream.launches`` prints what ``slime-ext check`` says to each beside what the
host's own parser and ``slime_ext.host.init`` say to the same launch, in one process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from slime_ext.errors import SlimeExtError
from slime_ext.tools.commands.check_answer import check
from slime_ext.tools.launch import python_script
from slime_ext.tools.launch.sources import named_sources
from tests.downstream import host_parser

ROOT = Path(__file__).parents[2]
SITE = ROOT / "slime_ext_cpu/site"
LAUNCH = re.compile(r"(\btrain(?:_async)?\.py)(?=\s)")
INIT = "--custom-megatron-init-path slime_ext.host.init"
TIS = f"--use-tis --custom-tis-function-path slime_ext.tis.token_tis {INIT}"
CORRECT = f"--use-tis --custom-tis-function-path slime_ext.tis.correct {INIT}"
# Flags that are added to a launch, and what stands in the file of its --custom-config-path.
ADDED = {
    "nothing": ("", ""),
    "metrics_only": (TIS.replace("token_tis", "metrics_only"), ""),
    "token_tis": (TIS, ""),
    "no --use-tis": (TIS.removeprefix("--use-tis "), ""),
    "sft": (f"{TIS} --loss-type sft_loss", ""),
    "greedy": (f"{TIS} --rollout-temperature 0", ""),
    "two references": (f"{TIS} --kl-coef 0.1 --kl-loss-coef 0.1", ""),
    "band": (f"{TIS.replace('token_tis', 'icepop_function')} --tis-clip 0.5", ""),
    "cispo": (TIS.replace("token_tis", "cispo"), ""),
    "whole step": (f"{CORRECT} --get-mismatch-metrics", "slime_ext: {preset: m2}"),
    "rebaseline": (
        f"{CORRECT} --get-mismatch-metrics",
        "slime_ext: {preset: geo_rs, group: rebaseline}",
    ),
    "rebaseline and whitening": (
        f"{CORRECT} --get-mismatch-metrics --normalize-advantages",
        "slime_ext: {preset: geo_rs, group: rebaseline}",
    ),
    "target twice": (
        f"{CORRECT} --num-steps-per-rollout 2",
        "slime_ext: {numerator: target, steps: [reweight, {truncate: {high: 2.0}}]}",
    ),
    "the file goes around a flag": (TIS, "{dump_details: /tmp/x, use_opsm: 'false'}"),
    "the file's text": (TIS, "kl_coef: 1e-3"),
    "the file's estimator": (TIS, "advantage_estimator: ppo"),
    "another system": (CORRECT, "slime_ext: {fireworks: {eps_clip: 0.3}}"),
    "a misspelt flag": (TIS.replace("--custom-tis-function", "--custom-tis-funtion"), ""),
    "a wrong name": (TIS.replace("token_tis", "token_tsi"), ""),
}
VARIABLES = {"BASE_FOLDER": "/root", "BASE_DIR": "/root", "MASTER_ADDR": "127.0.0.1"}  # that scripts ask for
NOT_HERE = "got ModuleNotFoundError"  # what a module of the script's wants; check imports none
# bash runs a script with no command on its PATH: what it would start is written down instead.
RECORD = r"""
set() { builtin set "$@"; builtin set +eu; }
command_not_found_handle() {
   case $1 in
      dirname) local path="${@: -1}"; case $path in */*) echo "${path%/*}";; *) echo .;; esac;;
      basename) local path="${@: -1}"; echo "${path##*/}";;
      *) { printf '%s\0' "$@"; printf '\036'; } >> "$RECORD_FILE";;
   esac
}
"""


@dataclass(frozen=True)
class Launch:
    """A script of a host's tree with flags added, and the flags that bash gives to train.py."""

    script: Path
    added: str
    flags: tuple[str, ...]


def scripts(folder: Path) -> list[Path]:
    """The launch scripts below a folder."""
    return [path for path in sorted(folder.rglob("*.sh")) if LAUNCH.search(path.read_text())]


def launches(tree: Path, folder: Path, added: list[str], known: set[str], thorough: str = "") -> list[Launch]:
    """Every script of a tree whose text is not among the known ones, with each of the additions.

    Args:
        folder: where the copies lie; an empty one.
        thorough: name of a script that has every addition.
        known: texts of other trees' scripts; those of this one are put in.
    """
    _copy(tree, folder)
    found = []
    for script in scripts(folder):
        text = script.read_text()
        if text in known:
            continue
        known.add(text)
        for name in ADDED if script.name == thorough else added:
            flags, content = ADDED[name]
            kept = _without(text, flags)
            copy = script.with_name(f"{script.stem}+{name.replace(' ', '-').replace(chr(39), '')}.sh")
            if content:
                copy.with_suffix(".yaml").write_text(content)
                flags += f" --custom-config-path {copy.with_suffix('.yaml')}"
            copy.write_text(LAUNCH.sub(rf"\1 {flags}", kept))
            if given := flags_of(copy):
                found.append(Launch(copy, name, given))
    return found


def _without(text: str, flags: str) -> str:
    """A script without the flags that are added to it, so that those count."""
    names = [word for word in flags.split() if word.startswith("--")]
    names += ["--global-batch-size"] if "--num-steps-per-rollout" in names else []
    for name in names:
        text = re.sub(rf"(?m)^\s*{name}(?![\w-])([ =][^-\s]\S*)?\s*$", "", text)
    return text


def flags_of(script: Path) -> tuple[str, ...]:
    """What bash gives to train.py; empty where the script ends before."""
    with tempfile.TemporaryDirectory() as folder:
        record, handler = Path(folder, "record"), Path(folder, "handler.sh")
        handler.write_text(RECORD)
        record.touch()
        environment = {"PATH": "/none", "HOME": folder, "BASH_ENV": str(handler), "RECORD_FILE": str(record)}
        subprocess.run(
            ["/bin/bash", str(script)],
            env=environment | VARIABLES,
            cwd=folder,
            timeout=60,
            check=False,
            capture_output=True,
            stdin=subprocess.DEVNULL,
        )
        commands = [line.split("\0")[:-1] for line in record.read_text().split("\036")]
    for words in commands:
        for at, word in enumerate(words):
            if Path(word).name in ("train.py", "train_async.py"):
                return tuple(words[at + 1 :])
    return ()


def told(found: list[tuple[str, ...]], package: str, tree: Path) -> list[tuple[str, str]]:
    """What the host's parser and ``init`` say to each list of flags."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "launches.json")
        file.write_text(json.dumps(found))
        answered = subprocess.run(
            [sys.executable, "-m", "tests.downstream.host_parser", package, str(file)],
            cwd=ROOT,
            env=os.environ
            | host_parser.ENVIRONMENT
            | {"PYTHONPATH": os.pathsep.join(map(str, (SITE, tree, ROOT)))},
            capture_output=True,
            text=True,
            check=False,
        )
    if answered.returncode:
        raise RuntimeError(answered.stderr[-2000:])
    return [tuple(verdict) for verdict in json.loads(answered.stdout)]


def checked(found: list[Launch]) -> list[str]:
    """What ``slime-ext check`` says to each; empty for ``ok``."""
    with patch.dict(os.environ, VARIABLES):
        return [_said(launch.script) for launch in found]


def _said(script: Path) -> str:
    try:
        check(named_sources(str(script), environment=tuple(VARIABLES)))
    except SlimeExtError as error:
        return str(error)
    return ""


def _copy(tree: Path, folder: Path) -> None:
    for pattern in ("*.sh", "*.yaml", "*.py"):
        for path in tree.rglob(pattern):
            target = folder / path.relative_to(tree)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())


def compared(tree: Path, added: list[str], known: set[str], thorough: str = "") -> list[Row]:
    """(launch, what check says, who of the host and init refuses, its line) for each new script of a tree."""
    package = tree.name.partition("-")[0]
    with tempfile.TemporaryDirectory() as folder:
        if package == "miles":
            _commands(tree, Path(folder, "commands"))
            tree = Path(folder, "commands")
        found = launches(tree, Path(folder, "copies"), added, known, thorough)
        verdicts = told([launch.flags for launch in found], package, tree) if found else []
        return [(*row, *verdict) for *row, verdict in zip(found, checked(found), verdicts, strict=True)]


def _commands(tree: Path, folder: Path) -> None:
    """The commands that miles' launch scripts, which are Python, would run, as shell scripts."""
    folder.mkdir()
    for script in sorted((tree / "scripts").glob("run_*.py")):
        with contextlib.suppress(SlimeExtError):  # one that needs a newer miles than there is
            folder.joinpath(f"{script.stem}.sh").write_text(python_script.command_of(str(script), []))


Row = tuple[Launch, str, str, str]


def unread(rows: list[Row]) -> list[Row]:
    """The rows of scripts that the host's parser refuses on this machine whatever is added to them."""
    alone = {_name(row): row[3] for row in rows if row[0].added == "nothing" and row[2] == "host"}
    return [row for row in rows if row[2] == "host" and alone.get(_name(row)) == row[3]]


def differing(rows: list[Row]) -> list[Row]:
    """The rows in which check refuses what the host and init let through, or lets through what init refuses.
    What the host's own parser refuses is left to it."""
    skipped = unread(rows)
    return [row for row in rows if row not in skipped and not _agree(row)]


def _agree(row: Row) -> bool:
    launch, said, who, line = row
    if launch.added == "a misspelt flag":
        return bool(said)
    return who == "host" or NOT_HERE in line or bool(said) == bool(line)


def _name(row: Row) -> str:
    return row[0].script.name.partition("+")[0]


def main() -> int:
    """Prints the table, and last in how many rows one refuses what the other lets through."""
    table, known, wrong, skipped = Table("script", "added", "check", "host and init", box=None), set(), 0, 0
    for tree in sorted(Path(os.environ["HOSTS"]).iterdir()):
        rows = compared(tree, sys.argv[1:] or list(ADDED), known)
        wrong, skipped = wrong + len(differing(rows)), skipped + len(unread(rows))
        for row in rows:
            launch, said, who, line = row
            mark = "DIFFERS " if row in differing(rows) else "not read " if row in unread(rows) else ""
            host = f"{who}: {line}" if line else "ok"
            table.add_row(f"{tree.name}/{_name(row)}", launch.added, mark + (said or "ok"), host)
    Console(width=260).print(table)
    print(f"{len(known)} scripts, {table.row_count} launches, {skipped} that the host does not read here")
    print(f"{wrong} where check and init differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
