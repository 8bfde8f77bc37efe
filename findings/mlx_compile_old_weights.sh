#!/usr/bin/env bash
# A function that mx.compile has compiled keeps the weights of a model that it only refers to: after an update it gives
# the old values. A compiled sampler draws the same token each time. The arguments inputs and outputs help.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" numpy==2.4.6 "mlx[cpu]==0.32.4"
run - <<'PYTHON' 2> errors
from importlib.metadata import version

import mlx.core as mx
import mlx.nn as nn
from recorded import expect

mx.random.seed(0)
model, values = nn.Linear(4, 3), mx.ones((1, 4))
LOGITS = mx.zeros((1, 1000))
forwards = {
    "plain": lambda x: model(x),
    "compiled": mx.compile(lambda x: model(x)),
    "compiled with inputs": mx.compile(lambda x: model(x), inputs=[model.state]),
}
samplers = {
    "plain": mx.random.categorical,
    "compiled": mx.compile(lambda logits: mx.random.categorical(logits)),
    "compiled with inputs": mx.compile(
        lambda logits: mx.random.categorical(logits), inputs=[mx.random.state], outputs=[mx.random.state]
    ),
}
before = {name: forward(values) for name, forward in forwards.items()}
model.update({"weight": mx.zeros((3, 4)), "bias": mx.zeros(3)})
is_new = {name: not forward(values).any().item() for name, forward in forwards.items()}
drawn = {name: [sampler(LOGITS).item() for _ in range(5)] for name, sampler in samplers.items()}
print("mlx", version("mlx"), "after all weights were set to 0, and five draws of 1,000 equal tokens:")
for name in forwards:
    print(f"  {name:20} uses the new weights: {is_new[name]}; draws {drawn[name]}")
expect("before the update all are alike", all(mx.allclose(before["plain"], x).item() for x in before.values()))
expect("the compiled function uses the old weights", is_new["plain"] and not is_new["compiled"])
expect("the compiled sampler draws one token", len(set(drawn["plain"])) > 1 and len(set(drawn["compiled"])) == 1)
expect("with inputs both are right", is_new["compiled with inputs"] and len(set(drawn["compiled with inputs"])) > 1)
PYTHON
