"""Each adapter against slime's hook on the same batch; what it refuses.

No other system is imported: the keywords of their calls are recorded, and test_real_packages.py holds them
against the real ones.
"""

from __future__ import annotations

import inspect
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from slime_ext.adapters import fireworks, seam, skyrl, verl
from slime_ext.errors import ConfigError, SlimeExtError
from tests.adapters.padded import EPS, batch, through_slime

ROOT = Path(__file__).parents[2]
SKYRL = SimpleNamespace(eps_clip_low=EPS, eps_clip_high=EPS)
VERL = SimpleNamespace(clip_ratio=EPS, clip_ratio_low=None, clip_ratio_high=None, global_batch_info={})
# What the other systems call: adapter's callable -> the keywords of its call.
CALLS = {
    skyrl.PolicyLoss: "log_probs old_log_probs advantages config loss_mask rollout_logprobs".split(),
    verl.PolicyLoss: (
        "old_log_prob log_prob advantages response_mask loss_agg_mode config rollout_is_weights".split()
    ),
}
SAME = {
    "token_tis": {"preset": "token_tis"},
    "icepop": {"preset": "icepop"},
    "seq_is": {"preset": "seq_is"},
    "geo_rs": {"preset": "geo_rs"},
    "veto": {"steps": [{"veto": {"low": 0.5}}, "reweight", {"truncate": {"high": 2.0}}]},
    "pure_is": {"preset": "pure_is"},
}
COUPLED = {"steps": ["reweight", {"truncate": {"high": 2.0}}, "normalize"]}


def token_sum(loss_mat, loss_mask, loss_agg_mode, **_):
    """verl's agg_loss, mode token-sum, on one rank."""
    return torch.where(loss_mask != 0, loss_mat, 0).sum()


