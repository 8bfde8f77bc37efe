#!/usr/bin/env bash
# CTranslate2's log-probs contain the repetition penalty, and neither temperature nor top-k.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 transformers==5.23.0 ctranslate2==4.8.5
run - <<'PYTHON' 2> errors
import ctranslate2
import torch
from ctranslate2.converters import TransformersConverter
from recorded import expect
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.manual_seed(0)
config = LlamaConfig(vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                     tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0)
model = LlamaForCausalLM(config).eval()
model.lm_head.weight.data.normal_(0, 0.3)
words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(300)}, unk_token="t0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", bos_token="t1", eos_token="t2",
                        pad_token="t0").save_pretrained("model")
model.save_pretrained("model")
TransformersConverter("model").convert("converted")
generator = ctranslate2.Generator("converted", compute_type="float32")
prompt = [3, 5, 7, 9]


def error_against_raw(**sampling):
    """The largest difference between the log-probs of the answer and those of the raw logits."""
    steps = list(generator.generate_tokens([f"t{i}" for i in prompt], max_length=8, return_log_prob=True, **sampling))
    tokens = [step.token_id for step in steps]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    raw = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return (torch.tensor([step.log_prob for step in steps]) - raw).abs().max().item()


print("ctranslate2", ctranslate2.__version__, "log-probs against those of the raw logits:")
errors = {
    "temperature 0.5": error_against_raw(sampling_topk=0, sampling_temperature=0.5),
    "top-k 5": error_against_raw(sampling_topk=5),
    "repetition penalty 1.5": error_against_raw(sampling_topk=1, repetition_penalty=1.5),
}
for name, value in errors.items():
    print(f"  {name:24} largest difference {value:.4f}")
expect("temperature and top-k are not in them", errors["temperature 0.5"] < 1e-4 and errors["top-k 5"] < 1e-4)
expect("the repetition penalty is", errors["repetition penalty 1.5"] > 1e-3)
PYTHON
