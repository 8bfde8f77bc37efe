"""Every place that runs corrections, asked about every preset and a few more: what it refuses and how.

The golden file has the refusals of each place, each with the corrections that get it.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slime_ext import correct, load_config, presets
from slime_ext.adapters import fireworks, skyrl, verl
from slime_ext.config.load import Loaded, to_mapping
from slime_ext.errors import ConfigError
from slime_ext.host import train_step
from slime_ext.host.hook import Hook, run
from slime_ext.host.step_metrics import current_step
from slime_ext.hosts.contract import HookCall
from slime_ext.rules.judge import RULES
from slime_ext.rules.setup import Setup
from slime_ext.tools.analysis.measures.planned import missing_input
from slime_ext.tools.plain_torch import obstacle
from tests.golden import golden

GOLDEN = Path(__file__).parent / "golden" / "needs.txt"
STALE = {"steps": [{"reject": {"unit": "sequence", "max_staleness": 3}}]}
MORE = {  # one mapping for each thing that a correction can need, and two for two at once
    "target": {"preset": "token_tis", "numerator": "target"},
    "surrogate": {"preset": "token_tis", "surrogate": "reinforce"},
    "terms": {"terms": ["squared_log_ratio"]},
    "advantages": {"steps": [{"reject": {"high": 2.0, "when": "negative_advantage"}}]},
    "whole step": {"steps": ["reweight", "truncate", "normalize"]},
    "atomic": {"preset": "icepop", "group": "atomic"},
    "rebaseline": {"preset": "icepop", "group": "rebaseline"},
    "kept": {"preset": "icepop", "denominator": "kept"},
    "all masks": {"preset": "icepop", "mask_scope": "all"},
    "kept and all masks": {"preset": "icepop", "denominator": "kept", "mask_scope": "all"},
    "ages": STALE,
    "age steps": {"steps": [{"reject": {"unit": "sequence", "max_staleness_steps": 3}}]},
    "center": {"preset": "cispo", "center": {"top_k": 3}},
    "atomic and ages": STALE | {"group": "atomic"},
    "pure_is, all masks": {"preset": "pure_is", "mask_scope": "all"},
    "pure_is, ages": STALE | {"preset": "pure_is"},
}
CORRECTIONS = {name: presets.get(name) for name in presets.PRESETS}
CORRECTIONS |= {f"({name})": load_config(mapping) for name, mapping in MORE.items()}


def flat(correction):
    values = torch.full((2,), -1.0)
    correct(values, values, values, [2], correction, target=values, advantages=values)


def of_skyrl(correction):
    theirs = SimpleNamespace(**dict.fromkeys(skyrl.CORRECTION_KEYS))
    more = {"eps_clip_low": 0.2, "eps_clip_high": 0.2, "off_policy_correction": theirs}
    algorithm = SimpleNamespace(policy_loss_type="slime_ext", **more)
    generator = SimpleNamespace(sampling_params=SimpleNamespace(logprobs=1))
    skyrl.check(
        correction, SimpleNamespace(trainer=SimpleNamespace(algorithm=algorithm), generator=generator)
    )


class Config(dict):
    """A mapping whose keys are attributes, too, as OmegaConf's."""

    __getattr__ = dict.__getitem__


def of_verl(loss_mode, **block):
    actor = Config(policy_loss={"loss_mode": loss_mode})
    roles = SimpleNamespace(actor=actor, rollout={"calculate_log_probs": True})
    verl.check(SimpleNamespace(algorithm={"rollout_correction": block}, actor_rollout_ref=roles))


def verl_weights(correction):
    of_verl("vanilla", slime_ext=to_mapping(correction))


def verl_loss(correction):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(presets, "find", lambda name, where: SimpleNamespace(correction=correction))
        of_verl("slime_ext.given", bypass_mode=True)


def cookbook(correction):
    rows = {"inf_logprobs": [[-1.0]], "old_policy_logprobs": [[-1.0]]}
    fireworks.loss(to_mapping(correction), advantages=[1.0], prompt_len=0, **rows)


def hook(correction, **more):
    """A call of the hook outside of an optimizer step, as without ``slime_ext.host.init``."""
    values = [torch.full((2,), -1.0)]
    given = {
        "pg_loss": torch.ones(2),
        "train_log_probs": values,
        "rollout_log_probs": values,
        "loss_masks": [torch.ones(2, dtype=torch.int32)],
        "total_lengths": [3],
        "response_lengths": [2],
    }
    call = HookCall.of(SimpleNamespace(use_tis=True), given | more)
    run(call, Hook(correction, "hook"), current_step())


def hook_with_all(correction):
    values = [torch.full((2,), -1.0)]
    hook(correction, cur_log_probs=values, advantages=values)


def plain_torch(correction):
    if why := obstacle(correction):
        raise ConfigError(why)


def launch_without_init(correction):
    setup = Setup(SimpleNamespace(), "correct", Loaded(correction))
    if line := RULES["missing_init"].judge(setup):
        raise ConfigError(line)


def step_whose_batches_cannot_be_read_ahead(correction):
    call = {"data_iterator": [iter(())]}
    train_step._opened(
        call, correction, SimpleNamespace(layout=lambda correction: None, leaves_loss_alone=False)
    )


def analyze(correction):
    mask = torch.ones(2, dtype=torch.bool)
    dump = SimpleNamespace(
        advantages=None, newest=None, groups=None, finite=mask, mask=mask, candidates=lambda: None
    )
    if why := missing_input(correction, dump):
        raise ConfigError(why)


PLACES = {
    "slime_ext.correct": flat,
    "skyrl": of_skyrl,
    "verl, weights": verl_weights,
    "verl, a loss": verl_loss,
    "fireworks": cookbook,
    "a hook call alone": hook,
    "a hook call with target and advantages": hook_with_all,
    "a launch without init": launch_without_init,
    "a step whose micro-batches cannot be read ahead": step_whose_batches_cannot_be_read_ahead,
    "plain torch": plain_torch,
    "analyze, a dump without advantages, versions and groups": analyze,
}


def refusal(place, correction):
    try:
        place(correction)
    except ConfigError as error:
        return str(error)
    return None


def refusals(place):
    """Message -> the corrections that it refuses."""
    lines = {}
    for name, correction in CORRECTIONS.items():
        if line := refusal(place, correction):
            lines.setdefault(line, []).append(name)
    return lines


def test_each_place_refuses_what_it_does_not_offer():
    blocks = []
    for where, place in PLACES.items():
        lines = (f"    {', '.join(names)}\n        {line}" for line, names in refusals(place).items())
        blocks.append("\n".join((where, *lines)))
    golden(GOLDEN, "\n\n".join(blocks) + "\n")
