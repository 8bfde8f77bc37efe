#!/usr/bin/env bash
# litellm maps the finish reason "abort", with which SGLang ends an answer that it stopped, to "stop". The same
# answer raises an error if it is streamed.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" litellm==1.110.2
export LITELLM_LOCAL_MODEL_COST_MAP=True
run - <<'PYTHON'
import logging
from importlib.metadata import version

import litellm
from recorded import expect
from served import Server

logging.getLogger("LiteLLM").setLevel(logging.ERROR)
litellm.suppress_debug_info = True


def ask(server: Server, **options: object) -> object:
    question = [{"role": "user", "content": "q"}]
    return litellm.completion("hosted_vllm/m", question, api_base=server.url, api_key="none", **options)


reasons, streamed = {}, {}
for reason in ("stop", "length", "abort", None):
    choice = {"index": 0, "message": {"role": "assistant", "content": "half"}, "finish_reason": reason}
    server = Server(answers=[{"object": "chat.completion", "choices": [choice]}])
    reasons[reason] = ask(server).choices[0].finish_reason
for reason in ("stop", "length", "abort"):
    first = {"index": 0, "delta": {"role": "assistant", "content": "half"}, "finish_reason": None}
    chunks = [first, {"index": 0, "delta": {}, "finish_reason": reason}]
    server = Server(answers=[{"object": "chat.completion.chunk", "choices": [chunk]} for chunk in chunks])
    try:
        streamed[reason] = [chunk.choices[0].finish_reason for chunk in ask(server, stream=True)][-1]
    except Exception as error:
        streamed[reason] = type(error).__name__
print("litellm", version("litellm"))
print("  the engine's reason -> the client's:", reasons)
print("  the same, streamed:", streamed)
expect("an aborted answer has ended with 'stop'", reasons["abort"] == "stop")
expect("so has one without a reason", reasons[None] == "stop")
expect("other reasons are passed on", (reasons["stop"], reasons["length"]) == ("stop", "length"))
expect("streamed, the aborted answer is an error", streamed["abort"] == "MidStreamFallbackError")
PYTHON
