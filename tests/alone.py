"""What a training process does with the wheel and what the wheel requires, nothing else: a program.

It imports every module outside ``tools``, has ``slime_ext.host.init`` wrap a host of a few lines, runs that
host's policy loss, and calls ``slime-ext --version`` and every command, which name the extra that they need.
``.ci/wheel`` runs it in an empty environment; ``tests/test_wheel.py`` with every other import refused.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import operator
import pkgutil
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

SLIME_EXT_TRAIN = ("train", "rehearse")
LOG_PROBS = {"log_probs": [-1.0, -1.0], "rollout_log_probs": [-1.0 - math.log(3), -1.0 + math.log(2)]}


def every_module():
    """Imports the package without its tools."""
    import slime_ext

    for module in pkgutil.walk_packages(slime_ext.__path__, "slime_ext."):
        if not module.name.startswith("slime_ext.tools") and not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def hook_call():
    """A loss by hand: ratios 3 and 1/2, of which the first is truncated at 2."""
    import torch

    from slime_ext import host

    sys.path.append(str(Path(__file__).parent / "host"))
    import trees

    to_process = SimpleNamespace(
        delitem=operator.delitem,
        setitem=operator.setitem,
        syspath_prepend=lambda path: sys.path.insert(0, path),
    )
    with tempfile.TemporaryDirectory() as folder:
        made = trees.made(Path(folder), to_process)
        args = Namespace(use_tis=True, custom_tis_function_path="slime_ext.tis.token_tis")
        host.init(args)
        batch = {name: [torch.tensor(values)] for name, values in LOG_PROBS.items()}
        batch |= {"advantages": [torch.ones(2)], "loss_masks": [torch.ones(2)]}
        batch |= {"total_lengths": [3], "response_lengths": [2]}
        current = [torch.tensor(LOG_PROBS["log_probs"], requires_grad=True)]
        loss, _ = made.loss.policy_loss_function(args, batch, current, None)
    assert abs(loss.item() - (2.0 + 0.5)) < 1e-6, loss


def answer(*words: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of ``slime-ext``."""
    from slime_ext.tools.commands import cli

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = cli.main(words)
    return status, out.getvalue(), err.getvalue()


def commands():
    """The version, and one line for each command, which begins nothing."""
    import slime_ext
    from slime_ext.tools.commands import cli

    assert answer("--version") == (0, f"slime-ext {slime_ext.__version__}\n", "")
    _, out, err = answer("doctor")  # which needs no extra
    assert "PyTorch" in out and not err, err
    for name in [name for name in cli.COMMANDS if name != "doctor"]:
        status, out, err = answer(name, "--help")
        extra = "train" if name in SLIME_EXT_TRAIN else "tools"
        assert (status, out) == (2, "") and err.count("\n") == 1, (name, status, err)
        assert err.startswith(f"slime-ext {name}: ") and f"slime-ext[{extra}]" in err, err


if __name__ == "__main__":
    every_module()
    hook_call()
    commands()
    print("the wheel alone: every module, init, a hook call, and every command's answer")
