#!/usr/bin/env bash
# The label -100, with which collators mark tokens to ignore, counts from the end in optax and mlx: the loss is that of
# the token V - 100, finite and with a gradient. Without a mask, prompts and padding are trained towards this token.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" numpy==2.4.6 jax==0.10.2 optax==0.2.8 "mlx[cpu]==0.32.4"
run - <<'PYTHON' 2> errors
from importlib.metadata import version

import jax
import jax.numpy as jnp
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import optax
from recorded import expect

VOCABULARY = 1000
logits = np.random.default_rng(0).normal(size=(3, VOCABULARY)).astype(np.float32)
labels = np.array([-100, VOCABULARY - 100, VOCABULARY])
# The first two rows have the same logits, so only their labels can make a difference.
logits[1] = logits[0]


def loss(values: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(values, jnp.array(labels))


by_optax, gradient = loss(jnp.array(logits)), jax.grad(lambda values: loss(values)[0])(jnp.array(logits))
by_mlx = np.array(nn.losses.cross_entropy(mx.array(logits[:2]), mx.array(labels[:2])))
print("optax", version("optax"), "mlx", version("mlx"), "losses of the labels", labels.tolist())
print("  optax:", by_optax.tolist())
print("  mlx:  ", by_mlx.tolist(), "(first two labels)")
expect("-100 has the loss of the token V - 100 in optax", by_optax[0] == by_optax[1])
expect("and in mlx", by_mlx[0] == by_mlx[1] and abs(by_mlx[0] - by_optax[0]) < 1e-4)
expect("it has that token's gradient", gradient[0].argmin() == VOCABULARY - 100 and gradient[0].min() < -0.9)
expect("in optax a label beyond the vocabulary is NaN", bool(jnp.isnan(by_optax[2])))
PYTHON
