#!/usr/bin/env bash
# inspect-ai's scorer match compares the end of the answer with the target, not its last word: 142, -42 and 0.42 are right
# for 42. With numeric=True it compares numbers, but takes "- 42" for 42.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" inspect-ai==0.3.285
run - <<'PYTHON' 2> errors
import asyncio

import inspect_ai
from inspect_ai.model import ModelOutput
from inspect_ai.scorer import Target, match
from inspect_ai.solver import TaskState
from recorded import expect


def is_right(answer: str, is_numeric: bool) -> bool:
    """Returns whether the answer is right for the target 42."""
    output = ModelOutput.from_content("none/none", answer)
    state = TaskState(model="none/none", sample_id=1, epoch=1, input="", messages=[], output=output)
    return asyncio.run(match(numeric=is_numeric)(state, Target("42"))).value == "C"


print("inspect-ai", inspect_ai.__version__, "match for the target 42, with and without numeric=True:")
seen = {}
for answer in ("42", "The answer is 142.", "-42", "0.42", "- 42", "43"):
    seen[answer] = is_right(answer, False), is_right(answer, True)
    print(f"  {answer!r}:", *seen[answer])
expect("42 is right and 43 is wrong", seen["42"] == (True, True) and seen["43"] == (False, False))
expect("142, -42 and 0.42 are right, and with numeric=True wrong", all(
    seen[answer] == (True, False) for answer in ("The answer is 142.", "-42", "0.42")))
expect('"- 42" is right in both', seen["- 42"] == (True, True))
PYTHON
