#!/usr/bin/env bash
# On a CPU, torch.rand in bfloat16 draws exactly 0 about twice in a thousand times, and values below 0.001 three
# times too often. Gumbel noise from it has infinities. bernoulli and exponential_ are right.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" torch numpy==2.4.6
run - <<'PYTHON'
import torch
from recorded import expect

torch.manual_seed(0)
COUNT, P = 1_000_000, 0.001
draws = torch.rand(COUNT, dtype=torch.bfloat16)
gumbel = -(-draws.log()).log()
zeros, below = (draws == 0).float().mean().item(), (draws < P).float().mean().item()
exact = torch.bernoulli(torch.full((COUNT,), P, dtype=torch.bfloat16)).float().mean().item()
exponential = torch.empty(COUNT, dtype=torch.bfloat16).exponential_()
print("torch", torch.__version__, f"of {COUNT} draws in bfloat16: {zeros:.2%} are 0, {below:.2%} are below {P}")
print(f"bernoulli({P}): {exact:.2%}; float32: {(torch.rand(COUNT) < P).float().mean().item():.2%} are below {P}")
print("Gumbel noise:", gumbel.isinf().sum().item(), "infinities")
expect("more than one of a thousand draws is 0", zeros > 1e-3)
expect("a draw is below 0.001 more than twice as often as it should be", below > 2 * P)
expect("Gumbel noise has infinities", gumbel.isinf().any().item())
expect("bernoulli is right", abs(exact - P) < 2e-4)
expect("exponential_ draws no 0", (exponential > 0).all().item())
PYTHON
