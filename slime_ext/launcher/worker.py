"""One training rank: ``python -m slime_ext.launcher.worker ARGS.json``, started by the supervisor.

A user's error is written as one line to the run's ``error.txt`` and answered with exit status 2; anything
else leaves its traceback on standard error, which the supervisor keeps in ``rank_N.log``.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import traceback
import warnings
from pathlib import Path

from slime_ext.errors import SlimeExtError

ERROR_FILE = "error.txt"


def main(argv: list[str]) -> int:
    """Reads the resolved arguments and runs the loop; the exit status."""
    args = argparse.Namespace(**json.loads(Path(argv[0]).read_text()))
    warnings.filterwarnings("ignore", module="megatron|torch|transformers")
    # What the package has to say (a correction that counts a ratio twice, say) belongs before the user's
    # eyes.
    logging.basicConfig(format="slime-ext: %(message)s", stream=sys.stdout)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from slime_ext.launcher import loop

        loop.run(args)
    except SlimeExtError as error:
        (Path(args.run_path) / ERROR_FILE).write_text(f"{error}\n")
        return 2
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: after an error the other ranks never arrive where the process group would wait for them.
    os._exit(status)
