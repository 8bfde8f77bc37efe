#!/usr/bin/env bash
# minijinja, which Rust servers use for chat templates, writes <, >, & and ' in a tool's description as escapes, and
# small or large floats in other digits. A prompt that is rendered by a router differs from the trainer's, which
# transformers renders.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" numpy==2.4.6 jinja2==3.1.6 minijinja==3.1.0 transformers==5.23.0
run - <<'PYTHON' 2> errors
from importlib.metadata import version

import minijinja
from recorded import expect
from transformers.utils.chat_template_utils import render_jinja_template

MESSAGES = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for tool in tools %}{{ tool | tojson }}{% endfor %} {{ messages[0].content }} {{ tools[0].limit }}"


def prompts(description: str, limit: float) -> tuple[str, str]:
    """Returns the text of one template in transformers and in minijinja."""
    tools = [{"name": "search", "description": description, "limit": limit}]
    (text,), *_ = render_jinja_template([MESSAGES], tools=tools, chat_template=TEMPLATE)
    environment = minijinja.Environment(trim_blocks=True, lstrip_blocks=True)
    return text, environment.render_str(TEMPLATE, messages=MESSAGES, tools=tools)


print("minijinja", version("minijinja"), "transformers", version("transformers"))
seen = [prompts(*tool) for tool in (("plain text", 0.5), ("it's a < b & c", 0.5), ("plain text", 1e-7))]
for one, other in seen:
    print(f"  transformers: {one}\n  minijinja:    {other}")
expect("plain text is the same", seen[0][0] == seen[0][1])
expect("transformers writes signs as they are", "it's a < b & c" in seen[1][0])
expect("minijinja escapes them", "it\\u0027s a \\u003c b \\u0026 c" in seen[1][1])
expect("1e-07 is 0.0000001", seen[2][0].endswith(" 1e-07") and seen[2][1].endswith(" 0.0000001"))
PYTHON
