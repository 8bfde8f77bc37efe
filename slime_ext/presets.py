"""One table: name -> correction, formula and source; other systems' names are aliases."""

from __future__ import annotations

from dataclasses import dataclass

from slime_ext.correction import Correction
from slime_ext.errors import ConfigError, did_you_mean
from slime_ext.objectives import PpoClip, Reinforce
from slime_ext.steps import Clip, Reject, Reweight, Truncate, Veto

VERL = "verl PR 3984, https://github.com/volcengine/verl/pull/3984"


@dataclass(frozen=True)
class Preset:
    """A named correction: what it computes, and where it comes from."""

    correction: Correction
    formula: str
    source: str


def _steps(*steps, **fields) -> Correction:
    return Correction(steps=steps, **fields)


PRESETS: dict[str, Preset] = {
    "metrics_only": Preset(Correction(), "w = 1; only metrics", VERL),
    "token_is": Preset(_steps(Reweight("token"), Truncate(2.0)), "w_t = min(rho_t, 2)", VERL),
    "seq_is": Preset(_steps(Reweight("sequence"), Truncate(2.0)), "w = min(prod rho, 2)", VERL),
    "seq_is_rs": Preset(
        _steps(Reweight("sequence"), Truncate(2.0), Reject("sequence", "ratio", "sum", 0.5, 2.0)),
        "w = min(prod rho, 2), sequence kept iff 0.5 <= prod rho <= 2",
        VERL,
    ),
    "seq_mis": Preset(
        _steps(Reweight("sequence"), Truncate(2.0), Reject("sequence", "ratio", "sum", 0.0, 2.0)),
        "w = prod rho, sequence kept iff prod rho <= 2",
        VERL,
    ),
    "geo_rs": Preset(
        _steps(Reject("sequence", "ratio", "mean", 1 / 1.001, 1.001), Veto(low=1e-4)),
        "w = 1, sequence kept iff 1/1.001 <= exp(mean l) <= 1.001 and every rho_t >= 1e-4",
        VERL,
    ),
    "geo_mis": Preset(
        _steps(Reject("sequence", "ratio", "mean", 0.999, 1.001), Veto(low=1e-4)),
        "w = 1, sequence kept iff 0.999 <= exp(mean l) <= 1.001 and every rho_t >= 1e-4",
        VERL,
    ),
    "ppo_is_bypass": Preset(
        Correction(surrogate=PpoClip(anchor="behavior")),
        "PPO clips target / behavior; no weight, which would count the ratio twice",
        VERL,
    ),
    "pure_is": Preset(
        _steps(Reweight("sequence"), Truncate(2.0), numerator="target", surrogate=Reinforce()),
        "-min(prod rho, 2) A log pi_target, rho = target / behavior",
        VERL,
    ),
    "icepop": Preset(
        _steps(Reweight("token"), Reject("token", "ratio", low=0.5, high=5.0)),
        "w_t = rho_t, token kept iff 0.5 <= rho_t <= 5",
        "IcePop, https://ringtech.notion.site/icepop; Ring-1T, https://arxiv.org/abs/2510.18855",
    ),
    "off_policy_is": Preset(
        _steps(Reweight("token"), Clip(0.8, 1.2), numerator="target", surrogate=Reinforce()),
        "-clip(rho_t, 0.8, 1.2) A log pi_target, rho = target / behavior",
        "slime PR 2084; MiniMax-M1, https://arxiv.org/abs/2506.13585",
    ),
}

ALIASES: dict[str, str] = {
    "disabled": "metrics_only",
    "token_tis": "token_is",
}


def get(name: str) -> Correction:
    """The correction of a preset or an alias.

    Raises:
        ConfigError: unknown, with the nearest name.
    """
    if (known := ALIASES.get(name, name)) in PRESETS:
        return PRESETS[known].correction
    names = [*PRESETS, *ALIASES]
    raise ConfigError(
        f"preset: expected one of {', '.join(sorted(names))}, got '{name}'{did_you_mean(name, names)}"
    )
