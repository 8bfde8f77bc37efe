"""Rules of the engine: how it samples, and what it records as a token's log-prob.

SGLang records log-softmax(logits / T) over the whole vocabulary, after penalties, biases and grammars. The
trainer computes log-softmax(logits / T). Setting by setting, as SGLang 0.5.23 was run on 2026-11-28:

    temperature 0, top-k 1      in the record: the value at temperature 1; no token is drawn at random
    top-p, top-k, min-p         not in the record: the sampler's probabilities are larger; no ratio shows it
    penalties, logit_bias       in the record, and not in the trainer's value
    min_new_tokens              in the record: the end token's probability goes to the other tokens
    grammar                     in the record: normalised over the allowed tokens
    SGLANG_RETURN_ORIGINAL_LOGPROB=1    takes the temperature out of the record, and nothing else
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from slime_ext.hosts.contract import OURS
from slime_ext.rules.rule import HINT, HOST, REFUSE, WARN, rule
from slime_ext.rules.setup import UNREAD, Parameter, Setup

RATIO_OFF = (
    "the sampler draws from a part of the vocabulary, and SGLang records log-probs over all of it, so every "
    "ratio is too large by a factor of 1 / the probability of that part"
)
PREFERRED = "--sglang-preferred-sampling-params"
# Settings that change what SGLang records, and that the trainer does not apply -> the value without effect.
PENALTIES = {"repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}}
MINIMUM = {"min_new_tokens": 0}
GRAMMARS = dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), "")
TRUNCATIONS = {"top_p": 1, "top_k": -1, "min_p": 0}  # these are not in what SGLang records
SAMPLING = {**PENALTIES, **MINIMUM, **GRAMMARS, **TRUNCATIONS, "temperature": UNREAD}
ORIGINAL = "SGLANG_RETURN_ORIGINAL_LOGPROB"
EXPERTS, CUSTOM = "return_routed_experts", "custom_params"  # fields of a request to /generate
LARGEST_FILE = 2**16  # bytes of a generation_config.json, which has a few hundred


@rule(REFUSE)
def greedy_sampling(setup: Setup) -> str | None:
    """The sampler's temperature or top-k picks the most likely token, so tokens are not drawn at random."""
    return _greedy(setup) if setup.function else None


@rule(WARN)
def greedy_sampling_beside_init(setup: Setup) -> str | None:
    """The sampler is greedy, so what is measured are no ratios of probabilities."""
    return None if setup.function else _greedy(setup)


def _greedy(setup: Setup) -> str | None:
    temperature, top_k = setup.flags.rollout_temperature, setup.flags.rollout_top_k
    if temperature is not None and temperature <= 0:
        flag, got = "--rollout-temperature", f"expected a number above 0, got {temperature}"
    elif top_k == 1:
        flag, got = "--rollout-top-k", "expected -1, got 1"
    else:
        return None
    wanted = "1.0" if flag == "--rollout-temperature" else "-1"
    return f"{flag}: {got}: set {flag} {wanted}, because greedy decoding has no probabilities to correct"


@rule(REFUSE)
def top_p_without_replay(setup: Setup) -> str | None:
    """The sampler leaves out tokens because of top-p, and the trainer's log-probs keep them."""
    return _top_p(setup) if setup.function else None


@rule(WARN)
def top_p_beside_init(setup: Setup) -> str | None:
    """The sampler leaves out tokens because of top-p, which no measured ratio shows."""
    return None if setup.function else _top_p(setup)


def _top_p(setup: Setup) -> str | None:
    if setup.flags.rollout_top_p in (None, 1) or setup.flags.use_sampling_support_replay:
        return None
    host = setup.known_host("whether this host's trainer normalises over what --rollout-top-p leaves")
    if host.replays_top_p:
        return None
    return (
        "--rollout-top-p: expected 1.0, or a host that replays what top-p leaves, got "
        f"{setup.flags.rollout_top_p}: remove the flag, or use slime v0.3.1 or newer, or miles' main with "
        f"--use-sampling-support-replay, because {RATIO_OFF}"
    )


@rule(REFUSE)
def top_k_without_replay(setup: Setup) -> str | None:
    """The sampler leaves out tokens because of top-k, and the trainer's log-probs keep them."""
    return _top_k(setup) if setup.function else None


@rule(WARN)
def top_k_beside_init(setup: Setup) -> str | None:
    """The sampler leaves out tokens because of top-k, which no measured ratio shows."""
    return None if setup.function else _top_k(setup)


def _top_k(setup: Setup) -> str | None:
    top_k = setup.flags.rollout_top_k
    if top_k in (None, -1, 1) or setup.flags.use_sampling_support_replay:
        return None
    return (
        f"--rollout-top-k: expected -1, or a host that replays what top-k leaves, got {top_k:g}: remove the "
        f"flag, or use miles' main with --use-sampling-support-replay, because {RATIO_OFF}"
    )


