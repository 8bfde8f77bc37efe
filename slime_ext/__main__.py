"""``python -m slime_ext``: the command line, if its script is not on the PATH."""

from __future__ import annotations

import sys

from slime_ext.tools.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
