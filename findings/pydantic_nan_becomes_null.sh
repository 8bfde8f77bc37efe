#!/usr/bin/env bash
# pydantic writes NaN and infinity as null, and refuses to read its own text. NaN as the text "NaN" it reads.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" pydantic==2.14.4
run - <<'PYTHON'
import math
from importlib.metadata import version

from pydantic import BaseModel, ConfigDict, ValidationError
from recorded import expect


class Sample(BaseModel):
    log_probs: list[float]


class Kept(Sample):
    model_config = ConfigDict(ser_json_inf_nan="constants")


def is_read(text: str) -> bool:
    try:
        return bool(Sample.model_validate_json(text))
    except ValidationError:
        return False


values = [-0.5, math.nan, -math.inf]
text, kept = Sample(log_probs=values).model_dump_json(), Kept(log_probs=values).model_dump_json()
print("pydantic", version("pydantic"))
print("written by default    ", text)
print("written with constants", kept)
expect("NaN and -infinity are written as null, without an error", text == '{"log_probs":[-0.5,null,null]}')
expect("pydantic does not read its own text", not is_read(text))
expect("with ser_json_inf_nan='constants' it writes NaN and -Infinity", kept == '{"log_probs":[-0.5,NaN,-Infinity]}')
expect("and reads them", is_read(kept))
expect('it also reads NaN as the text "NaN"', is_read('{"log_probs":["NaN"]}'))
PYTHON