@pytest.fixture
def recorded_verl(monkeypatch):
    module = ModuleType("verl.trainer.ppo.core_algos")
    module.agg_loss = token_sum
    for name in ("verl", "verl.trainer", "verl.trainer.ppo"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def assert_same(total, b, expected):
    """In float64 only the order of sums differs."""
    torch.testing.assert_close(total.detach(), expected[0], rtol=1e-9, atol=1e-9)
    (slope,) = torch.autograd.grad(total, b.target)
    torch.testing.assert_close(slope, expected[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mapping", SAME.values(), ids=SAME)
@pytest.mark.parametrize("seed", range(4))
def test_skyrl_has_slimes_loss_and_gradient(seed, mapping):
    b = batch(seed)
    loss = skyrl.PolicyLoss(seam.correction_named(mapping))
    total, metrics = loss(b.target, b.proximal, b.advantages, SKYRL, b.mask, b.behavior)
    assert_same(total, b, through_slime(b, mapping))
    assert all(isinstance(value, float) for value in metrics.values()) and "off_policy/k3_kl" in metrics


@pytest.mark.parametrize("mapping", [*SAME.values(), COUPLED], ids=[*SAME, "coupled"])
@pytest.mark.parametrize("seed", range(4))
def test_the_cookbook_has_slimes_loss_and_gradient(seed, mapping):
    b = batch(seed)
    prompts = [i % 3 for i in range(len(b.samples))]  # tokens of the prompts; the first token has no log-prob

    def whole(key):
        return [[0.0] * max(0, n - 1) + s[key] for n, s in zip(prompts, b.samples, strict=True)]

    targets = [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in whole("target")]
    data = [
        SimpleNamespace(loss_fn_inputs={"weights": SimpleNamespace(data=row)})
        for row in [[0.0] * max(0, n - 1) + s["mask"] for n, s in zip(prompts, b.samples, strict=True)]
    ]
    loss_fn = fireworks.loss(
        mapping,
        advantages=[s["advantage"][0] for s in b.samples],
        prompt_len=prompts,
        inf_logprobs=whole("behavior"),
        old_policy_logprobs=whole("proximal"),
    )
    total, metrics = loss_fn(data, targets)
    expected, slope = through_slime(b, mapping)
    torch.testing.assert_close(total.detach(), expected, rtol=1e-9, atol=1e-9)
    found = torch.zeros_like(slope)
    for row, (n, values) in enumerate(zip(prompts, torch.autograd.grad(total, targets), strict=True)):
        found[row, : len(values) - max(0, n - 1)] = values[max(0, n - 1) :]
    torch.testing.assert_close(found, slope, rtol=1e-9, atol=1e-9)
    assert "off_policy/k3_kl" in metrics


@pytest.mark.parametrize("name", ["token_tis", "icepop", "seq_is", "geo_rs", "veto"])
@pytest.mark.parametrize("seed", range(4))
def test_verls_weights_make_its_loss_slimes(seed, name):
    b = batch(seed)
    data = {"response_mask": b.mask, "rollout_log_probs": b.behavior, "old_log_probs": b.proximal}
    holder, metrics = verl.add_weights(seam.correction_named(SAME[name]), SimpleNamespace(batch=data))
    ratio = (b.target - b.proximal).exp()
    own = torch.maximum(-ratio * b.advantages, -ratio.clamp(1 - EPS, 1 + EPS) * b.advantages)
    weighted = torch.where(b.mask != 0, own * holder.batch["rollout_is_weights"], 0).sum()
    b.target.register_hook(lambda slope: torch.where(b.mask != 0, slope, 0))  # verl's loss: NaN at padding
    assert_same(weighted, b, through_slime(b, SAME[name]))
    assert holder.batch["response_mask"] is b.mask and "off_policy/k3_kl" in metrics


def test_verls_mask_loses_rejected_tokens_with_mask_scope_all():
    b = batch(3)
    mapping = {"steps": [{"veto": {"low": 0.8}}], "mask_scope": "all", "denominator": "kept"}
    data = {"response_mask": b.mask, "rollout_log_probs": b.behavior, "old_log_probs": b.proximal}
    verl.add_weights(seam.correction_named(mapping), SimpleNamespace(batch=data))
    lowest = torch.where(b.mask != 0, b.proximal - b.behavior, 0).amin(1)
    kept = lowest.exp() >= 0.8
    assert 0 < kept.sum() < len(kept)
    assert data["response_mask"].equal(b.mask * kept[:, None])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("recorded_verl")
def test_verls_bypass_loss_is_slimes(seed):
    b = batch(seed)
    loss = verl.PolicyLoss(seam.correction_named("pure_is"))
    total, metrics = loss(b.behavior, b.target, b.advantages, b.mask, "token-sum", VERL)
    assert_same(total, b, through_slime(b, {"preset": "pure_is"}))
    assert "actor/pg_clipfrac" in metrics


def skyrl_config(policy_loss_type="slime_ext", logprobs=1, **own):
    correction = SimpleNamespace(**dict.fromkeys(skyrl.CORRECTION_KEYS) | own)
    clip = {"eps_clip_low": EPS, "eps_clip_high": EPS}
    algorithm = SimpleNamespace(policy_loss_type=policy_loss_type, off_policy_correction=correction, **clip)
    sampling = SimpleNamespace(logprobs=logprobs)
    return SimpleNamespace(
        trainer=SimpleNamespace(algorithm=algorithm), generator=SimpleNamespace(sampling_params=sampling)
    )


def verl_config(loss_mode="vanilla", log_probs=True, trainer=None, loss_agg_mode="token-mean", **block):
    actor = Node(policy_loss={"loss_mode": loss_mode}, loss_agg_mode=loss_agg_mode)
    rollout = {"calculate_log_probs": log_probs}
    roles = SimpleNamespace(actor=actor, rollout=rollout)
    algorithm = {"rollout_correction": block}
    return SimpleNamespace(algorithm=algorithm, actor_rollout_ref=roles, trainer=trainer)


class Node(SimpleNamespace):
    """A part of an OmegaConf configuration."""

    def get(self, key, default=None):
        return vars(self).get(key, default)


def cookbook(mapping, count=1, **more):
    lists = {"inf_logprobs": [[-1.0]], "old_policy_logprobs": [[-1.0]]}
    return fireworks.loss(mapping, **{"advantages": [1.0] * count, "prompt_len": 0} | lists | more)


@pytest.mark.parametrize(
    ("given", "range_"),
    [
        ({}, (0.8, 1.2)),
        ({"eps_clip": 0.1}, (0.9, 1.1)),
        ({"eps_clip": 0.1, "eps_clip_high": 0.3}, (0.9, 1.3)),
    ],
)
def test_the_cookbooks_clip_is_the_calls(given, range_):
    """Against PPO's clipped loss in floats, on both signs of the advantage."""
    low, high = range_
    up, down = (cookbook("token_tis", advantages=[sign], **given) for sign in (1.0, -1.0))
    for ratio in (0.1, 0.4, 0.85, 1.15, 1.5, 2.5):
        target = torch.tensor([math.log(ratio) - 1.0])
        found = up([], [target])[0].item(), down([], [target])[0].item()
        assert found == pytest.approx((-min(ratio, high), max(ratio, low)), rel=1e-5), ratio


CENTERED = {"preset": "cispo", "center": {"top_k": 3}}
KEPT = {"steps": SAME["veto"]["steps"], "denominator": "kept", "mask_scope": "all"}


def of_skyrl(name, **changes):
    return lambda: skyrl.check(seam.correction_named(name), skyrl_config(**changes))


def of_verl(mode="vanilla", **changes):
    return lambda: verl.check(verl_config(mode, **changes))


def hydras(correction, **beside):
    """verl's configuration as Hydra makes it, with the correction's mapping in it."""
    omegaconf = pytest.importorskip("omegaconf")
    made = omegaconf.OmegaConf.create({"rollout_correction": {"slime_ext": correction}, **beside})
    config = verl_config()
    config.algorithm = made
    return config


def test_verl_reads_a_file_once(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("slime_ext: {steps: [reweight, {truncate: {high: 2.0}}]}")
    verl.check(verl_config(slime_ext=str(path)))
    path.unlink()
    assert verl._weights_named(str(path)).steps[1].high == 2.0


def test_a_mapping_of_hydras_is_a_mapping():
    steps = [{"reweight": {"level": "${level}"}}, {"truncate": {"high": 3.0}}]
    config = hydras({"steps": steps}, level="sequence")
    verl.check(config)
    found = seam.correction_named(config.algorithm.rollout_correction.slime_ext)
    plain = {"steps": [{"reweight": {"level": "sequence"}}, {"truncate": {"high": 3.0}}]}
    assert found == seam.correction_named(plain)
    data = {name: torch.zeros(1, 2) for name in verl.NAMES.values()}
    verl.add_weights(found, SimpleNamespace(batch=data))
    assert data["rollout_is_weights"].tolist() == [[0.0, 0.0]]
    with pytest.raises(ConfigError, match="did you mean 'truncate'"):
        verl.check(hydras({"steps": [{"truncat": {"high": 3.0}}]}))
    with pytest.raises(ConfigError) as error:
        verl.check(hydras({"steps": [{"reweight": {"level": "${nowhere}"}}]}))
    assert str(error.value) == (
        "rollout_correction.slime_ext.steps[0].reweight.level: expected a value that OmegaConf can resolve, "
        "got InterpolationKeyError: define what its ${...} names"
    )


ONE = {**KEPT, "denominator": "host"}
REFUSED = {
    "policy_loss_type: expected slime_ext, got regular": of_skyrl("token_tis", policy_loss_type="regular"),
    "nothing beside slime_ext, got tis_ratio_type": of_skyrl("token_tis", tis_ratio_type="token"),
    "sampling_params.logprobs: expected 1": of_skyrl("token_tis", logprobs=None),
    "slime_ext: expected no step coupled": of_skyrl(COUPLED),
    "slime_ext: expected no denominator: kept": of_skyrl(KEPT),
    "bypass_mode: expected false": of_verl(slime_ext="token_tis", bypass_mode=True),
    "expected no ['rollout_is'] beside it": of_verl(slime_ext="token_tis", rollout_is="token"),
    "expected no part that reads the target's log-probs": of_verl(slime_ext="pure_is"),
    "expected denominator kept with mask_scope all, got host": of_verl(slime_ext=ONE),
    "expected mask_scope all with denominator kept, got policy": of_verl(
        slime_ext={**KEPT, "mask_scope": "policy"}
    ),
    "loss_agg_mode: expected token-mean beside denominator kept": of_verl(
        slime_ext=KEPT, trainer={"use_v1": True}, loss_agg_mode="seq-mean-token-mean"
    ),
    "got host: set both or neither, because verl divides by the tokens that are left": of_verl(
        slime_ext=ONE, trainer={"use_v1": True}, loss_agg_mode="seq-mean-token-mean"
    ),
    "did you mean 'token_tis'": of_verl(slime_ext="token_tys"),
    "calculate_log_probs: expected true": of_verl(slime_ext="token_tis", log_probs=False),
    "bypass_mode: expected true": of_verl("slime_ext.pure_is"),
    "expected numerator target, got proximal": of_verl("slime_ext.token_tis", bypass_mode=True),
    "expected lists of one length, got [1, 2]": lambda: cookbook("token_tis", 2),
    "fireworks.loss: expected no denominator: kept": lambda: cookbook(KEPT),
    "slime_ext: expected no center": of_skyrl(CENTERED),
    "fireworks.loss: expected no center": lambda: cookbook(CENTERED),
    "numerator: expected proximal": of_skyrl({"numerator": "target", "steps": ["reweight", "truncate"]}),
    "slime_ext.guards: expected none outside of slime and miles": of_skyrl(
        {"preset": "token_tis", "guards": {"kept_fraction": {"min": 0.5, "action": "stop"}}}
    ),
    "slime_ext.backend: expected no such key, got one: delete it": lambda: cookbook(
        {"preset": "token_tis", "backend": "compiled"}
    ),
    "slime_ext.metrics: expected none": of_verl(slime_ext={"preset": "token_tis", "metrics": {"file": "a"}}),
    "steps: expected it under slime_ext": of_skyrl({"slime_ext": {"preset": "token_tis"}, "steps": []}),
    "slime_ext.fireworks: expected native keys": lambda: cookbook({"fireworks": {"tis_cap": 5.0}}),
}


@pytest.mark.parametrize(("said", "act"), REFUSED.items(), ids=list(REFUSED))
def test_what_a_seam_does_not_hand_over_is_refused_in_one_line(said, act):
    with pytest.raises(ConfigError) as caught:
        act()
    assert said in str(caught.value) and "\n" not in str(caught.value)


MISSPELT = {  # what a message begins with -> the adapter's call
    "slime_ext": lambda name: skyrl_main(f"slime_ext={name}"),
    verl.WEIGHTS: lambda name: verl.check(verl_config(slime_ext=name)),
    verl.LOSS: lambda name: verl.check(verl_config(f"slime_ext.{name}", bypass_mode=True)),
    "fireworks.loss": cookbook,
}


def skyrl_main(word):
    """SkyRL's entry point up to the word that names the correction; it exits with the line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["main_base", word])
        for name in ("skyrl", "skyrl.train", "skyrl.train.config", "skyrl.train.entrypoints"):
            patch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["skyrl.train.config"].SkyRLTrainConfig = None
        sys.modules["skyrl.train.entrypoints"].main_base = None
        skyrl.main()


@pytest.mark.parametrize("where", MISSPELT)
def test_a_misspelt_preset_is_one_line_that_begins_with_what_the_user_typed(where):
    with pytest.raises((ConfigError, SystemExit)) as caught:
        MISSPELT[where]("token_tys")
    near = "did you mean 'token_tis'? (or token_is, skyrl_token_tis; slime-ext presets lists all)"
    assert str(caught.value) == f"{where}: expected a known preset, got 'token_tys'; {near}"


VERLS_PACKAGE = {  # file of a package like verl -> its text
    "trainer/ppo/core_algos.py": "def register_policy_loss(name): return lambda loss: loss",
    "trainer/ppo/rollout_corr_helper.py": "def compute_rollout_correction_and_add_to_batch(): ...",
    "utils/config.py": "def validate_config(config): raise NotImplementedError",
    "trainer/main_ppo.py": """
import hydra
import slime_ext.adapters.verl
from verl.utils.config import validate_config
@hydra.main(version_base=None)
def main(config):
    validate_config(config)
main()
""",
}


def test_verls_program_ends_with_one_line_about_a_misspelt_preset(tmp_path):
    """Hydra, which runs verl, would print a traceback and a line of its own after it."""
    pytest.importorskip("hydra")
    for name, text in VERLS_PACKAGE.items():
        (path := tmp_path / "verl" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    flags = [f"+{verl.WEIGHTS}=token_tys", f"+{verl.LOSS}=vanilla"]
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo", *flags],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT)))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"{verl.WEIGHTS}: expected a known preset, got 'token_tys'; did you mean 'token_")


NAN = math.nan


def padded(**changes):
    """SkyRL's call on 2 samples of 3 tokens, of which the last is masked."""
    rows = {name: torch.full((2, 3), -1.0) for name in ("log_probs", "old_log_probs", "rollout_logprobs")}
    rows["log_probs"].requires_grad_()
    rows |= {"advantages": torch.ones(2, 3), "loss_mask": torch.tensor([[1.0, 1, 0], [1, 1, 0]])}
    return skyrl.PolicyLoss(seam.correction_named("token_tis"))(config=SKYRL, **rows | changes)


def verl_weights(**changes):
    data = {
        "response_mask": torch.ones(2, 3),
        **dict.fromkeys(("rollout_log_probs", "old_log_probs"), -torch.ones(2, 3)),
    }
    data |= changes
    data = {name: values for name, values in data.items() if values is not None}
    return verl.add_weights(seam.correction_named("token_tis"), SimpleNamespace(batch=data))


def verl_loss(**changes):
    rows = dict.fromkeys(("old_log_prob", "log_prob"), -torch.ones(2, 3))
    rows |= {"advantages": torch.ones(2, 3), "response_mask": torch.ones(2, 3)}
    return verl.PolicyLoss(seam.correction_named("pure_is"))(config=VERL, **rows | changes)


def at(place, value, fill=-1.0):
    found = torch.full((2, 3), fill)
    found[place] = value
    return found


def called(logprobs=None, weights=None, **lists):
    """The cookbook's loss on 2 samples of 2 response tokens."""
    rows = [[-1.0, -1.0], [-1.0, -1.0]]
    given = {"inf_logprobs": rows, "old_policy_logprobs": rows}
    loss_fn = fireworks.loss("token_tis", **{"advantages": [1.0, -1.0], "prompt_len": 0} | given | lists)
    data = [SimpleNamespace(loss_fn_inputs={"weights": SimpleNamespace(data=row)}) for row in weights or ()]
    return loss_fn(data, logprobs or [torch.full((2,), -1.0) for _ in range(2)])


TURNED = torch.full((3, 2), -1.0)
WRONG = {  # what a system hands over -> the line about it
    "skyrl NaN mask": (
        lambda: padded(loss_mask=at((1, 0), NAN, 1.0)),
        "loss_mask: expected a number at every token, got NaN or an infinity",
    ),
    "skyrl NaN advantage": (
        lambda: padded(advantages=at((1, 1), NAN)),
        "advantages: expected finite numbers at response tokens, got nan at sequence 1, token 1: ",
    ),
    "skyrl infinite advantage": (
        lambda: padded(advantages=at((0, 0), math.inf)),
        "advantages: expected finite numbers at response tokens, got inf at sequence 0, token 0: ",
    ),
    "skyrl NaN old log-prob": (
        lambda: padded(old_log_probs=at((1, 0), NAN)),
        "old_log_probs: expected finite log-probs at response tokens, got nan at sequence 1, token 0: ",
    ),
    "skyrl NaN log-prob": (
        lambda: padded(log_probs=at((1, 0), NAN)),
        "log_probs: expected finite log-probs at response tokens, got nan at sequence 1, token 0: ",
    ),
    **{
        f"skyrl transposed {name}": (
            lambda name=name: padded(**{name: TURNED}),
            f"{name}: expected the shape of loss_mask, [2, 3], got [3, 2]: pass [batch, tokens]",
        )
        for name in ("old_log_probs", "rollout_logprobs", "log_probs", "advantages")
    },
    "skyrl transposed mask": (
        lambda: padded(loss_mask=TURNED),
        "rollout_logprobs: expected the shape of loss_mask, [3, 2], got [2, 3]",
    ),
    "skyrl flat": (
        lambda: padded(rollout_logprobs=torch.ones(6)),
        "rollout_logprobs: expected the shape of loss_mask, [2, 3], got [6]",
    ),
    "skyrl without": (
        lambda: padded(rollout_logprobs=None),
        "slime_ext: expected rollout log-probs, got None",
    ),
    **{
        f"verl without {name}": (
            lambda name=name: verl_weights(**{name: None}),
            f"{name}: expected it in the rollout batch, got none: {why}",
        )
        for name, why in {
            "rollout_log_probs": "add actor_rollout_ref.rollout.calculate_log_probs=true",
            "old_log_probs": "compute it before the weights",
            "response_mask": "compute it before the weights",
        }.items()
    },
    "verl transposed": (
        lambda: verl_weights(rollout_log_probs=TURNED),
        "rollout_log_probs: expected the shape of response_mask, [2, 3], got [3, 2]",
    ),
    "verl NaN old log-prob": (
        lambda: verl_weights(old_log_probs=at((0, 2), NAN)),
        "old_log_probs: expected finite log-probs at response tokens, got nan at sequence 0, token 2",
    ),
    "verl NaN mask": (
        lambda: verl_weights(response_mask=at((0, 2), NAN, 1.0)),
        "response_mask: expected a number at every token, got NaN or an infinity",
    ),
    "verl loss transposed": (
        lambda: verl_loss(old_log_prob=TURNED),
        "old_log_prob: expected the shape of response_mask, [2, 3], got [3, 2]",
    ),
    "verl loss NaN advantage": (
        lambda: verl_loss(advantages=at((1, 2), NAN)),
        "advantages: expected finite numbers at response tokens, got nan at sequence 1, token 2",
    ),
    "fireworks NaN advantage": (
        lambda: called(advantages=[1.0, NAN]),
        "fireworks.loss: advantages: expected finite numbers at response tokens, got nan at sequence 1",
    ),
    "fireworks no advantage": (
        lambda: called(advantages=[1.0, None]),
        "fireworks.loss: advantages: expected finite numbers at response tokens, got nan at sequence 1",
    ),
    "fireworks NaN weight": (
        lambda: called(weights=[[1.0, 1.0], [1.0, NAN]]),
        "fireworks.loss: weights, sample 1: expected 0 or 1, got nan: write 0 to leave the token out",
    ),
    **{
        f"fireworks short {name}": (
            lambda name=name: called(**{name: [[-1.0, -1.0, -1.0], [-1.0]]}),
            f"fireworks.loss: {name}, sample 1: expected 2 numbers, one per target token, got 1: ",
        )
        for name in ("inf_logprobs", "old_policy_logprobs")
    },
    "fireworks without a row": (
        lambda: called(inf_logprobs=[[-1.0, -1.0], None]),
        "fireworks.loss: inf_logprobs, sample 1: expected 2 numbers, one per target token, got 0: ",
    ),
    "fireworks text": (
        lambda: called(inf_logprobs=[["-1.0", -1.0], [-1.0, -1.0]]),
        "fireworks.loss: inf_logprobs, sample 0: expected numbers, got something else: pass floats",
    ),
    "fireworks NaN old log-prob": (
        lambda: called(old_policy_logprobs=[[-1.0, -1.0], [-1.0, None]]),
        "fireworks.loss: old_policy_logprobs: expected finite log-probs at response tokens, got nan at s",
    ),
    "fireworks NaN log-prob": (
        lambda: called(logprobs=[torch.tensor([NAN, -1.0]), torch.zeros(2)]),
        "fireworks.loss: logprobs: expected finite log-probs at response tokens, got nan at sequence 0",
    ),
    "fireworks other data": (
        lambda: called(logprobs=[torch.zeros(2)]),
        "fireworks.loss: logprobs: expected 2 samples, got 1: pass the samples that the lists describe",
    ),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.usefixtures("recorded_verl")
def test_what_a_system_hands_over_wrong_is_one_line(what):
    act, line = WRONG[what]
    with pytest.raises(SlimeExtError) as caught:
        act()
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


@pytest.mark.usefixtures("recorded_verl")
def test_what_no_token_reads_may_be_anything():
    """A masked token's advantage and log-probs; a sampler's log-prob that is none rejects its token."""
    given = {name: at((slice(None), 2), NAN) for name in ("log_probs", "old_log_probs", "advantages")}
    assert padded(**given)[0].isfinite()
    total, metrics = padded(rollout_logprobs=at((0, 0), -9999.0))
    assert total.isfinite() and metrics["off_policy/nonfinite_fraction"] == 0.25
    assert verl_weights(rollout_log_probs=at((0, 0), NAN))[1][
        "off_policy/nonfinite_fraction"
    ] == pytest.approx(1 / 6)
    tensors = [torch.tensor([-9999.0, -1.0]), torch.full((3,), -1.0)]
    for rows in ([[None, -1.0], [-1.0, -1.0, -7.0]], tensors):
        total, metrics = called(inf_logprobs=rows, advantages=torch.ones(2))
        assert total.isfinite() and metrics["off_policy/nonfinite_fraction"] == 0.25
    assert called(advantages=[1.0, NAN], weights=[[1.0, 1.0], [0.0, 0.0]])[0].isfinite()


def test_what_fits_is_accepted():
    skyrl.check(seam.correction_named("token_tis"), skyrl_config())
    verl.check(verl_config())
    verl.check(verl_config(slime_ext="token_tis"))
    verl.check(verl_config(slime_ext=COUPLED))
    verl.check(verl_config(slime_ext=KEPT))
    verl.check(verl_config(slime_ext=KEPT, trainer={"use_v1": True}))
    verl.check(verl_config(slime_ext=ONE, trainer={"use_v1": True}))
    verl.check(verl_config("slime_ext.pure_is", bypass_mode=True))
    cookbook(COUPLED)


@pytest.mark.parametrize("ours", CALLS)
def test_the_recorded_call_binds(ours):
    inspect.signature(ours.__call__).bind(None, **dict.fromkeys(CALLS[ours]))
