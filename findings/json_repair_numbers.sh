#!/usr/bin/env bash
# json_repair reads a number up to the first character that it does not know, and drops such characters before it. A
# typographic minus is lost, a power or a grouped number is cut, and a number with a comma becomes text.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" json-repair==0.64.6
run - <<'PYTHON'
from importlib.metadata import version

import json_repair
from recorded import expect

CUT = {"\u22125": 5, "10^3": 10, "2**3": 2, "1 000": 1, "50%": 50}
KEPT = {"1,000": "1,000", "1/2": "1/2", "-5": -5, "1_000": 1000}
print("json_repair", version("json-repair"), 'reads {"answer": X} for X:')
read = {text: json_repair.loads(f'{{"answer": {text}}}')["answer"] for text in CUT | KEPT}
for text, value in read.items():
    print(f"  {text} as {value!r}")
expect("a typographic minus is left out, powers and grouped numbers are cut", CUT.items() <= read.items())
expect("a comma or a fraction makes text", KEPT.items() <= read.items())
PYTHON
