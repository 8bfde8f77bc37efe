#!/usr/bin/env bash
# llama.cpp's server returns no log-prob for a token that ends in the middle of a character, so there are fewer
# log-probs than tokens. The others are raw: the temperature is not in them.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" gguf==0.19.0 numpy==2.4.6 xllamacpp==2026.10.11549
cat > model.py <<'PYTHON'
"""Writes a random Llama with a token per byte."""

import gguf
import numpy as np

V, WIDTH, MIDDLE = 259, 64, 128
draw = np.random.default_rng(0)
file = gguf.GGUFWriter("model.gguf", "llama")
file.add_context_length(512)
file.add_embedding_length(WIDTH)
file.add_block_count(1)
file.add_feed_forward_length(MIDDLE)
file.add_head_count(4)
file.add_head_count_kv(4)
file.add_layer_norm_rms_eps(1e-5)
file.add_rope_dimension_count(WIDTH // 4)
file.add_vocab_size(V)
file.add_tokenizer_model("llama")
file.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))])
file.add_token_scores([0.0] * V)
file.add_token_types([2, 3, 3] + [6] * 256)
file.add_bos_token_id(1)
file.add_eos_token_id(2)
SHAPES = {f"attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
SHAPES |= {"ffn_gate": (MIDDLE, WIDTH), "ffn_up": (MIDDLE, WIDTH), "ffn_down": (WIDTH, MIDDLE)}
SHAPES |= {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)}
SHAPES = {f"blk.0.{name}": shape for name, shape in SHAPES.items()} | {"output_norm": (WIDTH,)}
for name, shape in ({"token_embd": (V, WIDTH), "output": (V, WIDTH)} | SHAPES).items():
    value = np.ones(shape) if len(shape) == 1 else draw.normal(0, 0.15, shape)
    file.add_tensor(f"{name}.weight", value.astype(np.float32))
file.write_header_to_file()
file.write_kv_data_to_file()
file.write_tensors_to_file()
file.close()
PYTHON
run model.py
run - 2>errors <<'PYTHON' || { tail -3 errors; exit 1; }
from importlib.metadata import version

import xllamacpp
from recorded import expect

params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel = "model.gguf", 512, 1
server = xllamacpp.Server(params)
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "cache_prompt": False, "ignore_eos": True}


def ask(seed: int = 1, count: int = 16, **more: object) -> dict:
    request = {"prompt": [1, 70, 71, 72], "n_predict": count, "logprobs": 1, "temperature": 1.0, "seed": seed}
    answer = server.handle_completions(request | OFF | more)
    entries = answer["choices"][0]["logprobs"]["content"]
    return {"tokens": answer["usage"]["completion_tokens"], "entries": entries}


ASCII = {"logit_bias": [[token, -1e9] for token in (0, 1, 2, *range(131, 259))]}


def log_prob(**more: object) -> float:
    """Returns the log-prob of the most likely first token; the sampled one is ASCII, so that there is one."""
    return ask(count=1, **ASCII, **more)["entries"][0]["top_logprobs"][0]["logprob"]


answers = [ask(seed) for seed in range(20)]
tokens = sum(answer["tokens"] for answer in answers)
entries = sum(len(answer["entries"]) for answer in answers)
ascii_only = ask(**ASCII)
plain = log_prob()
print("xllamacpp", version("xllamacpp"))
print(tokens, "tokens", entries, "log-probs; with ASCII only", ascii_only["tokens"], len(ascii_only["entries"]))
expect("there are fewer log-probs than tokens", entries < tokens)
expect("with ASCII characters only there are as many", len(ascii_only["entries"]) == ascii_only["tokens"])
expect("the temperature is not in them", abs(log_prob(temperature=0.5) - plain) < 1e-3)
PYTHON
