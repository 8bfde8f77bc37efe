#!/usr/bin/env bash
# jax.random.categorical draws its noise in the dtype of the logits. In bfloat16 there are few different values, and of
# equal ones the first token wins: of 50,000 equally likely tokens only the front ones are ever drawn.
. "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh" numpy==2.4.6 jax==0.10.2
run - <<'PYTHON'
import jax
import jax.numpy as jnp
from recorded import expect

TOKENS, DRAWS = 50_000, 20_000


def drawn(dtype: jnp.dtype) -> tuple[int, float]:
    """Returns how many different tokens are drawn, and the share of them in the first half of the vocabulary."""
    draws = jax.random.categorical(jax.random.key(0), jnp.zeros(TOKENS, dtype), shape=(DRAWS,))
    return len(jnp.unique(draws)), (draws < TOKENS // 2).mean().item()


def share(dtype: jnp.dtype) -> float:
    """Returns how often a token with probability 0.001 is drawn, in 1,000,000 draws."""
    logits = jnp.log(jnp.array([0.999, 0.001])).astype(jnp.bfloat16).astype(dtype)
    return (jax.random.categorical(jax.random.key(0), logits, shape=(1_000_000,)) == 1).mean().item()


narrow, wide = drawn(jnp.bfloat16), drawn(jnp.float32)
rare, true = share(jnp.bfloat16), share(jnp.float32)
print("jax", jax.__version__, f"{DRAWS} draws of {TOKENS} equal tokens, different ones and share of the first half:")
print(f"  bfloat16 {narrow[0]} {narrow[1]:.2f}, float32 {wide[0]} {wide[1]:.2f}; p = 0.001 drawn {rare:.5f}, {true:.5f}")
expect("in bfloat16 fewer than 2,000 different tokens are drawn", narrow[0] < 2_000)
expect("all of them in the first half of the vocabulary", narrow[1] == 1)
expect("in float32 more than 15,000 are", wide[0] > 15_000)
expect("a token with probability 0.001 is drawn less than 0.8 times as often", rare < 0.8 * true)
PYTHON
