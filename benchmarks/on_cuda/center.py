"""Times score centering with a head of 128, forward and backward.

It times the term, and the log-probs at the head.

If the slime checkout has score centering, it is timed, too.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from benchmarks.on_cuda import timing
from benchmarks.on_cuda.timing import Row
from benchmarks.speed import center

OF_SLIME = "slime/utils/score_centering.py"
TERM, LOG_PROBS = "score centering, the term", "score centering, log-probs at the head"
TOKENS, TOKENS_DRY = {TERM: 1 << 17, LOG_PROBS: 1 << 13}, {TERM: 1 << 7, LOG_PROBS: 1 << 4}
REPEAT, REPEAT_DRY = 20, 3


def main(argv: list[str] | None = None) -> None:
    parser = timing.parser(__doc__)
    parser.add_argument("--slime", type=Path)
    options = parser.parse_args(argv)
    dry, until = options.device == "cpu", time.monotonic() + options.seconds
    tokens, repeat = (TOKENS_DRY, REPEAT_DRY) if dry else (TOKENS, REPEAT)
    slime = str(options.slime) if options.slime and (options.slime / OF_SLIME).is_file() else None
    torch.set_num_threads(1)
    with torch.device(options.device):
        bodies = {
            TERM: center.terms(slime, tokens[TERM]),
            LOG_PROBS: center.log_probs(slime, tokens[LOG_PROBS], center.VOCABULARY),
        }
    for what, contenders in bodies.items():
        row = Row(what, tokens[what], "")
        timing.append(timing.measure(row, contenders, options.device, repeat, until), options.lines)


if __name__ == "__main__":
    main()
