#!/usr/bin/env bash
# In plain text, math-verify reads "- 5" as 5, "1e-3" as 1 and "1 1/2" as 1, and a number with the minus sign U+2212 as
# nothing, so right answers are wrong and wrong ones right. In \boxed{} it reads both signs.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" math-verify==0.9.0
run - <<'PYTHON'
from importlib.metadata import version

from math_verify import parse, verify
from recorded import expect

RIGHT = {"- 5": "-5", "\u22125": "-5", "1e-3": "0.001", "1 1/2": "1.5"}  # answer: its value
WRONG = {"- 5": "5", "1e-3": "1", "1 1/2": "1"}  # answer: a label that it does not equal


def accepts(label: str, answer: str) -> bool:
    return verify(parse(label), parse(answer))


print("math-verify", version("math-verify"))
for answer in RIGHT:
    print(f"  {ascii(answer)} is read as {[str(value) for value in parse(answer)]}")
expect("a right answer is refused", not any(accepts(label, answer) for answer, label in RIGHT.items()))
expect("a wrong one is accepted", all(accepts(label, answer) for answer, label in WRONG.items()))
expect("-5 and 0.001 are right", accepts("-5", "-5") and accepts("0.001", "0.001"))
expect(
    "in \\boxed{} both signs are read, and 1e-3 is not",
    [accepts(f"${label}$", f"\\boxed{{{answer}}}") for answer, label in RIGHT.items()] == [True, True, False, False],
)
PYTHON
