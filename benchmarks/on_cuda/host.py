"""Times a host's own ``loss_function`` and its gradient, with and without the plugin.

There is one rank and one micro-batch. The host is a checkout of slime or miles, or the wheel miles-rl. Only
its loss is imported. Every variant also runs on a small batch, where the losses on CPU and device must agree.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.machinery
import importlib.util
import io
import math
import os
import sys
import tempfile
import time
import types
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
import torch.distributed as dist

from benchmarks.on_cuda import timing
from benchmarks.on_cuda.timing import Row
from slime_ext import tis
from slime_ext.host import wrapping
from slime_ext.hosts.code import LOSS, TARGET
from slime_ext.hosts.contract import HookCall
from tests.downstream import host_loss

ROOT = Path(__file__).parents[2]
UNCORRECTED = "uncorrected"
INIT = "slime_ext.host.init"
WATCHED = "token_tis", "decoupled_geo_rs_token_tis"  # the presets that are run
VARIANTS: dict[str, dict[str, Any]] = {
    UNCORRECTED: {"use_tis": False, "custom_tis_function_path": None},
    "its own TIS": {"custom_tis_function_path": None},
} | {name: {"custom_tis_function_path": f"slime_ext.tis.{name}"} for name in WATCHED}
AGREE = 1e-4  # relative; both sides are float32, but add the softmax of a vocabulary in another order
SMALL, LARGE, LARGE_DRY = (8, 40, 200, 64), (16, 64, 960, 32_000), (8, 16, 160, 64)
REPEAT, REPEAT_DRY = 20, 3
# The module of the loss imports these, but nothing calls them.
ENGINES = ("ray", "ray.util", "ray.util.scheduling_strategies", "httpx")


class Absent:
    """Stands for any name of an engine's module.

    It is a class, because annotations use it, and a decorator.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __call__(self, *args: object, **kwargs: object) -> Absent:
        return self


def find(asked: Path | None, wheels: Path, scratch: Path) -> Path | None:
    """Returns a host's folder.

    It is the named one, that of `make install`, or a wheel unpacked into `scratch`.
    """
    made = ROOT / ".venv/miles"
    if existing := next((place for place in (asked, made) if place and place.is_dir()), None):
        return existing.resolve()
    for wheel in sorted(wheels.glob("miles_rl-*.whl")):
        folder = scratch / "-".join(wheel.name.split("-")[:2])
        with ZipFile(wheel) as archive:  # the wheel's megatron and sglang must not be used
            archive.extractall(folder, [name for name in archive.namelist() if name.startswith("miles/")])
        return folder
    return None


@contextlib.contextmanager
def one_rank(device: str) -> Iterator[None]:
    """Starts the process groups of Megatron on one rank."""
    from megatron.core import mpu  # 5 s, which the tests of this file don't pay

    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")  # because a machine's name may not resolve
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mpu.initialize_model_parallel()
    try:
        yield
    finally:
        dist.destroy_process_group()


def enter(folder: Path) -> host_loss.Slime:
    """Imports the host in a folder, with empty modules for engines that are not installed."""
    for name in [name for name in ENGINES if importlib.util.find_spec(name.partition(".")[0]) is None]:
        module = types.ModuleType(name)
        module.__path__, module.__getattr__ = [], lambda _: Absent
        module.__spec__ = importlib.util.spec_from_loader(name, None)
        sys.modules[name] = module
    host = host_loss.loaded("slime" if (folder / "slime").is_dir() else "miles", str(folder))
    host.join()
    return host


def batch_of(
    shape: tuple[int, int, int, int], device: str, drawn_on: str = "cpu"
) -> tuple[dict[str, Any], torch.Tensor]:
    """Makes a micro-batch as the host's actor does, and its logits [1, T, V].

    Args:
        shape: samples, tokens of a prompt, tokens of a response, and V.
    """
    count, prompt, response, vocabulary = shape
    place = {"generator": torch.Generator(drawn_on).manual_seed(0), "device": drawn_on}
    total = prompt + response
    tokens = torch.randint(0, vocabulary, (count, total), **place)
    logits = torch.randn(count, total, vocabulary, **place)
    made_by = logits[:, prompt - 1 : -1].log_softmax(-1)
    current = made_by.gather(2, tokens[:, prompt:, None])[..., 0]
    batch = batch_with(tokens, current, device)
    return batch, logits.view(1, -1, vocabulary).to(device).requires_grad_()


def batch_with(tokens: torch.Tensor, current: torch.Tensor, device: str) -> dict[str, Any]:
    """Makes a micro-batch as the host's actor does, whose other policies are near the current one.

    Args:
        tokens: [samples, tokens of a sample].
        current: [samples, tokens of a response] log-probs.
        device: where the lists are; values are drawn where `current` is.
    """
    place = {"generator": torch.Generator(current.device).manual_seed(1), "device": current.device}
    (count, total), response = tokens.shape, current.shape[1]

    def lists(values: torch.Tensor) -> list[torch.Tensor]:
        return list(values.to(device))

    noise = functools.partial(torch.randn, count, response, **place)
    proximal = current + 0.05 * noise()
    mask = (torch.rand(count, response, **place) < 0.9).int()
    sums = lists(mask.sum(1).float())
    return {
        "unconcat_tokens": lists(tokens),
        "tokens": lists(tokens),
        "total_lengths": [total] * count,
        "response_lengths": [response] * count,
        "loss_masks": lists(mask),
        "rollout_mask_sums": sums,
        "group_mask_sums": sums,  # its name in v0.3.0
        "advantages": lists(torch.randn(count, 1, **place).expand(-1, response)),
        "log_probs": lists(proximal),
        "rollout_log_probs": lists(proximal + 0.05 * noise()),
        "max_seq_lens": None,
        "ref_log_probs": None,
    }


