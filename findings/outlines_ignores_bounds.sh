#!/usr/bin/env bash
# outlines-core makes a regular expression of a JSON schema and leaves out, without an error, what it cannot express:
# bounds, multiples, unique items, and a pattern beside a length. llguidance applies it or names it.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" outlines-core==0.2.14 llguidance==1.9.1
run - <<'PYTHON'
import json
import re
from importlib.metadata import version

from llguidance import LLMatcher
from outlines_core.json_schema import build_regex_from_schema
from recorded import expect

CASES = {
    "7": {"type": "integer", "maximum": 5},
    "8": {"type": "integer", "multipleOf": 5},
    "[1,1]": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    '"bb"': {"type": "string", "pattern": "^a", "maxLength": 2},
}


def accepts(schema: dict, answer: str) -> bool:
    return re.fullmatch(build_regex_from_schema(json.dumps(schema)), answer) is not None


def llguidance_says(schema: dict) -> str:
    """Returns what llguidance has against a schema, or an empty text."""
    return LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))


print("outlines-core", version("outlines-core"), "llguidance", version("llguidance"))
for answer, schema in CASES.items():
    print(f"  {json.dumps(schema)}: {answer} is {'' if accepts(schema, answer) else 'not '}accepted")
expect("answers that break the schema are accepted", all(accepts(schema, answer) for answer, schema in CASES.items()))
expect("a pattern alone is kept", not accepts({"type": "string", "pattern": "^a"}, '"bb"'))
expect("an answer of another type is refused", not accepts(CASES["7"], '"7"'))
expect("llguidance names unique items as unknown", "uniqueItems" in llguidance_says(CASES["[1,1]"]))
expect("and takes multiples", llguidance_says(CASES["8"]) == "")
PYTHON
