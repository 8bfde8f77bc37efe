"""A list of allowed tokens, beside the noise of bfloat16."""

from __future__ import annotations

import pytest
import torch

from tests.tools.analysis.detectors.toys import Policy, findings, run


@pytest.mark.parametrize("banned", [3, 4, 6])
@pytest.mark.parametrize("noise", [0.005, 0.02])
def test_tokens_that_are_never_sampled_are_found_beside_noise(banned, noise):
    """Noise moves near tokens to both sides, but hardly any far token is likelier for the trainer."""
    never = torch.arange(60) < banned
    found = findings(run(warp=lambda logits, seen, at: logits.masked_fill(never, -torch.inf), noise=noise))
    assert set(found) == {"truncated_sampling"}


@pytest.mark.parametrize("seed", range(3))
def test_noise_and_old_weights_leave_out_no_tokens(seed):
    policy = Policy()
    policy.normal(seed + 1)
    noisy = run(policy=policy, sampler=policy.table + 0.4 * policy.normal(60, 60), noise=0.02)
    assert "truncated_sampling" not in findings(noisy)
