"""Rules that the host's code decides, and of how it starts and trains."""

from __future__ import annotations

import difflib
from functools import cache

from slime_ext.core.needs import Need
from slime_ext.hosts import contract
from slime_ext.hosts.code import STEP
from slime_ext.hosts.contract import INIT, INIT_FLAG, OURS, flag_of
from slime_ext.hosts.flags import DECISIVE, NEARLY
from slime_ext.rules.rule import HINT, INIT_ALONE, REFUSE, WARN, rule
from slime_ext.rules.setup import HostUnknownError, Setup

SAME_WORD = 0.7  # words of a flag that are at least this similar (difflib's ratio) are one word, misspelt
SAME_LETTERS = 0.95  # the same without dashes, where one has more dashes than the other
OF_ENGINE = ("--sglang-", "--router-")  # flags of the cluster's SGLang
DYNAMIC = (
    "--dynamic-context-parallel: expected off beside slime_ext, got on: remove the flag, because it splits "
    "each micro-batch over another group of ranks, which slime_ext does not support"
)


@rule(REFUSE)
def dynamic_context_parallel(setup: Setup) -> str | None:
    """The group of ranks that share a sequence changes with each micro-batch."""
    return DYNAMIC if setup.flags.dynamic_context_parallel else None


@rule(REFUSE)
def unknown_release(setup: Setup) -> str | None:
    """The host's functions differ in parameters from those of every supported release."""
    return setup.known_host().fault


@rule(REFUSE)
def flag_unknown_to_host(setup: Setup) -> str | None:
    """A flag decides whether slime_ext runs, and this host does not know it."""
    host = setup.known_host()
    flags = (name for name in DECISIVE if name not in setup.file and getattr(setup.flags, name))
    unknown = next((flag_of(name) for name in flags if not host.accepts(name, setup.args)), None)
    if unknown is None:
        return None
    return (
        f"{unknown}: expected a host that has this flag, got a {host.name} that ignores it: use a release "
        "that has it"
    )


@rule(REFUSE)
def missing_init(setup: Setup) -> str | None:
    """The hook needs something that only ``slime_ext.host.init`` passes to it."""
    passed = {name for name in contract.OPTIONAL if setup.host and setup.host.passes(name)}
    reads = {"cur_log_probs": Need.TARGET, "advantages": Need.ADVANTAGES}
    needed = (name for name, need in reads.items() if need in setup.correction.needs)
    unpassed = " and ".join(name for name in needed if name not in passed)
    who = f"{setup.host.name} does not pass" if setup.host else "no release of slime or miles passes"
    patched = "" if setup.host else " (name a patched checkout with --host DIR)"
    whys = {
        f"the correction reads {unpassed}, which {who} to a hook{patched}": unpassed,
        "the correction reads the samples' ages, which only init counts": setup.correction.needs_ages,
        "only init knows which samples share a prompt": setup.correction.group != "ignore",
        "without init each micro-batch is treated as an optimizer step": setup.correction.needs_plan,
        "on_nonfinite: raise acts when init reads a step's statistics": setup.correction.on_nonfinite
        == "raise",
    }
    why = next((why for why, is_so in whys.items() if is_so), "")
    if not why or not setup.function or _runs_init(setup):
        return None
    flag, wanted, got = flag_of(INIT), OURS[INIT], "none"
    if setup.flags.train_backend == "fsdp":
        flag, wanted, got = "--train-backend", "megatron", f"fsdp, which never calls {flag}"
    return (
        f"{flag}: expected {wanted} beside {contract.TIS}.{setup.function}, got {got}: set it, because {why}"
    )


def _runs_init(setup: Setup) -> bool:
    """Tells whether the host calls ``slime_ext.host.init``.

    Raises:
        HostUnknownError: the launch names a user's init, which may call it.
    """
    if not setup.may_run_init:
        return False
    path = setup.flags.custom_megatron_init_path
    if not setup.trains and path != OURS[INIT]:
        raise HostUnknownError(
            f"whether {path} calls slime_ext.host.init(args), without which {contract.TIS}.{setup.function} "
            "stops the run"
        )
    return True


@rule(REFUSE)
def missing_train_step(setup: Setup) -> str | None:
    """The correction couples the samples of a step, and the host has no ``train_one_step``."""
    if not setup.correction.needs_plan or setup.known_host().has_step:
        return None
    return (
        f"{setup.known_host().name}: expected a trainer with {STEP} beside a correction that couples the "
        "samples of an optimizer step, got one without (FSDP): use --train-backend megatron"
    )


