#!/usr/bin/env bash
# orjson reads an integer of more than 64 bits as a float, so that a long label loses digits. It refuses to write one.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" orjson==3.13.0 msgspec==0.23.0
run - <<'PYTHON'
import json

import msgspec
import orjson
from recorded import expect

LABEL, TEXT = 2**64 + 1, '{"label": 18446744073709551617}'
label = orjson.loads(TEXT)["label"]
try:
    written = orjson.dumps({"label": LABEL}).decode()
except TypeError as error:
    written = f"{type(error).__name__}: {error}"
print("orjson", orjson.__version__, TEXT, "is read as", repr(label), "and written as", written)
expect("the label is a float", type(label) is float)
expect("which is another number", int(label) == LABEL - 1)
expect("writing the integer is an error", written.startswith("TypeError"))
expect("64 bits are read right", orjson.loads(str(2**64 - 1)) == 2**64 - 1)
expect("json and msgspec read all digits", json.loads(TEXT) == msgspec.json.decode(TEXT) == {"label": LABEL})
PYTHON
