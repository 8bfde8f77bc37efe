"""Replaces the flags of a launch that a rehearsal cannot use. Every other flag stays as it is written."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from slime_ext.tools.launch.launch import Launch, WrittenFlag
from slime_ext_cpu.tiny import cpu_flags, engine_flags

ROLLOUTS = 2
RESPONSE = 16  # tokens
PROMPTS = 2  # per rollout, unless the optimizer steps need more
LEARNING_RATE = "1e-3"
CONCURRENCY = 64
PARALLEL = ("context", "tensor", "pipeline")  # the first kind that a script uses stays, over two ranks
TWIN, TRAIN, HELD_OUT = "model", "data/train.jsonl", "data/eval.jsonl"  # paths in the folder of a rehearsal
SPREAD = "slime_ext_cpu.rehearsal.rewards.post_process"

# Flags that a rehearsal leaves out, by what they belong to. A star matches any characters.
LEFT_OUT = {
    "model": """
        --num-layers --hidden-size --ffn-hidden-size --num-attention-heads --group-query-attention
        --num-query-groups --kv-channels --vocab-size --padded-vocab-size --make-vocab-size-divisible-by
        --seq-length --max-position-embeddings --spec --qk-layernorm --add-qkv-bias --add-bias-linear
        --disable-bias-linear --swiglu --normalization --norm-epsilon --rotary-base --rotary-percent
        --rotary-interleaved --rotary-scaling-factor --use-rope-scaling --rope-*
        --use-rotary-position-embeddings --position-embedding-type --no-position-embedding
        --untie-embeddings-and-output-weights --apply-layernorm-1p --post-self-attn-layernorm
        --post-mlp-layernorm --attention-output-gate --use-gated-attention --multi-latent-attention
        --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim --mscale* --beta-fast
        --beta-slow --num-experts --moe-* --use-routing-replay --use-rollout-routing-replay --mtp-*
        --enable-mtp-training --linear-* --experimental-*
        --enable-experimental --softmax-type --window-* --quick-geglu --glu-* --dsa-* --allgather-cp
        --enable-gloo-process-groups --attention-bias --model-name --megatron-to-hf-mode
        --custom-model-provider-path --original-max-position-embeddings
    """,
    "speed and memory of a GPU": """
        --recompute-granularity --recompute-method --recompute-num-layers --recompute-modules
        --attention-backend --transformer-impl --*fusion --optimizer-cpu-offload
        --optimizer-offload-fraction --overlap-* --use-precision-aware-optimizer --no-offload-* --offload-*
        --offload --update-weight-buffer-size --update-weight-transport --update-weight-mode
        --update-weights-bucket-size --train-memory-margin-bytes --train-env-vars --log-probs-chunk-size
        --data-pad-size-multiplier --cp-comm-type --fp8-* --fp4-* --te-* --decoder-*-pipeline-num-layers
        --num-layers-per-virtual-pipeline-stage --virtual-pipeline-* --use-torch-fsdp2 --tp-comm-*
        --sequence-parallel --distributed-timeout-minutes --deterministic-mode --balance-data --num-workers
        --no-rope-fusion --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
        --attention-dropout --hidden-dropout --distributed-backend --grad-reduce-in-bf16 --cross-entropy-*
        --main-grads-dtype --main-params-dtype --exp-avg-dtype --exp-avg-sq-dtype
    """,
    "the cluster": """
        --actor-num-nodes --actor-num-gpus-per-node --num-gpus-per-node --rollout-num-gpus
        --rollout-num-gpus-per-engine --critic-num-nodes --critic-num-gpus-per-node --colocate
        --use-fault-tolerance --rollout-health-* --expert-model-parallel-size --expert-tensor-parallel-size
        --*-model-parallel-size --context-parallel-size --release-train --use-distributed-post --*-timeout-*
    """,
    "the engine": """
        --sglang-* --router-* --use-slime-router --use-miles-router --prefill-num-servers --slime-router-*
        --miles-router-*
    """,
    "services outside": """
        --use-wandb --wandb-* --use-tensorboard --tb-* --use-mlflow --mlflow-* --use-prometheus
        --prometheus-* --use-miles-dashboard* --use-dashboard --dashboard-* --use-clearml --clearml-*
    """,
    "dumps": """
        --dump-details --save-debug-* --load-debug-* --save-retain-interval --memory-snapshot-*
        --record-memory-history --profile* --use-pytorch-profiler --save --save-interval --save-hf
        --async-save --log-interval --timing-* --ckpt-*
    """,
    "checkpoints": """
        --hf-checkpoint --ref-load --load --critic-load --critic-save --no-load-* --finetune --ckpt-step
        --ref-ckpt-step --load-format --start-rollout-id --rotary-seq-len-*
    """,
    "schedule": """
        --num-rollout --num-epoch --lr --min-lr --lr-decay-iters --lr-warmup-* --critic-lr* --eval-interval
        --n-samples-per-eval-prompt --train-iters --num-critic-only-steps
    """,
    "batch": """
        --rollout-batch-size --global-batch-size --over-sampling-batch-size --micro-batch-size
        --ref-micro-batch-size --max-tokens-per-gpu --log-probs-max-tokens-per-gpu
    """,
    "lengths": """
        --rollout-max-response-len --rollout-max-context-len --rollout-max-prompt-len --eval-max-*
        --rollout-min-response-len
    """,
    "data": """
        --prompt-data --eval-prompt-data --eval-config --dynamic-sampling-filter-path
        --custom-reward-post-process-path
    """,
}
PATTERNS = [(pattern, why) for why, patterns in LEFT_OUT.items() for pattern in patterns.split()]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a rollout: prompts x samples, in optimizer steps of `batch` samples."""

    prompts: int
    samples: int
    batch: int

    @property
    def steps(self) -> int:
        return self.prompts * self.samples // self.batch

    def __str__(self) -> str:
        steps = f"{self.steps} optimizer step{'s' * (self.steps > 1)}"
        return f"{self.prompts} prompts x {self.samples} samples, {self.batch} per step ({steps})"


