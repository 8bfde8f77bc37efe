"""Defines the presets: name -> correction, formula and source.

A name of another system is an alias if its correction has a name already. In the formulas, l = log numerator
- log behavior per token and rho = e^l. Pi is the product of rho over the response tokens of a sequence, and
geo is their geometric mean. The numerator is the proximal policy, unless the formula says "target". If the
formula has no loss, the weights multiply the host's loss. t counts the response tokens of a sequence from 1.
Numbers are the sources' defaults, unless the formula says "ours".
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from slime_ext.aliases import ALIASES
from slime_ext.core.centering import Center
from slime_ext.core.correction import Correction
from slime_ext.core.losses import Delightful, PpoClip, Reinforce
from slime_ext.core.prefix_steps import PrefixBudget, PrefixReject, PrefixReweight
from slime_ext.core.state import Step
from slime_ext.core.steps import (
    Clip,
    EssTruncate,
    MinPrefixReweight,
    Reject,
    Reweight,
    SecondMoment,
    SignedClip,
    Truncate,
    Veto,
)
from slime_ext.core.terms import ReverseK3, SquaredLogRatio
from slime_ext.errors import ConfigError, cut, quoted
from slime_ext.hosts.estimators import ESTIMATORS

PR3984 = "verl PR 3984, https://github.com/volcengine/verl/pull/3984"
VERL = "verl, verl/trainer/config/algorithm.py, https://github.com/verl-project/verl"
SKYRL = "SkyRL PR 849, https://github.com/NovaSky-AI/SkyRL/pull/849"
FIREWORKS = "fw-ai cookbook PR 169, https://github.com/fw-ai/cookbook/pull/169"
SAO = "SAO (GLM-5.2), direct importance sampling, https://arxiv.org/abs/2607.07508"
ICEPOP = "IcePop, https://ringtech.notion.site/icepop; Ring-1T, https://arxiv.org/abs/2510.18855"

TOKEN, SEQUENCE = Reweight("token"), Reweight("sequence")
CAP = Truncate(2.0)
BAND = Reject("token", "ratio", low=0.5, high=5.0)
GEO = Reject("sequence", "ratio", "mean", 0.999, 1.001)
K3 = Reject("sequence", "k3", "mean", high=0.01)
TARGET = {"numerator": "target"}
PURE = {"numerator": "target", "surrogate": Reinforce()}
BYPASS = {"numerator": "target", "surrogate": PpoClip(anchor="behavior")}


@dataclass(frozen=True)
class Preset:
    """A named correction with its formula and source."""

    formula: str
    source: str
    fields: Mapping[str, Any]  # the arguments of ``Correction``

    @cached_property
    def correction(self) -> Correction:
        """The correction. It is built on first use, because each one is tried on a batch (``core.idle``)."""
        return Correction(**self.fields)


def _preset(formula: str, source: str, *steps: Step, **fields: Any) -> Preset:
    return Preset(formula, source, {"steps": steps, **fields})


PULL_REQUESTS = {
    "metrics_only": _preset("w = 1: only metrics", PR3984),
    "token_tis": _preset("w_t = min(rho_t, 2)", PR3984, TOKEN, CAP),
    "seq_is": _preset("w = min(Pi, 2)", PR3984, SEQUENCE, CAP),
    "seq_is_rs": _preset(
        "w = min(Pi, 2), sequence kept iff 0.5 <= Pi <= 2",
        PR3984,
        SEQUENCE,
        CAP,
        Reject("sequence", "ratio", "sum", 0.5, 2.0),
    ),
    "seq_mis": _preset(
        "w = Pi, sequence kept iff Pi <= 2",
        PR3984,
        SEQUENCE,
        CAP,
        Reject("sequence", "ratio", "sum", 0.0, 2.0),
    ),
    "geo_rs": _preset(
        "w = 1, sequence kept iff 1/1.001 <= geo <= 1.001 and every rho_t >= 1e-4",
        PR3984,
        Reject("sequence", "ratio", "mean", 1 / 1.001, 1.001),
        Veto(low=1e-4),
    ),
    "geo_mis": _preset(
        "w = 1, sequence kept iff 0.999 <= geo <= 1.001 and every rho_t >= 1e-4", PR3984, GEO, Veto(low=1e-4)
    ),
    "ppo_is_bypass": _preset(
        "PPO clips target / behavior; verl's weight (cap 2) would count that ratio twice, so it is left out",
        PR3984,
        **BYPASS,
    ),
    "pure_is": _preset("-min(Pi, 2) A log pi, target", PR3984, SEQUENCE, CAP, **PURE),
    "off_policy_is": _preset(
        "-clip(rho_t, 0.8, 1.2) A log pi, target",
        "slime PR 2084; CISPO, 2506.13585",
        TOKEN,
        Clip(0.8, 1.2),
        **PURE,
    ),
    "off_policy_is_one_sided": _preset(
        "-min(rho_t, 1.2) A log pi, target", "slime PR 2084; CISPO, 2506.13585", TOKEN, Truncate(1.2), **PURE
    ),
    "importance_sampling": _preset(
        "-rho_t A log pi, target, without a cap",
        "Tinker's loss of this name, https://tinker-docs.thinkingmachines.ai/losses",
        TOKEN,
        **PURE,
    ),
    "fireworks_token": _preset("w_t = min(rho_t, 5)", FIREWORKS, TOKEN, Truncate(5.0)),
    "fireworks_geometric": _preset("w = min(geo, 5)", FIREWORKS, Reweight("geometric"), Truncate(5.0)),
    "skyrl_seq_tis": _preset("w = min(Pi, 5)", SKYRL, SEQUENCE, Truncate(5.0)),
    "skyrl_geo_mask": _preset(
        "w = 1, sequence kept iff 0.99 <= geo <= 1.01", SKYRL, Reject("sequence", "ratio", "mean", 0.99, 1.01)
    ),
    "skyrl_product_mask": _preset(
        "w = 1, sequence kept iff 0.5 <= Pi <= 2", SKYRL, Reject("sequence", "ratio", "sum", 0.5, 2.0)
    ),
    "skyrl_outlier_mask": _preset(
        "w = 1, sequence kept iff 1e-4 <= every rho_t <= 100", SKYRL, Veto(1e-4, 100.0)
    ),
}

VERL_HEAD = {
    "decoupled_geo_rs": _preset("w = 1, sequence kept iff 0.999 <= geo <= 1.001", VERL, GEO),
    "decoupled_geo_rs_seq_tis": _preset(
        "w = min(Pi, 2), sequence kept iff 0.999 <= geo <= 1.001", VERL, SEQUENCE, CAP, GEO
    ),
    "decoupled_geo_rs_token_tis": _preset(
        "w_t = min(rho_t, 2), sequence kept iff 0.999 <= geo <= 1.001", VERL, TOKEN, CAP, GEO
    ),
    "decoupled_k3_rs": _preset("w = 1, sequence kept iff mean k3 <= 0.01", VERL, K3),
    "decoupled_k3_rs_seq_tis": _preset(
        "w = min(Pi, 2), sequence kept iff mean k3 <= 0.01", VERL, SEQUENCE, CAP, K3
    ),
    "decoupled_k3_rs_token_tis": _preset(
        "w_t = min(rho_t, 2), sequence kept iff mean k3 <= 0.01", VERL, TOKEN, CAP, K3
    ),
    "bypass_ppo_clip_geo_rs": _preset(
        "PPO clips target / behavior, sequence kept iff 0.999 <= geo <= 1.001, target", VERL, GEO, **BYPASS
    ),
    "bypass_ppo_clip_k3_rs": _preset(
        "PPO clips target / behavior, sequence kept iff mean k3 <= 0.01, target", VERL, K3, **BYPASS
    ),
    "bypass_pg_geo_rs": _preset(
        "-A log pi, sequence kept iff 0.999 <= geo <= 1.001, target", VERL, GEO, **PURE
    ),
    "bypass_pg_geo_rs_seq_tis": _preset(
        "-min(Pi, 2) A log pi, sequence kept iff 0.999 <= geo <= 1.001, target",
        VERL,
        SEQUENCE,
        CAP,
        GEO,
        **PURE,
    ),
    "bypass_pg_geo_rs_token_tis": _preset(
        "-min(rho_t, 2) A log pi, sequence kept iff 0.999 <= geo <= 1.001, target",
        VERL,
        TOKEN,
        CAP,
        GEO,
        **PURE,
    ),
    "bypass_pg_token_icepop": _preset(
        "-rho_t A log pi, token kept iff 0.5 <= rho_t <= 5, target", VERL, TOKEN, BAND, **PURE
    ),
}

LITERATURE = {
    "icepop": _preset("w_t = rho_t, token kept iff 0.5 <= rho_t <= 5", ICEPOP, TOKEN, BAND),
    "kpop": _preset(
        "w_t = rho_t, token kept iff max(D_B(p||q), D_B(q||p)) <= 0.1, p and q the token's probabilities",
        "KPop, https://ringtech.notion.site/kpop; Ring-2.6, https://arxiv.org/abs/2606.15079",
        TOKEN,
        Reject("token", "binary_kl_max", high=0.1),
    ),
    "trm": _preset(
        "w = 1, sequence kept iff max k2 <= 0.5 and mean k3 <= 0.01 (thresholds ours)",
        "Trust region masking, https://arxiv.org/abs/2512.23075; slime PR 1568",
        Reject("sequence", "k2", "max", high=0.5),
        K3,
    ),
    "min_prefix": _preset(
        "w_t = min(rho_t min_{i<t} rho_i, 2) (cap ours)",
        "MinPRO, https://arxiv.org/abs/2601.22718",
        MinPrefixReweight(),
        CAP,
    ),
    "turn_tis": _preset(
        "w = min(product of rho over the turn, 2) (cap ours)",
        "ST-PPO, https://arxiv.org/abs/2511.20718",
        Reweight("turn"),
        CAP,
    ),
    "m2": _preset(
        "w = 1, tokens with the largest l^2 of the step dropped until the mean l^2 of the rest is below 0.04",
        "M2PO, https://arxiv.org/abs/2510.01161; AReaL's all-sign variant",
        SecondMoment(0.04),
    ),
    "cispo": _preset(
        "-min(rho_t, 5) A log pi, target",
        "MiniMax-M1, https://arxiv.org/abs/2506.13585; bounds of ScaleRL, https://arxiv.org/abs/2510.13786",
        TOKEN,
        Truncate(5.0),
        **PURE,
    ),
    "opsm": _preset(
        "sequence dropped iff mean k1 > 1e-4 and its mean advantage < 0, target",
        "DeepSeek-V3.2, https://arxiv.org/abs/2512.02556; delta of slime's --opsm-delta",
        Reject("sequence", "k1", "mean", high=1e-4, when="negative_advantage"),
        **TARGET,
    ),
    "topr": _preset(
        "-w A log pi, w = 1 where A >= 0, clip(Pi, 0, 1) where A < 0, target",
        "TOPR, https://arxiv.org/abs/2503.14286",
        SignedClip(),
        **PURE,
    ),
    "dppo_tv": _preset(
        "-min(rho_t, 20) A log pi, token dropped iff |p - q| > 0.2 and A l > 0, target",
        "DPPO, https://arxiv.org/abs/2602.04879; verl's dppo_tv; threshold of SkyRL and prime-rl",
        TOKEN,
        Truncate(20.0),
        Reject("token", "tv", high=0.2, when="outward"),
        **PURE,
    ),
    "glm5": _preset(
        "-rho_t A log pi, token kept iff 0.5 <= rho_t <= 2, target (bounds ours: the report gives none; "
        "those of GLM-5.2 are sao_math and sao_code)",
        "GLM-5, https://arxiv.org/abs/2602.15763",
        TOKEN,
        Reject("token", "ratio", low=0.5, high=2.0),
        **PURE,
    ),
    "seq_mask_tis": _preset(
        "w_t = rho_t without a cap, sequence kept iff 0.999 <= geo <= 1.002",
        "NeMo-RL, seq-mask-tis; OpenRLHF, seq-mask-tis",
        TOKEN,
        Reject("sequence", "ratio", "mean", 0.999, 1.002),
    ),
}

AUTUMN_2026 = {
    "flash_reinforce": _preset(
        "-rho_t A log pi without a cap, sequence kept iff mean D_B(q||p) <= 5e-3, target (slime's threshold; "
        "miles and TRL use 3e-3, verl 1e-3)",
        "FlashREINFORCE; miles, loss/hub/corrections.py 347a58e; OpenRLHF PR 1339",
        TOKEN,
        Reject("sequence", "binary_kl", "mean", high=5e-3),
        **PURE,
    ),
    "sao_math": _preset(
        "-rho_t A log pi, token kept iff 0.7 <= rho_t <= 6, target (the paper's bounds are strict)",
        SAO,
        TOKEN,
        Reject("token", "ratio", low=0.7, high=6.0),
        **PURE,
    ),
    "sao_code": _preset(
        "-rho_t A log pi, token kept iff 0.2 <= rho_t <= 4, target (the paper's bounds are strict)",
        SAO,
        TOKEN,
        Reject("token", "ratio", low=0.2, high=4.0),
        **PURE,
    ),
    "score_centering": _preset(
        "-min(rho_t, 2) A log pi + A C_t, C_t the sampler's mean of min(rho, 2) log pi, from its 128 "
        "likeliest tokens, target (cap of slime's --tis-clip)",
        "Score centering, https://arxiv.org/abs/2609.20807; slime, --use-score-centering 2e5cd7c",
        TOKEN,
        CAP,
        center=Center(),
        **PURE,
    ),
    "ipo": _preset(
        "-rho_t A log pi + 1e-3 l^2, token dropped from the first term iff |p - q| > 0.1, target",
        "prime-rl PR 1930, 2798 and 3418 (INTELLECT policy optimization)",
        TOKEN,
        Reject("token", "tv", high=0.1),
        terms=(SquaredLogRatio(1e-3),),
        **PURE,
    ),
    "cppo": _preset(
        "-rho_t A log pi, token dropped iff A l > 0 and (v D > 0.2 or sum of v D to t > 0.2 + 0.02 sum of v "
        "before t), D = |p - q|, v falls from 1 to 0.8 along the response, target",
        "CPPO, https://arxiv.org/abs/2606.10968; UniRL, algorithms/cppo.py, without its 90th percentile",
        TOKEN,
        PrefixBudget("tv", 0.2, 0.02, 0.8),
        **PURE,
    ),
    "ctpo": _preset(
        "-w_t A log pi, w_t the product of rho to t, token kept iff w_t <= e^(0.05 sqrt t) and, where A < 0, "
        "w_t >= e^(-0.025 sqrt t), target",
        "CTPO, https://arxiv.org/abs/2605.07331; horizon-llm/CTPO, cum-token-cumprod-la; miles PR 3097",
        PrefixReweight(),
        PrefixReject(high=math.exp(0.05), growth="sqrt"),
        PrefixReject(low=math.exp(-0.025), growth="sqrt", when="negative_advantage"),
        **PURE,
    ),
    "p3o": _preset(
        "-min(rho_t, ESS) A log pi + (1 - ESS) (e^-l - 1 + l), l of the target, ESS of the step's rho (the "
        "paper's method if a rollout is one optimizer step)",
        "P3O, https://arxiv.org/abs/2605.12380; Relax PR 234",
        TOKEN,
        EssTruncate(),
        surrogate=Reinforce(),
        terms=(ReverseK3(1.0, times_one_minus_ess=True),),
    ),
    "delightful": _preset(
        "-sigma(-A log pi) A log pi, the gate detached (not a correction: it changes the objective)",
        "Delightful policy gradient, https://arxiv.org/abs/2603.14608; miles PR 2348; open-instruct PR 1628",
        numerator="target",
        surrogate=Delightful(),
    ),
}

PRESETS: dict[str, Preset] = {**PULL_REQUESTS, **VERL_HEAD, **LITERATURE, **AUTUMN_2026}

NAMES = (*PRESETS, *ALIASES)


def find(name: str, where: str = "preset") -> Preset:
    """Finds the preset of a name or an alias; messages begin with ``where``.

    Raises:
        ConfigError: the name is unknown, or is an estimator of the host. The message has the nearest names,
            or what to type.
    """
    if name in ESTIMATORS and name not in NAMES:
        raise ConfigError(f"{where}: expected a correction, got '{name}', {an_estimator(name)}")
    if name not in NAMES:  # there are about sixty, so the message lists only similar ones
        first, *more = difflib.get_close_matches(cut(name), NAMES, n=3) or [""]
        meant = f"; did you mean '{first}'?" if first else ""
        lists = "slime-ext presets lists all"
        near = f"or {', '.join(more)}; {lists}" if more else lists
        raise ConfigError(f"{where}: expected a known preset, got {quoted(name)}{meant} ({near})")
    return PRESETS[ALIASES.get(name, name)]


def an_estimator(name: str) -> str:
    """Says what to type if a host's estimator was taken for a correction."""
    return (
        f"an estimator of the host: type --advantage-estimator {name}, and a correction beside it, such as "
        f"--custom-tis-function-path slime_ext.tis.token_tis"
    )


def get(name: str) -> Correction:
    """Returns the correction of a name or an alias.

    Raises ConfigError as ``find`` does.
    """
    return find(name).correction
