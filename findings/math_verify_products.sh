#!/usr/bin/env bash
# math-verify adds a whole number and a whole number in brackets: 2(3) is 5. Digits in groups with a thin space are
# a product, so 10\,000 is 0. Degrees are radians, and \log is the decimal logarithm.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" math-verify==0.9.0 latex2sympy2-extended==1.11.0 antlr4-python3-runtime==4.13.2
run - <<'PYTHON'
from importlib.metadata import version

from math_verify import parse, verify
from recorded import expect

PAIRS = {  # an answer, the label that it should equal, and another label
    "2(3)": ("6", "5"),
    r"4\left(5\right)": ("20", "9"),
    r"10\,000": ("10000", "0"),
    "10 000": ("10000", "0"),
    "3 1/2": ("3.5", "2"),
    r"\sin 90^\circ": ("1", r"\sin 90"),
    r"\log(e)": ("1", r"\log_{10}(e)"),
}
RIGHT = {"2(-3)": "-6", "2(x+1)": "2x+2", r"3\frac{1}{2}": "3.5", "10,000": "10000", r"\ln(e)": "1"}


def is_right(answer: str, label: str) -> bool:
    return verify(parse(f"${label}$"), parse(f"${answer}$"))


print("math-verify", version("math-verify"), "latex2sympy2_extended", version("latex2sympy2_extended"))
for answer, (label, other) in PAIRS.items():
    print(f"  {answer} for the label {label}: {is_right(answer, label)}, for {other}: {is_right(answer, other)}")
for answer, label in RIGHT.items():
    print(f"  {answer} for the label {label}: {is_right(answer, label)}")
expect("all of the first are wrong", not any(is_right(answer, label) for answer, (label, _) in PAIRS.items()))
expect("they equal another number", all(is_right(answer, other) for answer, (_, other) in PAIRS.items()))
expect("the others are right", all(is_right(answer, label) for answer, label in RIGHT.items()))
PYTHON
