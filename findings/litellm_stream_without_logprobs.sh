#!/usr/bin/env bash
# litellm.stream_chunk_builder, which makes one answer of a stream's chunks, joins text and token ids, but leaves
# the log-probs out. It counts the tokens of the text anew.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" litellm==1.110.2
export LITELLM_LOCAL_MODEL_COST_MAP=True
run - <<'PYTHON'
from importlib.metadata import version

import litellm
from recorded import expect
from served import Server

litellm.suppress_debug_info = True
LOGPROBS = [-0.1, -0.2, -0.3, -0.4, -0.5]


def chunk(place: int, logprob: float) -> dict:
    of_token = {"token": "ab"[place % 2], "logprob": logprob, "bytes": None, "top_logprobs": []}
    choice = {"index": 0, "delta": {"role": "assistant", "content": "ab"[place % 2]}, "finish_reason": None}
    choice |= {"token_ids": [10 + place], "logprobs": {"content": [of_token]}}
    return {"object": "chat.completion.chunk", "choices": [choice]}


end = {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
server = Server(answers=[*(chunk(*place) for place in enumerate(LOGPROBS)), end])
question = [{"role": "user", "content": "q"}]
options = {"api_base": server.url, "api_key": "none", "stream": True, "logprobs": True}
chunks = list(litellm.completion("hosted_vllm/m", question, **options))
passed = [c.choices[0].logprobs["content"][0]["logprob"] for c in chunks if c.choices[0].logprobs]
joined = litellm.stream_chunk_builder(chunks).model_dump()
choice, counted = joined["choices"][0], joined["usage"]["completion_tokens"]
print("litellm", version("litellm"))
print("  log-probs of the chunks:", passed)
print("  of the joined answer:", choice.get("logprobs"), "token ids:", choice["token_ids"], "tokens:", counted)
expect("every chunk has its log-prob", passed == LOGPROBS)
expect("the joined answer has the text and the ids", (choice["message"]["content"], choice["token_ids"]) == (
    "ababa", [10, 11, 12, 13, 14]))
expect("it has no log-probs", choice.get("logprobs") is None)
expect("it counts other than 5 tokens", counted != 5)
PYTHON
