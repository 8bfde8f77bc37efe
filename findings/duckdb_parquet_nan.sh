#!/usr/bin/env bash
# In a Parquet file that pyarrow or polars wrote, duckdb takes the file's minimum and maximum for those of all
# values, and they leave NaN out. isnan finds no row, and k3 <= 0.75 keeps the row with NaN. A file of duckdb's own
# is right.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" numpy==2.4.6 pyarrow==26.0.1 polars==2.1.0 duckdb==2.0.1
run - <<'PYTHON'
import duckdb
import polars
import pyarrow
from pyarrow import parquet
from recorded import expect

steps = pyarrow.table({"k3": [0.5, 0.75, float("nan")]})
parquet.write_table(steps, "pyarrow.parquet")
polars.from_arrow(steps).write_parquet("polars.parquet")
parquet.write_table(steps, "plain.parquet", write_statistics=False)
duckdb.sql("copy steps to 'duckdb.parquet' (format parquet)")
SOURCES = ("steps", "'pyarrow.parquet'", "'polars.parquet'", "'plain.parquet'", "'duckdb.parquet'")
QUESTIONS = (
    "count(*) from {} where isnan(k3)",
    "count(*) from {} where k3 <= 0.75",
    "count(*) from {} where k3 > 1",
    "max(k3) from {}",
    "count(*) filter (where isnan(k3)) from {}",
)


def answers(question: str) -> list[str]:
    return [str(duckdb.sql("select " + question.format(source)).fetchall()[0][0]) for source in SOURCES]


print("duckdb", duckdb.__version__, "of", steps["k3"].to_pylist(), "in", *SOURCES)
seen = {question: answers(question) for question in QUESTIONS}
for question, found in seen.items():
    print(" ", question.format("..."), *found)
nan, few, many, largest, counted = seen.values()
expect("isnan finds the row in memory, and none in the files", nan == ["1", "0", "0", "1", "1"])
expect("k3 <= 0.75 keeps NaN in the files", few == ["2", "3", "3", "2", "2"])
expect("NaN counts as more than 1 in memory, and not in the files", many == ["1", "0", "0", "1", "1"])
expect("the maximum is NaN, and 0.75 in the file of pyarrow", largest == ["nan", "0.75", "nan", "nan", "nan"])
expect("isnan in a filter of a sum is right", counted == ["1"] * 5)
PYTHON
