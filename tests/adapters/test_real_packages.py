"""The adapters inside the real packages: verl 0.9.1, SkyRL 0.3.0 and the cookbook at 76821fa.

    bash tests/adapters/real.sh            # makes a scratch environment beside the one of `make install`

Each system's own function calls ours; loss and gradient are slime's hook's, in float64 to 1e-9, in float32
(SkyRL's worker, verl's ppo_loss) to 1e-5. Then its own training step runs on a model of twenty logits.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from types import SimpleNamespace

import pytest
import torch
import typing_extensions

from slime_ext.adapters import fireworks, seam, skyrl
from slime_ext.errors import ConfigError
from tests.adapters.padded import EPS, batch, through_slime
from tests.adapters.test_seams import CALLS, COUPLED, SAME, assert_same

WORDS, LENGTH = 5, 4
PROMPT = 2


@pytest.fixture(scope="module")
def real_verl():
    pytest.importorskip("verl.trainer.ppo.core_algos", reason="needs verl: bash tests/adapters/real.sh")
    adapter = importlib.import_module("slime_ext.adapters.verl")
    adapter.install()
    return adapter


@pytest.fixture(scope="module")
def real_skyrl():
    import typing

    typing.TypedDict = typing_extensions.TypedDict  # SkyRL 0.3.0's pydantic models need it before Python 3.12
    return pytest.importorskip("skyrl.backends.skyrl_train.utils.ppo_utils", reason="needs skyrl: real.sh")


@pytest.fixture(scope="module")
def cookbook():
    if "COOKBOOK" in os.environ:
        sys.path.insert(0, os.environ["COOKBOOK"])
    return pytest.importorskip("training.utils.rl.grpo", reason="needs the cookbook: COOKBOOK=its folder")


class Toy(torch.nn.Module):
    """A policy of WORDS logits per position; what the rollout sampled and how likely it was then."""

    def __init__(self, rows: int = 8) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.logits = torch.nn.Parameter(torch.randn(LENGTH, WORDS, generator=draw))
        behavior = (self.logits.detach() + 0.3 * torch.randn(LENGTH, WORDS, generator=draw)).log_softmax(-1)
        self.words = torch.multinomial(behavior.exp(), rows, replacement=True, generator=draw).T  # [B, T]
        self.behavior = behavior.expand(rows, LENGTH, WORDS).gather(2, self.words[..., None])[..., 0]
        self.mask = torch.ones(rows, LENGTH)
        self.mask[:2, -1] = 0
        self.advantages = (self.words == 3).float() - 0.5

    def log_probs(self) -> torch.Tensor:
        rows = self.logits.log_softmax(-1).expand(len(self.words), LENGTH, WORDS)
        return rows.gather(2, self.words[..., None])[..., 0]


def learn(model: Toy, step, count: int = 30) -> list[float]:
    """The losses of some optimizer steps; ``step`` computes one and its gradients."""
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.5), []
    for _ in range(count):
        optimizer.zero_grad()
        losses.append(step())
        optimizer.step()
    return losses


# verl


def test_verl_calls_a_loss_with_what_is_recorded(real_verl):
    from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla

    assert [*inspect.signature(compute_policy_loss_vanilla).parameters] == CALLS[real_verl.PolicyLoss]


@pytest.mark.parametrize("name", ["token_tis", "icepop", "seq_is", "geo_rs", "veto"])
def test_verls_own_loss_with_our_weights_is_slimes(real_verl, name):
    from verl import DataProto
    from verl.trainer.ppo import core_algos, rollout_corr_helper

    b = batch(2)
    safe = {key: torch.where(b.mask != 0, getattr(b, key), 0) for key in ("target", "proximal", "advantages")}
    data = {"response_mask": b.mask, "rollout_log_probs": b.behavior, "old_log_probs": b.proximal}
    given = DataProto.from_single_dict(data)
    block = {"slime_ext": SAME[name], "rollout_is": None}
    given, metrics = rollout_corr_helper.compute_rollout_correction_and_add_to_batch(given, block)
    config = actor(clip_ratio=EPS, clip_ratio_c=1e9)
    total, _ = core_algos.compute_policy_loss_vanilla(
        safe["proximal"],
        safe["target"],
        safe["advantages"],
        b.mask,
        "token-sum",
        config,
        given.batch["rollout_is_weights"],
    )
    assert_same(total, b, through_slime(b, SAME[name]))
    assert "off_policy/k3_kl" in metrics


def test_verl_without_ours_is_verls_own(real_verl):
    from verl import DataProto
    from verl.trainer.ppo import rollout_corr_helper

    b, found = batch(2), []
    block = {"rollout_is": "token", "rollout_is_threshold": 2.0}
    ours = rollout_corr_helper.compute_rollout_correction_and_add_to_batch
    for function in (ours, ours.__wrapped__):
        names = {"response_mask": b.mask, "rollout_log_probs": b.behavior, "old_log_probs": b.proximal}
        data = {key: torch.where(b.mask != 0, value, 0) for key, value in names.items()}
        found.append(function(DataProto.from_single_dict(data), block)[0].batch["rollout_is_weights"])
    assert found[0].equal(found[1])


def test_verl_refuses_before_it_validates(real_verl):
    from omegaconf import OmegaConf
    from verl.utils.config import validate_config

    config = OmegaConf.create(
        {
            "algorithm": {"rollout_correction": {"slime_ext": "token_tys"}},
            "actor_rollout_ref": {"actor": {"policy_loss": {}}, "rollout": {"calculate_log_probs": True}},
        }
    )
    with pytest.raises(ConfigError, match="did you mean 'token_tis'"):
        validate_config(config, False, False)


def actor(**changes):
    from verl.workers.config import ActorConfig

    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **changes)


@pytest.mark.parametrize("mode", ["vanilla", "slime_ext.pure_is"])
def test_verls_training_step_learns(real_verl, mode):
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.workers.config.actor import PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    model = Toy()
    rows, config = len(model.words), actor(policy_loss=PolicyLossConfig(loss_mode=mode))
    old = model.behavior if mode != "vanilla" else model.log_probs().detach()
    holder = SimpleNamespace(
        batch={"response_mask": model.mask, "rollout_log_probs": model.behavior, "old_log_probs": old}
    )
    real_verl.add_weights(seam.correction_named("token_tis"), holder)
    fields = {"response_mask": model.mask, "old_log_probs": old, "advantages": model.advantages}
    if mode == "vanilla":
        fields["rollout_is_weights"] = holder.batch["rollout_is_weights"]
    ids = {"prompts": torch.zeros(rows, PROMPT).long(), "responses": model.words}
    nested = {
        key: torch.nested.as_nested_tensor(list(value), layout=torch.jagged)
        for key, value in (fields | ids).items()
    }
    data = TensorDict(nested, batch_size=rows)
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=int(model.mask.sum()), global_batch_size=rows)

    def step():
        whole = [torch.cat([torch.zeros(PROMPT - 1), row, torch.zeros(1)]) for row in model.log_probs()]
        output = {"log_probs": torch.nested.as_nested_tensor(whole, layout=torch.jagged)}
        loss, _ = ppo_loss(config, output, data)
        loss.backward()
        return float((model.log_probs().detach().exp() * (model.words == 3)).sum())  # of the rewarded words

    rewarded = learn(model, step)
    assert rewarded[-1] > 1.1 * rewarded[0]


# SkyRL


def test_skyrl_calls_a_loss_with_what_is_recorded(real_skyrl):
    assert [*inspect.signature(real_skyrl.ppo_policy_loss).parameters] == CALLS[skyrl.PolicyLoss]


@pytest.mark.parametrize("mapping", SAME.values(), ids=SAME)
def test_skyrls_registry_has_slimes_loss(real_skyrl, mapping):
    skyrl.register(seam.correction_named(mapping))
    b = batch(2)
    config = SimpleNamespace(eps_clip_low=EPS, eps_clip_high=EPS)
    loss = real_skyrl.PolicyLossRegistry.get("slime_ext")
    total, _ = loss(
        b.target, b.proximal, b.advantages, config=config, loss_mask=b.mask, rollout_logprobs=b.behavior
    )
    assert_same(total, b, through_slime(b, mapping))


def test_without_steps_it_is_skyrls_own_loss(real_skyrl):
    from skyrl.train.config import AlgorithmConfig

    b = batch(2)
    values = [torch.where(b.mask != 0, x, 0) for x in (b.target, b.proximal, b.advantages)]
    given = {"config": AlgorithmConfig(), "loss_mask": b.mask, "rollout_logprobs": b.behavior}
    own, _ = real_skyrl.ppo_policy_loss(*values, **given)
    ours, _ = skyrl.PolicyLoss(seam.correction_named({"steps": []}))(*values, **given)
    torch.testing.assert_close(ours, own, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["regular", "slime_ext"])
def test_skyrls_worker_step_learns(real_skyrl, name, monkeypatch):
    from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase
    from skyrl.train.config import AlgorithmConfig
    from skyrl.train.dataset.replay_buffer import Experience

    skyrl.register(seam.correction_named("token_tis"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    toy = Toy()
    worker = PolicyWorkerBase.__new__(PolicyWorkerBase)
    algorithm = AlgorithmConfig(policy_loss_type=name, use_kl_loss=False, temperature=1.0)
    worker.cfg = SimpleNamespace(algorithm=algorithm)
    worker.policy_loss_fn = real_skyrl.PolicyLossRegistry.get(name)
    worker.mesh_rank = SimpleNamespace(dp_size=1)
    worker.scheduler = SimpleNamespace(get_last_lr=lambda: [0.5])
    worker.strategy = SimpleNamespace(backward=lambda loss, *_: loss.backward())
    worker.optimizer, rows = None, len(toy.words)

    class Model(torch.nn.Module):
        def forward(self, *_, **__):
            return toy.log_probs(), {"entropy": torch.zeros(rows, LENGTH + PROMPT)}

    worker.model = Model()
    old = toy.log_probs().detach()

    def step():
        experience = Experience(
            sequences=torch.zeros(rows, LENGTH + PROMPT).long(),
            action_log_probs=old,
            base_action_log_probs=None,
            values=None,
            returns=None,
            advantages=toy.advantages / rows,
            attention_mask=torch.ones(rows, LENGTH + PROMPT).long(),
            loss_mask=toy.mask.long(),
            action_mask=None,
            rollout_logprobs=toy.behavior,
            rollout_expert_indices=None,
            num_actions=LENGTH,
            info={},
        )
        worker._forward_backward_micro(experience, 1.0)
        return float((toy.log_probs().detach().exp() * (toy.words == 3)).sum())

    rewarded = learn(toy, step)
    assert rewarded[-1] > 1.1 * rewarded[0]


def test_skyrls_entry_point_ends_in_one_line(real_skyrl, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["main_base", "trainer.override_entrypoint=slime_ext.adapters.skyrl"])
    with pytest.raises(SystemExit, match="slime_ext: expected one value, got 0"):
        skyrl.main()


# the cookbook


@pytest.mark.parametrize("seed", range(3))
def test_the_cookbooks_own_tis_is_its_dialect_through_ours(cookbook, seed):
    from training.utils.rl.tis import TISConfig

    b = batch(seed)
    samples = [s for s in b.samples if all(s["mask"])] or pytest.skip("no sample without a masked token")
    rows = {key: [s[key] for s in samples] for key in ("target", "behavior", "proximal")}
    given = {
        "advantages": [s["advantage"][0] for s in samples],
        "prompt_len": 1,
        "inf_logprobs": rows["behavior"],
        "old_policy_logprobs": rows["proximal"],
    }
    found = []
    own = cookbook.make_grpo_loss_fn(ref_logprobs=[], kl_beta=0.0, tis_config=TISConfig(cap=1.1), **given)
    ours = fireworks.loss({"steps": ["reweight", {"truncate": {"high": 1.1}}]}, **given)
    for function in (own, ours):
        target = [torch.tensor(row, requires_grad=True, dtype=torch.float64) for row in rows["target"]]
        total, _ = function([], target)
        found.append([total.detach(), *torch.autograd.grad(total, target)])
    for theirs, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)  # its log-probs are float32


def test_a_coupled_step_sees_the_whole_call(cookbook):
    given = {"advantages": [1.0, -1.0], "prompt_len": 1, "inf_logprobs": [[-1.0], [-2.0]]}
    loss_fn = fireworks.loss(COUPLED, old_policy_logprobs=[[-0.5], [-2.0]], **given)
    total, _ = loss_fn([], [torch.tensor([-0.5]), torch.tensor([-2.0])])
    weights = torch.tensor([0.5, 0.0]).exp()
    weights = weights / weights.mean()
    torch.testing.assert_close(total, -(weights * torch.tensor([1.0, -1.0])).sum())
