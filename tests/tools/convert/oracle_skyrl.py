"""SkyRL's score centering, which no wheel has, transcribed from PR 2244."""

import math


def centered_loss(trainer, sampler, sampled, advantage, f, top_k, eps=1e-6):
    """One token's loss with score centering, as SkyRL PR 2244 has the paper's appendix A.3.

    Args:
        trainer, sampler: log-probs over the vocabulary; the head is the sampler's ``top_k`` largest.
    """
    head = sorted(range(len(sampler)), key=lambda v: -sampler[v])[:top_k]
    p, q = ([math.exp(row[v]) for v in head] for row in (trainer, sampler))
    rho = max(1 - math.fsum(q), eps) / max(1 - math.fsum(p), eps)
    residual = [b * f(a / b) - rho * f(1 / rho) * a for a, b in zip(p, q, strict=True)]
    correction = math.fsum(c * trainer[v] for c, v in zip(residual, head, strict=True))
    weight = f(math.exp(trainer[sampled] - sampler[sampled]))
    return -advantage * (weight * trainer[sampled] - correction)
