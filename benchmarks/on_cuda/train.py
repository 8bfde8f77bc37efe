"""Times an optimizer step of a Megatron GPT with a host's own policy loss, and the hook's share of it.

There is one rank. The GPT has 1.1 billion parameters, in the shape of Qwen3 with 16 layers, and Megatron's
local layers in bfloat16. A step trains four micro-batches of 8 sequences of 1,024 tokens with the fused AdamW
of PyTorch. Under the plugin, a step also measures and reduces all metrics, as in a job with ``host.init``.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

from benchmarks.on_cuda import timing
from benchmarks.on_cuda.host import UNCORRECTED, WATCHED, Variant, batch_with, parser, time_in_host
from benchmarks.on_cuda.timing import Row
from slime_ext import tis
from slime_ext.core.metrics.layout import MetricsLayout
from slime_ext.host import step_metrics
from slime_ext.host.configured import setup_for
from slime_ext.host.step_metrics import OptimizerStep

REPEAT, REPEAT_DRY = 6, 2


@dataclass(frozen=True)
class Size:
    """The shape of the model and of a step.

    Args:
        prompt: tokens of a prompt; all others of a sequence are its response.
    """

    layers: int = 16
    hidden: int = 2048
    feed_forward: int = 6144
    heads: int = 16
    groups: int = 8
    vocabulary: int = 151_936
    sequences: int = 8
    length: int = 1024
    prompt: int = 128
    micro_batches: int = 4

    @property
    def response(self) -> int:
        return self.length - self.prompt


DRY = Size(2, 64, 128, 4, 2, 512, sequences=2, length=64, prompt=8, micro_batches=2)


def gpt(size: Size, device: str) -> GPTModel:
    """Builds the model, without dropout, as RL trains it."""
    if device == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    else:  # Megatron's own tracker reads CUDA's random state, and its rotary embedding asks for the device
        tensor_parallel.random.initialize_rng_tracker(inference_rng_tracker=True)
        torch.cuda.current_device = lambda: torch.device("cpu")
    config = TransformerConfig(
        num_layers=size.layers,
        hidden_size=size.hidden,
        ffn_hidden_size=size.feed_forward,
        num_attention_heads=size.heads,
        num_query_groups=size.groups,
        kv_channels=size.hidden // size.heads,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # The fused forms need Apex or Transformer Engine, which are not installed.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=device == "cpu",
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=size.vocabulary,
        max_sequence_length=size.length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )
    return model.to(device, torch.bfloat16)


class Step:
    """Runs one optimizer step of one variant, and notes what its hook calls take.

    Attributes:
        hooks: for each hook call, its start and its end: on the device two events, on a CPU two times.
    """

    def __init__(
        self, host: Any, name: str, model: GPTModel, optimizer: torch.optim.Optimizer, size: Size, device: str
    ) -> None:
        self.host, self.model, self.optimizer, self.size, self.device = host, model, optimizer, size, device
        place = torch.Generator(device).manual_seed(0)
        shape = size.micro_batches, size.sequences, size.length
        self.tokens = torch.randint(0, size.vocabulary, shape, generator=place, device=device)
        self.positions = torch.arange(size.length, device=device).expand(size.sequences, -1)
        hidden = torch.ones(size.length, size.length, device=device, dtype=torch.bool).triu(1)
        self.hidden = hidden[None, None]  # True: a later token, which attention must not read
        with torch.no_grad():
            self.batches = [self.batch(tokens) for tokens in self.tokens]
        self.variant = Variant(host, name, self.batches[0], None)
        self.variant.args.global_batch_size = size.sequences * size.micro_batches
        self.hooks: list[tuple[Any, Any]] = []

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the model's logits [1, T, V] in float32, packed as a host hands them to its loss."""
        logits = self.model(tokens, self.positions, self.hidden)
        return logits.float().view(1, -1, self.size.vocabulary)

    def batch(self, tokens: torch.Tensor) -> dict[str, Any]:
        """Returns the host's micro-batch, whose proximal policy is near the model."""
        whole = self.logits(tokens).view(*tokens.shape, -1)[:, self.size.prompt - 1 : -1]
        chosen = tokens[:, self.size.prompt :, None]
        current = torch.stack(
            [row.log_softmax(-1).gather(1, at)[:, 0] for row, at in zip(whole, chosen, strict=True)]
        )
        return batch_with(tokens, current, self.device)

    def __call__(self) -> None:
        self.variant.enter()
        self.hooks.clear()
        corrected = self.variant.args.custom_tis_function_path is not None
        step = OptimizerStep(self.layout) if corrected else None
        with contextlib.nullcontext() if step is None else step_metrics.under_way(step), self.noted():
            for tokens, batch in zip(self.tokens, self.batches, strict=True):
                args, logits = self.variant.args, self.logits(tokens)
                self.host.loss(args, dict(batch), self.size.micro_batches, logits)[0].backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if step is not None:
                step.reduce()

    @functools.cached_property
    def layout(self) -> MetricsLayout:
        return MetricsLayout.of(setup_for(self.variant.args).hook_correction, curves=False)

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Notes when each hook call starts and ends, without waiting for the device."""

        def now() -> Any:
            if self.device != "cuda":
                return time.perf_counter()
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event

        def run_and_note(*arguments: Any) -> Any:
            start = now()
            result = run(*arguments)
            self.hooks.append((start, now()))
            return result

        run = tis.run
        try:
            tis.run = run_and_note
            yield
        finally:
            tis.run = run

    def hook_milliseconds(self) -> float:
        """Returns what the hook calls of the last step took together."""
        if self.device != "cuda":
            return sum(end - start for start, end in self.hooks) * 1e3
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in self.hooks)


def measured(host: Any, folder: Path, size: Size, device: str, repeat: int, until: float) -> list[Row]:
    """Returns a row for each variant: the time of a step, and the hook's share of it."""
    model = gpt(size, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    make = functools.partial(Step, host, model=model, optimizer=optimizer, size=size, device=device)
    steps = {name: make(name) for name in (UNCORRECTED, *WATCHED)}
    count = sum(p.numel() for p in model.parameters()) / 1e9
    what = f"training step of a GPT of {count:.2f} billion parameters, loss of {folder.name}"
    tokens = size.micro_batches * size.sequences * size.length
    rows = timing.measure(Row(what, tokens, ""), steps, device, repeat, until, with_waits=False)
    return [_with_share(row, steps[row.contender]) for row in rows]


def _with_share(row: Row, step: Step) -> Row:
    if row.milliseconds is None or row.contender == UNCORRECTED:
        return row
    if len(step.hooks) != step.size.micro_batches:
        return replace(row, why=f"{len(step.hooks)} hook calls in {step.size.micro_batches} micro-batches")
    return replace(row, share=step.hook_milliseconds() / row.milliseconds)


def main(argv: Sequence[str] | None = None) -> None:
    words = parser(__doc__)
    words.add_argument("--sequences", type=int, help="sequences of a micro-batch")
    options = words.parse_args(argv)
    dry, until = options.device == "cpu", time.monotonic() + options.seconds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = DRY if dry else Size()
    size = replace(size, sequences=options.sequences or size.sequences)
    repeat = REPEAT_DRY if dry else REPEAT
    timed = functools.partial(measured, size=size, device=options.device, repeat=repeat, until=until)
    time_in_host(options, "training step", timed)


if __name__ == "__main__":
    main()
