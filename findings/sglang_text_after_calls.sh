#!/usr/bin/env bash
# SGLang's parsers of tool calls drop the text that follows a call, so the next prompt, made of the message, lacks
# tokens that were sampled. In a stream all but one keep it.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 aiohttp==3.14.5 ipython==9.18.1 msgspec==0.23.0 openai==2.8.0 orjson==3.13.0 packaging==26.4 partial-json-parser==0.2.1.1.post7 pillow==13.0.0 psutil==7.2.2 pybase64==1.5.1 pydantic==2.14.4 pyzmq==27.3.0 regex==2026.11.19 requests==2.34.2 starlette==1.10.0 triton==3.9.0 xgrammar==0.2.9
environment/bin/python -m pip --disable-pip-version-check install -qq --no-compile --no-deps sglang==0.5.23
run - <<'PYTHON'
from importlib.metadata import version

from recorded import expect
from tool_calls import in_json, of_coder, of_glm, streamed, whole

FORMS = {"qwen25": in_json, "hermes": in_json, "qwen3_coder": of_coder, "glm45": of_glm}
texts = {parser: ("Let me look. " + form("main"), form("main") + " I wait.") for parser, form in FORMS.items()}
before = {parser: whole(parser, text)[0] for parser, (text, _) in texts.items()}
after = {parser: whole(parser, text)[0] for parser, (_, text) in texts.items()}
stream = {parser: streamed(parser, text)[0] for parser, (_, text) in texts.items()}
print("sglang", version("sglang"), "- text that the message keeps: before a call, after it, after it in a stream")
for parser in FORMS:
    print(f"  {parser:<12} {before[parser]!r:<16} {after[parser]!r:<6} {stream[parser]!r}")
expect("text before a call is kept", all(text.strip() == "Let me look." for text in before.values()))
expect("text after a call is lost", set(after.values()) == {""})
expect("in a stream Hermes, Qwen3-Coder and GLM-4.5 keep it",
       [parser for parser, text in stream.items() if text.strip() == "I wait."] == ["hermes", "qwen3_coder", "glm45"])
PYTHON
