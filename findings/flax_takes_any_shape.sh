#!/usr/bin/env bash
# flax compares no shapes when it loads weights: from_bytes and nnx.update put arrays of another shape into a model.
# With a checkpoint of another vocabulary and another hidden size the model runs, and is another model.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" numpy==2.4.6 jax==0.10.2 flax==0.12.8
run - <<'PYTHON' 2> errors
import flax
import jax
import jax.numpy as jnp
from flax import nnx, serialization
from recorded import expect


class Model(nnx.Module):
    def __init__(self, words: int, hidden: int, seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.embed = nnx.Embed(words, 8, rngs=rngs)
        self.up = nnx.Linear(8, hidden, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(hidden, 8, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.down(nnx.relu(self.up(self.embed(tokens))))


def shapes(state: object) -> list[tuple]:
    return sorted(leaf.shape for leaf in jax.tree.leaves(state))


model, other = Model(32, 16, 0), Model(48, 24, 1)
before, wanted, others = model(jnp.arange(4)), shapes(nnx.state(model)), shapes(nnx.state(other))
nnx.update(model, nnx.state(other))
updated, after = shapes(nnx.state(model)), model(jnp.arange(4))
target = {"embed": jnp.zeros((32, 8))}
read = serialization.from_bytes(target, serialization.to_bytes({"embed": jnp.ones((48, 8))}))
print("flax", flax.__version__, "shapes:")
print("  of the model", wanted, "and of the other one", others)
print("  of the model after nnx.update", updated, "and its outputs are", after.shape)
print("  of what from_bytes returns", shapes(read), "for a target with", shapes(target))
expect("nnx.update takes all shapes of the other model", updated == others != wanted)
expect("the model runs, and its outputs are the other model's", after.shape == before.shape and bool(
    jnp.array_equal(after, other(jnp.arange(4))) and not jnp.allclose(before, after)))
expect("from_bytes returns the shape of the file", shapes(read) == [(48, 8)])
PYTHON
