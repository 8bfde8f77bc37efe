#!/usr/bin/env bash
# polars decides the columns of a list of dictionaries by the first 100. If the rewards of these are 0 or 1, each later
# reward of 0.5 becomes 0, and a key that comes later is left out, both without an error.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" polars==2.1.0
run - <<'PYTHON'
import polars
from recorded import expect

FIRST = [{"reward": 1}] * 100
LATE = {"reward": 0.5, "truncated": True}


def last(rows: list[dict], **options: object) -> dict:
    """Returns the last row of a table of some rows."""
    return polars.DataFrame(rows, **options).row(-1, named=True)


early, late = last([*FIRST[1:], LATE]), last([*FIRST, LATE])
print("polars", polars.__version__, "the row", LATE)
print("  as number 100 is", early, "and as number 101", late)
expect("row 100 is read as it is", early == LATE)
expect("row 101 has another reward and no second key", late == {"reward": 0})
expect("from_dicts does the same", polars.from_dicts([*FIRST, LATE]).row(-1, named=True) == {"reward": 0})
expect("with infer_schema_length=None it is right", last([*FIRST, LATE], infer_schema_length=None) == LATE)
PYTHON
