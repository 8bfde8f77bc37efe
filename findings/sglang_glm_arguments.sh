#!/usr/bin/env bash
# SGLang's parser of GLM-4.5 reads a tool's argument as JSON or Python and then writes it as text again, although
# its schema says that it is a string: "1.10" becomes "1.1". In a stream it stays as it was.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 aiohttp==3.14.5 ipython==9.18.1 msgspec==0.23.0 openai==2.8.0 orjson==3.13.0 packaging==26.4 partial-json-parser==0.2.1.1.post7 pillow==13.0.0 psutil==7.2.2 pybase64==1.5.1 pydantic==2.14.4 pyzmq==27.3.0 regex==2026.11.19 requests==2.34.2 starlette==1.10.0 triton==3.9.0 xgrammar==0.2.9
environment/bin/python -m pip --disable-pip-version-check install -qq --no-compile --no-deps sglang==0.5.23
run - <<'PYTHON'
from importlib.metadata import version

from recorded import expect
from tool_calls import in_json, of_coder, of_glm, streamed, whole

NAMES = ["1.10", "12e3456", "true", "null", '"main"', "[1,2]", "main", "007", "2026-01-01"]
seen = {name: (whole("glm45", of_glm(name))[1], streamed("glm45", of_glm(name))[1]) for name in NAMES}
others = {
    ("qwen25", name): whole("qwen25", in_json(name))[1] for name in NAMES
} | {("qwen3_coder", name): whole("qwen3_coder", of_coder(name))[1] for name in NAMES}
print("sglang", version("sglang"), "- argument, as the tool gets it, and as it gets it from a stream")
for name, (once, stream) in seen.items():
    print(f"  {name:<12} {once!r:<16} {stream!r}")
changed = {name: once for name, (once, _) in seen.items() if once != name}
expect("six strings change", changed == {
    "1.10": "1.1", "12e3456": "inf", "true": "True", "null": "None", '"main"': "main", "[1,2]": "[1, 2]"})
expect("none changes in a stream", all(name == stream for name, (_, stream) in seen.items()))
expect("with the parser of Qwen2.5 none changes, with that of Qwen3-Coder only null",
       [key for key, name in others.items() if name != key[1]] == [("qwen3_coder", "null")])
PYTHON
