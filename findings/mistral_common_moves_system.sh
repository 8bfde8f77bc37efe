#!/usr/bin/env bash
# mistral-common writes the system prompt into the last user message in versions 2 and 3 of its tokenizers. In the
# second turn it moves, so the tokens of the first turn are no prefix, and what was sampled after them stands after
# others.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" numpy==2.3.5 sentencepiece==0.2.3 mistral-common==1.13.1
run - <<'PYTHON' 2> errors
import mistral_common
from mistral_common.protocol.instruct.messages import AssistantMessage, SystemMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from recorded import expect

ANSWER = AssistantMessage(content="Yes.")


def turns(version: str, start: list) -> tuple[bool, str, str]:
    """Returns whether the first turn's tokens begin those of the second, and both texts."""
    tokenizer = getattr(MistralTokenizer, version)()
    first = [*start, UserMessage(content="One?")]
    encoded = [
        tokenizer.encode_chat_completion(ChatCompletionRequest(messages=messages))
        for messages in (first, [*first, ANSWER, UserMessage(content="Two?")])
    ]
    one, two = (some.tokens for some in encoded)
    return two[: len(one)] == one, encoded[0].text, encoded[1].text


print("mistral-common", mistral_common.__version__)
seen = {}
for version in ("v1", "v2", "v3", "v7"):
    seen[version], one, two = turns(version, [SystemMessage(content="Be brief")])
    print(f"  {version}, first turn:  {one}")
    print(f"  {version}, second turn: {two}")
expect("in v1 and v7 the first turn begins the second", seen["v1"] and seen["v7"])
expect("in v2 and v3 it does not", not seen["v2"] and not seen["v3"])
expect("without a system prompt it does", all(turns(version, [])[0] for version in seen))
PYTHON
