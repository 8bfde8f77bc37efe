"""Every flag of `slime-ext train`: name, type, default, help. "ours": neither slime's nor Megatron's."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import Field, TypeAdapter, ValidationError

from slime_ext.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Flag:
    """One flag; its type, pydantic's, reads a word of the command line and a value of YAML alike.

    A `bool` is a switch; `clears` names the attribute that a switch sets to False.
    """

    name: str
    type: Any = bool
    default: Any = None
    help: str = ""
    many: bool = False
    clears: str | None = None
    required: bool = False

    @property
    def key(self) -> str:
        """The flag's own name as an identifier."""
        return self.name.lstrip("-").replace("-", "_")

    @property
    def dest(self) -> str:
        """The attribute that it sets."""
        return self.clears or self.key

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.type)

    def read(self, value: Any, where: str, of_words: bool = False) -> Any:
        """`value` in the flag's type.

        Args:
            where: what errors name.
            of_words: numbers may be spelled as text.

        Raises:
            ConfigError: a value of another type, or out of range.
        """
        if value is None and self.default is None and self.type is not bool:
            return None
        if self.many:
            return [self._one(v, where, of_words) for v in (value if isinstance(value, list) else [value])]
        return self._one(value, where, of_words)

    def _one(self, value: Any, where: str, of_words: bool) -> Any:
        try:
            return self._adapter.validate_python(value, strict=not (of_words and isinstance(value, str)))
        except ValidationError as error:
            expected = wanted(error.errors()[0]["msg"])
        hint = ""
        if get_origin(self.type) is Literal:
            hint = did_you_mean(str(value), get_args(self.type))
        elif isinstance(value, str) and expected == "a valid number" and "e" in value:
            hint = ": write it as 1.0e-4, YAML reads 1e-4 as text"
        raise ConfigError(f"{where}: expected {expected}, got {value!r}{hint}")

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Adds it to argparse, which leaves its words as they are, and leaves out what is not given."""
        text, absent = self.help.replace("%", "%%"), argparse.SUPPRESS
        if self.type is bool:
            action = "store_false" if self.clears else "store_true"
            parser.add_argument(self.name, dest=self.dest, action=action, default=absent, help=text)
            return
        known = [", ".join(get_args(self.type))] if get_origin(self.type) is Literal else []
        known += [] if self.default is None else [f"default {self.default}"]
        text += f" ({'; '.join(known)})" if known else ""
        nargs = "+" if self.many else None
        parser.add_argument(self.name, nargs=nargs, metavar="VALUE", default=absent, help=text)


def wanted(said: str) -> str:
    """What was expected, of pydantic's message.

    >>> wanted("Input should be a valid integer, unable to parse string as an integer")
    'a valid integer'
    """
    if said.startswith("String should"):
        return "some text"
    what = said.removeprefix("Input should be ").split(", unable")[0].split(", got")[0]
    return f"a number {what}" if what.startswith(("greater", "less")) else what


def _number(kind: type = float, **limits: float) -> Any:
    return Annotated[kind, Field(**limits, **({"allow_inf_nan": False} if kind is float else {}))]


Text = Annotated[str, Field(pattern=r"\S")]
Count, Whole, Seed = _number(int, ge=1), _number(int, ge=0), _number(int, ge=0, lt=2**32)
NotNegative, Positive, Above1 = _number(ge=0), _number(gt=0), _number(gt=1)
Share, Clip, Beta = _number(gt=0, le=1), _number(ge=0, le=1), _number(ge=0, lt=1)
Layers = Literal["local", "transformer_engine"]
Engine = Literal["auto", "float32", "bfloat16", "float16"]
Cache = Literal["auto", "bfloat16", "fp8_e4m3"]
Wide, Decay = Literal["float32", "float64"], Literal["constant", "linear", "cosine"]
Estimator = Literal["grpo", "gspo", "cispo"]
Rounding = Literal["fp8", "fp8_block", "int8", "int4"]

GROUPS: dict[str, tuple[Flag, ...]] = {
    "model": (
        Flag("--hf-checkpoint", Text, required=True, help="folder of config.json, tokenizer, maybe weights"),
        Flag(
            "--transformer-impl", Layers, "transformer_engine", "whose layers; Transformer Engine's need CUDA"
        ),
        Flag("--init-method-std", Positive, 0.02, "standard deviation of random initial weights"),
        Flag("--seed", Seed, 1234, "seed of the initial weights"),
    ),
    "parallelism": (
        Flag("--tensor-model-parallel-size", Count, 1, "ranks that share each layer"),
        Flag("--pipeline-model-parallel-size", Count, 1, "ranks that share the stack of layers"),
        Flag("--context-parallel-size", Count, 1, "ranks that share each sequence"),
        Flag("--actor-num-gpus-per-node", Count, help="training ranks; default: tensor x pipeline x context"),
        Flag("--distributed-timeout-minutes", Count, 10, "how long a collective may wait"),
    ),
    "precision": (
        Flag("--bf16", help="train in bfloat16 (CUDA)"),
        Flag("--fp16", help="train in float16 (CUDA)"),
        Flag("--params-dtype", Wide, "float32", "type of weights without --bf16 and --fp16; ours"),
    ),
    "data": (
        Flag("--prompt-data", Text, required=True, help="JSONL file, one prompt a line"),
        Flag("--input-key", Text, "input", "key of the prompt in a line"),
        Flag("--label-key", Text, help="key of the label in a line"),
        Flag("--num-rollout", Count, required=True, help="number of rollouts"),
        Flag("--rollout-shuffle", help="a new order of the prompts each epoch"),
        Flag("--rollout-seed", Seed, 42, "seed of that order and of sampling"),
    ),
    "sampling": (
        Flag("--rollout-batch-size", Count, required=True, help="prompts in a rollout"),
        Flag("--n-samples-per-prompt", Count, 1, "samples of each prompt"),
        Flag("--rollout-temperature", Positive, 1.0, "of sampling, applied to the trainer's logits too"),
        Flag("--rollout-top-p", Share, 1.0, "sample from the smallest set with this probability"),
        Flag("--rollout-top-k", _number(int, ge=-1), -1, "sample from the k likeliest tokens; -1: all"),
        Flag("--rollout-max-prompt-len", Count, help="longer prompts are left out"),
        Flag("--rollout-max-response-len", Count, required=True, help="most tokens of a response"),
        Flag("--rollout-stop-token-ids", int, many=True, help="end a response; default: the tokenizer's eos"),
        Flag("--update-weights-interval", Count, 1, "rollouts between two pushes of weights to the engine"),
        Flag(
            "--train-async", help="sample the next rollout while this one is trained, as train_async.py; ours"
        ),
        Flag(
            "--rollout-weight-rounding", Rounding, help="the engine's weights, as if it were quantised; ours"
        ),
    ),
    "reward": (
        Flag("--rm-type", Text, help="built-in reward: characters or exact"),
        Flag("--custom-rm-path", Text, help="module.function(args, sample) that replaces it; may be async"),
    ),
    "evaluation": (
        Flag("--eval-prompt-data", Text, many=True, help="name and path, name and path, ..."),
        Flag("--eval-interval", Count, help="rollouts between evaluations"),
        Flag("--skip-eval-before-train", help="no evaluation before the first step"),
        Flag("--eval-trained-weights", help="not the older or rounded ones that the engine has; ours"),
        Flag("--n-samples-per-eval-prompt", Count, 1, "samples of each held-out prompt"),
        Flag("--eval-temperature", NotNegative, help="default: --rollout-temperature; 0 is greedy"),
        Flag("--eval-max-response-len", Count, help="default: --rollout-max-response-len"),
    ),
    "steps": (
        Flag("--global-batch-size", Count, help="samples in an optimizer step; default: the whole rollout"),
        Flag("--num-steps-per-rollout", Count, help="optimizer steps in a rollout, the same said otherwise"),
        Flag("--micro-batch-size", Count, 1, "samples in a forward pass"),
        Flag("--ppo-n-minibatches", Count, 1, "forward-backward passes in an optimizer step; ours"),
    ),
    "loss": (
        Flag("--advantage-estimator", Estimator, "grpo", "the policy loss; grpo: PPO's clip"),
        Flag("--eps-clip", Clip, 0.2, "lower clip distance of the ratio"),
        Flag("--eps-clip-high", NotNegative, help="upper clip distance; default: --eps-clip"),
        Flag("--eps-clip-c", Above1, help="bound of the dual clip, which it switches on"),
        Flag("--entropy-coef", NotNegative, 0.0, "weight of the entropy bonus"),
        Flag("--disable-grpo-std-normalization", clears="grpo_std_normalization", help="mean only"),
        Flag("--disable-rewards-normalization", clears="rewards_normalization", help="advantages: rewards"),
        Flag("--normalize-advantages", help="whiten the advantages over the rollout"),
        Flag("--calculate-per-token-loss", help="mean over tokens instead of over samples"),
        Flag("--recompute-loss-function", help="compute the loss again in the backward pass"),
    ),
    "correction": (
        Flag("--use-tis", help="call the correction and use what it returns"),
        Flag("--tis-clip", Positive, 2.0, "upper bound of the importance weight"),
        Flag("--tis-clip-low", NotNegative, 0.0, "lower bound of the importance weight"),
        Flag("--custom-tis-function-path", Text, help="the correction, such as slime_ext.tis.correct"),
        Flag("--custom-config-path", Text, help="YAML file with flag values and the key slime_ext"),
        Flag("--get-mismatch-metrics", help="call the correction for its metrics"),
        Flag("--use-rollout-logprobs", help="anchor the ratio at the sampler's log-probs"),
        Flag("--custom-megatron-init-path", Text, help="module.function(args), before the model is built"),
        Flag("--rollout-data-postprocess-path", Text, help="function called before the steps of a rollout"),
        Flag("--custom-rollout-log-function-path", Text, help="function called after sampling"),
    ),
    "optimizer": (
        Flag("--lr", NotNegative, 1e-6, "learning rate"),
        Flag("--min-lr", NotNegative, 0.0, "learning rate at the end of the decay"),
        Flag("--lr-decay-style", Decay, "linear", "shape of the decay"),
        Flag("--lr-warmup-iters", Whole, 0, "steps of linear warm-up"),
        Flag("--lr-decay-iters", Count, help="steps until --min-lr; default: all steps of the run"),
        Flag("--weight-decay", NotNegative, 0.01, "AdamW weight decay"),
        Flag("--adam-beta1", Beta, 0.9, "AdamW beta 1"),
        Flag("--adam-beta2", Beta, 0.999, "AdamW beta 2"),
        Flag("--adam-eps", Positive, 1e-8, "AdamW epsilon"),
        Flag("--clip-grad", NotNegative, 1.0, "largest gradient norm; 0: no limit"),
    ),
    "engine": (
        Flag("--sglang-dtype", Engine, "auto", "number format of the engine; auto: the trainer's"),
        Flag(
            "--sglang-kv-cache-dtype", Cache, "auto", "number format of the engine's KV cache; auto: its own"
        ),
        Flag("--sglang-server-url", Text, help="use the server that runs there; ours"),
        Flag("--sglang-python", Text, help="its interpreter; default: .venv-sglang/bin/python; ours"),
        Flag("--sglang-server-concurrency", Count, 512, "most requests under way"),
        Flag("--sglang-context-length", Count, help="most tokens of prompt and response in the engine"),
        Flag("--sglang-max-total-tokens", Count, help="size of the engine's cache in tokens"),
        Flag("--sglang-max-running-requests", Count, help="most sequences the engine runs at once"),
        Flag("--sglang-attention-backend", Text, help="default: torch_native without CUDA"),
        Flag("--sglang-mem-fraction-static", Share, help="share of memory for weights and cache"),
        Flag("--sglang-request-timeout", Positive, 300.0, "seconds until a request is tried again; ours"),
        Flag("--sglang-start-timeout", Positive, 300.0, "seconds the server may take to start; ours"),
        Flag("--sglang-max-restarts", Whole, 3, "times a dead server is started again; ours"),
    ),
    "output": (
        Flag("--run-dir", Text, "runs", "directory of all runs; ours"),
        Flag("--run-name", Text, help="the run's directory there; default: --config's name, numbered; ours"),
        Flag("--save", Text, help="directory of checkpoints; default: checkpoints in the run's directory"),
        Flag("--load", Text, help="directory of checkpoints to go on from"),
        Flag("--save-interval", Count, help="rollouts between checkpoints; default: one at the end"),
        Flag("--save-keep", Whole, 2, "newest checkpoints kept; 0: all; ours"),
        Flag("--no-dump-details", help="write no dumps; ours"),
    ),
}
FLAGS: tuple[Flag, ...] = tuple(flag for group in GROUPS.values() for flag in group)
BY_NAME = {flag.key: flag for flag in FLAGS}
BY_DEST = {flag.dest: flag for flag in FLAGS}
