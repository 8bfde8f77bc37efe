"""Whether the Triton kernels compute on this machine's device what the eager path computes there.

``slime-ext doctor --kernels`` asks once, in a process of its own. What passed is kept in the user's cache
folder under a name that the device, the libraries and this package's source make, and ``auto`` looks it up.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from slime_ext import presets
from slime_ext.correction import Correction, Plan, Tokens
from slime_ext.kernels.apply import Backend, Eager, Work
from slime_ext.kernels.built import cache_folder
from slime_ext.metrics.layout import Layout
from slime_ext.ops.segments import Segments

NAMES = ("token_tis", "icepop", "seq_mis", "skyrl_outlier_mask", "decoupled_geo_rs_token_tis", "topr", "kpop")


class Case(NamedTuple):
    """A batch to compare on: its sequences, how far apart its policies are, what else is known of it."""

    lengths: tuple[int, ...]
    noise: float  # of the log-ratios, nats
    planned: bool = False  # with ages, scales and rejected groups, on a rank that counts no sequences


# Chunks of every width; sequences that are kept and such that are not, single tokens likewise.
CASES = (
    Case((5, 0, 300, 1, 64), 2e-3),
    Case((1, 1), 0.3),
    Case((40,) * 3000, 2e-3),
    Case((40,) * 3000, 0.3),
    Case((200,) * 50, 0.3, planned=True),
    Case((400,) * 30, 2e-3),
    Case((131072,), 2e-4),
    Case((1 << 20, 3), 2e-4),
)
DTYPES = (torch.float32, torch.bfloat16)
# Relative and absolute: products of float32 that an exponential went into; sums of such in another order.
TOKENS, SUMS = 1e-5, 1e-4
MINUTES = 10
PACKAGE = Path(presets.__file__).parent
ROOMS = (".", "ops", "metrics", "kernels")  # whose files make the record's name
COMMAND = (sys.executable, "-m", "slime_ext.kernels.proof")


class Found(NamedTuple):
    """What a backend made of a batch: the tensors that are compared, by name, and how closely."""

    keep: Tensor
    tensors: dict[str, tuple[Tensor, float]]


def is_proven() -> bool:
    """Whether the kernels have passed on the CUDA device that this process uses already."""
    return torch.cuda.is_initialized() and record("cuda").exists()


def prove() -> str:
    """Asks in another process, which a faulty kernel may end. Returns what is wrong, or nothing."""
    try:
        done = subprocess.run(
            COMMAND, env=_environment(), capture_output=True, text=True, timeout=60 * MINUTES
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {MINUTES} minutes"
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return "" if done.returncode == 0 else (lines or [f"it ended with {done.returncode}"])[-1].strip()


def _environment() -> dict[str, str]:
    """That of this process, but with kernels that run on the device."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def differences(device: str, names: Sequence[str] = NAMES, cases: Sequence[Case] = CASES) -> Iterator[str]:
    """What the kernels do otherwise than the eager path, a line for each batch and correction."""
    from slime_ext.kernels.triton import Triton

    for dtype in DTYPES:
        for case in cases:
            batch, plan = batch_of(case, dtype, device)
            for name in names:
                correction = correction_of(name, case)
                eager, once, twice = (
                    _found(backend, batch, plan)
                    for backend in (Eager(correction), Triton(correction), Triton(correction))
                )
                said = _apart(once, eager) or _not_the_same(once, twice)
                if said:
                    count, size = len(case.lengths), sum(case.lengths)
                    yield f"{name}, {dtype}, {count} sequences of {size} tokens: {said}"


def correction_of(name: str, case: Case) -> Correction:
    """The preset, as a plan makes it."""
    preset = presets.get(name)
    return replace(preset, group="atomic") if case.planned and preset.numerator == "proximal" else preset


def batch_of(case: Case, dtype: torch.dtype, device: str) -> tuple[Tokens, Plan | None]:
    """Masked positions hold NaN; where there are several sequences, some tokens have no behavior log-prob."""
    generator, count = torch.Generator().manual_seed(sum(case.lengths)), len(case.lengths)
    log_probs, noise, advantages = torch.randn(3, sum(case.lengths), generator=generator)
    proximal, mask = -log_probs.abs(), advantages.abs() > 0.1
    behavior = torch.where(mask, proximal + case.noise * noise, torch.nan)
    if count > 2:
        behavior[3::5000] = -torch.inf
    values = (x.to(dtype).to(device) for x in (proximal, behavior, proximal, advantages))
    tokens = Tokens(Segments.whole(case.lengths, mask.to(device)), *values)
    if not case.planned:
        return tokens, None
    number = torch.arange(count)
    ages = torch.where(number % 5 == 4, torch.nan, number % 40)
    plan = Plan(scale=(0.5 + number / count).to(device), keep=(number % 3 != 2).to(device))
    return replace(tokens, ages=ages.to(device)), plan


def _found(backend: Backend, batch: Tokens, plan: Plan | None) -> Found:
    loss, target = (x.float().clone().requires_grad_() for x in (batch.advantages, batch.target))
    layout = Layout.of(backend.correction)
    work = Work(replace(batch, target=target), loss, plan, layout=layout, first=plan is None)
    applied = backend.apply(work)
    total = applied.loss.square().sum()
    gradient = torch.autograd.grad(total, (loss, target), allow_unused=True, materialize_grads=True)
    tensors = {"loss": applied.loss.detach(), "gradient": torch.cat(gradient)}
    tensors |= dict(zip(("ratio", "clipped", "rejected"), applied.channel, strict=True))
    near = {name: (tensor, TOKENS) for name, tensor in tensors.items()}
    return Found(applied.keep, near | {n: (t, SUMS) for n, t in applied.measured._asdict().items()})


def _apart(one: Found, other: Found) -> str:
    if not torch.equal(one.keep, other.keep):
        return "they keep other tokens than the eager path"
    for name, (tensor, bound) in one.tensors.items():
        expected = other.tensors[name][0]
        if not torch.allclose(tensor.double(), expected.double(), bound, bound, equal_nan=True):
            return f"another {name} than the eager path's"
    return ""


def _not_the_same(one: Found, other: Found) -> str:
    pairs = ((tensor, other.tensors[name][0]) for name, (tensor, _) in one.tensors.items())
    same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)
    return "" if same else "not the same bits twice"


@functools.cache
def record(device: str) -> Path:
    """The file whose presence is the proof."""
    import triton

    about: list[object] = [device, torch.__version__, torch.version.cuda, triton.__version__]
    if device == "cuda":
        about += [torch.cuda.get_device_name(), torch.cuda.get_device_capability()]
    digest = hashlib.sha256(repr(about).encode())
    for room in ROOMS:
        for path in sorted(PACKAGE.joinpath(room).glob("*.py")):
            digest.update(path.read_bytes())
    return cache_folder() / f"proven-{digest.hexdigest()[:32]}"


def main(device: str = "cuda") -> int:
    """Compares, keeps what passed, and prints what did not."""
    said = next(differences(device), None)
    if said is None:
        record(device).touch()
        return 0
    print(said)
    return 1


if __name__ == "__main__":
    sys.exit(main())
