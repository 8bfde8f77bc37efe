"""`slime-ext report` reads what the hosts' own TensorBoard logger writes."""

from __future__ import annotations

import importlib.util
import sys
import types

from slime_ext.tools.report.run_series import read_run


def test_what_the_hosts_own_logger_leaves_is_read(host, tmp_path, monkeypatch):
    (source,) = (host.folder / host.name).rglob("tensorboard_utils.py")
    misc = types.ModuleType(f"{host.name}.utils.misc")
    misc.SingletonMeta = type
    for name in (host.name, f"{host.name}.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, misc.__name__, misc)
    spec = importlib.util.spec_from_file_location("logger_of_the_host", source)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "log"))
    args = types.SimpleNamespace(use_tensorboard=True, tb_project_name="p", tb_experiment_name="e")
    logger = module._TensorboardAdapter(args)
    for i in range(4):
        logger.log({"rollout/raw_reward": i / 4}, step=i)
        for step in (2 * i, 2 * i + 1):
            logger.log({"train/off_policy/k3_kl": 1e-3}, step=step)
    logger.finish() if hasattr(logger, "finish") else logger._writer.close()
    found = read_run(tmp_path)
    assert list(found["rollout/raw_reward"].items()) == [(0, 0.0), (2, 0.25), (4, 0.5), (6, 0.75)]
