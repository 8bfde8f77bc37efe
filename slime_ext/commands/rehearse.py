"""``slime-ext rehearse run.sh``: two small rollouts of a launch script through the real host, without a
GPU."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from slime_ext.commands import light
from slime_ext.commands.output import console, table
from slime_ext.errors import ConfigError, SlimeExtError
from slime_ext.folders import make_folder
from slime_ext.scripts.launch import Launch
from slime_ext.scripts.read import launch_of
from slime_ext.without_cuda.driver import run_host
from slime_ext.without_cuda.rehearsal import checks, evidence, preflight, prompts, run
from slime_ext.without_cuda.stand_ins.torch_cuda import refuse_cuda

FAILED = 1
STYLES = {checks.OK: "green", checks.WRONG: "bold red", checks.NOT_REACHED: "yellow"}


def main(argv: list[str]) -> int:
    """Prints the page and returns 0, 1 where a line is wrong; a mistake in the script is reported before
    the run."""
    parser = argparse.ArgumentParser(
        prog="slime-ext rehearse", description="Rehearses a launch script of slime or miles without a GPU."
    )
    parser.add_argument("script", help="launch script: .sh, or .py of miles")
    parser.add_argument("--host", help="'miles' for the wheel, or a checkout; by default the script's own")
    parser.add_argument("--megatron", help="a checkout of Megatron-LM; by default the wheel's")
    parser.add_argument("--out", type=Path, help="folder of the run; by default a new one")
    parser.add_argument("--timeout", type=float, default=run.TIMEOUT_S, help="seconds until the run is ended")
    parser.epilog = "Words behind -- are flags of the script's own."
    end = argv.index("--") if "--" in argv else len(argv)
    return rehearse(parser.parse_args(argv[:end], argparse.Namespace(own=argv[end + 1 :])))


def rehearse(given: argparse.Namespace) -> int:
    """The exit status of a rehearsal.

    Raises:
        ConfigError: no host, a script that launches nothing, a mistake that needs no run to be seen.

    """
    began, screen = time.monotonic(), console()
    launch = launch_of(given.script, given.own, given.host)
    host = run.host_of(launch, given.host)
    launch = run.with_found_files(launch, host)
    screen.print(f"{given.script}: {len(launch.flags)} flags, on {host}", markup=False)
    for note in launch.notes:
        screen.print(note, markup=False)
    if wrong := mistakes(launch, host):
        raise ConfigError("\n  ".join(wrong))
    rows = prompts.all_rows(launch)
    refuse_cuda("rehearse", "run the script itself")
    out = (given.out or Path(tempfile.mkdtemp(prefix="slime-ext-rehearsal-"))).absolute()
    make_folder(out)
    flags, account = run.prepare(launch, rows, out)
    screen.print("replaced", table((f"  {name}", text) for name, text in account.items()))
    environment = run.environment_of(launch, out)
    options = {"timeout": given.timeout, "environment": environment, "megatron": given.megatron}
    status = run_host(host.name, flags, out, launch.asynchronous, **options)
    found = checks.lines(launch, seen := evidence.gather(out, status, time.monotonic() - began))
    screen.print(page(found, checks.unseen(launch, account), seen))
    facts = {"seconds": round(seen.seconds), "status": status, "lines": [vars(line) for line in found]}
    (out / "page.json").write_text(json.dumps(facts, indent=2))
    return FAILED if status or any(line.state == checks.WRONG for line in found) else 0


def page(lines: Sequence[checks.PageLine], unseen: Sequence[str], seen: evidence.Evidence) -> RenderableType:
    """The ten lines, and what no machine without a GPU shows."""
    head = f"rehearsed in {seen.seconds:.0f} s; the host's log: {seen.log}"
    rows = table((f"  {x.name}", Text(x.state, STYLES.get(x.state, "")), x.text) for x in lines)
    return Group(Text(head), rows, Text("\n  ".join(["not seen without a GPU", *unseen])))


def mistakes(launch: Launch, host: run.RehearsalHost) -> list[str]:
    """What the launch's text shows to be wrong: of the host's flags, of functions, of our configuration."""
    known = preflight.known_flags(host.package, run.wheel_folder() / "megatron")
    paths = run.module_paths(launch, host)
    found = list(preflight.mistakes(launch, known, paths, is_own_host=host.is_own))
    return found or list(of_rules(launch))


def of_rules(launch: Launch) -> Iterator[str]:
    """What ``slime-ext check`` says of the launch."""
    try:
        light.call("slime_ext.commands.check:check", launch.script, None, (), launch)
    except SlimeExtError as error:
        said = str(error).replace(launch.script, Path(launch.script).name)
        flag = launch.flag(said.partition(":")[0])
        yield f"{flag.where}: {said}" if flag else said
