"""``slime-ext analyze PATH...``: what is wrong in a run's dumps, and what each correction would have done."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from slime_ext.analysis.document import Document, to_json
from slime_ext.analysis.findings import detectors
from slime_ext.analysis.readers import Job
from slime_ext.analysis.report import write_report
from slime_ext.analysis.run import Request, analyse, read_configs
from slime_ext.commands.analyze_summary import summary
from slime_ext.commands.arguments import read_mapping
from slime_ext.commands.output import console
from slime_ext.errors import ConfigError, did_you_mean

FOUND = 1
ANY = "any"
STDOUT = "-"


def main(argv: list[str]) -> int:
    """Prints the summary, writes what was asked for; 1 if a finding of --fail-on is there."""
    given = _parser().parse_args(argv)
    _check(given)
    documents = _documents(given)
    if given.out:
        write_report(*_first_and_other(documents, given.out))
    if given.json:
        _write(given.json, documents)
    written = [path for path in (given.out, given.json) if path not in (None, STDOUT)]
    summary(console(stderr=given.json == STDOUT), documents, written)
    named = {finding.name for finding in documents[0].findings}
    return FOUND if named & set(given.fail_on) or (ANY in given.fail_on and named) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slime-ext analyze",
        description="Reads dumps of a run (slime's --dump-details, slime-ext train, JSONL) and says what is "
        "wrong with its log-probs, and what each correction would have done.",
        epilog=f"Findings: {', '.join(_names())}.",
    )
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="folder of dumps, file, or pattern such as 'dumps/*/1?.pt'"
    )
    parser.add_argument("--against", metavar="PATH", action="append", help="another run, side by side")
    parser.add_argument("--rollouts", metavar="RANGE", help="such as 100-200 or 0,5,10-")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (each holds one rollout)")
    parser.add_argument(
        "--config",
        metavar="FILE",
        action="append",
        default=[],
        help="a correction of your own, beside the presets",
    )
    parser.add_argument(
        "--suggest",
        type=float,
        metavar="RATE",
        help="thresholds that reject this share; reads the files twice",
    )
    parser.add_argument("--out", metavar="FILE.html", help="write the report as one HTML file")
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the same numbers (with --against: a list of two); -: to stdout, the summary to stderr",
    )
    parser.add_argument(
        "--fail-on",
        metavar="FINDING",
        action="append",
        default=[],
        help=f"exit with {FOUND} if found; or '{ANY}'",
    )
    parser.add_argument("--tokenizer", metavar="DIR", help="to show tokens as text")
    return parser


def _names() -> list[str]:
    return [detector.name for detector in detectors()]


def _check(given: argparse.Namespace) -> None:
    """What argparse lets through."""
    if given.jobs < 1:
        raise ConfigError(f"--jobs: expected at least 1, got {given.jobs}")
    if given.suggest is not None and not 0 < given.suggest < 1:
        raise ConfigError(f"--suggest: expected a share between 0 and 1, got {given.suggest:g}")
    for name in given.fail_on:
        if name not in (*_names(), ANY):
            near = did_you_mean(name, [*_names(), ANY]) or f": one of {', '.join([*_names(), ANY])}"
            raise ConfigError(f"--fail-on: expected the name of a finding, got '{name}'{near}")
    for path in filter(None, (given.out, given.json)):
        if Path(path).is_dir():
            raise ConfigError(f"{path}: expected a file to write, got a folder")


def _documents(given: argparse.Namespace) -> list[Document]:
    configs = read_configs(given.config, read_mapping)
    requests = [
        Request(tuple(paths), given.rollouts, given.jobs, configs, given.suggest, given.tokenizer)
        for paths in (given.paths, given.against)
        if paths
    ]
    files = [request.files() for request in requests]
    total = sum(
        job.size * request.passes for request, jobs in zip(requests, files, strict=True) for job in jobs
    )
    with _bar(total) as done:
        return [analyse(request, jobs, done) for request, jobs in zip(requests, files, strict=True)]


@contextmanager
def _bar(total: int) -> Iterator:
    """A progress bar on stderr with the time left, if that is a terminal."""
    screen = Console(stderr=True)
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task("read", total=total)

        def done(job: Job) -> None:
            progress.advance(task, job.size)

        yield done


def _first_and_other(documents: Sequence[Document], out: str) -> tuple:
    return documents[0], out, documents[1] if len(documents) > 1 else None


def _write(path: str, documents: Sequence[Document]) -> None:
    texts = [to_json(document) for document in documents]
    text = texts[0] if len(texts) == 1 else "[\n" + ",\n".join(texts) + "\n]"
    if path == STDOUT:
        sys.stdout.write(text + "\n")
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text + "\n", encoding="utf-8")
