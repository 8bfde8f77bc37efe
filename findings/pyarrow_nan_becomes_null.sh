#!/usr/bin/env bash
# A table that goes to pandas and back has null where it had NaN, also inside lists: a log-prob that was NaN is missing
# afterwards, and a mean over the column leaves it out.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" numpy==2.4.6 pandas==3.1.1 pyarrow==26.0.1
run - <<'PYTHON'
import math

import pyarrow as pa
import pyarrow.compute as compute
from recorded import expect

nan = math.nan
table = pa.table({"k3": [0.5, nan], "log_probs": [[-0.1, nan], [-0.2]]})
again = pa.Table.from_pandas(table.to_pandas())
before, after = (compute.mean(each["k3"]).as_py() for each in (table, again))
print("pyarrow", pa.__version__, again.to_pydict(), f"mean of k3: {before}, then {after}")
expect("NaN in a column is null afterwards", again["k3"].to_pylist() == [0.5, None])
expect("and so is NaN in a list", again["log_probs"].to_pylist() == [[-0.1, None], [-0.2]])
expect("the mean was NaN, and is that of the other values", math.isnan(before) and after == 0.5)
PYTHON
