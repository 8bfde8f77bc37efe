"""Parts that launches of the table share, and the setup that a launch makes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from slime_ext.config.load import Loaded, read_config
from slime_ext.core.correction import Correction
from slime_ext.hosts.flags import ARGUMENTS
from slime_ext.rules.setup import Parameter, Setup

DEFAULTS = {name: argument.default for name, argument in ARGUMENTS.items()}
TOKEN = {"preset": "token_tis"}
PLANNED, CENTERED = {"preset": "m2"}, {"preset": "cispo", "center": {"top_k": 8}}
ON_HOST = TOKEN | {"center": {"top_k": 8}}
TARGET = {"numerator": "target", "steps": ["reweight", {"truncate": {"high": 2.0}}]}
REINFORCE, KEPT = {"surrogate": "reinforce"}, {"preset": "geo_rs", "denominator": "kept"}
RAW = REINFORCE | {"numerator": "target", "steps": ["reweight"], "center": {"top_k": 8}}
REBASED, ATOMIC = ({"preset": "geo_rs", "group": group} for group in ("rebaseline", "atomic"))
WATCHED = {"preset": "token_tis", "guards": {"staleness_mean": {"max": 4}}}
CERTIFIED = {"preset": "token_tis", "guards": {"certified": {"min": 1}}, "metrics": {"certify": True}}
AGES = {"steps": [{"reject": {"max_staleness": 4}}]}
HOOK, OFF = {"custom_tis_function_path": "slime_ext.tis.correct"}, {"use_tis": False}
INIT = {"custom_megatron_init_path": "slime_ext.host.init"}
SEED = {"function": "off_policy_is_function", "of": TARGET}
STRAW = {"rollout_data_transport": "straw"}
THEIRS = {"custom_tis_function_path": "my.hook"}
BATCHES = {"rollout_batch_size": 16, "n_samples_per_prompt": 4, "global_batch_size": 32}  # two steps
ALONE = {"function": "", "of": None}  # nothing of ours but init
CUSTOM_LOSS = {"loss_type": "custom_loss", "custom_loss_function_path": "my.loss", "custom_loss": "def loss"}
REDUCER = {"custom_pg_loss_reducer_function_path": "my.f"}
VARIABLE = "SGLANG_RETURN_ORIGINAL_LOGPROB"
ORIGINAL = {"environment": {VARIABLE: "1"}}
IDLE = {"repetition_penalty": 1.0, "frequency_penalty": 0, "presence_penalty": None, "logit_bias": {}}
SEEDED = {"sglang_enable_deterministic_inference": True}
GENERATE = {"custom_generate_function_path": "slime_ext.host.generate"}
CHECKPOINT = {"hf_checkpoint": str(Path(__file__).parent / "checkpoint")}

REPLAY, STOCK = {"use_rollout_routing_replay": True}, {"router_drops": {"return_routed_experts": "0.3.2"}.get}
NO_PARAMS = {"router_drops": {"custom_params": "0.3.2"}.get}


def preferred(**params):
    return {"sglang_preferred_sampling_params": json.dumps(params)}


def set_by_function(**params):
    return {"sampled_with": [Parameter("my/rollout.py:12", *each) for each in params.items()]}


def a_host(**says):
    """The code of a host in which everything fits, but for what ``says`` says."""
    fits = {"name": "slime", "fault": "", "has_step": True, "carries_versions": True}
    yes = dict.fromkeys(("passes", "defines", "accepts"), lambda *_: True)
    yes["flags"] = frozenset
    return SimpleNamespace(**fits | yes | {"may_skip_proximal": True, "replays_top_p": True} | says)


HOST, WITHOUT_FLAGS = a_host(), a_host(accepts=lambda *_: False)
UNSCORED = a_host(defines=lambda name: name != "forward_only")
FLAGS = {"host": a_host(flags=lambda: frozenset({"--eps-clip-high", "--rollout-batch-size"}))}


def setup_of(function="correct", of=TOKEN, file=(), host=None, **more):
    """A launch with --use-tis and the host's defaults, its flags beside them."""
    loaded = Loaded(Correction()) if of is None else read_config(of)
    names = ("custom_loss", "environment", "program", "flag_names", "trains", "sampled_with")
    names += ("router_drops", "custom_generate")
    known = {name: more.pop(name) for name in names if name in more}
    args = SimpleNamespace(**{**DEFAULTS, "use_tis": True, "slime_ext": None, **more})
    return Setup(args, function, loaded, file=file, host=host, **known)