class Variant:
    """Computes the host's loss and gradient of one variant on one batch."""

    def __init__(
        self, host: host_loss.Slime, name: str, batch: Mapping[str, Any], logits: torch.Tensor | None
    ):
        self.host, self.batch, self.logits = host, batch, logits
        changed = {"global_batch_size": len(batch["loss_masks"]), **VARIANTS[name]}
        self.args = Namespace(**(host_loss.DEFAULTS | {"slime_ext": None} | changed))

    def __call__(self) -> torch.Tensor:
        self.logits.grad = None
        self.enter()
        loss = self.host.loss(self.args, dict(self.batch), 1, self.logits)[0]
        loss.backward()
        return loss.detach()

    def enter(self) -> None:
        """Wraps the host's loss as in a job with the plugin, or removes the wrapper."""
        if self.args.custom_tis_function_path is None:
            wrapping.unwrap(self.host.module, LOSS, TARGET)
        elif not hasattr(self.host.module.policy_loss_function, wrapping.MARK):
            with contextlib.redirect_stdout(io.StringIO()):
                self.host.module.load_function(INIT)(self.args)


@contextlib.contextmanager
def watched() -> Iterator[list[int | None]]:
    """Counts for each call how often the hook waits for the device."""
    waits: list[int | None] = []

    def counting(call: HookCall, *rest: Any) -> Any:
        said: list[Any] = []
        waits.append(timing.waits(lambda: said.append(run(call, *rest)), call.pg_loss.device.type))
        return said[0]

    run = tis.run
    try:
        tis.run = counting  # not one of its functions, because the host may have kept that function
        yield waits
    finally:
        tis.run = run


def stance(device: str) -> str:
    """Compiles on a device only. A host compiles parts of its loss, for half a minute on a CPU."""
    return "force_eager" if device == "cpu" else "default"


def checked(host: host_loss.Slime, name: str, device: str) -> str:
    """Says how a variant's loss and gradient on the device differ from the CPU's.

    Returns "" if they do not.
    """
    results = []
    for place in ("cpu", device):
        batch, logits = batch_of(SMALL, place)
        with torch.compiler.set_stance(stance(place)):
            loss = Variant(host, name, batch, logits)()
        results.append((float(loss), float(logits.grad.double().norm())))
    for what, expected, got in zip(("loss", "gradient norm"), *results, strict=True):
        if not math.isclose(expected, got, rel_tol=AGREE, abs_tol=1e-6):
            return f"{what} {got!r} on the device, {expected!r} on the CPU"
    return ""


def measured(host: host_loss.Slime, folder: Path, device: str, dry: bool, until: float) -> list[Row]:
    """Returns a row for each variant."""
    shape = LARGE_DRY if dry else LARGE
    batch, logits = batch_of(shape, device, device)
    names = [name for name in VARIANTS if not (dry and name.startswith(WATCHED[1]))]
    bodies = {name: Variant(host, name, batch, logits) for name in names}
    of = f"policy loss of {host.module.__name__.partition('.')[0]} ({folder.name})"
    row, repeat = Row(of, shape[0] * shape[2], ""), REPEAT_DRY if dry else REPEAT
    rows = timing.measure(row, bodies, device, repeat, until, with_waits=False)
    return [_completed(row, host, bodies[row.contender], device) for row in rows]


def _completed(row: Row, host: host_loss.Slime, body: Variant, device: str) -> Row:
    """Returns the row with the waits of its hook alone, and the result of ``checked``."""
    if row.why:
        return row
    try:
        with watched() as waits:
            body()
        why = checked(host, row.contender, device)
    except Exception as error:  # a failure is a line, as in timing, and the other variants still run
        return replace(row, why=timing.said(error))
    if body.args.custom_tis_function_path and not waits:
        why = why or "the host did not call the hook"
    return replace(row, waits=waits[0] if waits else None, why=why)


def parser(document: str) -> argparse.ArgumentParser:
    """Returns the flags of a step that runs in a host."""
    made = timing.parser(document)
    made.add_argument("--host", type=Path)
    made.add_argument("--wheels", type=Path, default=ROOT / "cuda-wheels")
    return made


def time_in_host(options: Namespace, what: str, timed: Callable[[host_loss.Slime, Path], list[Row]]) -> None:
    """Appends the rows that ``timed`` measures in a host, or a row that says that there is none."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = find(options.host, options.wheels, Path(scratch))
        if folder is None:
            why = "no host: name a checkout with --slime, or put the wheel miles-rl into --wheels"
            timing.append([Row(what, 0, "", why=why)], options.lines)
            return
        with one_rank(options.device), torch.compiler.set_stance(stance(options.device)):
            timing.append(timed(enter(folder), folder), options.lines)


def main(argv: Sequence[str] | None = None) -> None:
    options = parser(__doc__).parse_args(argv)
    until = time.monotonic() + options.seconds
    torch.set_num_threads(1)
    timed = functools.partial(measured, device=options.device, dry=options.device == "cpu", until=until)
    time_in_host(options, "policy loss of a host", timed)


if __name__ == "__main__":
    main()
