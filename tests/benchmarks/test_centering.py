"""The table of losses and candidates agrees with its loops, and its loops with finite differences and E_q."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import centering as table
from tests import oracle
from tests.ranks import GROUP

EXACT = 1e-13
SMALL = (
    ["TIS", "sequence factor", "host's PPO, four steps"],
    ["top-k head", "top-p support"],
)


def test_every_loss_and_candidates_agree_with_the_loops_on_one_process():
    found = table.differences(["1"], list(table.LOSSES), list(table.CANDIDATES), range(4))
    assert len(found) == len(table.LOSSES) * len(table.CANDIDATES)
    assert max(max(pair) for pair in found.values()) < EXACT, found


@pytest.mark.slow
@pytest.mark.xdist_group(GROUP)
@pytest.mark.parametrize("layout", [name for name in table.LAYOUTS if name != "1"])
def test_ranks_agree_with_the_loops(layout):
    found = table.differences([layout], *SMALL, range(2))
    assert max(max(pair) for pair in found.values()) < EXACT, found


def test_the_worlds_have_clipped_tokens_of_both_signs_and_far_weights():
    """Else the table would not see the clip, or the cap."""
    clipped, capped = set(), False
    for seed in range(4):
        world = table.World.of(seed, 4)
        advantages = [a for row in world.advantages for a in row]
        sides = zip(world.trainer, world.proximal, world.sampler, world.nucleus, advantages, strict=True)
        for *logits, ids, advantage in sides:
            p, o, q = (oracle.log_softmax(row, ids) for row in logits)
            capped |= any(o[v] - q[v] > math.log(1.3) for v in ids)
            clipped |= {
                advantage > 0
                for v in ids
                if oracle.score_factor(table.PPO, advantage, p[v], o[v], q[v]) == 0.0
            }
    assert clipped == {True, False} and capped


@pytest.mark.parametrize("name", table.LOSSES)
@pytest.mark.parametrize("of", table.CANDIDATES)
def test_the_loops_gradient_is_the_slope_of_their_loss(name, of, monkeypatch):
    """Finite differences in the logits, with weights and coefficients held where they were."""
    loss, top_k = table.LOSSES[name], table.CANDIDATES[of]
    world = table.World.of(0, loss.steps_per_rollout)
    wanted = table.by_loops(loss, world, top_k).gradient
    held, step = _held(loss, world, top_k), 1e-6
    for t in range(0, len(world.trainer), 3):
        for j in range(table.VOCABULARY):
            up, down = (
                held(t, [x + sign * step * (v == j) for v, x in enumerate(world.trainer[t])])
                for sign in (1, -1)
            )
            assert wanted[t, j].item() == pytest.approx((up - down) / (2 * step), abs=2e-8), (t, j)


def _held(loss, world, top_k):
    """The loss of token t as a function of its logits."""
    p, o, q = (world.log_probs(x, top_k) for x in (world.trainer, world.proximal, world.sampler))
    f, m = (oracle.spec(*steps, numerator=loss.numerator) for steps in (loss.f, loss.m))
    kind = table.PPO if loss.is_hosts else ("reinforce",)
    columns = [[row[y] for row, y in zip(side, world.sampled, strict=True)] for side in (p, o, q)]
    batch, at = [], 0
    for mask, advantage in zip(world.masks, world.advantages, strict=True):
        names = dict(zip(("target", "proximal", "behavior"), columns, strict=True))
        part = {key: values[at : at + len(mask)] for key, values in names.items()}
        batch.append({"mask": mask, "advantage": advantage, "host_loss": [0.0] * len(mask), **part})
        at += len(mask)
    factors = [x for s in oracle.correct(m, batch) for x in s["weights"]]
    advantages = [a for row in world.advantages for a in row]
    candidates = world.candidates(top_k)

    def value(t, logits):
        now = oracle.log_softmax(logits, None if top_k is not None else candidates[t])
        a, y = advantages[t], world.sampled[t]

        def weight(log_p, log_o, log_q):
            return oracle.weight_alone(f, a, log_p, log_o, log_q)

        def g(log_p, log_o, log_q):
            return weight(log_p, log_o, log_q) * oracle.score_factor(kind, a, log_p, log_o, log_q)

        head = [(p[t][v], o[t][v], q[t][v]) for v in candidates[t]]
        cs = oracle.candidate_coefficients(head, g, has_tail=top_k is not None)
        added = math.fsum(c * now[v] for c, v in zip(cs, candidates[t], strict=True))
        own = p[t][y], o[t][y], q[t][y]
        return factors[t] * (weight(*own) * oracle.surrogate(kind, a, now[y], *own[1:]) + a * added)

    return value


@pytest.mark.parametrize("name", [name for name in table.LOSSES if name != "sequence factor"])
@pytest.mark.parametrize(("of", "left"), [("top-p support", 1e-14), ("whole vocabulary", 2e-6)])
def test_the_mean_over_the_sampler_is_zero(name, of, left):
    """Sum over y of q_y times the gradient for y: all of the vocabulary, but for the floor of its tail, and
    all of the support. Without centering it is not."""
    loss, top_k = table.LOSSES[name], table.CANDIDATES[of]
    world = table.World.of(1, loss.steps_per_rollout)
    whole = [[1] * len(mask) for mask in world.masks]
    candidates, q = world.candidates(top_k), world.log_probs(world.sampler, top_k)
    mean = torch.zeros(len(q), table.VOCABULARY, dtype=torch.float64)
    size = torch.zeros_like(mean)
    for k in range(max(map(len, candidates))):
        sampled = [ids[min(k, len(ids) - 1)] for ids in candidates]
        share = [
            math.exp(row[y]) * (k < len(ids)) for row, y, ids in zip(q, sampled, candidates, strict=True)
        ]
        world = table.World(**vars(world) | {"sampled": sampled, "masks": whole})
        part = torch.tensor(share, dtype=torch.float64)[:, None] * _by_ours(loss, world, top_k)
        mean, size = mean + part, size + part.abs()
    assert mean.abs().max() < left and size.max() > 0.1


def _by_ours(loss, world, top_k):
    (name,) = (key for key, value in table.LOSSES.items() if value is loss)
    (of,) = (key for key, value in table.CANDIDATES.items() if value == top_k)
    return table.share_of(world, (1, 1), 0, table.identity, table.identity, name, of).gradient


def test_the_program_prints_its_table(capsys):
    assert table.main(["--layouts", "1", "--seeds", "1"]) == 0
    shown = capsys.readouterr().out
    assert "largest difference" in shown and "host's PPO, four steps" in shown and "top-p support" in shown