@rule(WARN, INIT_ALONE)
def fsdp_beside_init(setup: Setup) -> str | None:
    """The trainer is FSDP's, which never calls ``init``, and no other part of slime_ext runs."""
    if setup.function or setup.flags.train_backend != "fsdp":
        return None
    return (
        f"--train-backend: expected megatron beside {OURS[INIT]}, got fsdp: use megatron, because fsdp never "
        f"calls {flag_of(INIT)}, so nothing is measured"
    )


@rule(WARN)
def fsdp_beside_function(setup: Setup) -> str | None:
    """The trainer is FSDP's, where the correction runs without metrics and guards."""
    if not setup.function or setup.flags.train_backend != "fsdp":
        return None
    return (
        "--train-backend: expected megatron beside slime_ext.tis, got fsdp, which calls no "
        "--custom-megatron-init-path: use megatron to get guards, the certificate, off_policy.jsonl, and "
        "more metrics than those that the host logs itself"
    )


@rule(WARN)
def guards_beside_release_train(setup: Setup) -> str | None:
    """The trainer restarts for each rollout, so guards count steps within one rollout only."""
    if not setup.flags.release_train:
        return None
    return (
        "--release-train: expected off beside slime_ext.guards, got on: remove the flag, because the trainer "
        "ends with each rollout, and the next trainer knows neither the steps that guards counted nor that a "
        "guard chose metrics_only"
    )


@rule(WARN)
def metrics_of_one_replica(setup: Setup) -> str | None:
    """Data parallel replicas are independent, so each has its own metrics and guards."""
    if not setup.flags.indep_dp:
        return None
    return (
        "--ft-components: expected data parallel ranks of one group, got independent replicas: remove the "
        "flag to have metrics and guards over all ranks, because each replica has its own, and "
        "off_policy.jsonl has those of the first"
    )


@rule(WARN)
def misspelt_host_flag(setup: Setup) -> str | None:
    """A flag is spelled nearly like a flag of the host, which has no flag of its name."""
    # Megatron's and SGLang's flags are not in the host's code.
    known = setup.host.flags() if setup.host else frozenset()
    names = [name for name in setup.flag_names if name not in known and not name.startswith(OF_ENGINE)]
    misspelt = [(name, near) for name in names if (near := _near(name, known))]
    if not misspelt or setup.host is None:
        return None
    many = len(misspelt) > 1
    return (
        f"{' and '.join(name for name, _ in misspelt)}: expected {'flags' if many else 'a flag'} of "
        f"{setup.host.name}, got {'names' if many else 'a name'} that it does not define; did you mean "
        f"{' and '.join(near for _, near in misspelt)}?"
    )


@cache  # because a launch is judged several times, and 60 names take 0.1 s
def _near(name: str, known: frozenset[str]) -> str:
    """Returns the flag that a name is a misspelling of; else ""."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=NEARLY)
    return near[0] if near and _is_misspelt(name, near[0]) else ""


def _is_misspelt(name: str, other: str) -> bool:
    """Whether a name that resembles another differs by letters or dashes and not by whole words.

    Megatron's --rope-type is no misspelling of miles' --opd-type, and --no-save is none of --save.
    """
    words, other_words = name.split("-"), other.split("-")
    if len(words) != len(other_words):
        return _resemble(name.replace("-", ""), other.replace("-", ""), SAME_LETTERS)
    return all(
        _resemble(word, other_word, SAME_WORD) for word, other_word in zip(words, other_words, strict=True)
    )


def _resemble(text: str, other: str, least: float) -> bool:
    return sorted(text) == sorted(other) or difflib.SequenceMatcher(None, text, other).ratio() >= least


@rule(HINT)
def missing_metrics(setup: Setup) -> str | None:
    """The correction runs without ``slime_ext.host.init``, so there are no metrics."""
    if setup.flags.custom_megatron_init_path or not setup.function or missing_init.judge(setup):
        return None
    return f"no metrics: in slime add {INIT_FLAG}"


@rule(HINT)
def init_of_your_own(setup: Setup) -> str | None:
    """``--custom-megatron-init-path`` names a user's init, which has to call that of slime_ext."""
    if setup.flags.custom_megatron_init_path in (None, OURS[INIT]):
        return None
    return (
        f"no metrics and no check at start-up, unless {setup.flags.custom_megatron_init_path} calls "
        "slime_ext.host.init(args): call it there"
    )
