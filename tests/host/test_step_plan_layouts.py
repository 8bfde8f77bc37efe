"""The step plan over real gloo processes: data parallel, context parallel, both."""

from __future__ import annotations

import pytest

from tests.host import slime_rollouts as slime
from tests.host.test_step_plan import CASES, by_position, close, samples, spec
from tests.ranks import GROUP, run_ranks


def on_a_rank(dp, cp):
    """Every case's shares of the losses on one rank of a real layout."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(context_parallel_size=cp)
    dp_rank, cp_rank = parallel_state.get_data_parallel_rank(), parallel_state.get_context_parallel_rank()
    found = {}
    for name, (mapping, _, _) in CASES.items():
        data = slime.data_of(samples(name, 1), dp=(dp_rank, dp), cp=(cp_rank, cp))
        found[name] = data["partition"], slime.train(slime.arguments(mapping), data, (cp_rank, cp))
    return found


@pytest.mark.slow
@pytest.mark.xdist_group(GROUP)
@pytest.mark.parametrize(("dp", "cp"), [(2, 1), (1, 2), (2, 2)])
def test_every_layout_gives_the_losses_of_one_process(dp, cp):
    ranks = run_ranks(on_a_rank, dp * cp, dp, cp)
    for name, (_, _, how) in CASES.items():
        rollout = samples(name, 1)
        found = by_position(rollout, [rank[name] for rank in ranks])
        assert close(found, slime.expected(rollout, spec(name), **how)), name
