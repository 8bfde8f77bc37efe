#!/usr/bin/env bash
# optax adds the squares of all leaves in the dtype of the gradients. In bfloat16 the sum stops rising, so the
# global norm of many leaves is too small, and clipped gradients are larger than the limit.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" numpy==2.4.6 jax==0.10.2 optax==0.2.8
run - <<'PYTHON' 2> errors
import jax
import jax.numpy as jnp
import optax
from recorded import expect


def norms(leaves: int, dtype: object) -> tuple[float, float, float]:
    """Returns the true norm of gradients, the one that optax computes, and that of the gradients clipped to 1."""
    gradients = [jnp.full(16, 0.125, dtype)] * leaves
    clip = optax.clip_by_global_norm(1.0)
    clipped, _ = clip.update(gradients, clip.init(gradients))
    true = [jnp.sqrt(sum(jnp.sum(g.astype(jnp.float32) ** 2) for g in some)).item() for some in (gradients, clipped)]
    return true[0], float(optax.global_norm(gradients)), true[1]


print("optax", optax.__version__, "jax", jax.__version__, "true norm, optax's, and that after clip_by_global_norm(1):")
seen = {}
for leaves in (16, 400, 1600):
    for dtype in (jnp.float32, jnp.bfloat16):
        seen[leaves, dtype] = norms(leaves, dtype)
        print(f"  {leaves} leaves in {dtype.__name__}:", *(f"{norm:.3f}" for norm in seen[leaves, dtype]))
expect("float32 is right", all(abs(seen[leaves, jnp.float32][2] - 1) < 1e-3 for leaves in (16, 400, 1600)))
expect("16 leaves in bfloat16 are right", seen[16, jnp.bfloat16] == (2, 2, 1))
expect("1,600 leaves have the norm 20, and optax says 8", seen[1600, jnp.bfloat16][:2] == (20, 8))
expect("so they are clipped to 2.5 instead of 1", abs(seen[1600, jnp.bfloat16][2] - 2.5) < 0.01)
PYTHON
