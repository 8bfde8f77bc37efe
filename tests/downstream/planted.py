"""Faults planted into a run of a real host, by functions that its flags name; PLANTED says which."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from slime_ext_cpu.processes import MARK, marked_processes

PER_ROLLOUT = 16  # samples
KILLED_AT = (
    5,
    PER_ROLLOUT * 2 + 5,
)  # samples while which an engine is killed: in the first and third rollout
ACTOR, SERVER = "ray::SGLangEngine", "multiprocessing.spawn"
_killed: set[int] = set()
_sent: dict[str, Any] = {}


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], **more: Any) -> Any:
    """For --custom-generate-function-path: the host's own, and what PLANTED does to its sample."""
    package = "slime" if "slime.rollout.sglang_rollout" in sys.modules else "miles"
    planted = os.environ["PLANTED"]
    if planted.startswith("kill_engine"):
        _kill_an_engine(sample.index, 1 if planted == "kill_engine" else 2)
    made = await sys.modules[f"{package}.rollout.sglang_rollout"].generate(args, sample, sampling_params)
    if made.rollout_log_probs:
        PLANTS.get(planted, lambda made: None)(made)
    return made


def init(args: Any) -> None:
    """For --custom-megatron-init-path: slime_ext's own, then what PLANTED does to weights on their way."""
    from slime_ext import host

    host.init(args)
    package = "slime" if "slime.backends.megatron_utils.actor" in sys.modules else "miles"
    actor = sys.modules[f"{package}.backends.megatron_utils.actor"]
    module = sys.modules[actor.UpdateWeightFromDistributed.__module__]
    send, change = module.update_weights_from_distributed, PUSHES[os.environ["PLANTED"]]

    def update_weights_from_distributed(
        group_name: str, group: Any, version: int, engines: Any, tensors: list, **more: Any
    ) -> Any:
        return send(group_name, group, version, engines, change(tensors), **more)

    module.update_weights_from_distributed = update_weights_from_distributed


def _first_copy(tensors: list) -> list:
    """The values of the first push, in every push."""
    return [(name, _sent.setdefault(name, tensor.clone())) for name, tensor in tensors]


def _without_a_layer(tensors: list) -> list:
    return [(name, tensor) for name, tensor in tensors if ".layers.1." not in name]


def before_step(args: Any, rollout_id: int, step_id: int, *more: Any) -> None:
    """For --custom-megatron-before-train-step-hook-path: kills the trainer when its third rollout begins."""
    if os.environ["PLANTED"] == "kill_trainer" and rollout_id == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def _nan(sample: Any) -> None:
    if sample.index % 4 == 1:
        sample.rollout_log_probs[0] = float("nan")


def _positive(sample: Any) -> None:
    if sample.index % 4 == 1:
        sample.rollout_log_probs = [0.7 for _ in sample.rollout_log_probs]


def _missing(sample: Any) -> None:
    sample.rollout_log_probs = None


def _some_missing(sample: Any) -> None:
    if sample.index % 4 == 1:
        sample.rollout_log_probs = None


PUSHES = {"nothing": lambda tensors: tensors, "older_push": _first_copy, "skipped_layer": _without_a_layer}
PLANTS = {"nan": _nan, "positive": _positive, "missing": _missing, "some_missing": _some_missing}


def _kill_an_engine(index: int, times: int) -> None:
    """Kills the server of one engine of this run, whose children end with it; once per process and sample."""
    if index not in KILLED_AT[:times] or index in _killed:
        return
    _killed.add(index)
    own = marked_processes(os.environ[MARK])
    actors = {pid for pid in own if _command(pid).startswith(ACTOR)}
    server = min(pid for pid in own if _parent(pid) in actors and SERVER in _command(pid))
    print(f"planted: kills the engine {server} at sample {index}", flush=True)
    os.kill(server, signal.SIGKILL)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
