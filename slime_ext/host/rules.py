"""Defines the rules of a launch: errors, warnings and hints.

A rule is a function under ``@rule``. It gets the ``Setup`` and returns a message, or None if the launch keeps
the rule. ``RULES`` holds the rules by name, in the order in which they are judged. ``init`` and the first
hook call raise at REFUSE and log WARN. ``slime-ext check`` and ``rehearse`` raise at REFUSE and HOST, and
print WARN and HINT. A rule is skipped if it reads an argument whose value is unknown, or asks the host's code
and no host is known; ``unchecked`` says which rules were skipped and why.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from slime_ext.config.foreign import FOREIGN
from slime_ext.config.load import Loaded
from slime_ext.config.places import PLACES
from slime_ext.core.centering import split
from slime_ext.core.correction import Correction
from slime_ext.core.losses import DualClip, HostLoss, PpoClip, Reinforce
from slime_ext.core.metrics.names import CERTIFICATE
from slime_ext.core.needs import Need
from slime_ext.core.state import weight_ranges
from slime_ext.core.steps import Normalize, Reject, Reweight, Veto
from slime_ext.errors import ConfigError, warn_once
from slime_ext.hosts import contract
from slime_ext.hosts.code import RESPONSES, SCORE, STEP, HostCode
from slime_ext.hosts.contract import INIT, INIT_FLAG, LOG, LOG_FLAG, OURS, flag_of
from slime_ext.hosts.flags import ARGUMENTS, DECISIVE

WITHOUT_RATIO = ("reinforce", "flash_reinforce", "rloo")  # estimators whose loss is -A log pi_target
WITH_BASELINE = (None, "grpo", "gspo", "cispo")  # estimators that only subtract the group's mean
READS_BAND = ("vanilla_tis_function", "icepop_function")
MEASURING = {"guards", "metrics"}  # keys that act without a correction of slime_ext
NO_HOST = "no checkout of the host is here; name one with --host DIR"
ENGINE = "sglang_router_ip"  # a host has this argument if its engine is SGLang
# Arguments that slime checks, or derives others from, before it reads --custom-config-path.
CHECKED_BEFORE = {
    *(ARGUMENTS.keys() - OURS - {"custom_tis_function_path", "use_tis", "get_mismatch_metrics"}),
    *"kl_loss_coef grpo_std_normalization use_dynamic_batch_size max_tokens_per_gpu balance_by_flops "
    "over_sampling_batch_size save save_interval eval_interval eval_prompt_data eval_config dump_details "
    "save_debug_rollout_data save_debug_train_data load_debug_rollout_data debug_rollout_only "
    "debug_train_only enable_mtp_training mtp_num_layers opd_type opd_teacher_load".split(),
}


class UnknownError(Exception):
    """Raised if a rule cannot be judged. The text says why, or what was not checked."""


class ArgumentUnknownError(UnknownError):
    """Raised if a rule reads an argument whose value is not known."""


class HostUnknownError(UnknownError):
    """Raised if a rule needs unknown code, of the host or of a user's init.

    If the error has no text, nothing is printed about it.
    """


class _Arguments:
    """Gives rules the arguments in ARGUMENTS, and ``slime_ext``. One that the host lacks is None."""

    def __init__(self, args: Any, unknown: Collection[str]) -> None:
        self._args, self._unknown = args, unknown

    def __getattr__(self, name: str) -> Any:
        if name not in ARGUMENTS and name != "slime_ext":
            raise KeyError(f"ARGUMENTS: expected {name}, which a rule reads, got none: add it")
        if name in self._unknown:
            raise ArgumentUnknownError(f"{flag_of(name)} is known only where the script runs")
        return getattr(self._args, name, None)


@dataclass(frozen=True)
class Setup:
    """Holds what the rules judge.

    Args:
        args: the host's arguments.
        function: the function of ``slime_ext.tis`` that runs; empty if it is not one of these.
        loaded: the configuration of that function.
        unknown: names of arguments whose values are not known.
        file: the top-level keys of the file of --custom-config-path.
        pg_loss_type: the answer of the host's ``get_pg_loss_type``; None if the host has no such function.
        host: the code of the host; None if it is not known.
        trains: whether this process trains, so that a hook call shows what the host passes to it.
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
        """The arguments, for rules to read."""
        return _Arguments(self.args, self.unknown)

    @property
    def correction(self) -> Correction:
        """The correction of slime_ext; the identity if none runs."""
        return self.loaded.correction

    @property
    def names_ours(self) -> bool:
        """Whether the launch names a slime_ext function or has the key ``slime_ext:``."""
        functions = [getattr(self.args, name, None) for name in (*OURS, "custom_tis_function_path")]
        is_configured = getattr(self.args, "slime_ext", None) is not None
        return is_configured or any(str(function).startswith("slime_ext") for function in functions)

    def known_host(self, question: str = "") -> HostCode:
        """Returns the host's code.

        Args:
            question: what the code would tell. The line that says what was not checked has this text.

        Raises:
            HostUnknownError: the host is not known.
        """
        if self.host is None:
            raise HostUnknownError(question and f"{question}: {NO_HOST}")
        return self.host

    @property
    def runs_init(self) -> bool:
        """Whether the host calls ``slime_ext.host.init``.

        Raises:
            HostUnknownError: the launch names a user's init, which may call it.
        """
        if not self.may_run_init:
            return False
        if not self.trains and self.a.custom_megatron_init_path != OURS[INIT]:
            raise HostUnknownError(
                f"whether {self.a.custom_megatron_init_path} calls slime_ext.host.init(args), without which "
                f"{contract.TIS}.{self.function} stops the run"
            )
        return True

    @property
    def may_run_init(self) -> bool:
        """Like ``runs_init``, but it trusts a user's init to call ``slime_ext.host.init``."""
        if self.trains or self.a.custom_megatron_init_path is None:
            return self.trains
        return bool(self.a.train_backend != "fsdp")  # FSDP never calls the flag's function

    @property
    def may_skip_proximal(self) -> bool:
        """Whether the host skips proximal log-probs if the flags allow it (slime since v0.3.0).

        An unknown host is assumed to be a new one.
        """
        return not self.trains if self.host is None else self.host.may_skip_proximal

    @property
    def hook_correction(self) -> Correction | None:
        """The correction that the hook applies; None if the host calls no such hook."""
        return self.correction if self.function and contract.calls_hook(self.args) else None

    @property
    def reads_ages(self) -> bool:
        """Whether the correction or a guard acts on the ages of samples."""
        return self.correction.needs_ages or any(name.startswith("staleness_") for name in self.loaded.guards)

    @property
    def steps(self) -> int:
        """Optimizer steps per rollout, from --num-steps-per-rollout or from the batch sizes.

        It is 1 with --use-dynamic-global-batch-size (slime v0.2.2 to v0.2.4, miles), which puts all samples
        of a rollout into one step.
        """
        a = self.a
        if a.use_dynamic_global_batch_size:
            return 1
        if a.num_steps_per_rollout:
            return a.num_steps_per_rollout  # type: ignore[no-any-return]
        sizes = (a.rollout_batch_size, a.n_samples_per_prompt, a.global_batch_size)
        return max(1, sizes[0] * sizes[1] // sizes[2]) if all(sizes) else 1

    @property
    def acts(self) -> bool:
        """Whether the correction changes the loss."""
        return self.a.use_tis is not False

    @property
    def own_loss(self) -> bool:
        """Whether a surrogate of slime_ext replaces the host's loss."""
        return self.acts and not isinstance(self.correction.surrogate, HostLoss)

    @property
    def has_ratio(self) -> bool:
        """Whether the host's loss has the factor target / proximal (PPO, GSPO, CISPO).

        REINFORCE, -A log pi_target, has no such factor, and passes the target's log-probs as the proximal's.
        """
        loss_type = self.pg_loss_type or self.a.pg_loss_type
        if loss_type is None:
            return not (self.a.use_score_centering or self.a.advantage_estimator in WITHOUT_RATIO)
        return bool(loss_type != "reinforce")

    @property
    def counts_target_twice(self) -> bool:
        """Whether the target ratio enters twice: once in our weight, once in the host's loss.

        This is harmless in the first optimizer step of a rollout, and wrong from the second step on.
        """
        weighs = self.correction.numerator == "target" and self.correction.sets_weights
        return weighs and self.acts and not self.own_loss and self.has_ratio

    @property
    def refuses_second_step(self) -> bool:
        """Whether a second step of a rollout is refused. A seed's function gets a warning."""
        named = self.hook_correction is not None and self.function not in contract.SEEDS
        return named and self.counts_target_twice

    @property
    def is_second_step_trained(self) -> bool:
        """Whether the target and the proximal policy can differ."""
        return self.steps > 1 or bool(self.a.keep_old_actor)

    @property
    def reads_proximal_head(self) -> bool:
        """Whether ``center`` reads the proximal policy's log-probs at the head.

        It does not with a host's REINFORCE, where the proximal policy is the target.
        """
        return self.correction.needs_proximal_head and self.acts and self.has_ratio

    @property
    def skips_proximal(self) -> bool:
        """Whether the host computes no proximal log-probs for a rollout, according to the flags."""
        a = self.a
        if a.skip_actor_forward_only:  # miles
            return True
        if a.use_rollout_logprobs and not a.get_mismatch_metrics:
            return True
        needed = (a.get_mismatch_metrics, a.kl_coef, a.keep_old_actor, a.use_opd)
        others = a.use_critic or a.advantage_estimator == "gspo" or a.loss_type not in (None, "policy_loss")
        replayed = a.use_routing_replay and not a.use_rollout_routing_replay
        return self.may_skip_proximal and self.steps == 1 and not (any(needed) or others or replayed)


class Severity(Enum):
    """Decides where a rule's message is raised, logged or printed; the module says how."""

    REFUSE = "slime_ext would be wrong, or never act"
    HOST = "the host refuses it"
    WARN = "probably not what you mean"
    HINT = "the launch can still add it"


REFUSE, HOST, WARN, HINT = Severity


class Subject(Enum):
    """Says what a rule judges. Some callers judge only one subject."""

    FILE = "the file of --custom-config-path, before it is loaded"
    CORRECTION = "the parts of the correction, together with the arguments"
    INIT_ALONE = "a launch that uses only init of slime_ext"
    LAUNCH = "anything else"


FILE, CORRECTION, INIT_ALONE, LAUNCH = Subject
Judge = Callable[[Setup], str | None]  # returns the message; None or empty if the launch keeps the rule


@dataclass(frozen=True)
class Rule:
    """One check of a launch.

    Args:
        judge: returns the message. Its name is the rule's name, and its docstring says what it judges.
        severity: where the message is raised, logged or printed.
        subject: what is judged.
    """

    judge: Judge
    severity: Severity
    subject: Subject

    @property
    def name(self) -> str:
        """The name for ``slime-ext check --ignore``."""
        return self.judge.__name__


class Line(NamedTuple):
    """A message for the user, and the rule that it comes from, if any."""

    message: str
    rule: Rule | None = None

    def __str__(self) -> str:
        """Appends the rule's name to the message, as ruff does."""
        return f"{self.message} [{self.rule.name}]" if self.rule else self.message


class BrokenRuleError(ConfigError):
    """Raised with a rule's message.

    It holds the rule, but loses it when it is sent to another process.
    """

    rule: Rule | None = None


RULES: dict[str, Rule] = {}  # by name, in the order in which they are judged


def rule(severity: Severity, subject: Subject = LAUNCH) -> Callable[[Judge], Rule]:
    """Adds a function to ``RULES``."""

    def add(judge: Judge) -> Rule:
        RULES[judge.__name__] = made = Rule(judge, severity, subject)
        return made

    return add


# The file of --custom-config-path.


@rule(REFUSE, FILE)
def misplaced_key(s: Setup) -> str | None:
    """The file has a key beside ``slime_ext:`` that belongs under it, or to another system."""
    # A lost indentation or a previous hook can leave it there. A user's hook may read keys there, as slime's
    # mis.py does. Beside such a hook, only the keys in MEASURING are judged.
    if not s.function and s.a.slime_ext is None:
        return None
    is_anothers = not s.function and s.a.custom_tis_function_path is not None
    start, end = "--custom-config-path: expected ", "; if it is an argument of your own, rename it"
    keys = (key for key in s.file if key not in ARGUMENTS and (key in MEASURING or not is_anothers))
    for key in keys:
        if system := FOREIGN.get(key):
            return (
                f"{start}no key of {system} beside slime_ext, got {key}: remove it, or translate the "
                f"file: slime-ext convert --from {system} FILE{end}"
            )
        if place := PLACES.get(key):
            return (
                f"{start}the key {key} {place}, got it beside slime_ext, where nothing reads it: indent it"
                f"{end}"
            )
    return None


@rule(REFUSE, FILE)
def unread_configuration(s: Setup) -> str | None:
    """The function that the launch names does not read the key ``slime_ext:``."""
    mapping = s.a.slime_ext
    if s.function not in ("", *contract.SEEDS) or mapping is None:
        return None
    if isinstance(mapping, Mapping) and set(mapping) <= MEASURING:
        return None
    return (
        f"--custom-tis-function-path: expected {contract.TIS}.correct beside the key slime_ext, got "
        f"{s.a.custom_tis_function_path or 'none'}: name {contract.TIS}.correct, or remove the key, because "
        "nothing reads it"
    )


# Flags that exclude each other, or exclude slime_ext.

NO_POLICY_LOSS = (
    "--loss-type: expected policy_loss beside slime_ext, got sft_loss: remove slime_ext's flags, because "
    "there is no policy loss to measure or correct"
)


OFF_IN_FILE = (
    "--custom-config-path: expected no key use_tis, or true, beside a correction, got false, which replaces "
    "--use-tis"
)


@rule(REFUSE)
def function_never_called(s: Setup) -> str | None:
    """The launch names a function of slime_ext, and no flag makes the host call it."""
    if not contract.function_of(s.a) or s.a.use_tis or s.a.get_mismatch_metrics:
        return None
    if "use_tis" in s.file:
        return f"{OFF_IN_FILE}: remove the key, because the host then never calls the function"
    return (
        "--use-tis: expected on beside --custom-tis-function-path, got off: add --use-tis, because without "
        "it the host never calls the function; for metrics alone, remove --custom-tis-function-path, because "
        "slime_ext.host.init measures without it"
    )


@rule(REFUSE)
def sft_beside_function(s: Setup) -> str | None:
    """The loss is that of supervised fine-tuning, which has no policy loss to correct."""
    return NO_POLICY_LOSS if s.function and s.a.loss_type == "sft_loss" else None


@rule(REFUSE)
def greedy_sampling(s: Setup) -> str | None:
    """The sampler's temperature is 0, so its tokens are not drawn at random."""
    if not s.function or s.a.rollout_temperature is None or s.a.rollout_temperature > 0:
        return None
    return (
        f"--rollout-temperature: expected a number above 0, got {s.a.rollout_temperature}: set "
        "--rollout-temperature 1.0, because greedy decoding has no probabilities to correct"
    )


@rule(REFUSE)
def score_centering_beside_function(s: Setup) -> str | None:
    """The host's score centering is on beside a function of slime_ext."""
    if not (s.function and s.a.use_tis and s.a.use_score_centering):
        return None
    return (
        "--use-score-centering: expected the host's own vanilla_tis_function or icepop_function beside it, "
        f"got {s.a.custom_tis_function_path}: name one of the two, because the host centers no other "
        "weights, or remove --use-score-centering; slime_ext.host.init measures in both cases"
    )


@rule(HOST)
def score_centering_beside_mismatch_metrics(s: Setup) -> str | None:
    """The host refuses its mismatch metrics beside its score centering."""
    if not (s.function and s.a.get_mismatch_metrics and s.a.use_score_centering):
        return None
    return (
        "--get-mismatch-metrics: expected off beside --use-score-centering, got on: remove "
        "--get-mismatch-metrics, because the host refuses it there; slime_ext.host.init measures without it"
    )


@rule(HOST)
def rollout_logprobs_beside_tis(s: Setup) -> str | None:
    """The host refuses --use-rollout-logprobs beside a correction."""
    if not (s.a.use_tis and s.a.use_rollout_logprobs and s.has_ratio):
        return None
    return (
        "--use-rollout-logprobs: expected off beside --use-tis, got on: remove one, because the host refuses "
        "the two together"
    )


@rule(REFUSE)
def proximal_not_computed(s: Setup) -> str | None:
    """The correction needs proximal log-probs before the step, and the host computes none."""
    if not (s.correction.needs_plan and s.skips_proximal):
        return None
    if s.a.skip_actor_forward_only:
        return (
            "--skip-actor-forward-only: expected off with a correction that couples the samples of an "
            "optimizer step, got on: remove it, because with it miles computes no proximal log-probs before "
            "it trains"
        )
    return (
        "--get-mismatch-metrics: expected on with a correction that couples the samples of an optimizer "
        "step, got off: add --get-mismatch-metrics, because without it slime computes no proximal log-probs "
        "before it trains a rollout of one step"
    )


# The parts of the correction, together with the arguments.

ALL_TOKENS = (
    "the sampler's head is normalised over the whole vocabulary, so tokens must be drawn from all of it"
)
BYTES_OF_ENTRY = 8  # an entry of a head is an id and a log-prob


@rule(REFUSE, CORRECTION)
def center_without_generate(s: Setup) -> str | None:
    """``center`` is set without the generate function that asks for the sampler's head."""
    if s.correction.center is None or s.a.custom_generate_function_path:
        return None
    top_k = s.correction.center.top_k
    return (
        "--custom-generate-function-path: expected slime_ext.host.generate beside center, got none: add it, "
        f"because it asks SGLang for the sampler's {top_k} most likely tokens; this costs "
        f"{BYTES_OF_ENTRY * top_k:,} bytes per response token (four times as many as JSON), and less than a "
        "tenth of SGLang's time with a model of 135M parameters (docs/slime.md)"
    )


@rule(REFUSE, CORRECTION)
def center_beside_allgather_cp(s: Setup) -> str | None:
    """``center`` is set beside ``--allgather-cp``."""
    if s.correction.center is None or not s.a.allgather_cp:
        return None
    return (
        "--allgather-cp: expected off beside center, got on: remove the flag, because it puts the log-probs "
        "on other ranks than the logits"
    )


@rule(REFUSE, CORRECTION)
def center_beside_top_p(s: Setup) -> str | None:
    """``center`` is set, the sampler uses top-p, and nothing records which tokens that keeps."""
    if s.correction.center is None or s.a.rollout_top_p in (None, 1):
        return None
    host = s.known_host("whether this host records what --rollout-top-p leaves, which center then reads")
    if host.replays_top_p:
        return None
    return (
        f"--rollout-top-p: expected 1.0 beside center, got {s.a.rollout_top_p}: {ALL_TOKENS}; remove the "
        "flag, or use slime v0.3.1 or newer, which records the tokens that top-p leaves "
        f"(rollout_top_p_token_ids, _offsets); {host.name} does not"
    )


@rule(REFUSE, CORRECTION)
def center_beside_top_k(s: Setup) -> str | None:
    """``center`` is set, and the sampler leaves out tokens because of top-k."""
    if s.correction.center is None or s.a.rollout_top_k in (None, -1):
        return None
    return (
        f"--rollout-top-k: expected -1 beside center, got {s.a.rollout_top_k:g}: {ALL_TOKENS}; remove the "
        "flag: no host records the tokens that top-k leaves (slime since v0.3.1 records those that top-p "
        "leaves)"
    )


@rule(REFUSE, CORRECTION)
def center_beside_sequence_ratio(s: Setup) -> str | None:
    """``center`` is set on the host's GSPO loss, which has one ratio per sequence."""
    if not _centers_the_hosts_loss(s) or s.a.advantage_estimator != "gspo":
        return None
    return (
        "--advantage-estimator: expected grpo, or another without a sequence ratio, beside center on the "
        "host's loss, got gspo: set grpo, because the ratio of gspo is that of a whole sequence, and a token "
        "that was not sampled has none"
    )


@rule(REFUSE, CORRECTION)
def center_beside_cispo(s: Setup) -> str | None:
    """``center`` is set on the host's CISPO loss, which has a gradient at clipped ratios."""
    if not _centers_the_hosts_loss(s) or "cispo" not in (s.a.advantage_estimator, s.a.pg_loss_type):
        return None
    return (
        "--advantage-estimator: expected grpo, or another with PPO's loss, beside center on the host's loss, "
        "got cispo: set grpo and use center with the preset cispo, whose ratio is that to the sampler; the "
        "host's cispo has a gradient where its ratio is clipped, and center knows only PPO's gradient"
    )


@rule(REFUSE, CORRECTION)
def center_beside_opsm(s: Setup) -> str | None:
    """``center`` is set on the host's loss, which ``--use-opsm`` masks before our hook sees it."""
    if not _centers_the_hosts_loss(s) or not s.a.use_opsm:
        return None
    return (
        "--use-opsm: expected off beside center on the host's loss, got on: remove the flag, and copy the "
        "step of the preset opsm to slime_ext.steps, because the flag drops sequences from the loss and not "
        "from what center adds"
    )


@rule(REFUSE, CORRECTION)
def center_without_proximal_head(s: Setup) -> str | None:
    """``center`` needs proximal log-probs of the head, and this host's log-prob pass is unknown."""
    if not (s.reads_proximal_head and s.is_second_step_trained):
        return None
    host = s.known_host(
        "whether this host's log-prob pass can be reached, where center reads the proximal policy"
    )
    if host.defines(SCORE) and s.a.train_backend != "fsdp":
        return None
    return (
        f"slime_ext.center: expected one optimizer step per rollout and no --keep-old-actor, got {s.steps} "
        f"steps on a {host.name} without {SCORE}: train one step without --keep-old-actor, or use surrogate: "
        "reinforce with numerator: target, because center needs the proximal policy's log-probs at the head, "
        "and this host has no pass for them"
    )


def _centers_the_hosts_loss(s: Setup) -> bool:
    return s.correction.center is not None and s.acts and not s.own_loss


@rule(REFUSE, CORRECTION)
def ratio_applied_twice(s: Setup) -> str | None:
    """The host's loss and the weights would both apply the ratio of trainer to sampler."""
    is_in_loss = s.acts and s.a.use_rollout_logprobs and not s.own_loss and s.has_ratio
    if not (is_in_loss and s.correction.sets_weights):
        return None
    return (
        "--use-rollout-logprobs: expected off beside --use-tis, got on: remove one, because the ratio would "
        "be applied twice"
    )


@rule(REFUSE, CORRECTION)
def target_counted_twice(s: Setup) -> str | None:
    """The host's loss and the weights both count the target ratio, over several steps."""
    if not (s.counts_target_twice and s.is_second_step_trained and s.function not in contract.SEEDS):
        return None
    return (
        f"slime_ext.numerator: expected proximal beside the host's surrogate with {s.steps} optimizer steps "
        "per rollout or --keep-old-actor, got target: use numerator: proximal or surrogate: reinforce, "
        "because the host's loss has the factor target / proximal already"
    )


DISCARDED = (
    "would be discarded, because a surrogate of slime_ext replaces the host's loss; use surrogate: host"
)


@rule(REFUSE, CORRECTION)
def discarded_opsm(s: Setup) -> str | None:
    """A surrogate of slime_ext would discard the mask of ``--use-opsm``."""
    if not (s.own_loss and s.a.use_opsm):
        return None
    return f"--use-opsm: expected off, got on: its mask {DISCARDED}"


@rule(REFUSE, CORRECTION)
def discarded_gspo(s: Setup) -> str | None:
    """A surrogate of slime_ext would discard the sequence ratio of GSPO."""
    if not (s.own_loss and s.a.advantage_estimator == "gspo"):
        return None
    return f"--advantage-estimator: expected another, got gspo: its sequence ratio {DISCARDED}"


@rule(REFUSE, CORRECTION)
def discarded_cispo(s: Setup) -> str | None:
    """A surrogate of slime_ext would discard the clipped weight of CISPO."""
    if not (s.own_loss and "cispo" in (s.a.advantage_estimator, s.a.pg_loss_type)):
        return None
    return f"--advantage-estimator: expected another, got cispo: its clipped weight {DISCARDED}"


@rule(REFUSE, CORRECTION)
def discarded_dual_clip(s: Setup) -> str | None:
    """A surrogate of slime_ext without a dual clip would discard the floor of ``--eps-clip-c``."""
    if not s.own_loss or s.a.eps_clip_c is None or isinstance(s.correction.surrogate, DualClip):
        return None
    return (
        f"--eps-clip-c: expected none beside this surrogate of slime_ext, got {s.a.eps_clip_c}: remove the "
        "flag, or use surrogate: dual_clip, because this surrogate would discard the floor"
    )


@rule(WARN, CORRECTION)
def off_policy_is_counted_twice(s: Setup) -> str | None:
    """``off_policy_is_function`` counts the target ratio twice, over several steps per rollout."""
    is_it = s.function == "off_policy_is_function" and s.counts_target_twice
    if not (is_it and s.is_second_step_trained):
        return None
    return (
        "off_policy_is_function: expected one optimizer step per rollout and no --keep-old-actor, got "
        f"{s.steps} steps: use slime_ext.tis.off_policy_is, because the host's loss has the factor target / "
        "proximal already, and the ratio is counted twice"
    )


@rule(REFUSE, CORRECTION)
def kept_denominator_beside_reducer(s: Setup) -> str | None:
    """``denominator: kept`` is set beside a user's reducer."""
    is_kept = s.correction.denominator == "kept" and s.acts
    if not (is_kept and s.a.custom_pg_loss_reducer_function_path):
        return None
    return (
        "slime_ext.denominator: expected host beside --custom-pg-loss-reducer-function-path, got kept: use "
        "denominator: host, or remove the flag, because slime_ext cannot know what that function divides by"
    )


@rule(REFUSE, CORRECTION)
def group_of_one_sample(s: Setup) -> str | None:
    """``group`` is set, and each prompt has one sample."""
    if not (s.correction.group != "ignore" and s.acts and s.a.n_samples_per_prompt == 1):
        return None
    return (
        f"slime_ext.group: expected ignore with --n-samples-per-prompt 1, got {s.correction.group}: use "
        "group: ignore, because a group of one sample has no other samples"
    )


def _rebaselines(s: Setup) -> bool:
    return s.correction.group == "rebaseline" and s.acts


def _not_rebaselined(beside: str) -> str:
    return f"slime_ext.group: expected ignore or atomic with {beside}, got rebaseline"


@rule(REFUSE, CORRECTION)
def rebaseline_without_group_baseline(s: Setup) -> str | None:
    """``group: rebaseline`` is set beside an estimator without a group baseline."""
    if not _rebaselines(s) or s.a.advantage_estimator in WITH_BASELINE:
        return None
    return _not_rebaselined(
        "an --advantage-estimator other than grpo, gspo and cispo (such advantages have no group baseline)"
    )


@rule(REFUSE, CORRECTION)
def rebaseline_without_normalization(s: Setup) -> str | None:
    """``group: rebaseline`` is set, and the host subtracts no baseline."""
    if not _rebaselines(s) or s.a.rewards_normalization is not False:
        return None
    return _not_rebaselined("--disable-rewards-normalization (there is no baseline to compute again)")


@rule(REFUSE, CORRECTION)
def rebaseline_beside_whitening(s: Setup) -> str | None:
    """``group: rebaseline`` is set, and the host normalises the advantages afterwards."""
    if not _rebaselines(s) or not s.a.normalize_advantages:
        return None
    return _not_rebaselined(
        "--normalize-advantages (the host normalises the advantages over the whole batch afterwards)"
    )


@rule(REFUSE, CORRECTION)
def rebaseline_beside_distillation(s: Setup) -> str | None:
    """``group: rebaseline`` is set beside on-policy distillation."""
    if not _rebaselines(s) or not s.a.use_opd:
        return None
    return _not_rebaselined("--use-opd (the advantages already contain the teacher's term)")


@rule(REFUSE, CORRECTION)
def rebaseline_beside_own_advantages(s: Setup) -> str | None:
    """``group: rebaseline`` is set beside a user's advantage function."""
    if not _rebaselines(s) or not s.a.custom_advantage_function_path:
        return None
    return _not_rebaselined("--custom-advantage-function-path (its baseline is not known)")


@rule(REFUSE, CORRECTION)
def rebaseline_beside_own_rewards(s: Setup) -> str | None:
    """``group: rebaseline`` is set beside a user's reward post-processing."""
    if not _rebaselines(s) or not s.a.custom_reward_post_process_path:
        return None
    return _not_rebaselined("--custom-reward-post-process-path (its baseline is not known)")


@rule(REFUSE, CORRECTION)
def proximal_unknown_before_step(s: Setup) -> str | None:
    """The correction needs proximal log-probs before the step, and REINFORCE uses the target's."""
    if not (s.correction.needs_plan and s.acts and not s.has_ratio and s.is_second_step_trained):
        return None
    return (
        "--pg-loss-type: expected ppo with a correction that couples the samples of an optimizer step, got "
        f"reinforce with {s.steps} steps per rollout: set --pg-loss-type ppo, or train one step per rollout "
        "without --keep-old-actor, because the host passes the target's log-probs as the proximal's, and "
        "they are not known before a step"
    )


# Rules that the host's code decides.

DYNAMIC = (
    "--dynamic-context-parallel: expected off beside slime_ext, got on: remove the flag, because it splits "
    "each micro-batch over another group of ranks, which slime_ext does not support"
)


@rule(REFUSE)
def dynamic_context_parallel(s: Setup) -> str | None:
    """The group of ranks that share a sequence changes with each micro-batch."""
    return DYNAMIC if s.a.dynamic_context_parallel else None


@rule(REFUSE)
def unknown_release(s: Setup) -> str | None:
    """The host's functions differ in parameters from those of every supported release."""
    return s.known_host().fault


@rule(REFUSE)
def flag_unknown_to_host(s: Setup) -> str | None:
    """A flag decides whether slime_ext runs, and this host does not know it."""
    host = s.known_host()
    flags = (name for name in DECISIVE if name not in s.file and getattr(s.a, name))
    unknown = next((flag_of(name) for name in flags if not host.accepts(name, s.args)), None)
    if unknown is None:
        return None
    return (
        f"{unknown}: expected a host that has this flag, got a {host.name} that ignores it: use a release "
        "that has it"
    )


@rule(REFUSE)
def missing_init(s: Setup) -> str | None:
    """The hook needs something that only ``slime_ext.host.init`` passes to it."""
    passed = {name for name in contract.OPTIONAL if s.host and s.host.passes(name)}
    reads = {"cur_log_probs": Need.TARGET, "advantages": Need.ADVANTAGES}
    needed = (name for name, need in reads.items() if need in s.correction.needs)
    unpassed = " and ".join(name for name in needed if name not in passed)
    who = f"{s.host.name} does not pass" if s.host else "no release of slime or miles passes"
    patched = "" if s.host else " (name a patched checkout with --host DIR)"
    whys = {
        f"the correction reads {unpassed}, which {who} to a hook{patched}": unpassed,
        "the correction reads the samples' ages, which only init counts": s.correction.needs_ages,
        "only init knows which samples share a prompt": s.correction.group != "ignore",
        "without init each micro-batch is treated as an optimizer step": s.correction.needs_plan,
        "on_nonfinite: raise acts when init reads a step's statistics": s.correction.on_nonfinite == "raise",
    }
    why = next((why for why, is_so in whys.items() if is_so), "")
    if not why or not s.function or s.runs_init:
        return None
    flag, wanted, got = flag_of(INIT), OURS[INIT], "none"
    if s.a.train_backend == "fsdp":
        flag, wanted, got = "--train-backend", "megatron", f"fsdp, which never calls {flag}"
    return f"{flag}: expected {wanted} beside {contract.TIS}.{s.function}, got {got}: set it, because {why}"


@rule(REFUSE)
def missing_train_step(s: Setup) -> str | None:
    """The correction couples the samples of a step, and the host has no ``train_one_step``."""
    if not s.correction.needs_plan or s.known_host().has_step:
        return None
    return (
        f"{s.known_host().name}: expected a trainer with {STEP} beside a correction that couples the samples "
        "of an optimizer step, got one without (FSDP): use --train-backend megatron"
    )


@rule(REFUSE)
def missing_weight_versions(s: Setup) -> str | None:
    """A key needs the samples' ages, and their weight versions do not reach the trainer."""
    aged = ("staleness_", *CERTIFICATE)  # metrics that nobody can compute without the samples' ages
    guards = [f"slime_ext.guards.{name}" for name in s.loaded.guards if name.startswith(aged)]
    readers = ["max_staleness"] if s.correction.needs_ages else guards
    if not readers or getattr(s.a, LOG) == OURS[LOG] or not s.may_run_init:
        return None
    host = s.known_host(
        "whether this host's trainer gets the samples' weight versions, which slime's does only with "
        f"{LOG_FLAG}"
    )
    if host.carries_versions:
        return None
    keeps = f"{readers[0]}: expected the samples' weight versions, got a {host.name} that keeps them"
    if not host.accepts(LOG, s.args):  # slime before v0.2.2
        return f"{keeps} and has no {flag_of(LOG)}: use a newer release, or the patch of docs/patches.md"
    return f"{keeps} in its rollout manager: add {LOG_FLAG}"


@rule(REFUSE)
def missing_head(s: Setup) -> str | None:
    """``center`` is set, and the host cannot bring the sampler's head to the loss."""
    if s.correction.center is None:
        return None
    host = s.known_host("whether the sampler's head reaches this host's loss")
    lacks = {
        f"{STEP} (Megatron's trainer)": not host.has_step or s.a.train_backend == "fsdp",
        f"{RESPONSES} among its modules": not host.defines(RESPONSES),
        f"{flag_of(LOG)} (slime since v0.2.2)": not host.accepts(LOG, s.args),
        "SGLang as its engine": not host.accepts(ENGINE, s.args),
    }
    lacking = next((what for what, is_lacking in lacks.items() if is_lacking), None)
    if lacking is None:
        return None
    return (
        f"slime_ext.center: expected a host with {lacking}, got {host.name} without: remove center, or use "
        "such a host, because otherwise the sampler's head does not reach the loss"
    )


# Warnings and hints.


@rule(WARN, INIT_ALONE)
def sft_beside_init(s: Setup) -> str | None:
    """The loss is that of supervised fine-tuning, which has no policy loss to measure."""
    return NO_POLICY_LOSS if not s.function and s.a.loss_type == "sft_loss" else None


@rule(WARN, INIT_ALONE)
def fsdp_beside_init(s: Setup) -> str | None:
    """The trainer is FSDP's, which never calls ``init``, and no other part of slime_ext runs."""
    if s.function or s.a.train_backend != "fsdp":
        return None
    return (
        f"--train-backend: expected megatron beside {OURS[INIT]}, got fsdp: use megatron, because fsdp never "
        f"calls {flag_of(INIT)}, so nothing is measured"
    )


@rule(WARN)
def unread_tis_clip(s: Setup) -> str | None:
    """The function of the launch does not read ``--tis-clip`` or ``--tis-clip-low``."""
    # A flag that has the host's default value looks like a missing flag.
    bounds = {dest: getattr(s.a, dest) for dest in contract.BAND}
    bounds = {dest: value for dest, value in bounds.items() if value not in (None, ARGUMENTS[dest].default)}
    reads = READS_BAND + (("off_policy_is_function",) if contract.takes_tis_bounds() else ())
    if not s.function or s.function in reads or not bounds:
        return None
    dest, value = next(iter(bounds.items()))
    return (
        f"{flag_of(dest)}: expected none beside slime_ext.tis.{s.function}, got {value:g}: remove the flag, "
        "because only slime_ext.tis.vanilla_tis_function and icepop_function read it; to set a cap, write "
        "truncate: {high: ...} under slime_ext.steps"
    )


@rule(WARN)
def masks_beside_reducer(s: Setup) -> str | None:
    """The correction rejects tokens beside a user's reducer, which may divide by the masks."""
    rejects = any(isinstance(step, Reject | Veto) for step in s.correction.steps)
    if not (rejects and s.a.custom_pg_loss_reducer_function_path):
        return None
    return (
        f"--custom-pg-loss-reducer-function-path {s.a.custom_pg_loss_reducer_function_path}: expected "
        f"slime's reducer beside mask_scope: {s.correction.mask_scope}, got yours: if it divides by the "
        "masks, choose mask_scope: policy for the host's masks, or all for masks without the rejected tokens"
    )


@rule(WARN)
def correction_switched_off(s: Setup) -> str | None:
    """The correction would change the loss, and ``--use-tis`` is off."""
    if not s.function or s.correction.is_identity or s.a.use_tis:
        return None
    if "use_tis" in s.file:
        return f"{OFF_IN_FILE}: remove the key, because slime_ext then only measures"
    return "--use-tis: expected on beside a correction, got off, so slime_ext only measures: add --use-tis"


@rule(WARN)
def correction_without_steps(s: Setup) -> str | None:
    """``--use-tis`` is on, and the correction changes nothing."""
    if not (s.function and s.correction.is_identity and s.a.use_tis):
        return None
    return (
        "slime_ext.steps: expected a step beside --use-tis, got none, so slime_ext only measures: write a "
        "preset or steps under slime_ext, or remove --use-tis"
    )


@rule(WARN)
def fsdp_beside_function(s: Setup) -> str | None:
    """The trainer is FSDP's, where the correction runs without metrics and guards."""
    if not s.function or s.a.train_backend != "fsdp":
        return None
    return (
        "--train-backend: expected megatron beside slime_ext.tis, got fsdp, which calls no "
        "--custom-megatron-init-path: use megatron to get guards, the certificate, off_policy.jsonl, and "
        "more metrics than those that the host logs itself"
    )


@rule(WARN)
def guards_beside_release_train(s: Setup) -> str | None:
    """The trainer restarts for each rollout, so guards count steps within one rollout only."""
    if not s.a.release_train:
        return None
    return (
        "--release-train: expected off beside slime_ext.guards, got on: remove the flag, because the trainer "
        "ends with each rollout, and the next trainer knows neither the steps that guards counted nor that a "
        "guard chose metrics_only"
    )


@rule(WARN)
def metrics_of_one_replica(s: Setup) -> str | None:
    """Data parallel replicas are independent, so each has its own metrics and guards."""
    if not s.a.indep_dp:
        return None
    return (
        "--ft-components: expected data parallel ranks of one group, got independent replicas: remove the "
        "flag to have metrics and guards over all ranks, because each replica has its own, and "
        "off_policy.jsonl has those of the first"
    )


@rule(WARN)
def nan_is_not_skipped(s: Setup) -> str | None:
    """The host skips steps with NaN, and slime_ext stops at the trainer's NaN."""
    if s.a.check_for_nan_in_loss_and_grad is not False:
        return None
    return (
        "--no-check-for-nan-in-loss-and-grad: expected off beside slime_ext, got on: remove the flag, "
        "because slime_ext stops the run at a NaN among the trainer's log-probs, even if the host skips such "
        "steps"
    )


@rule(WARN)
def host_flag_in_file(s: Setup) -> str | None:
    """The file has flags of slime, which slime checks before it reads the file."""
    keys = ", ".join(key for key in s.file if key in CHECKED_BEFORE)
    if not keys:
        return None
    return (
        f"--custom-config-path: expected slime's flags on the command line, got {keys} in the file: move "
        "them to the command line, because slime checks its flags, and derives others from them, before it "
        "reads the file"
    )


@rule(HINT)
def missing_function(s: Setup) -> str | None:
    """The file has a correction and names no function that reads it."""
    if s.function != "correct" or s.a.custom_tis_function_path:
        return None
    return f"names no function: for slime, add custom_tis_function_path: {contract.TIS}.correct"


@rule(HINT)
def missing_metrics(s: Setup) -> str | None:
    """The correction runs without ``slime_ext.host.init``, so there are no metrics."""
    if s.a.custom_megatron_init_path or not s.function or missing_init.judge(s):
        return None
    return f"no metrics: in slime add {INIT_FLAG}"


@rule(HINT)
def ages_of_straw(s: Setup) -> str | None:
    """Batches come from straw-queue, which keeps old samples, and nothing bounds their age."""
    # slime/utils/staleness.py at 85f762d, docs/en/advanced/straw.md at 12e4668.
    if s.a.rollout_data_transport != "straw" or s.reads_ages:
        return None
    return (
        "--rollout-data-transport straw: the oldest samples come first, and none is dropped for its age: to "
        "bound the age, write slime_ext.steps: [{reject: {max_staleness: 4}}]. slime's staleness/max "
        "compares the oldest token's version with the engines' when a batch is made; "
        "off_policy/staleness_max compares it with the trainer's latest push, so a push in between makes it "
        "larger"
    )


AGES_TOO_LOW = (
    "because the engine otherwise keeps keys and values of older weights over a push, which no weight "
    "version of a sample shows, so ages are too low; the sampler's log-probs are right in both cases"
)


@rule(WARN)
def ages_beside_kept_cache(s: Setup) -> str | None:
    """A key reads the samples' ages, and the engine keeps keys and values of older weights."""
    # slime/utils/arguments.py at 002fa9d6 (--flush-cache-interval); miles' weight update mixin at 31f1ca9.
    if not s.reads_ages:
        return None
    if s.a.flush_cache_interval not in (None, 1):
        return (
            "--flush-cache-interval: expected 1 beside max_staleness or a guard on staleness, got "
            f"{s.a.flush_cache_interval:g}: set it to 1, {AGES_TOO_LOW}"
        )
    if s.a.pause_generation_mode == "in_place":
        return (
            "--pause-generation-mode: expected retract or abort beside max_staleness or a guard on "
            f"staleness, got in_place: set it to retract, {AGES_TOO_LOW}"
        )
    return None


@rule(HINT)
def init_of_your_own(s: Setup) -> str | None:
    """``--custom-megatron-init-path`` names a user's init, which has to call that of slime_ext."""
    if s.a.custom_megatron_init_path in (None, OURS[INIT]):
        return None
    return (
        f"no metrics and no check at start-up, unless {s.a.custom_megatron_init_path} calls "
        "slime_ext.host.init(args): call it there"
    )


# Corrections that do nothing, or that cannot do what they are for.

USUAL_K3 = 1e-3  # nats per token, if only the numerics of sampler and trainer differ
VANISHED = 0.1  # below this median weight a correction removes most responses from the loss


@rule(WARN)
def center_without_effect(s: Setup) -> str | None:
    """``center`` is set, and the mean that it would subtract is already 0."""
    correction = s.correction
    if correction.center is None or not s.acts or split(correction.steps)[0] != (Reweight(),):
        return None
    # E_q[(p / q) grad log p] = E_p[grad log p] = 0 if p is the policy that is trained. With PPO's loss, or
    # with weights of the proximal policy, p is that policy only in the first step of a rollout.
    is_of_target = correction.numerator == "target" and isinstance(correction.surrogate, Reinforce)
    is_known = isinstance(correction.surrogate, Reinforce | HostLoss | PpoClip | DualClip)
    if not is_known or (s.is_second_step_trained and not is_of_target):
        return None
    return (
        "slime_ext.center: expected a bound on the token weights beside it, such as truncate: {high: 2.0}, "
        "got none: add one, because under the sampler the unbounded ratio times the score has mean 0, and "
        "center adds a gradient of exactly 0"
        + ("" if is_of_target else " while a rollout is one optimizer step")
    )


@rule(WARN)
def sequence_weights_vanish(s: Setup) -> str | None:
    """Weights are products over whole responses, and the launch allows responses that are too long."""
    tokens, steps = s.a.rollout_max_response_len, s.correction.steps
    of_sequences = any(isinstance(step, Reweight) and step.level == "sequence" for step in steps)
    of_mean_1 = any(isinstance(step, Normalize) for step in steps)
    if not (of_sequences and tokens and s.acts and s.function) or of_mean_1:
        return None
    bounds = weight_ranges(steps)[-1]
    mean, median = expected_weight(tokens, USUAL_K3, bounds.high)
    if max(median, bounds.low) >= VANISHED:
        return None
    return (
        "slime_ext.steps: expected weights of tokens, or a geometric mean, beside --rollout-max-response-len "
        f"{tokens}, got the product over a response: use level: token or level: geometric, because at a k3 "
        f"of {USUAL_K3:g} the weight of a response of that length has mean {mean:.2g} and median {median:.1g}"
    )


def expected_weight(tokens: int, k3: float, cap: float) -> tuple[float, float]:
    """Computes the mean and the median of min(Pi, cap) under the sampler.

    Pi is the product of the ratios of a response. The log-ratios are assumed to be independent and normal,
    with mean -k3 and variance 2 k3. Then the mean of each ratio is 1, and the mean of the k3 estimator is k3
    to second order. With s^2 = 2 tokens k3, log Pi is N(-s^2 / 2, s^2):

        E[min(Pi, cap)] = Phi((log cap - s^2 / 2) / s) + cap Phi(-(log cap + s^2 / 2) / s)

    >>> [round(x, 4) for x in expected_weight(8192, 1e-3, 2.0)]
    [0.0601, 0.0003]
    >>> expected_weight(8192, 1e-3, math.inf)[0]
    1.0
    """
    spread, median = math.sqrt(2 * tokens * k3), math.exp(-tokens * k3)
    if cap == math.inf:
        return 1.0, median
    phi, of_cap = statistics.NormalDist().cdf, math.log(cap) if cap > 0 else -math.inf
    mean = phi((of_cap - spread**2 / 2) / spread) + cap * phi(-(of_cap + spread**2 / 2) / spread)
    return mean, min(median, cap)


RATIO_OFF = (
    "the sampler draws from a part of the vocabulary, and SGLang records log-probs over all of it, so every "
    "ratio is too large by a factor of 1 / the probability of that part"
)


@rule(WARN)
def top_p_without_replay(s: Setup) -> str | None:
    """The sampler leaves out tokens because of top-p, and the trainer's log-probs keep them."""
    if not s.function or s.a.rollout_top_p in (None, 1) or s.a.use_sampling_support_replay:
        return None
    host = s.known_host("whether this host's trainer normalises over what --rollout-top-p leaves")
    if host.replays_top_p:
        return None
    return (
        f"--rollout-top-p: expected 1.0, or a host that replays what top-p leaves, got {s.a.rollout_top_p}: "
        f"remove the flag, or use slime v0.3.1 or newer, or miles' main with --use-sampling-support-replay, "
        f"because {RATIO_OFF}"
    )


@rule(WARN)
def top_k_without_replay(s: Setup) -> str | None:
    """The sampler leaves out tokens because of top-k, and the trainer's log-probs keep them."""
    if not s.function or s.a.rollout_top_k in (None, -1) or s.a.use_sampling_support_replay:
        return None
    return (
        f"--rollout-top-k: expected -1, or a host that replays what top-k leaves, got {s.a.rollout_top_k:g}: "
        f"remove the flag, or use miles' main with --use-sampling-support-replay, because {RATIO_OFF}"
    )


@rule(HOST)
def score_centering_refused(s: Setup) -> str | None:
    """The host refuses its score centering beside another flag."""
    if not s.a.use_score_centering:
        return None
    reducer, estimator = s.a.custom_pg_loss_reducer_function_path, s.a.advantage_estimator
    refused = {  # flag -> whether the host refuses it, what the host expects, what it gets
        "--use-opsm": (s.a.use_opsm, "off", "on"),
        "--use-opd": (s.a.use_opd, "off", "on"),
        "--rollout-top-k": (s.a.rollout_top_k not in (None, -1), "-1", f"{s.a.rollout_top_k or -1:g}"),
        "--custom-pg-loss-reducer-function-path": (reducer, "none", reducer),
        "--advantage-estimator": (estimator in ("gspo", "cispo"), "grpo or reinforce", estimator),
    }
    for flag, (is_refused, wanted, got) in refused.items():
        if is_refused:
            return (
                f"{flag}: expected {wanted} beside --use-score-centering, got {got}: remove one, because the "
                "host refuses the two together"
            )
    return None


ALL = tuple(RULES.values())
OF_THE_FILE, OF_THE_CORRECTION, OF_INIT_ALONE = (
    tuple(each for each in ALL if each.subject is subject) for subject in (FILE, CORRECTION, INIT_ALONE)
)


def said(setup: Setup, severities: Collection[Severity], rules: Collection[Rule] = ALL) -> Iterator[Line]:
    """Yields the line of each rule of these severities that the launch breaks."""
    for each in (each for each in rules if each.severity in severities):
        with contextlib.suppress(UnknownError):
            if message := each.judge(setup):
                yield Line(message, each)


def unchecked(setup: Setup, kind: type[UnknownError] = UnknownError) -> Iterator[Line]:
    """Yields a line for each rule that cannot be judged: what was not checked, or why.

    Args:
        kind: HostUnknownError for rules that need the code of the host or of a user's init;
            ArgumentUnknownError for rules that need the value of an argument.
    """
    for each in ALL:
        try:
            each.judge(setup)
        except UnknownError as error:
            if isinstance(error, kind) and str(error):
                yield Line(str(error), each)


def require(
    setup: Setup, severities: Collection[Severity] = (REFUSE,), rules: Collection[Rule] = ALL
) -> None:
    """Raises BrokenRuleError with the first line that ``said`` yields."""
    for message, broken in said(setup, severities, rules):
        error = BrokenRuleError(message)
        error.rule = broken
        raise error


def enforce(setup: Setup, rules: Collection[Rule] = ALL) -> None:
    """Raises BrokenRuleError at the first REFUSE, and logs each WARN once, in a training process."""
    require(setup, rules=rules)
    for line in said(setup, (WARN,), rules):
        warn_once(line.message)
