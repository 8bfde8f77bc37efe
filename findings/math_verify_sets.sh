#!/usr/bin/env bash
# math-verify reads two boxed answers as a set, so the right last answer counts as wrong. The pair (1,2) equals
# the set {1,2}, but not {2,1}, although it reads both as the same set.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" math-verify==0.9.0
run - <<'PYTHON'
from importlib.metadata import version

from math_verify import parse, verify
from recorded import expect

rows = (
    ("$5$", r"\boxed{5}"),
    ("$5$", r"\boxed{4}, no, \boxed{5}"),
    ("$5$", r"So $x = 4$. No, it is \boxed{5}"),
    ("$(1,2)$", r"$\{1,2\}$"),
    ("$(1,2)$", r"$\{2,1\}$"),
    ("$(1,2)$", "$(2,1)$"),
    (r"$10\%$", "$0.1$"),
    (r"$10\%$", "$10$"),
)
print("math-verify", version("math-verify"))
verdicts = []
for label, answer in rows:
    verdicts.append(verify(parse(label), parse(answer)))
    print(f"  label {label:10} answer {answer:32} {verdicts[-1]!s:5} read as {parse(answer)[0]}")
expect("one boxed answer is right, and so is a correction outside a box", verdicts[0] and verdicts[2])
expect("two boxed answers are wrong, even if the last one is right", not verdicts[1])
expect("(1,2) equals {1,2}, and not {2,1}", verdicts[3] and not verdicts[4])
expect("10% equals 0.1, and 10, too", verdicts[6] and verdicts[7])
PYTHON
