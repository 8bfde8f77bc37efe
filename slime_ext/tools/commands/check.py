"""Runs ``slime-ext check FILE``: checks a configuration or a whole launch script."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slime_ext.errors import ConfigError, SlimeExtError, cut, did_you_mean
from slime_ext.tools.commands.lazy_torch import load_later
from slime_ext.tools.commands.script_flags import add_flags_of_reading, apart

if TYPE_CHECKING:
    from slime_ext.rules.rule import Line
    from slime_ext.tools.commands.check_answer import Answer

LAST_LINES = {
    "ok": "ok",
    "incomplete": "some things are unknown here, so not everything was checked",
    "unused": "",
}


class _Rules(argparse.Action):
    """Prints all rules and exits, those that refuse a launch first."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from slime_ext.rules.judge import RULES
        from slime_ext.rules.rule import Severity
        from slime_ext.tools.commands.output import console

        screen = console()
        for rule in sorted(RULES.values(), key=lambda rule: [*Severity].index(rule.severity)):
            text = " ".join((rule.judge.__doc__ or "").replace("``", "").split())
            screen.print(f"{rule.name} ({rule.severity.name.lower()}): {text}", markup=False, soft_wrap=True)
        parser.exit()


def command_line() -> argparse.ArgumentParser:
    """Returns the flags of the command."""
    parser = argparse.ArgumentParser(
        prog="slime-ext check",
        description="Checks a configuration, or a launch script's arguments. For a launch without slime_ext, "
        "prints the flags that add it.",
    )
    parser.add_argument("file", help="YAML file of --custom-config-path, or a launch script")
    parser.add_argument(
        "--args", metavar="SCRIPT", help="launch script with the other arguments of a YAML FILE"
    )
    what = "checkout of the host; default: the checkout whose train.py the script starts"
    parser.add_argument("--host", metavar="DIR", help=what)
    what = "leave out the lines of a rule that warns or hints; repeat for more rules"
    parser.add_argument("--ignore", metavar="NAME", action="append", default=[], help=what)
    what = "error: exit with 1 at an error (the default); warning: also at a warning"
    parser.add_argument("--fail-on", choices=("error", "warning"), default="error", help=what)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for CI")
    parser.add_argument("--rules", action=_Rules, nargs=0, help="list all rules and exit")
    add_flags_of_reading(parser)
    return parser


def main(argv: list[str]) -> int:
    """Prints what the file resolves to.

    Returns 0, or 1 if there is a warning and --fail-on is ``warning``. With --json, an error is a field of
    the object, and ``main`` returns 1.

    Raises:
        ConfigError: without --json, the errors of ``check``.
    """
    words, script_words = apart(argv)
    args = command_line().parse_args(words)

    load_later()  # torch, which takes two seconds
    from slime_ext.tools.check.lines import line_of
    from slime_ext.tools.checkout import named_checkout
    from slime_ext.tools.commands import cli
    from slime_ext.tools.commands.check_answer import Answer, check
    from slime_ext.tools.commands.output import WIDE, console, table
    from slime_ext.tools.launch.sources import named_sources

    try:
        _forbid_ignoring(args.ignore)
        host = None if args.host is None else named_checkout(args.host)
        answer = check(
            named_sources(args.file, args.args, script_words, host, run=args.run, environment=args.env)
        )
    except SlimeExtError as error:
        line = line_of(error)
        if args.json:
            print(_json_of(args.file, Answer({}, ""), "error", line))
            return cli.WRONG
        if line.rule:
            raise ConfigError(str(line)) from None
        raise
    notes = [note for note in answer.notes if note.rule is None or note.rule.name not in args.ignore]
    warnings = sum(map(_warns, notes))
    status = cli.WRONG if args.fail_on == "warning" and warnings else 0
    if args.json:
        print(_json_of(args.file, replace(answer, notes=tuple(notes)), answer.status))
        return status
    rows = [("file", args.file), *answer.rows.items()]
    rows += [(when, str(offer)) for when, offer in answer.offers.items()]
    rows += [("warning" if _warns(note) else "note", str(note)) for note in notes]
    rows += [("unknown", line) for line in answer.unread]
    rows += [("not checked", str(line)) for line in answer.unasked]
    console(width=WIDE).print(table(rows), markup=False)

    # The last line says whether the launch is all right, and why the command fails.
    count = f"{warnings} warning{'s'[: warnings > 1]}"
    last = LAST_LINES[answer.status]
    last = f"{last}; {count}" if last and warnings else last
    if last := f"failed because of {count} (--fail-on warning)" if status else last:
        print(last)
    return status


def _warns(line: Line) -> bool:
    from slime_ext.rules.rule import WARN

    return line.rule is not None and line.rule.severity is WARN


def _forbid_ignoring(names: Sequence[str]) -> None:
    """Raises ConfigError for an unknown name, or for a rule that refuses a launch."""
    from slime_ext.rules.judge import RULES
    from slime_ext.rules.rule import HINT, WARN

    for name in names:
        if name not in RULES:
            near = did_you_mean(name, RULES) or ": slime-ext check --rules lists the rules"
            raise ConfigError(f"--ignore: expected a rule's name, got '{cut(name)}'{near}")
        if RULES[name].severity not in (WARN, HINT):
            why = RULES[name].severity.value
            raise ConfigError(
                f"--ignore: expected a rule that warns or hints, got {name} ({why}): change the launch"
            )


def _json_of(file: str, answer: Answer, status: str, error: Line | None = None) -> str:
    def of_line(line: Line) -> dict[str, str | None]:
        name, severity = (line.rule.name, line.rule.severity.name.lower()) if line.rule else (None, None)
        return {"rule": name, "severity": severity, "message": line.message}

    # An offer is two fields: its flags on one line, and its comments.
    offers: dict[str, str | list[str]] = {}
    for when, offer in answer.offers.items():
        offers |= {when: " ".join(offer.flags), f"{when}_comments": [*offer.comments]}
    unread = [{"rule": None, "why": line} for line in answer.unread]
    unjudged = [
        {"rule": line.rule and line.rule.name, "why": line.message}
        for line in (*answer.skipped, *answer.unasked)
    ]
    fields = {
        "file": file,
        "status": status,
        "resolved": {**answer.rows, **offers},
        "lines": [of_line(note) for note in answer.notes],
        "not_checked": unread + unjudged,
        "error": None if error is None else of_line(error),
    }
    return json.dumps(fields, indent=2)
