"""The metrics in the log of real hosts: their own ``train``, ``train_one_step`` and logging, ours around it.

``HOSTS=path/to/hosts pytest tests/downstream/test_train_step.py``
"""

from __future__ import annotations

import ast

import pytest

from slime_ext import presets
from slime_ext.core.metrics.names import scalars
from slime_ext.hosts.code import LEADING, STEP
from tests import oracle
from tests.core.metrics.test_statistics import accumulated
from tests.downstream.host_step import VERSION

pytestmark = [pytest.mark.slow]


def test_the_function_that_is_wrapped_is_a_global_that_train_looks_up(host):
    tree = host.tree.step.tree
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    parameters = [arg.arg for arg in functions[STEP].args.args]
    calls = [
        n.func.id
        for n in ast.walk(functions["train"])
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
    ]
    assert tuple(parameters[:5]) == LEADING[STEP] and calls.count(STEP) == 1


def test_the_log_of_the_host_has_the_metrics_of_every_step(measured):
    (found,) = measured["two steps"]
    assert f"slime_ext: certificate, weights {VERSION}: not known: k3 " in found["said"]
    for step, seeds in enumerate([(1, 2), (3,)]):
        batch = [s for seed in seeds for s in oracle.random_batch(seed)]
        wanted = scalars(accumulated(presets.get("geo_rs"), batch))
        key, logged = found["logged"][step]
        assert key == "train/step" and logged["train/step"] == 3 * 2 + step
        assert {n: logged[f"train/{n}"] for n in wanted} == pytest.approx(wanted, rel=1e-9)
        assert found["rows"][step]["step_id"] == step and "train/grad_norm" in logged
    assert found["rows"][0].keys() >= wanted.keys()
