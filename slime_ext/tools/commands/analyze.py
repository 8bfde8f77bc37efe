"""Runs ``slime-ext analyze``: finds faults in dumps, and what each correction would have done."""

from __future__ import annotations

import argparse
import errno
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from slime_ext.errors import ConfigError, did_you_mean
from slime_ext.tools.analysis.document import FINDINGS, Document, Finding, json_of
from slime_ext.tools.analysis.readers.find import NoDumps, RolloutRanges, dumps_of
from slime_ext.tools.analysis.readers.flags import files_of_flags
from slime_ext.tools.analysis.request import SHORTLIST, Request
from slime_ext.tools.analysis.texts import decoder
from slime_ext.tools.collection import importing
from slime_ext.tools.commands.analyze_summary import show_news, summary
from slime_ext.tools.commands.output import PlainConsole, console
from slime_ext.tools.folders import make_folder, refuse_link, write_file

if TYPE_CHECKING:  # because it imports torch
    from slime_ext.tools.analysis.measures.user_corrections import UserCorrection

FAILED = 1
EVERY_S = 2.0
ANY, ALL, EXACT = "any", "all", "exact"
# Word of --fail-on -> the severities that it means.
AT_LEAST = {"error": ("error",), "warning": ("error", "warning"), ANY: ("error", "warning")}
STDOUT = "-"
OUT, JSON = "--out", "--json"
Configs = Sequence[tuple[str, Mapping[str, Any]]]


def main(argv: list[str]) -> int:
    """Analyses runs, prints the summary and writes the requested files.

    Returns 1 if the run has a finding of --fail-on or breaks --expect, else 0.
    """
    flags = command_line().parse_args(argv)
    _check(flags)
    screen, configs = console(stderr=flags.json == STDOUT), _read_configs(flags.config)
    documents = _followed(flags, configs, screen) if flags.follow else _documents(flags, configs)
    _show(flags, documents, screen)
    failing = _failing(flags.fail_on, documents[0].findings)
    if failing:
        reasons = ", ".join(f"{finding.name} ({finding.severity})" for finding in failing)
        screen.print(
            f"failed by --fail-on {' '.join(flags.fail_on)}: {reasons}", markup=False, soft_wrap=True
        )
    is_unexpected = flags.expect == EXACT and not _is_exact(documents[0])
    return FAILED if is_unexpected or failing else 0


def _failing(words: Sequence[str], findings: Sequence[Finding]) -> list[Finding]:
    """Returns the findings that --fail-on names, by name or by severity.

    A finding that may be another one ("Either a or b") counts for both names. A note counts only by name.
    """
    kinds = {kind for word in words for kind in AT_LEAST.get(word, ())}
    return [f for f in findings if f.severity in kinds or not {f.name, *f.or_else}.isdisjoint(words)]


def _is_exact(document: Document) -> bool:
    """Whether all tokens were read and compared, and none differs."""
    exact = document.exact
    return exact is not None and exact.tokens > 0 and not exact.differing and document.is_whole


def _show(flags: argparse.Namespace, documents: Sequence[Document], screen: PlainConsole) -> None:
    with _writing("stdout", STDOUT):
        summary(screen, documents)
    for flag, path, write in ((OUT, flags.out, _write_page), (JSON, flags.json, _write_json)):
        if path is not None:
            with _writing(flag, path):
                write(path, documents)
            if path != STDOUT:
                screen.print(f"wrote {path}", markup=False, soft_wrap=True)