@rule(REFUSE)
def min_p_without_replay(setup: Setup) -> str | None:
    """The engine leaves out tokens because of min_p, and the trainer's log-probs keep them."""
    return _min_p(setup) if setup.function else None


@rule(WARN)
def min_p_beside_init(setup: Setup) -> str | None:
    """The engine leaves out tokens because of min_p, which no measured ratio shows."""
    return None if setup.function else _min_p(setup)


def _min_p(setup: Setup) -> str | None:
    min_p = _preferred(setup).get("min_p")
    if not min_p:
        return None
    return f"{PREFERRED}: expected no min_p, got one: remove it, because {RATIO_OFF}; no host replays min_p"


@rule(REFUSE)
def original_log_probs(setup: Setup) -> str | None:
    """The engine records log-probs at temperature 1, and the trainer computes them at the sampler's."""
    return _original(setup) if setup.function else None


@rule(WARN)
def original_log_probs_beside_init(setup: Setup) -> str | None:
    """The engine records log-probs at temperature 1, so the temperature is in every measured ratio."""
    return None if setup.function else _original(setup)


def _original(setup: Setup) -> str | None:
    temperature = setup.flags.rollout_temperature
    is_on = setup.environment.get(ORIGINAL, "").lower() in ("1", "true")
    if not is_on or temperature in (None, 1):
        return None
    return (
        f"{ORIGINAL}: expected 0 beside --rollout-temperature {temperature:g}, got 1: unset it, because "
        f"SGLang then records log-probs at temperature 1 and the trainer computes them at {temperature:g}, "
        "so every ratio contains the temperature"
    )


@rule(HOST)
def unreadable_sampling_params(setup: Setup) -> str | None:
    """The engine's preferred sampling parameters are no JSON object, so it does not start."""
    text = setup.flags.sglang_preferred_sampling_params
    if not text or isinstance(_as_json(text), dict):
        return None
    return f"{PREFERRED}: expected a JSON object, got another text: write it as '{{\"min_p\": 0}}', in quotes"


@rule(WARN)
def penalties_in_record(setup: Setup) -> str | None:
    """The engine penalises or biases tokens, which is in its log-probs and not in the trainer's."""
    names = list(dict.fromkeys(each.name for each in _active(setup, PENALTIES)))
    if not names:
        return None
    where = next(each.where for each in _active(setup, PENALTIES))
    return (
        f"{where}: expected no {' or '.join(names)}, got one: remove it, because SGLang records "
        "log-probs after it and the trainer computes them without: the ratio shows it beside numerics, and "
        f"a correction works against it, also with {ORIGINAL}=1"
    )


@rule(WARN)
def minimum_length_in_record(setup: Setup) -> str | None:
    """The engine forbids the end token at first, which is in its log-probs and not in the trainer's."""
    for where, name, _ in _active(setup, MINIMUM):
        return (
            f"{where}: expected no {name}, got one: remove it, and give short responses a lower reward, "
            "because up to that length SGLang records log-probs without the end token and the trainer "
            "computes them with it: every ratio there is too low by the end token's probability"
        )
    return None


@rule(WARN)
def grammar_in_record(setup: Setup) -> str | None:
    """The engine allows only tokens of a grammar, which is in its log-probs and not in the trainer's."""
    for where, name, _ in _active(setup, GRAMMARS):
        return (
            f"{where}: expected no {name}, got one: remove it, or set the loss mask of those tokens to 0, "
            "because SGLang records log-probs over the allowed tokens and the trainer over all tokens: "
            f"ratios are far below 1 where the grammar forbids likely tokens, also with {ORIGINAL}=1"
        )
    return None


@rule(WARN)
def truncation_of_function(setup: Setup) -> str | None:
    """A rollout function leaves out tokens, which are in the recorded log-probs and in the trainer's."""
    replayed = ["top_p", "top_k"] if setup.flags.use_sampling_support_replay else []
    replayed += [] if setup.flags.rollout_top_p in (None, 1) else ["top_p"]  # the host asks what top-p leaves
    for where, name, _ in _known(setup.sampled_with, TRUNCATIONS):
        if name not in replayed:
            return (
                f"{where}: expected {name} {TRUNCATIONS[name]:g}, got another number: remove it from the "
                f"rollout function, because {RATIO_OFF}"
            )
    return None


