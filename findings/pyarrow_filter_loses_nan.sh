#!/usr/bin/env bash
# A filter on a Parquet file loses rows that the same filter keeps in memory: the file's minimum and maximum leave
# NaN out, so pyarrow skips a group of rows where no other value passes. Negated comparisons, which keep NaN, are
# wrong then.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" numpy==2.4.6 pyarrow==26.0.1 polars==2.1.0
run - <<'PYTHON'
import polars
import pyarrow
from pyarrow import compute, dataset, parquet
from recorded import expect

table = pyarrow.table({"k3": [0.0, 0.5, float("nan"), 1.0]})
parquet.write_table(table, "steps.parquet")
parquet.write_table(table, "plain.parquet", write_statistics=False)
k3 = compute.field("k3")
FILTERS = {"~(k3 <= 1)": ~(k3 <= 1), "~(k3 >= 0)": ~(k3 >= 0), "k3.is_nan()": k3.is_nan(), "~(k3 > 1)": ~(k3 > 1)}
print("pyarrow", pyarrow.__version__, "number of rows", table["k3"].to_pylist(), "that pass")
seen = {}
for name, rows in FILTERS.items():
    seen[name] = [
        table.filter(rows).num_rows,
        parquet.read_table("steps.parquet", filters=rows).num_rows,
        dataset.dataset("steps.parquet").to_table(filter=rows).num_rows,
        parquet.read_table("plain.parquet", filters=rows).num_rows,
    ]
    print("  {}: in memory {}, read_table {}, dataset {}, without statistics {}".format(name, *seen[name]))
lazy = polars.scan_parquet("steps.parquet").filter(~(polars.col("k3") <= 0.5)).collect().height
eager = polars.from_arrow(table).filter(~(polars.col("k3") <= 0.5)).height
expect("not at most 1: NaN passes in memory, and in the file nothing", seen["~(k3 <= 1)"] == [1, 0, 0, 1])
expect("not at least 0: the same", seen["~(k3 >= 0)"] == [1, 0, 0, 1])
expect("is_nan and not above 1 are right", seen["k3.is_nan()"] == [1] * 4 and seen["~(k3 > 1)"] == [4] * 4)
expect("polars reads the same rows from the file as from memory", lazy == eager)
PYTHON
