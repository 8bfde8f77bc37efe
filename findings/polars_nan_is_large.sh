#!/usr/bin/env bash
# In polars the maximum leaves out NaN, whereas a filter and a sort take NaN for the largest number. The mean is NaN.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" polars==2.1.0
run - <<'PYTHON'
import math

import polars
from polars import col
from recorded import expect

table = polars.DataFrame({"step": [1, 2, 3, 4], "k3": [0.1, math.nan, 0.3, 0.2]})
largest = table["k3"].max()
above = table.filter(col("k3") > 10)["step"].to_list()
print("polars", polars.__version__, "k3", table["k3"].to_list())
print(f"  max {largest}, median {table['k3'].median()}, mean {table['k3'].mean()}; k3 > 10 in steps {above}")
expect("the maximum leaves out NaN", largest == 0.3 and table["k3"].arg_max() == 2)
expect("a filter for values above 10 keeps the row with NaN", above == [2])
expect("NaN is the last of the sorted values", table.sort("k3")["step"].to_list() == [1, 4, 3, 2])
expect("and the median counts it as the largest", table["k3"].median() == 0.25)
expect("the mean is NaN", math.isnan(table["k3"].mean()))
PYTHON
