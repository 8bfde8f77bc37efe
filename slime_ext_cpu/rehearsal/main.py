"""Rehearses a launch script: prints the page, runs the host and writes the result."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.text import Text

from slime_ext.errors import ConfigError, SlimeExtError
from slime_ext.tools.check.run import check_launch
from slime_ext.tools.checkout import Checkout
from slime_ext.tools.commands.output import WIDE, console, table
from slime_ext.tools.folders import make_folder, new_folder
from slime_ext.tools.launch.launch import Launch
from slime_ext.tools.launch.read import read_launch
from slime_ext_cpu import driver, machine
from slime_ext_cpu.rehearsal import checks, evidence, preflight, prompts, run

FAILED = 1
STYLES = {checks.OK: "green", checks.WRONG: "bold red", checks.NOT_REACHED: "yellow"}


def rehearse(options: argparse.Namespace) -> int:
    """Rehearses a launch script and returns the exit status.

    Raises:
        ConfigError: there is no host, the script launches nothing, its text shows a mistake, or the machine
            lacks something that the run needs.
    """
    began, screen = time.monotonic(), console(width=WIDE)
    launch = read_launch(options.script, options.arguments, options.host, options.env)
    host = run.host_of(launch, options.host)
    launch = run.with_found_files(launch, host)
    screen.print(f"{options.script}: {len(launch.flags)} flags, on {host}", markup=False)
    known = preflight.known_flags(host.package, driver.wheel_folder() / "megatron")
    for note in (*launch.notes, *engine_notes(launch, known)):
        screen.print(note, markup=False)
    if wrong := mistakes(launch, host, known):
        for line in wrong[:-1]:
            print(f"slime-ext rehearse: {line}", file=sys.stderr)
        raise ConfigError(wrong[-1])
    rows = prompts.all_rows(launch)
    out = new_folder(options.out, Path("runs/rehearsal")).absolute()
    make_folder(out)
    launch = run.with_written_files(launch, out)
    with driver.ended_by_signals(), machine.room_or_one_line(out):
        ran = driver.HostRun(
            host.name,
            out,
            asynchronous=launch.asynchronous,
            timeout=options.timeout,
            environment=run.environment_of(launch, out),
        )
        ran.check()
        for note in machine.notes():
            screen.print(note, markup=False)
        flags, account = run.prepare(launch, rows, out)
        screen.print("replaced", table((f"  {name}", text) for name, text in account.items()))
        status = _status(dataclasses.replace(ran, flags=flags))
        seen = evidence.gather(out, status, time.monotonic() - began)
        return _report(launch, account, seen, out, screen)


def _status(ran: driver.HostRun) -> int:
    """Runs the host and returns its exit status. If the user ends it, prints where the log is."""
    try:
        return ran.run()
    except (KeyboardInterrupt, SystemExit):
        print(f"slime-ext rehearse: stopped before the host ended; its log: {ran.out}/log", file=sys.stderr)
        raise


def _report(
    launch: Launch, account: Mapping[str, str], seen: evidence.Evidence, out: Path, screen: Console
) -> int:
    """Prints the page, writes page.json, and returns the command's exit status."""
    lines = checks.lines(launch, seen)
    screen.print(page(lines, checks.unseen(launch, account), seen))
    facts = {"seconds": round(seen.seconds), "status": seen.status, "lines": [vars(line) for line in lines]}
    (out / "page.json").write_text(json.dumps(facts, indent=2))
    return FAILED if seen.status or any(line.state == checks.WRONG for line in lines) else 0


def page(lines: Sequence[checks.PageLine], unseen: Sequence[str], seen: evidence.Evidence) -> RenderableType:
    """Lays out the ten lines, and what no machine without a GPU can show."""
    head = f"rehearsed in {seen.seconds:.0f} s; the host's log: {seen.log}"
    rows = table((f"  {x.name}", Text(x.state, STYLES.get(x.state, "")), x.text) for x in lines)
    return Group(Text(head), rows, Text("\n  ".join(["not seen without a GPU", *unseen])))


def engine_notes(launch: Launch, known: Mapping[str, str]) -> Iterator[str]:
    """Yields a note for each flag that the SGLang of this environment lacks."""
    engine = Path(sysconfig.get_path("purelib"), "sglang/srt")
    with contextlib.suppress(metadata.PackageNotFoundError):
        yield from preflight.unknown_to_engine(launch, known, engine, metadata.version("sglang"))


def mistakes(launch: Launch, host: run.RehearsalHost, known: Mapping[str, str]) -> list[str]:
    """Returns the mistakes that the launch's text shows in flags, functions and our configuration.

    Args:
        known: what ``preflight.known_flags`` returned.
    """
    paths = run.module_paths(launch, host)
    lines = list(preflight.mistakes(launch, known, paths, is_own_host=host.is_own))
    return lines or list(of_rules(launch, host))


def of_rules(launch: Launch, host: run.RehearsalHost) -> Iterator[str]:
    """Yields what ``slime-ext check`` refuses in the launch on this host."""
    code = Checkout(host.package) if host.is_own else None
    try:
        check_launch(launch, host=code)
    except SlimeExtError as error:
        message = str(error).replace(launch.script, Path(launch.script).name)
        flag = launch.flag(message.partition(":")[0])
        yield f"{flag.where}: {message}" if flag else message
