#!/usr/bin/env bash
# apply_if_finite leaves out updates that are not finite, but only so many in a row: the next one is applied, and the
# parameters are NaN from then on, without an error.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" numpy==2.4.6 jax==0.10.2 optax==0.2.8
run - <<'PYTHON'
import jax.numpy as jnp
import optax
from recorded import expect

optimizer = optax.apply_if_finite(optax.sgd(1.0), max_consecutive_errors=3)
weights, seen = jnp.zeros(1), []
state = optimizer.init(weights)
for gradient in (jnp.nan, jnp.nan, jnp.nan, jnp.nan, 1.0):
    update, state = optimizer.update(jnp.array([gradient]), state, weights)
    weights = optax.apply_updates(weights, update)
    seen.append(weights.item())
print("optax", optax.__version__, "weights after four gradients of NaN, and after a finite one:", seen)
expect("three gradients of NaN are left out", seen[:3] == [0, 0, 0])
expect("the fourth makes the weights NaN, and they stay NaN", seen[3] != seen[3] and seen[4] != seen[4])
PYTHON