@rule(WARN)
def temperature_of_function(setup: Setup) -> str | None:
    """A rollout function samples at another temperature than the one that the trainer divides logits by."""
    temperature = setup.flags.rollout_temperature
    idle = {} if temperature is None else {"temperature": temperature}
    for where, _, value in _known(setup.sampled_with, idle):
        effect = (
            "SGLang then picks the most likely token and records its log-prob at temperature 1, which leaves "
            "no probabilities to correct"
            if value == 0
            else "SGLang records log-probs at this temperature and the trainer computes them at "
            "--rollout-temperature, so every ratio contains the temperature"
        )
        return (
            f"{where}: expected the temperature of --rollout-temperature, {temperature:g}, got another "
            f"number: write args.rollout_temperature, because {effect}"
        )
    return None


@rule(HINT)
def unread_sampling_parameters(setup: Setup) -> str | None:
    """A rollout function sets sampling parameters to values that are known only where it runs."""
    unread = [each for each in setup.sampled_with if each.value is UNREAD]
    if not unread:
        return None
    names = ", ".join(dict.fromkeys(each.name for each in unread))
    return (
        f"{unread[0].where}: {names} of the rollout function cannot be read here: keep penalties, biases, "
        "grammars, top-p, top-k and min-p off and the temperature at --rollout-temperature, or see "
        "docs/engines.md for what the ratio then means"
    )


@rule(WARN)
def router_without_replay(setup: Setup) -> str | None:
    """The installed sglang-router drops the field with which the host asks for what it replays."""
    flags = setup.flags
    if flags.sglang_router_ip or flags.use_slime_router or flags.use_miles_router:
        return None  # another router than the installed one
    asks_top_p = flags.rollout_top_p not in (None, 1) and setup.host is not None and setup.host.replays_top_p
    for flag, is_on, name in (
        ("--use-rollout-routing-replay", flags.use_rollout_routing_replay, EXPERTS),
        ("--rollout-top-p", asks_top_p, CUSTOM),
    ):
        if is_on and (version := setup.router_drops(name)):
            return (
                f"{flag}: expected that the installed sglang-router passes {name} on, got "
                f"{version} without it: install the build that the host's Dockerfile names, "
                "because this one removes the field from each request and answers 200, so the samples lack "
                "what the trainer replays, and it stops at the first rollout"
            )
    return None


@rule(HINT)
def seed_without_effect(setup: Setup) -> str | None:
    """The engine gets a sampling seed, which acts only under deterministic inference."""
    if _preferred(setup).get("sampling_seed") is None or setup.flags.sglang_enable_deterministic_inference:
        return None
    return (
        f"{PREFERRED}: sampling_seed has no effect without --sglang-enable-deterministic-inference: add the "
        "flag, or remove the seed"
    )


@rule(HINT)
def sampling_of_checkpoint(setup: Setup) -> str | None:
    """The model's generation_config.json has sampling settings, which apply to chat requests only."""
    flags = setup.flags
    functions = (flags.custom_generate_function_path, flags.rollout_function_path)
    if not any(path and path not in OURS.values() for path in functions):
        return None  # the host's own function asks /generate, and passes its own settings
    config = _generation_config(flags.hf_checkpoint)
    idle = {"repetition_penalty": 1, "temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0}
    named = [name for name, value in idle.items() if config.get(name) not in (None, value)]
    if not named:
        return None
    return (
        f"generation_config.json of --hf-checkpoint sets {', '.join(named)}: SGLang applies them to chat "
        "requests that do not set them, and not to /generate (its end tokens apply to both): if your rollout "
        "function asks for chat completions, pass each of them there, because the trainer does not apply them"
    )


def _active(setup: Setup, idle: dict[str, Any]) -> Iterator[Parameter]:
    """Yields the parameters with an effect, of the engine's flag and of the user's rollout functions."""
    preferred = [Parameter(PREFERRED, name, value) for name, value in _preferred(setup).items()]
    return _known([*preferred, *setup.sampled_with], idle)


def _known(parameters: Collection[Parameter], idle: dict[str, Any]) -> Iterator[Parameter]:
    """Yields the parameters whose values are known and differ from ``idle``, name -> value without effect."""
    for each in parameters:
        if each.name in idle and each.value is not UNREAD and each.value not in (idle[each.name], None):
            yield each


def _preferred(setup: Setup) -> dict[str, Any]:
    """Reads the sampling parameters that the engine adds to each request, except those that hosts pass."""
    params = _as_json(setup.flags.sglang_preferred_sampling_params or "")
    return params if isinstance(params, dict) else {}


def _as_json(text: Any) -> Any:
    try:
        return json.loads(str(text))
    except (ValueError, RecursionError):
        return None


def _generation_config(checkpoint: Any) -> dict[str, Any]:
    """Reads a model's generation_config.json; empty if it is not here or cannot be read."""
    path = Path(str(checkpoint or ""), "generation_config.json")
    try:
        is_read = bool(checkpoint) and path.is_file() and path.stat().st_size <= LARGEST_FILE
        config = _as_json(path.read_text("utf-8", "ignore")) if is_read else None
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
