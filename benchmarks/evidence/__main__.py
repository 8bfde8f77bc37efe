"""Makes the tables and the picture of the recorded runs.

    python -m benchmarks.evidence table        # the tables of docs/evidence.md and RESULTS.md
    python -m benchmarks.evidence picture      # docs/img/gains.png

The program that executed the runs is no longer here; RESULTS.md says where it is.
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.evidence import pages, picture, rows, settings


def main(argv: list[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evidence", description=__doc__.splitlines()[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("table", help="write the tables of the pages")
    commands.add_parser("picture", help="draw gains.png in docs/img")
    options = parser.parse_args(argv)
    (pages if options.command == "table" else picture).write(settings.read(), rows.read())
    return 0


if __name__ == "__main__":
    sys.exit(main())
