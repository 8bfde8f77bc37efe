"""Launches for the rules: parts that cases share, and the setup that they make."""

from __future__ import annotations

from types import SimpleNamespace

from slime_ext.config.load import Loaded, read_config
from slime_ext.core.correction import Correction
from slime_ext.hosts.flags import ARGUMENTS
from slime_ext.rules.judge import RULES
from slime_ext.rules.setup import Setup

DEFAULTS = {name: argument.default for name, argument in ARGUMENTS.items()}
TOKEN = {"preset": "token_tis"}
PLANNED, CENTERED = {"preset": "m2"}, {"preset": "cispo", "center": {"top_k": 8}}
ON_HOST = TOKEN | {"center": {"top_k": 8}}
TARGET = {"numerator": "target", "steps": ["reweight", {"truncate": {"high": 2.0}}]}
REINFORCE, KEPT = {"surrogate": "reinforce"}, {"preset": "geo_rs", "denominator": "kept"}
RAW = REINFORCE | {"numerator": "target", "steps": ["reweight"], "center": {"top_k": 8}}
REBASED = {"preset": "geo_rs", "group": "rebaseline"}
WATCHED = {"preset": "token_tis", "guards": {"staleness_mean": {"max": 4}}}
CERTIFIED = {"preset": "token_tis", "guards": {"certified": {"min": 1}}, "metrics": {"certify": True}}
AGES = {"steps": [{"reject": {"max_staleness": 4}}]}
HOOK, OFF = {"custom_tis_function_path": "slime_ext.tis.correct"}, {"use_tis": False}
INIT = {"custom_megatron_init_path": "slime_ext.host.init"}
SEED = {"function": "off_policy_is_function", "of": TARGET}
STRAW = {"rollout_data_transport": "straw"}
THEIRS = {"custom_tis_function_path": "my.hook"}
BATCHES = {"rollout_batch_size": 8, "n_samples_per_prompt": 8, "global_batch_size": 32}  # two steps
ALONE = {"function": "", "of": None}  # nothing of ours but init


def a_host(**says):
    """The code of a host in which everything fits, but for what ``says`` says."""
    fits = {"name": "slime", "fault": "", "has_step": True, "carries_versions": True}
    yes = dict.fromkeys(("passes", "defines", "accepts"), lambda *_: True)
    yes["flags"] = frozenset
    return SimpleNamespace(**fits | yes | {"may_skip_proximal": True, "replays_top_p": True} | says)


HOST, WITHOUT_FLAGS = a_host(), a_host(accepts=lambda *_: False)
UNSCORED = a_host(defines=lambda name: name != "forward_only")


def setup_of(function="correct", of=TOKEN, file=(), host=None, **more):
    """A launch with --use-tis and the host's defaults, its flags beside them."""
    loaded = Loaded(Correction()) if of is None else read_config(of)
    names = ("custom_loss", "environment", "program", "flag_names")
    known = {name: more.pop(name) for name in names if name in more}
    args = SimpleNamespace(**{**DEFAULTS, "use_tis": True, "slime_ext": None, **more})
    return Setup(args, function, loaded, file=file, host=host, **known)


def judged(name, arguments, line):
    """Holds what a rule says of a launch against how its line begins; None: it says nothing."""
    message = RULES[name].judge(setup_of(**arguments))
    assert bool(message) is (line is not None) and (message or "").startswith(line or ""), message
