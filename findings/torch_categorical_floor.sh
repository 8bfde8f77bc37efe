#!/usr/bin/env bash
# torch.distributions.Categorical moves probabilities into [eps, 1 - eps] of their dtype before it takes their
# logarithm: in bfloat16 no log-prob is below -4.84, and in float32 a token that cannot be drawn has -15.94.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6
run - <<'PYTHON'
import torch
from recorded import expect
from torch.distributions import Categorical

probabilities = torch.tensor([0.96, 0.0356, 0.004, 0.0004, 0.0])
tokens = torch.arange(5)


def logprobs(**options: object) -> list[float]:
    return Categorical(**options).log_prob(tokens).tolist()


seen = {
    "probs, bfloat16": logprobs(probs=probabilities.bfloat16()),
    "logits, bfloat16": logprobs(logits=probabilities.log().bfloat16()),
    "probs, float32": logprobs(probs=probabilities),
    "logarithm": probabilities.log().tolist(),
}
print("torch", torch.__version__, "log-probs of", [round(p, 4) for p in probabilities.tolist()])
for name, values in seen.items():
    print(f"  {name}:", *(f"{value:.2f}" for value in values))
expect("in bfloat16 all rare tokens have -4.84", set(seen["probs, bfloat16"][2:]) == {-4.84375})
expect("with logits they have their own, to 0.05", all(
    abs(a - b) < 0.05 for a, b in zip(seen["logits, bfloat16"][:4], seen["logarithm"][:4])))
expect("in float32 a token of probability 0 has -15.94", abs(seen["probs, float32"][4] + 15.942385) < 1e-4)
PYTHON
