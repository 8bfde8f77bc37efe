#!/usr/bin/env bash
# mlx-lm normalises log-probs in the dtype of the model: in bfloat16 they are off by up to 0.1 nats, and the
# probabilities of all tokens do not add up to 1.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" "mlx[cpu]==0.32.4" mlx-lm==0.32.2
run - <<'PYTHON'
from importlib.metadata import version

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from recorded import expect

mx.random.seed(0)
sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4}
model = llama.Model(llama.ModelArgs(model_type="llama", vocab_size=300, rms_norm_eps=1e-5,
                                    tie_word_embeddings=False, **sizes))
model.lm_head.weight = mx.random.normal(model.lm_head.weight.shape) * 0.6
prompt = mx.array([3, 5, 7, 9])
print("mlx", version("mlx"), "mlx-lm", version("mlx-lm"), "log-probs of a random Llama:")
errors, masses = {}, {}
for dtype in (mx.float32, mx.float16, mx.bfloat16):
    model.set_dtype(dtype)
    logits = model(prompt[None])[0, -1].astype(mx.float32)
    exact = logits - mx.logsumexp(logits)
    _, logprobs = next(generate_step(prompt, model, max_tokens=1))
    wide = logprobs.astype(mx.float32)
    errors[dtype], masses[dtype] = mx.abs(wide - exact).max().item(), mx.exp(wide).sum().item()
    print(f"  {dtype!s:18} logprobs in {logprobs.dtype!s:18} largest error {errors[dtype]:.4f}, "
          f"sum of probabilities {masses[dtype]:.4f}")
expect("float32 is exact to 1e-5", errors[mx.float32] < 1e-5)
expect("bfloat16 is off by more than 0.03, against the model's own logits", errors[mx.bfloat16] > 0.03)
expect("its probabilities miss 1 by more than 0.003", abs(masses[mx.bfloat16] - 1) > 0.003)
PYTHON
