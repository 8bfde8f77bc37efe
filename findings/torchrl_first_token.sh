#!/usr/bin/env bash
# torchrl's TransformersWrapper records the log-prob 0 for the first token of each answer, and leaves the temperature
# out of the others. The same wrapper with generate=False gives the first token its log-prob.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6 transformers==5.23.0 torchrl==0.14.1 tensordict==0.14.3
run - <<'PYTHON' 2> errors
import torch
import torchrl
from recorded import expect
from tensordict import TensorDict
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torchrl.modules.llm import TransformersWrapper
from torchrl.modules.llm.policies.common import Masks, Tokens
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

words = {"pad": 0, "end": 1} | {f"word{number}": number for number in range(2, 32)}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel(words, unk_token="end")), pad_token="pad", eos_token="end", padding_side="left"
)
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                num_key_value_heads=2, pad_token_id=0, eos_token_id=None)
).eval()
model.lm_head.weight.data.normal_(0, 0.5)
options = {"tokenizer": tokenizer, "input_mode": "tokens", "return_log_probs": True, "pad_output": True}


def batch(**tokens: torch.Tensor) -> TensorDict:
    (values,) = tokens.values()
    mask = Masks(all_attention_mask=torch.ones_like(values).bool(), batch_size=(64,))
    return TensorDict(tokens=Tokens(**tokens, batch_size=(64,)), masks=mask, batch_size=(64,))


def distances(temperature: float) -> dict[str, float]:
    """Returns mean differences of recorded log-probs from the model's, in nats."""
    sampling = {"max_new_tokens": 12, "do_sample": True, "top_k": 32, "temperature": temperature}
    sampler = TransformersWrapper(model, generate=True, generate_kwargs=sampling, **options)
    reply = sampler(batch(prompt=torch.randint(2, 32, (64, 5))))
    texts, recorded = reply["tokens"].full, reply["log_probs"].response
    with torch.no_grad():
        logits = model(texts).logits[:, 4:-1]
    raw, tempered = ((logits / t).log_softmax(-1).gather(-1, texts[:, 5:, None])[..., 0] for t in (1.0, temperature))
    scored = TransformersWrapper(model, generate=False, **options)(batch(full=texts))["log_probs"].full[:, 5:]
    return {
        "first token, recorded value": recorded[:, 0].abs().max().item(),
        "first token, the model's value": raw[:, 0].abs().mean().item(),
        "other tokens, from the model's": (recorded - raw)[:, 1:].abs().mean().item(),
        "other tokens, from those with the temperature": (recorded - tempered)[:, 1:].abs().mean().item(),
        "all tokens with generate=False, from the model's": (scored - raw).abs().mean().item(),
    }


print("torchrl", torchrl.__version__, "at temperature 0.5, mean, in nats:")
seen = distances(0.5)
for name, value in seen.items():
    print(f"  {name}: {value:.1e}")
zero, first, raw, tempered, scored = seen.values()
expect("the first token of each answer has the log-prob 0, and should have another one", zero == 0 and first > 0.5)
expect("the others have the model's, without the temperature", raw < 1e-5 and tempered > 0.1)
expect("with generate=False all are the model's", scored < 1e-5)
PYTHON
