#!/usr/bin/env bash
# xgrammar is stricter than a JSON schema: keys must come in the order of the schema, and further keys are forbidden, so
# valid answers are masked. It is also looser: "not" and "uniqueItems" are left out without an error.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 xgrammar==0.2.9
run - <<'PYTHON' 2>/dev/null
import json
from importlib.metadata import version

import xgrammar
from recorded import expect

END, KIND = 255, xgrammar.VocabType.RAW
TOKENS = [*(bytes([byte]) for byte in range(END)), b"</s>"]
COMPILER = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(TOKENS, KIND, vocab_size=256, stop_token_ids=[END]))
POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"]}


def accepts(schema: dict, answer: str, **options: object) -> bool:
    matcher = xgrammar.GrammarMatcher(COMPILER.compile_json_schema(json.dumps(schema), **options))
    return matcher.accept_string(answer) and matcher.accept_token(END)


ANSWERS = ('{"x": 1, "y": 2}', '{"y": 2, "x": 1}', '{"x": 1, "y": 2, "z": 3}')
accepted = [accepts(POINT, answer) for answer in ANSWERS]
print("xgrammar", version("xgrammar"), json.dumps(POINT))
for answer, is_accepted in zip(ANSWERS, accepted):
    print(f"  {answer} is {'' if is_accepted else 'not '}accepted")
expect("only the answer with the schema's keys in their order is accepted", accepted == [True, False, False])
expect("strict_mode=False allows the further key", accepts(POINT, ANSWERS[2], strict_mode=False))
expect("but no other order", not accepts(POINT, ANSWERS[1], strict_mode=False))
expect('"not" is left out', accepts({"not": {"type": "string"}}, '"a"'))
expect("unique items, too", accepts({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 1]"))
expect("a maximum is kept", not accepts({"type": "integer", "maximum": 5}, "7"))
PYTHON
