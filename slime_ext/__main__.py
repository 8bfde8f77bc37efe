"""``python -m slime_ext``: runs the command line if its script is not on the PATH."""

from __future__ import annotations

import os
import sys

try:
    here = os.getcwd()  # noqa: PTH109 (pathlib is not loaded yet, and could be a file of the working directory)
except OSError:  # the working directory was removed
    here = ""
if sys.path[0] in ("", here):  # ``python -m`` puts it before the standard library
    del sys.path[0]

from slime_ext.tools.commands.cli import run

if __name__ == "__main__":
    run()
