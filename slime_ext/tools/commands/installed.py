"""What this machine has of what slime runs on. Nothing but torch is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from slime_ext.errors import ConfigError
from slime_ext.host.hosts import PASSED

APEX_HOW = "build it from github.com/NVIDIA/apex with its C++ and CUDA extensions"
STOCK, PATCHED = "passes no cur_log_probs", "passes cur_log_probs"
CORE_ALONE = "megatron-core alone, without megatron.training"
VERSION = re.compile(r"^\s*version\s*=\s*[\"']([^\"']+)", re.M)


class Component(NamedTuple):
    """One thing that may be installed.

    Args:
        found: its version, or what there is instead; empty: nothing.
        usable: whether it is what its name says, and works here.
        note: what is to be known, or to be done.
    """

    found: str = ""
    usable: bool = False
    note: str = ""


def cuda() -> Component:
    """Whether torch sees a device."""
    if not _has("torch"):
        return Component(note="needs PyTorch")
    import torch  # two seconds, and the only one that knows

    if not torch.cuda.is_available():
        built = torch.version.cuda
        return Component(note=f"PyTorch for CUDA {built}, no device" if built else "PyTorch for CPU")
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    return Component(str(torch.version.cuda), True, f"{torch.cuda.device_count()} x {', '.join(names)}")


def megatron() -> Component:
    """megatron-core alone, or Megatron-LM, whose megatron.training slime imports."""
    if not _has("megatron.core"):
        return Component(note="pip install megatron-core, or a checkout of Megatron-LM on PYTHONPATH")
    note = "Megatron-LM" if _has("megatron.training") else CORE_ALONE
    return Component(_version("megatron-core"), True, note)


def apex() -> Component:
    """NVIDIA apex; the project of that name on PyPI is another one."""
    folder = _folder("apex")
    if folder is None:
        return Component(note=APEX_HOW)
    version = _version("apex")
    if not (folder / "multi_tensor_apply").is_dir():
        why = f"the apex of PyPI, which has nothing to do with NVIDIA's: pip uninstall apex, then {APEX_HOW}"
        return Component(version, False, why)
    is_built = _has("amp_C") and _has("fused_weight_gradient_mlp_cuda")
    return Component(version, is_built, "" if is_built else f"without its extensions: {APEX_HOW}")


def slime(folder: str | None = None) -> Component:
    """slime, and whether its hook is given the target's log-probs.

    Raises:
        ConfigError: the folder that was named holds none.
    """
    root = Path(folder) if folder else _root("slime")
    if root is None:
        return Component(note="a checkout of github.com/THUDM/slime, installed or on PYTHONPATH")
    loss = root / "slime/backends/megatron_utils/loss.py"
    if not loss.is_file():
        lacks = f"{root}: expected a checkout of slime, got no {loss.relative_to(root)}"
        if folder:
            raise ConfigError(f"--slime-dir {lacks}")
        return Component(note=lacks)
    is_patched = PASSED["cur_log_probs"].search(loss.read_text())
    return Component(_version_in(root), True, PATCHED if is_patched else STOCK)


def _package(module: str, how: str) -> Callable[[], Component]:
    """A package, without importing it; ``how`` it is installed."""
    return lambda: (
        Component(_version(module.replace("_", "-")), True) if _has(module) else Component(note=how)
    )


COMPONENTS: dict[str, Callable[[], Component]] = {
    "Python": lambda: Component(platform.python_version(), True),
    "PyTorch": _package("torch", "pip install torch"),
    "CUDA": cuda,
    "Megatron": megatron,
    "Transformer Engine": _package(
        "transformer_engine", "pip install transformer-engine[pytorch], with CUDA"
    ),
    "NVIDIA apex": apex,
    "Triton": _package("triton", "comes with PyTorch for CUDA"),
    "transformers": _package("transformers", "pip install transformers"),
    "Ray": _package("ray", "pip install ray"),
    "SGLang": _package("sglang", "pip install sglang"),
}


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _folder(module: str) -> Path | None:
    spec = importlib.util.find_spec(module)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def _root(module: str) -> Path | None:
    folder = _folder(module)
    return folder.parent if folder else None


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "a checkout"


def _version_in(root: Path) -> str:
    """As the checkout's setup.py says; as installed where there is none."""
    path = root / "setup.py"
    found = VERSION.search(path.read_text(encoding="utf-8")) if path.is_file() else None
    return found[1] if found else _version(root.name)
