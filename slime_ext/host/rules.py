"""One table of rules on a launch: what would make a correction wrong or idle, and what a user should know.

``init`` and the first hook call raise at REFUSE and log WARN. ``slime-ext check`` and ``rehearse`` raise at
REFUSE and HOST, and print WARN and HINT. A rule that reads an argument of unknown value is skipped: where a
rule speaks depends on its severity and on what is known. A rule that asks the host's code, where none is at
hand, is skipped too, and ``unasked`` has the words for what was not checked.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from slime_ext.config.loaded import Loaded
from slime_ext.config.places import FOREIGN, PLACES
from slime_ext.core.correction import Correction
from slime_ext.core.losses import DualClip, HostLoss
from slime_ext.core.steps import Reject, Veto
from slime_ext.errors import ConfigError, warn_once
from slime_ext.host import contract
from slime_ext.host.contract import INIT, INIT_FLAG, LOG, LOG_FLAG, OURS, flag_of
from slime_ext.host.flags import ARGUMENTS, DECISIVE
from slime_ext.host.hosts import RESPONSES, STEP, HostCode

WITHOUT_RATIO = ("reinforce", "flash_reinforce", "rloo")  # estimators whose loss is -A log pi_target
WITH_BASELINE = (None, "grpo", "gspo", "cispo")  # estimators that subtract a group's mean, and nothing later
READS_BAND = ("vanilla_tis_function", "icepop_function")
MEASURING = {"guards", "metrics"}  # keys that act without a correction of ours
ENGINE = "sglang_router_ip"  # an argument that a host has whose engine is SGLang
# What slime asserts on, or derives other arguments from, before it reads --custom-config-path.
CHECKED_BEFORE = {
    *(ARGUMENTS.keys() - OURS - {"custom_tis_function_path", "use_tis", "get_mismatch_metrics"}),
    *"kl_loss_coef grpo_std_normalization use_dynamic_batch_size max_tokens_per_gpu balance_by_flops "
    "over_sampling_batch_size save save_interval eval_interval eval_prompt_data eval_config dump_details "
    "save_debug_rollout_data save_debug_train_data load_debug_rollout_data debug_rollout_only "
    "debug_train_only enable_mtp_training mtp_num_layers opd_type opd_teacher_load".split(),
}


Facts = dict[str, Callable[[Any], Any]]  # words -> whether arguments are so


class UnknownError(Exception):
    """A rule reads an argument whose value is not known."""


class HostUnknownError(UnknownError):
    """A rule asks the host's code, or an init of the user's own, and neither is known."""


class _Arguments:
    """The arguments of ARGUMENTS and ``slime_ext``; None where the host lacks one."""

    def __init__(self, args: Any, unknown: Collection[str]) -> None:
        self._args, self._unknown = args, unknown

    def __getattr__(self, name: str) -> Any:
        if name not in ARGUMENTS and name != "slime_ext":
            raise KeyError(f"ARGUMENTS: expected {name}, which a rule reads, got none: add it")
        if name in self._unknown:
            raise UnknownError(name)
        return getattr(self._args, name, None)


@dataclass(frozen=True)
class Setup:
    """What a rule looks at.

    Args:
        args: the host's arguments.
        function: of ``slime_ext.tis``; empty where another's runs, or none.
        loaded: what the function was made of.
        unknown: names of arguments whose values are not known.
        file: keys at the top of the file of --custom-config-path.
        pg_loss_type: what the host's ``get_pg_loss_type`` says; None where it has none.
        host: the code of the host; None where none is at hand.
        trains: whether this process is the one that trains, where a hook call itself shows what it is passed.
    """

    args: Any
    function: str = ""
    loaded: Loaded = field(default_factory=lambda: Loaded(Correction()))
    unknown: Collection[str] = ()
    file: Collection[str] = ()
    pg_loss_type: str | None = None
    host: HostCode | None = None
    trains: bool = False

    @functools.cached_property
    def a(self) -> Any:
        """The arguments as rules read them."""
        return _Arguments(self.args, self.unknown)

    @property
    def correction(self) -> Correction:
        """The identity where no correction of ours runs."""
        return self.loaded.correction

    @property
    def known_host(self) -> HostCode:
        """The host's code. Raises HostUnknownError where none is at hand."""
        if self.host is None:
            raise HostUnknownError
        return self.host

    @property
    def runs_init(self) -> bool:
        """Whether the host calls ``slime_ext.host.init``. Raises HostUnknownError for an init of the user's
        own, which may call it."""
        if not self.may_run_init:
            return False
        if not self.trains and self.a.custom_megatron_init_path != OURS[INIT]:
            raise HostUnknownError
        return True

    @property
    def may_run_init(self) -> bool:
        """As ``runs_init``, where an init of the user's own is trusted to call it."""
        if self.trains or self.a.custom_megatron_init_path is None:
            return self.trains
        return bool(self.a.train_backend != "fsdp")  # which never calls that flag

    @property
    def may_skip_proximal(self) -> bool:
        """Whether the host does without proximal log-probs where flags allow it (slime since v0.3.0): a host
        that is not at hand is taken for a new one."""
        return not self.trains if self.host is None else self.host.may_skip_proximal

    @property
    def hook_correction(self) -> Correction | None:
        """What the hook will apply; None where the flags call no function that has a correction."""
        return self.correction if self.function and contract.calls_hook(self.args) else None

    @property
    def steps(self) -> int:
        """Optimizer steps per rollout, from --num-steps-per-rollout or from the batch sizes; one where
        --use-dynamic-global-batch-size (slime v0.2.2 to v0.2.4, miles) makes a step of whatever there is."""
        a = self.a
        if a.use_dynamic_global_batch_size:
            return 1
        if a.num_steps_per_rollout:
            return int(a.num_steps_per_rollout)
        sizes = (a.rollout_batch_size, a.n_samples_per_prompt, a.global_batch_size)
        return int(max(1, sizes[0] * sizes[1] // sizes[2])) if all(sizes) else 1

    @property
    def acts(self) -> bool:
        """Whether the correction changes the loss."""
        return self.a.use_tis is not False

    @property
    def own_loss(self) -> bool:
        """Whether a surrogate of ours replaces the host's loss."""
        return self.acts and not isinstance(self.correction.surrogate, HostLoss)

    @property
    def has_ratio(self) -> bool:
        """Whether the host's loss has the factor target / proximal (PPO, GSPO, CISPO); REINFORCE, -A log
        pi_target, has none, and passes the target's log-probs for the proximal's."""
        found = self.pg_loss_type or self.a.pg_loss_type
        if found is None:
            return not (self.a.use_score_centering or self.a.advantage_estimator in WITHOUT_RATIO)
        return bool(found != "reinforce")

    @property
    def counts_target_twice(self) -> bool:
        """Whether weights target / behavior multiply a loss with the factor target / proximal: right while
        both policies are equal, which ends with the first optimizer step of a rollout."""
        weighs = self.correction.numerator == "target" and self.correction.sets_weights
        return weighs and self.acts and not self.own_loss and self.has_ratio

    @property
    def refuses_second_step(self) -> bool:
        """Whether a second step of a rollout would be wrong; of a seed's function it is warned of."""
        named = self.hook_correction is not None and self.function not in contract.SEEDS
        return named and self.counts_target_twice

    @property
    def is_second_step_trained(self) -> bool:
        """Whether target and proximal can differ."""
        return self.steps > 1 or bool(self.a.keep_old_actor)

    @property
    def skips_proximal(self) -> bool:
        """slime's condition for a rollout without recomputed log-probs, as far as flags decide it."""
        a = self.a
        needed = (a.get_mismatch_metrics, a.kl_coef, a.use_rollout_logprobs, a.keep_old_actor, a.use_opd)
        others = a.use_critic or a.advantage_estimator == "gspo" or a.loss_type not in (None, "policy_loss")
        replayed = a.use_routing_replay and not a.use_rollout_routing_replay
        return self.may_skip_proximal and self.steps == 1 and not (any(needed) or others or replayed)


class Severity(Enum):
    """Where a rule speaks: see the module."""

    REFUSE = "ours would be wrong, or never act"
    HOST = "the host refuses it"
    WARN = "probably not what is meant"
    HINT = "a launch can still add it"


REFUSE, HOST, WARN, HINT = Severity


@dataclass(frozen=True)
class Rule:
    """A line that a launch deserves.

    Args:
        when: whether it does; text that it returns is ``{found}``.
        message: with ``{a.<name>}`` for the value of an argument, ``{s.<name>}`` for what ``Setup`` has.
        asks: what was not checked where ``when`` raises HostUnknownError.
    """

    when: Callable[[Setup], Any]
    message: str
    severity: Severity = REFUSE
    asks: str = ""


def _misplaced_key(s: Setup) -> str:
    """A key of ours or of another system beside ``slime_ext:``, where a lost indentation or a former hook
    leaves it. Beside another's hook, which may read it there as slime's mis.py does, only what acts without a
    correction of ours is judged."""
    if not s.function and s.a.slime_ext is None:
        return ""
    is_anothers = not s.function and s.a.custom_tis_function_path is not None
    keys = (key for key in s.file if key not in ARGUMENTS and (key in MEASURING or not is_anothers))
    for key in keys:
        if system := FOREIGN.get(key):
            return (
                f"no key of {system} beside slime_ext, got {key}: leave it out, or translate the file: "
                f"slime-ext convert --from {system} FILE"
            )
        if place := PLACES.get(key):
            return f"the key {key} {place}, got it beside slime_ext, where nothing reads it: indent it"
    return ""


def _unread_clip(s: Setup) -> str:
    """--tis-clip beside a function that does not read it; the host's default is not told from no flag."""
    given = {dest: getattr(s.a, dest) for dest in contract.BAND}
    given = {dest: value for dest, value in given.items() if value not in (None, ARGUMENTS[dest].default)}
    reads = READS_BAND + (("off_policy_is_function",) if contract.takes_tis_bounds() else ())
    if not s.function or s.function in reads or not given:
        return ""
    dest, value = next(iter(given.items()))
    return f"{flag_of(dest)}: expected none beside slime_ext.tis.{s.function}, got {value:g}"


NO_BASELINE: Facts = {  # what undoes or replaces slime's group baseline
    "an --advantage-estimator other than grpo, gspo and cispo (its advantages have no group baseline)":
        lambda a: a.advantage_estimator not in WITH_BASELINE,
    "--disable-rewards-normalization (there is no baseline to compute again)":
        lambda a: a.rewards_normalization is False,
    "--normalize-advantages (the advantages are whitened over the whole batch afterwards)":
        lambda a: a.normalize_advantages,
    "--use-opd (the teacher's term is in the advantages already)": lambda a: a.use_opd,
    "--custom-advantage-function-path (its baseline is not known)":
        lambda a: a.custom_advantage_function_path,
    "--custom-reward-post-process-path (its baseline is not known)":
        lambda a: a.custom_reward_post_process_path,
}  # fmt: skip


DISCARDED: Facts = {  # work of the host's loss that a surrogate of ours replaces
    "--use-opsm: expected off, got on: its mask": lambda a: a.use_opsm,
    "--advantage-estimator: expected another, got gspo: its sequence ratio":
        lambda a: a.advantage_estimator == "gspo",
    "--advantage-estimator: expected another, got cispo: its clipped weight":
        lambda a: "cispo" in (a.advantage_estimator, a.pg_loss_type),
}  # fmt: skip


def _init_is_missed(s: Setup) -> str:
    """Where a hook call lacks what only ``init`` brings to it, and stops, or corrects other than it says."""
    passed = {name for name in contract.OPTIONAL if s.host and s.host.passes(name)}
    reads = {"cur_log_probs": s.correction.needs_target, "advantages": s.correction.needs_advantages}
    unpassed = " and ".join(name for name, is_read in reads.items() if is_read and name not in passed)
    who = f"{s.host.name} does not pass" if s.host else "no release of slime or miles passes"
    patched = "" if s.host else " (name a patched checkout with --host DIR)"
    whys = {
        f"it reads {unpassed}, which {who} to a hook{patched}": unpassed,
        "it reads the samples' ages, which only init counts": s.correction.needs_ages,
        "which samples share a prompt is known only to init": s.correction.group != "ignore",
        "each micro-batch would be an optimizer step of its own": s.correction.needs_plan,
        "on_nonfinite: raise acts when init reads a step's statistics": s.correction.on_nonfinite == "raise",
    }
    why = next((why for why, is_so in whys.items() if is_so), "")
    if not why or not s.function or s.runs_init:
        return ""
    flag, wanted, got = flag_of(INIT), OURS[INIT], "none"
    if s.a.train_backend == "fsdp":
        flag, wanted, got = "--train-backend", "megatron", f"fsdp, which never calls {flag}"
    return f"{flag}: expected {wanted} beside {contract.TIS}.{s.function}, got {got}: {why}"


def _lacking_versions(s: Setup) -> str:
    """What reads the samples' ages where their weight versions do not reach the trainer."""
    guards = [f"slime_ext.guards.{name}" for name in s.loaded.guards if name.startswith("staleness_")]
    readers = ["max_staleness"] if s.correction.needs_ages else guards
    if not readers or getattr(s.a, LOG) == OURS[LOG] or not s.may_run_init:
        return ""
    if s.known_host.carries_versions:
        return ""
    keeps = f"{readers[0]}: expected the samples' weight versions, got a {s.known_host.name} that keeps them"
    if not s.known_host.accepts(LOG, s.args):  # slime before v0.2.2
        return f"{keeps} and has no {flag_of(LOG)}: use a newer release, or the diff of docs/patches.md"
    return f"{keeps} in its rollout manager: add {LOG_FLAG}"


def _lacking_head(s: Setup) -> str:
    """What the host lacks to bring the sampler's head to the loss."""
    if s.correction.center is None:
        return ""
    host = s.known_host
    lacks = {
        f"{STEP} (Megatron's trainer)": not host.has_step or s.a.train_backend == "fsdp",
        f"{RESPONSES} among its modules": not host.defines(RESPONSES),
        f"{flag_of(LOG)} (slime since v0.2.2)": not host.accepts(LOG, s.args),
        "SGLang as its engine": not host.accepts(ENGINE, s.args),
    }
    return next((what for what, is_lacking in lacks.items() if is_lacking), "")


def _unknown_flag(s: Setup) -> str:
    """A flag that decides whether ours runs, and that this host ignores because it is older."""
    host = s.known_host
    given = (name for name in DECISIVE if name not in s.file and getattr(s.a, name))
    return next((flag_of(name) for name in given if not host.accepts(name, s.args)), "")


def _where(asks: Callable[[Setup], bool], when: Callable[[Any], Any]) -> Callable[[Setup], Any]:
    return lambda s: asks(s) and when(s.a)


NO_POLICY_LOSS = (
    "--loss-type: expected policy_loss beside slime_ext, got sft_loss: it has no policy loss to measure or "
    "to correct"
)
NOTHING_MEASURED = (  # where init is all that a launch has of ours
    Rule(lambda s: not s.function and s.a.loss_type == "sft_loss", NO_POLICY_LOSS, WARN),
    Rule(lambda s: not s.function and s.a.train_backend == "fsdp",
         f"--train-backend: expected megatron beside {OURS[INIT]}, got fsdp, which never calls "
         f"{flag_of(INIT)}: nothing is measured", WARN),
)  # fmt: skip
OF_THE_FILE = (  # before what stands in it is read
    Rule(_misplaced_key,
         "--custom-config-path: expected {found}; an argument of your own needs another name"),
    Rule(lambda s: s.function in ("", *contract.SEEDS) and s.a.slime_ext is not None
         and (not isinstance(s.a.slime_ext, Mapping) or set(s.a.slime_ext) - MEASURING)
         and (s.a.custom_tis_function_path or "none"),
         f"--custom-tis-function-path: expected {contract.TIS}.correct beside the key slime_ext, got "
         "{found}: nothing would read that key"),
)  # fmt: skip
OF_THE_LAUNCH = (
    Rule(lambda s: contract.function_of(s.a) and not (s.a.use_tis or s.a.get_mismatch_metrics),
         "--use-tis: expected on beside --custom-tis-function-path, got off: the function would never be "
         "called; for metrics alone leave it out, slime_ext.host.init measures without"),
    Rule(lambda s: s.function and s.a.loss_type == "sft_loss", NO_POLICY_LOSS),
    Rule(lambda s: s.function and s.a.rollout_temperature is not None and s.a.rollout_temperature <= 0,
         "--rollout-temperature: expected a number above 0, got {a.rollout_temperature}: greedy decoding has "
         "no probabilities to correct"),
    Rule(lambda s: s.function and s.a.use_tis and s.a.use_score_centering,
         "--use-score-centering: expected the host's own vanilla_tis_function or icepop_function beside it, "
         "got {a.custom_tis_function_path}: the host centers no other weights; without a function, "
         "slime_ext.host.init measures beside it"),
    Rule(lambda s: s.function and s.a.get_mismatch_metrics and s.a.use_score_centering,
         "--get-mismatch-metrics: expected off beside --use-score-centering, got on: the host refuses it; "
         "slime_ext.host.init measures without", HOST),
    Rule(lambda s: s.a.use_tis and s.a.use_rollout_logprobs and s.has_ratio,
         "--use-rollout-logprobs: cannot be combined with --use-tis: the host refuses both. Remove one.",
         HOST),
    Rule(lambda s: s.correction.needs_plan and s.skips_proximal,
         "--get-mismatch-metrics: expected on with a correction that couples the samples of an optimizer "
         "step, got off: with one step per rollout slime computes no proximal log-probs before it trains"),
)  # fmt: skip
WHOLE = ": the sampler's head is normalised over the whole vocabulary, which must be what is sampled from"
DYNAMIC = (
    "--dynamic-context-parallel: expected off beside slime_ext, got on: a sample is then cut over another "
    "group for each micro-batch, which slime_ext does not follow"
)
NO_HOST = "no checkout of the host is here; --host DIR names one"
OF_THE_HOST = (  # what its code decides
    Rule(lambda s: s.a.dynamic_context_parallel, DYNAMIC),
    Rule(lambda s: s.known_host.fault, "{found}"),
    Rule(_unknown_flag, "{found}: expected a host that has this flag, got {s.host.name} without it: that "
         "release ignores it"),
    Rule(_init_is_missed, "{found}",
         asks="whether {a.custom_megatron_init_path} calls slime_ext.host.init(args), without which "
         f"{contract.TIS}.{{s.function}} stops the run"),
    Rule(lambda s: s.correction.needs_plan and s.known_host and not s.known_host.has_step,
         f"{{s.host.name}}: expected a trainer with {STEP} beside a correction that couples the samples of "
         "an optimizer step, got one without (FSDP)"),
    Rule(_lacking_versions, "{found}",
         asks="whether this host's trainer gets the samples' weight versions, which slime's does only with "
         f"{LOG_FLAG}: {NO_HOST}"),
    Rule(_lacking_head,
         "slime_ext.center: expected a host with {found}, got {s.host.name} without: the sampler's head does "
         "not reach the loss there",
         asks=f"whether the sampler's head reaches this host's loss: {NO_HOST}"),
)  # fmt: skip
OF_THE_CORRECTION = (  # between its parts and the arguments: what its numbers depend on
    Rule(lambda s: s.correction.center is not None and not s.a.custom_generate_function_path,
         "--custom-generate-function-path: expected slime_ext.host.generate beside center, got none: it asks "
         "SGLang for the sampler's {s.correction.center.top_k} most likely tokens"),
    Rule(lambda s: s.correction.center is not None and s.a.allgather_cp,
         "--allgather-cp: expected off beside center, got on: it spreads the log-probs over other ranks than "
         "the logits"),
    Rule(lambda s: s.correction.center is not None and s.a.rollout_top_p not in (None, 1),
         "--rollout-top-p: expected 1.0 beside center, got {a.rollout_top_p}" + WHOLE),
    Rule(lambda s: s.correction.center is not None and s.a.rollout_top_k not in (None, -1),
         "--rollout-top-k: expected -1 beside center, got {a.rollout_top_k}" + WHOLE),
    Rule(lambda s: s.acts and s.a.use_rollout_logprobs and not s.own_loss and s.has_ratio
         and s.correction.sets_weights,
         "--use-rollout-logprobs: cannot be combined with --use-tis: the ratio would be applied twice. "
         "Remove one."),
    Rule(lambda s: s.counts_target_twice and s.is_second_step_trained and s.function not in contract.SEEDS,
         "slime_ext.numerator: expected proximal beside the host's surrogate with {s.steps} optimizer steps "
         "per rollout or --keep-old-actor, got target: its loss counts target / proximal already; use "
         "surrogate: reinforce"),
    *(Rule(_where(lambda s: s.own_loss, when),
           f"{what} would be discarded beside a surrogate of slime_ext; use surrogate: host")
      for what, when in DISCARDED.items()),
    Rule(lambda s: s.own_loss and s.a.eps_clip_c is not None
         and not isinstance(s.correction.surrogate, DualClip),
         "--eps-clip-c: expected none beside this surrogate of slime_ext, got {a.eps_clip_c}: its floor "
         "would be discarded; use surrogate: dual_clip"),
    Rule(lambda s: s.function == "off_policy_is_function" and s.counts_target_twice
         and s.is_second_step_trained,
         "off_policy_is_function: expected one optimizer step per rollout and no --keep-old-actor, got "
         "{s.steps} steps: the host's loss has the factor target / proximal already, so that ratio is "
         "counted twice; use slime_ext.tis.off_policy_is", WARN),
    Rule(lambda s: s.correction.denominator == "kept" and s.acts and s.a.custom_pg_loss_reducer_function_path,
         "slime_ext.denominator: expected host beside --custom-pg-loss-reducer-function-path, got kept: what "
         "that function divides by is not known"),
    Rule(lambda s: s.correction.group != "ignore" and s.acts and s.a.n_samples_per_prompt == 1,
         "slime_ext.group: expected ignore with --n-samples-per-prompt 1, got {s.correction.group}: a group "
         "of one sample has no others"),
    *(Rule(_where(lambda s: s.correction.group == "rebaseline" and s.acts, when),
           f"slime_ext.group: expected ignore or atomic with {what}, got rebaseline")
      for what, when in NO_BASELINE.items()),
    Rule(lambda s: s.correction.needs_plan and s.acts and not s.has_ratio and s.is_second_step_trained,
         "--pg-loss-type: expected ppo with a correction that couples the samples of an optimizer step, got "
         "reinforce with {s.steps} steps per rollout: the host passes the target's log-probs for the "
         "proximal's, and they are not known before a step"),
)  # fmt: skip
TO_BE_KNOWN = (
    *NOTHING_MEASURED,
    Rule(_unread_clip,
         "{found}: only slime_ext.tis.vanilla_tis_function and icepop_function read it; a cap of yours is "
         "truncate: {{high: ...}} under slime_ext.steps", WARN),
    Rule(lambda s: any(isinstance(step, Reject | Veto) for step in s.correction.steps)
         and s.a.custom_pg_loss_reducer_function_path,
         "--custom-pg-loss-reducer-function-path {a.custom_pg_loss_reducer_function_path}: expected slime's "
         "reducer beside mask_scope: {s.correction.mask_scope}, got one of yours: if it divides by the "
         "masks, policy passes it the host's and all the reduced ones", WARN),
    Rule(lambda s: s.function and not s.correction.is_identity and not s.a.use_tis,
         "--use-tis: expected on beside a correction, got off: the loss stays as it is, only metrics", WARN),
    Rule(lambda s: s.function and s.correction.is_identity and s.a.use_tis,
         "slime_ext.steps: expected one beside --use-tis, got none: the loss stays as it is, only metrics",
         WARN),
    Rule(lambda s: s.function and s.a.train_backend == "fsdp",
         "--train-backend: expected megatron beside slime_ext.tis, got fsdp, which calls no "
         "--custom-megatron-init-path: no metrics but the host's own channel, no guards, certificate or "
         "off_policy.jsonl", WARN),
    Rule(lambda s: s.a.release_train,
         "--release-train: expected a trainer that stays beside slime_ext.guards, got one that ends with "
         "each rollout: steps in a row and metrics_only begin anew with the next", WARN),
    Rule(lambda s: s.a.indep_dp,
         "--ft-components: expected data parallel ranks of one group, got independent replicas: metrics and "
         "guards are those of each replica alone, off_policy.jsonl has the first one's", WARN),
    Rule(lambda s: s.a.check_for_nan_in_loss_and_grad is False,
         "--no-check-for-nan-in-loss-and-grad: expected a run that may end beside slime_ext, got one that "
         "skips steps with NaN: a NaN among the trainer's own log-probs stops it all the same", WARN),
    Rule(lambda s: ", ".join(key for key in s.file if key in CHECKED_BEFORE),
         "--custom-config-path: expected flags of slime's own on the command line, got {found} in the file: "
         "slime checks its flags, and derives others from them, before it reads the file; give it as a flag",
         WARN),
    Rule(lambda s: s.function == "correct" and not s.a.custom_tis_function_path,
         f"names no function: slime needs custom_tis_function_path: {contract.TIS}.correct", HINT),
    Rule(lambda s: not s.a.custom_megatron_init_path and s.function and not _init_is_missed(s),
         f"no metrics: in slime add {INIT_FLAG}", HINT),
    Rule(lambda s: s.a.custom_megatron_init_path not in (None, OURS[INIT]),
         "no metrics and no check at start-up unless {a.custom_megatron_init_path} calls "
         "slime_ext.host.init(args)", HINT),
)  # fmt: skip
RULES = (*OF_THE_FILE, *OF_THE_LAUNCH, *OF_THE_CORRECTION, *OF_THE_HOST, *TO_BE_KNOWN)


def said(setup: Setup, severities: Collection[Severity], rules: Collection[Rule] = RULES) -> Iterator[str]:
    """The line of each rule of these severities that the launch breaks."""
    for rule in (rule for rule in rules if rule.severity in severities):
        with contextlib.suppress(UnknownError):
            if found := rule.when(setup):
                yield rule.message.format(a=setup.a, s=setup, found=found)


def unasked(setup: Setup, rules: Collection[Rule] = RULES) -> Iterator[str]:
    """What was not checked because the host's code, or what an init of the user's own calls, is not known."""
    for rule in (rule for rule in rules if rule.asks):
        try:
            rule.when(setup)
        except HostUnknownError:
            yield rule.asks.format(a=setup.a, s=setup)
        except UnknownError:  # an argument, which has a line of its own
            continue


def require(
    setup: Setup, severities: Collection[Severity] = (REFUSE,), rules: Collection[Rule] = RULES
) -> None:
    """Raises ConfigError with the first line that ``said`` has."""
    for line in said(setup, severities, rules):
        raise ConfigError(line)


def enforce(setup: Setup, rules: Collection[Rule] = RULES) -> None:
    """What a training process does: raises ConfigError at the first REFUSE, logs each WARN once."""
    require(setup, rules=rules)
    for line in said(setup, (WARN,), rules):
        warn_once(line)