def group_of(name: str) -> str | None:
    """Returns the key of `LEFT_OUT` for a flag, or None if the flag stays."""
    return next((why for pattern, why in PATTERNS if fnmatch.fnmatchcase(name, pattern)), None)


def kept(launch: Launch) -> Iterator[WrittenFlag]:
    """Yields the flags that stay as they are written."""
    return (flag for flag in launch.flags if group_of(flag.name) is None)


def sizes_of(launch: Launch) -> Sizes:
    """Returns the script's sizes. Without --global-batch-size, optimizer steps share the rollout evenly."""
    prompts, samples = launch.number("--rollout-batch-size", 32), launch.number("--n-samples-per-prompt", 1)
    steps = max(launch.number("--num-steps-per-rollout", 1), 1)
    return Sizes(prompts, samples, launch.number("--global-batch-size", prompts * samples // steps))


def small_sizes(sizes: Sizes) -> Sizes:
    """Returns the fewest prompts that keep samples per prompt and optimizer steps."""
    prompts = min(PROMPTS, sizes.prompts)
    while prompts * sizes.samples % sizes.steps:
        prompts += 1
    return Sizes(prompts, sizes.samples, prompts * sizes.samples // sizes.steps)


def response_of(launch: Launch) -> int:
    """Returns the most tokens that a response has in the rehearsal."""
    return min(RESPONSE, launch.number("--rollout-max-response-len", RESPONSE))


def split_of(launch: Launch) -> str | None:
    """Returns the kind of parallelism that stays, or None for a single rank."""
    return next((kind for kind in PARALLEL if launch.number(_parallel(kind), 1) > 1), None)


def replaced_flags(launch: Launch, model: Sequence[str], longest: int, out: Path) -> list[str]:
    """Returns the host's command line: the script's flags, with small values for large ones.

    Args:
        model: Megatron's flags for the twin.
        longest: tokens of the longest prompt.
        out: the rehearsal's folder, as ``run.prepare`` left it.
    """
    sizes, split = sizes_of(launch), split_of(launch)
    small, context, folder = small_sizes(sizes), longest + 2 * RESPONSE, out / TWIN
    replacements: dict[str, object] = {
        "--actor-num-nodes": 1,
        "--actor-num-gpus-per-node": 2 if split else 1,
        "--num-gpus-per-node": 4,
        "--hf-checkpoint": folder,
        "--load": folder,
        "--prompt-data": out / TRAIN,
        "--num-rollout": ROLLOUTS,
        "--rollout-batch-size": small.prompts,
        "--global-batch-size": small.batch,
        "--rollout-max-response-len": response_of(launch),
        "--lr": LEARNING_RATE,
        "--save": out / "checkpoint",
        "--save-interval": ROLLOUTS,
        "--dump-details": out / "dumps",
        "--tb-project-name": "rehearsal",
        "--tb-experiment-name": "run",
    }
    if split:
        replacements[_parallel(split)] = 2
    if launch.flag("--ref-load"):
        replacements["--ref-load"] = folder
    if (more := launch.number("--over-sampling-batch-size", 0)) > sizes.prompts:
        replacements["--over-sampling-batch-size"] = -(-more * small.prompts // sizes.prompts)
    if launch.flag("--use-dynamic-batch-size"):  # so that a step still has several micro-batches
        replacements["--max-tokens-per-gpu"] = 2 * context
    else:
        size = launch.number("--micro-batch-size", 1)
        replacements["--micro-batch-size"] = max(n for n in range(1, size + 1) if small.batch % n == 0)
    if launch.value("--loss-type") != "sft_loss":
        replacements["--custom-reward-post-process-path"] = SPREAD
    words = [word for flag in kept(launch) for word in (flag.name, *flag.values)]
    words += model
    words += cpu_flags(of_megatron=launch.value("--train-backend") != "fsdp")
    words += engine_flags(context, 64 * context, CONCURRENCY)
    words += [str(word) for pair in replacements.items() for word in pair]
    return [*words, *_evaluation(launch, out), "--use-tensorboard"]


def _parallel(kind: str) -> str:
    """Returns the flag for a kind of parallelism."""
    return f"--{kind}{'' if kind == 'context' else '-model'}-parallel-size"


def _evaluation(launch: Launch, out: Path) -> list[str]:
    if not (launch.flag("--eval-prompt-data") and launch.flag("--eval-interval")):
        return []
    data = ["--eval-prompt-data", launch.value("--eval-prompt-data"), str(out / HELD_OUT)]
    words = ["--eval-interval", str(ROLLOUTS), "--n-samples-per-eval-prompt", "1"]
    return [*words, *data, "--eval-max-response-len", str(RESPONSE)]


def account(launch: Launch, twin: str, data: str) -> dict[str, str]:
    """Says what was replaced, by what and why: {subject: sentence}.

    Args:
        twin: sentence about the small model.
        data: sentence about where the rows come from.
    """
    sizes, split = sizes_of(launch), split_of(launch)
    rate, longest = (
        launch.value(name, "the host's default") for name in ("--lr", "--rollout-max-response-len")
    )
    rows = {
        "model": twin,
        "data": data,
        "sizes": f"{sizes} -> {small_sizes(sizes)}",
        "ranks": f"{_layout(launch)} -> {f'2 ranks, {split} parallel' if split else '1 rank'}",
        "lengths": f"responses of {longest} -> {response_of(launch)} tokens",
        "schedule": f"{launch.value('--num-rollout', '?')} -> {ROLLOUTS} rollouts; learning rate {rate} -> "
        f"{LEARNING_RATE}, so that a single step changes the weights visibly",
    }
    if launch.value("--loss-type") != "sft_loss":
        rows["rewards"] = (
            "if all rewards of a rollout are equal, as a random model's are, 1 is added to every second one; "
            "the reward function itself runs unchanged"
        )
    if launch.flag("--colocate"):
        rows["weights"] = (
            "--colocate: trainer and engine are separate, and weights are pushed by gloo instead of CUDA IPC"
        )
    if flag := launch.flag("--dynamic-sampling-filter-path"):
        rows["filter"] = f"{flag} is left out, because it would refuse all groups of a random model forever"
    if launch.flag("--eval-config"):
        rows["evaluation"] = "--eval-config is left out"
    for why in ("speed and memory of a GPU", "the engine", "services outside"):
        if names := dict.fromkeys(flag.name for flag in launch.flags if group_of(flag.name) == why):
            rows[why] = f"left out: {', '.join(names)}"
    return rows


def _layout(launch: Launch) -> str:
    nodes, gpus = launch.number("--actor-num-nodes", 1), launch.value("--actor-num-gpus-per-node", "8")
    sizes = {kind: launch.number(_parallel(kind), 1) for kind in (*PARALLEL, "expert")}
    split = ", ".join(f"{kind} {size}" for kind, size in sizes.items() if size > 1)
    return f"{nodes} x {gpus} GPUs{f' ({split})' if split else ''}"
