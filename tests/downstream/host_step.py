"""Runs the ``train`` of a real host for two optimizer steps on one rank, with our metrics in place.

Everything from the loop over steps to the call of the logger is the host's own. Megatron's schedule is
replaced by one that calls the hook once per micro-batch, the optimizer by one that does nothing, and packages
that no CPU needs by empty ones.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import inspect
import io
import json
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed.nn

ROLLOUT, VERSION = 3, 7
GUARDS = {"k3_kl": {"max": 0.0, "action": "metrics_only", "steps": 1}}
ABSENT = (
    "megatron.training",
    "megatron.bridge",
    "mbridge",
    "ray",
    "sglang",
    "sglang_router",
    "wandb",
    "torch_memory_saver",
    "tqdm",
    "pandas",
)


class Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages with any attribute, in the place of what may be installed; asked first."""

    def find_spec(self, name, path=None, target=None):
        """A spec for what no CPU needs."""
        if not any(name == absent or name.startswith(absent + ".") for absent in ABSENT):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: (
            MagicMock(name=name) if not name.startswith("__") else _missing(name)
        )
        return module

    def exec_module(self, module) -> None:
        """Nothing to run."""


def _missing(name):
    raise AttributeError(name)


def arguments(folder: str):
    """The host's arguments as a step reads them; whatever else it asks for is off."""

    class Args(SimpleNamespace):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return None

    return Args(
        use_tis=True,
        custom_tis_function_path="slime_ext.tis.correct",
        slime_ext={"preset": "geo_rs", "guards": GUARDS},
        save=folder,
        seq_length=8,
        micro_batch_size=1,
        check_for_nan_in_loss_and_grad=True,
        eps_clip=0.2,
        context_parallel_size=1,
        tensor_model_parallel_size=1,
        global_batch_size=4,
    )


class Model:
    """A model chunk without parameters."""

    role = "actor"

    def zero_grad_buffer(self) -> None:
        """There is none."""

    def train(self) -> None:
        """It does nothing either way."""


def schedule(args):
    """Megatron's forward_backward_func as the loss sees it: each micro-batch calls the hook."""
    from slime_ext import tis

    keys = ("log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths", "pg_loss")

    def run(**kwargs):
        for _ in range(kwargs["num_microbatches"]):
            batch = kwargs["data_iterator"][0].get_next(keys)
            batch["pg_loss"] = torch.cat(batch["pg_loss"])
            tis.correct(args, train_log_probs=batch.pop("log_probs"), **batch)
        return [{"keys": ["loss"], "values": torch.tensor([1.0, 2.0])}]

    return lambda *a, **k: run


def rollout_of(seeds):
    """What a trainer holds of a rollout, one micro-batch per seed; its samples have an index, no versions."""
    from tests import oracle
    from tests.test_tis import as_slime_calls

    calls, data, indices = [as_slime_calls(oracle.random_batch(seed)) for seed in seeds], {}, []
    for call in calls:
        call["pg_loss"] = list(call["pg_loss"].split(call["response_lengths"]))
        call["log_probs"] = call.pop("train_log_probs")
        del call["head"]  # not part of what a trainer holds
        count = len(data.get("loss_masks", ()))
        indices.append(list(range(count, count + len(call["loss_masks"]))))
        for key, values in call.items():
            data[key] = [*data.get(key, ()), *values]
    return data | {"sample_indices": list(range(len(data["loss_masks"])))}, indices


def given(function, **known):
    """The arguments that a function has parameters for; those of a release that are not known are empty."""
    names = inspect.signature(function).parameters
    return {name: known.get(name) for name in names if name in known or names[name].default is inspect._empty}


def _logger_of(model: ModuleType) -> ModuleType:
    """What writes a step's values, by the name that the module of the steps, or of miles' log, has for it."""
    room = sys.modules[getattr(model, "log_train_step", model.train).__module__]
    names = ("logging_utils", "tracking_utils", "tracking")
    return next(found for name in names if (found := getattr(room, name, None)))


def two_steps(name: str, folder: str) -> dict[str, Any]:
    """What reached the host's logger, step by step, and the lines of the file; on ``run_ranks``' one rank."""
    sys.path.insert(0, folder)
    sys.pycache_prefix = str(Path(tempfile.gettempdir(), "slime_ext_pycache"))  # the tree stays as it is
    sys.meta_path.insert(0, Empty())
    from megatron.core import mpu

    from slime_ext.host import certify, log_rollout, train_step
    from slime_ext.hosts import running
    from tests.downstream.drift import Tree
    from tests.downstream.host_loss import Miles, iterator_of

    place = tempfile.TemporaryDirectory()
    mpu.initialize_model_parallel()
    tree = Tree(Path(folder))
    model = importlib.import_module(tree.step.module)
    args, logged = arguments(place.name), []
    if name == "miles":
        Miles.join()
    _logger_of(model).log = lambda args, values, step_key: logged.append((step_key, values))
    train_step.install(running.Host(model, model))
    model.get_args = lambda: args
    model.get_model_config = lambda chunk: SimpleNamespace()
    data, indices = rollout_of((1, 2, 3))
    sample = {"weight_versions": ["6", str(VERSION)], "response_length": 0, "rollout_log_probs": None}
    log_rollout(ROLLOUT, None, [SimpleNamespace(index=i, **sample) for i in data["sample_indices"]], {})
    certify.after_push(VERSION, [])
    model.get_forward_backward_func = schedule(args)
    optimizer = MagicMock(param_groups=[{}], step=lambda: (True, 0.5, 0))
    scheduler = SimpleNamespace(step=lambda increment: None, get_lr=lambda group: 1e-6)
    known = {
        "rollout_id": ROLLOUT,
        "model": [Model()],
        "optimizer": optimizer,
        "opt_param_scheduler": scheduler,
        "data_iterator": [iterator_of(tree)(data, micro_batch_indices=indices)],
        "num_microbatches": [2, 1],
        "global_batch_sizes": [4, 4],
        "num_rollouts": [4, 4],
    }
    with contextlib.redirect_stdout(io.StringIO()) as said:
        model.train(**given(model.train, **known))
    rows = [json.loads(line) for line in (Path(place.name) / train_step.FILE).read_text().splitlines()]
    found = {"logged": logged, "rows": rows, "said": said.getvalue()}
    found["gave_up"] = train_step.reporter_of(args).leaves_loss_alone
    place.cleanup()
    return json.loads(json.dumps(found, default=float))
