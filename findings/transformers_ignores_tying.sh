#!/usr/bin/env bash
# transformers does not tie the head to the embedding, although the config says so, if the checkpoint has
# another head. If the config says "not tied" and the checkpoint has no head, the head is random.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch transformers==5.23.0
run - <<'PYTHON'
import json
from pathlib import Path

import torch
import transformers
from recorded import expect
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)


def read(saved_tied: bool, says_tied: bool) -> tuple:
    """Saves a model, changes what its config says about tying, and reads it; also returns what was saved."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=saved_tied))
    model.save_pretrained("model")
    file = Path("model/config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": says_tied}))
    return model, AutoModelForCausalLM.from_pretrained("model")


print("transformers", transformers.__version__, "torch", torch.__version__)
saved, model = read(saved_tied=False, says_tied=True)
head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
expect("the config says tied", model.config.tie_word_embeddings)
expect("the head is not the embedding", not torch.equal(head, embedding))
expect("it is the one of the checkpoint", torch.equal(head, saved.lm_head.weight))
saved, model = read(saved_tied=True, says_tied=False)
head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
expect("without a head in the checkpoint there is no error", not model.config.tie_word_embeddings)
expect("and the head is neither the saved one nor the embedding",
       not torch.equal(head, saved.lm_head.weight) and not torch.equal(head, embedding))
PYTHON