class _List(argparse.Action):
    """Prints all findings and exits, as --help does with all flags."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from slime_ext.tools.analysis.findings import DETECTORS  # imports torch

        screen = console()
        for name, detector in sorted(DETECTORS.items()):
            asks = f"; needs {detector.asks}" if detector.asks else ""
            line = f"{name} ({detector.severity}, {detector.says}): {detector.what}{asks}"
            screen.print(" ".join(line.split()), markup=False, soft_wrap=True)
        parser.exit()


def command_line() -> argparse.ArgumentParser:
    """Returns the flags of the command."""
    parser = argparse.ArgumentParser(
        prog="slime-ext analyze",
        description="Reads dumps of a run (slime's --dump-details, slime-ext train, JSONL). Prints what is "
        "wrong with the log-probs, and what each correction would have done.",
        epilog=f"Findings: {', '.join(FINDINGS)}.",
    )
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="folder of dumps, file, or pattern such as 'dumps/*/1?.pt'"
    )
    what = "a second run to compare with; repeat for more paths of that run"
    parser.add_argument("--against", metavar="PATH", action="append", help=what)
    what = "rollouts to read, such as 100-200 or 0,5,10-; default: all"
    parser.add_argument("--rollouts", metavar="RANGE", help=what)
    parser.add_argument(
        "--presets",
        metavar="NAMES",
        help="presets to evaluate, such as token_tis,geo_rs, or 'all'; "
        f"default: {len(SHORTLIST)}, one of each kind",
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="read each rollout of a running job when its dumps are written, until Ctrl-C or the job's end",
    )
    parser.add_argument(
        "--alert-exit",
        action="store_true",
        help=f"with --follow: exit with {FAILED} at the first finding of --fail-on, which is then '{ANY}' by "
        "default",
    )
    parser.add_argument(
        "--every",
        type=float,
        default=EVERY_S,
        metavar="SECONDS",
        help=f"with --follow: look for new dumps every so many seconds; default: {EVERY_S:g}",
    )
    parser.add_argument(
        "--idle",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="with --follow: stop after so many seconds without a new dump; default: never",
    )
    what = "number of processes, each of which holds one rollout in memory; default: 1"
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help=what)
    parser.add_argument(
        "--config",
        metavar="FILE",
        action="append",
        default=[],
        help="YAML file of a correction to evaluate beside the presets; repeat for more files",
    )
    parser.add_argument(
        "--suggest",
        type=float,
        metavar="RATE",
        help="print the threshold at which each rejection drops at most this share, such as 0.01",
    )
    parser.add_argument(OUT, metavar="FILE.html", help="write the report as one HTML file")
    parser.add_argument(
        JSON,
        metavar="FILE",
        help="write the same numbers as JSON (with --against: a list of two objects); '-' is stdout, and the "
        "summary then goes to stderr",
    )
    parser.add_argument(
        "--fail-on",
        metavar="FINDING",
        action="append",
        default=[],
        help=f"exit with {FAILED} at this finding, or at any finding of a severity: 'error', or 'warning' or "
        f"'{ANY}' for both; repeat for more",
    )
    parser.add_argument(
        "--expect",
        choices=[EXACT],
        help=f"exit with {FAILED} unless both log-probs of every token are equal, bit for bit; prints where "
        "they differ",
    )
    parser.add_argument("--findings", action=_List, nargs=0, help="list all findings and exit")
    what = "folder of the tokenizer, to show tokens as text"
    parser.add_argument("--tokenizer", metavar="DIR", help=what)
    return parser


def _check(flags: argparse.Namespace) -> None:
    """Checks what argparse cannot check, before torch is imported, because that takes seconds."""
    if flags.jobs < 1:
        raise ConfigError(f"--jobs: expected at least 1, got {flags.jobs}")
    if flags.suggest is not None and not 0 < flags.suggest < 1:
        raise ConfigError(f"--suggest: expected a share between 0 and 1, got {flags.suggest:g}")
    _check_follow(flags)
    for name in flags.fail_on:
        _known("--fail-on", "the name of a finding", name, (*FINDINGS, *AT_LEAST))
    flags.presets = _presets(flags.presets) if flags.presets else SHORTLIST
    RolloutRanges.parse(flags.rollouts)
    _check_outputs(flags)
    decoder(flags.tokenizer)
    if flags.alert_exit and not flags.fail_on:
        flags.fail_on = [ANY]


def _check_follow(flags: argparse.Namespace) -> None:
    """Raises ConfigError for a flag that needs --follow and lacks it, or that it excludes."""
    if flags.follow and flags.against is not None:
        raise ConfigError("--against: expected none beside --follow, got one: analyse both runs afterwards")
    if flags.follow and flags.expect is not None:
        raise ConfigError("--expect: expected none beside --follow, got one: type it without --follow")
    if flags.alert_exit and not flags.follow:
        raise ConfigError("--alert-exit: expected --follow beside it, got none: add it, or type --fail-on")
    if not flags.follow and (flags.every, flags.idle) != (EVERY_S, math.inf):
        raise ConfigError(
            "--every, --idle: expected --follow beside them, got none: add --follow, or leave them out"
        )
    if not (flags.every >= 0 and flags.idle > 0):
        raise ConfigError(f"--every, --idle: expected seconds, got {flags.every:g} and {flags.idle:g}")


def _known(flag: str, what: str, name: str, names: Sequence[str]) -> None:
    if name not in names:
        near = did_you_mean(name, names) or f": type one of {', '.join(names)}"
        raise ConfigError(f"{flag}: expected {what}, got '{name}'{near}")


def _presets(text: str) -> tuple[str, ...]:
    from slime_ext.aliases import ALIASES
    from slime_ext.presets import PRESETS, find  # imports torch, which --help does not need

    named = tuple(dict.fromkeys(ALIASES.get(name, name) for name in text.split(",")))
    names = tuple(PRESETS) if text == ALL else named
    for name in names:
        find(name, "--presets")
    return names


def _check_outputs(flags: argparse.Namespace) -> None:
    """Makes the folders of the outputs, before the first file is read.

    Raises:
        ConfigError: an output cannot be written.
    """
    if flags.out == STDOUT:
        raise ConfigError(f"{OUT}: expected a file, got '{STDOUT}': only {JSON} writes to stdout")
    files = _outputs(flags)
    for flag, path in files.items():
        with _writing(flag, str(path)):
            refuse_link(path)
            make_folder(path.parent)
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if path.is_file() or not path.exists():  # no pipe, no device
                TemporaryFile(dir=path.parent).close()
    if len({path.resolve() for path in files.values()}) < len(files):
        raise ConfigError(f"{JSON}: expected another file than {OUT}, got '{flags.json}': name two files")


def _outputs(flags: argparse.Namespace) -> dict[str, Path]:
    """Returns flag -> the file that it writes."""
    both = ((OUT, flags.out), (JSON, flags.json))
    return {flag: Path(path) for flag, path in both if path not in (None, STDOUT)}


@contextmanager
def _writing(flag: str, path: str) -> Iterator[None]:
    """Turns an OSError into one line that says what could not be written, and why."""
    try:
        yield
    except BrokenPipeError:  # as in `| head`, which is no mistake
        raise
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"{flag}: expected a file that can be written, got '{path}': {why}") from None


def _read_configs(files: Sequence[str]) -> Configs:
    """Reads the files of --config once, because a file may be a pipe."""
    if not files:
        return ()
    from slime_ext.config.files import read_mapping

    configs = [(file, read_mapping(file)) for file in files]
    _corrections(configs)  # raises for a mistake, before any dump is read
    return configs


def _corrections(configs: Configs) -> dict[str, UserCorrection]:
    """Returns the corrections of --config. Without any, it spares an import of 10 ms."""
    if not configs:
        return {}
    from slime_ext.tools.analysis.measures.user_corrections import load_user_corrections

    return load_user_corrections(configs)


@contextmanager
def _importing_torch() -> Iterator[None]:
    """Lets torch leave other packages' devices alone, because dumps are read on the CPU.

    Looking for such packages takes 5 ms, and starting one's device can take seconds.
    """
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # also for the processes of --jobs
    with importing("torch"):
        yield


def _documents(flags: argparse.Namespace, configs: Configs) -> list[Document]:
    requests = [_request(flags, paths) for paths in (flags.paths, flags.against) if paths]
    files = [request.files() for request in requests]
    _refuse_to_replace_inputs(flags)

    with _importing_torch():  # after all mistakes were found
        from slime_ext.tools.analysis.pipeline import use_one_thread
        from slime_ext.tools.analysis.run import analyse

    use_one_thread()
    corrections, both = _corrections(configs), list(zip(requests, files, strict=True))
    with _bar(sum(job.size for dumps in files for job in dumps.jobs)) as done:
        return [analyse(replace(request, configs=corrections), dumps, done) for request, dumps in both]


def _refuse_to_replace_inputs(flags: argparse.Namespace) -> None:
    """Refuses an output that would replace a file of a run or of --config."""
    outputs = _outputs(flags)
    if not outputs:
        return
    paths = [*flags.paths, *(flags.against or ())]
    inputs = {file.resolve() for file in (*map(Path, flags.config), *files_of_flags(paths))}
    for path in paths:
        with suppress(NoDumps):
            inputs |= {*dumps_of([path])}
    for flag, output in outputs.items():
        if output.resolve() in inputs:
            raise ConfigError(
                f"{flag}: expected a new file, got '{output}', which this command reads: name another file"
            )


def _request(flags: argparse.Namespace, paths: Sequence[str]) -> Request:
    more = {"presets": flags.presets, "rate": flags.suggest, "tokenizer": flags.tokenizer}
    more["exact"] = flags.expect == EXACT
    return Request(tuple(paths), flags.rollouts, flags.jobs, **more)


def _followed(flags: argparse.Namespace, configs: Configs, screen: PlainConsole) -> list[Document]:
    """Prints each rollout and each alert of a run as it comes.

    Returns the document when the run ends, or when an alert ends the command.
    """
    with _importing_torch():
        from slime_ext.tools.analysis.follow import Follower
        from slime_ext.tools.analysis.pipeline import use_one_thread

    use_one_thread()
    request = replace(_request(flags, flags.paths), configs=_corrections(configs))
    _refuse_to_replace_inputs(flags)
    follower, since = Follower(request), time.monotonic()
    screen.print(f"following {flags.paths[0]}: Ctrl-C ends it", markup=False, soft_wrap=True)
    with suppress(KeyboardInterrupt):
        while not follower.has_ended() and time.monotonic() - since < flags.idle:
            for news in follower.look():
                since = time.monotonic()
                show_news(screen, news, as_json=flags.json == STDOUT)
                if flags.alert_exit and _failing(flags.fail_on, news.alerts):
                    return [follower.document()]
            time.sleep(flags.every)
    return [follower.document()]


@contextmanager
def _bar(total: int) -> Iterator[Any]:
    """Shows a progress bar with the time left, if stderr is a terminal."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield lambda job: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn  # slow

    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True) as progress:
        task = progress.add_task("read", total=total)
        yield lambda job: progress.advance(task, job.size)


def _write_page(path: str, documents: Sequence[Document]) -> None:
    from slime_ext.tools.analysis.page.page import write_report  # imports matplotlib

    write_report(documents[0], path, *documents[1:])


def _write_json(path: str, documents: Sequence[Document]) -> None:
    texts = [json_of(document, indent=1) for document in documents]
    text = texts[0] if len(texts) == 1 else "[\n" + ",\n".join(texts) + "\n]"
    if path == STDOUT:
        print(text, flush=True)
    else:
        write_file(Path(path), text + "\n")
