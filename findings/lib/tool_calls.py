"""Parses answers with tool calls as SGLang's server does, whole or as a stream."""

import json
import logging

from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser

logging.disable(logging.CRITICAL)
TOOL = {
    "name": "find",
    "description": "Finds a file.",
    "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
}
TOOLS = [Tool(type="function", function=TOOL)]


def in_json(name: str) -> str:
    """Returns a call as Qwen2.5 and Hermes write it."""
    return f'<tool_call>\n{{"name": "find", "arguments": {json.dumps({"name": name})}}}\n</tool_call>'


def of_coder(name: str) -> str:
    """Returns a call as Qwen3-Coder writes it."""
    return f"<tool_call>\n<function=find>\n<parameter=name>\n{name}\n</parameter>\n</function>\n</tool_call>"


def of_glm(name: str) -> str:
    """Returns a call as GLM-4.5 writes it."""
    return f"<tool_call>find\n<arg_key>name</arg_key>\n<arg_value>{name}</arg_value>\n</tool_call>"


def whole(parser: str, text: str) -> tuple[str, str]:
    """Returns the text beside the call, and the call's argument."""
    rest, calls = FunctionCallParser(TOOLS, parser).parse_non_stream(text)
    return rest, json.loads(calls[0].parameters)["name"]


def streamed(parser: str, text: str) -> tuple[str, str]:
    """Returns the same of an answer that arrives character by character."""
    stream, rest, arguments = FunctionCallParser(TOOLS, parser), "", ""
    for character in text:
        more, calls = stream.parse_stream_chunk(character)
        rest += more or ""
        arguments += "".join(call.parameters or "" for call in calls)
    return rest, json.loads(arguments)["name"]
