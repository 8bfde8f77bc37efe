"""What this machine has of what slime and the embedded launcher run on. Nothing but torch is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from slime_ext.errors import ConfigError
from slime_ext.launcher.validation.places import default_python
from slime_ext.patching.declared import load_patches
from slime_ext.patching.plan import status
from slime_ext.patching.tree import Tree

APEX_HOW = "build it from github.com/NVIDIA/apex with its C++ and CUDA extensions"
CORE_ALONE = "megatron-core alone, without megatron.training"
VERSION = re.compile(r"^\s*version\s*=\s*[\"']([^\"']+)", re.M)


@dataclass(frozen=True)
class Part:
    """One thing that may be installed.

    Args:
        found: its version, or what there is instead; empty: nothing.
        usable: whether it is what its name says, and works here.
        note: what is to be known, or to be done.
    """

    name: str
    found: str
    usable: bool
    note: str = ""


def python() -> Part:
    """This interpreter."""
    is_known = sys.version_info >= (3, 10)
    return Part("Python", platform.python_version(), is_known, "" if is_known else "3.10 or newer is needed")


def cuda() -> Part:
    """Whether torch sees a device."""
    if not _has("torch"):
        return Part("CUDA", "", False, "needs PyTorch")
    import torch  # two seconds, and the only one that knows

    if not torch.cuda.is_available():
        built = torch.version.cuda
        return Part("CUDA", "", False, f"PyTorch for CUDA {built}, no device" if built else "PyTorch for CPU")
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    return Part("CUDA", str(torch.version.cuda), True, f"{torch.cuda.device_count()} x {', '.join(names)}")


def megatron() -> Part:
    """megatron-core alone, or Megatron-LM, whose megatron.training slime imports."""
    if not _has("megatron.core"):
        return Part(
            "Megatron", "", False, "pip install megatron-core, or a checkout of Megatron-LM on PYTHONPATH"
        )
    version = _version("megatron-core") or "a checkout"
    if _has("megatron.training"):
        return Part("Megatron", version, True, "Megatron-LM")
    return Part("Megatron", version, True, CORE_ALONE)


def apex() -> Part:
    """NVIDIA apex; the project of that name on PyPI is another one."""
    folder = _folder("apex")
    if folder is None:
        return Part("NVIDIA apex", "", False, APEX_HOW)
    version = _version("apex") or "a checkout"
    if not (folder / "multi_tensor_apply").is_dir():
        why = f"the apex of PyPI, which has nothing to do with NVIDIA's: pip uninstall apex, then {APEX_HOW}"
        return Part("NVIDIA apex", version, False, why)
    if not (_has("amp_C") and _has("fused_weight_gradient_mlp_cuda")):
        return Part("NVIDIA apex", version, False, f"without its extensions: {APEX_HOW}")
    return Part("NVIDIA apex", version, True)


def sglang() -> Part:
    """The rollout engine, here or in an environment of its own."""
    if _has("sglang"):
        return Part("SGLang", _version("sglang") or "a checkout", True)
    other = default_python()
    ask = "import importlib.metadata as m; print(m.version('sglang'))"
    try:
        done = subprocess.run([other, "-c", ask], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        done = None
    if done and done.returncode == 0:
        return Part("SGLang", done.stdout.strip(), True, f"in the environment of {other}")
    return Part("SGLang", "", False, "pip install sglang, or make install for the launcher's own environment")


def slime(folder: str | None = None) -> Part:
    """slime and its state: stock, or patched.

    Raises:
        ConfigError: the folder that was named holds none.
    """
    root = Path(folder) if folder else _root("slime")
    if root is None:
        return Part("slime", "", False, "a checkout of github.com/THUDM/slime, installed or on PYTHONPATH")
    try:
        tree = Tree(root)
    except ConfigError as error:
        if folder:
            raise ConfigError(f"--slime-dir {error}") from None
        return Part("slime", "", False, str(error))
    states = ", ".join(f"patch {patch.id} {status(tree, patch).state}" for patch in load_patches())
    return Part("slime", _version_in(root) or "a checkout", True, states)


def _package(module: str, name: str, how: str) -> Part:
    """A package, without importing it; ``how`` it is installed."""
    if not _has(module):
        return Part(name, "", False, how)
    return Part(name, _version(module.replace("_", "-")) or "a checkout", True)


PACKAGES = {
    "torch": ("PyTorch", "pip install torch"),
    "transformer_engine": ("Transformer Engine", "pip install transformer-engine[pytorch], with CUDA"),
    "triton": ("Triton", "comes with PyTorch for CUDA"),
    "transformers": ("transformers", "pip install transformers"),
    "ray": ("Ray", "pip install ray"),
}
ORDER = "python torch cuda megatron transformer_engine apex triton transformers ray sglang".split()
PARTS: dict[str, Callable[[], Part]] = {
    name: partial(_package, name, *PACKAGES[name]) if name in PACKAGES else globals()[name] for name in ORDER
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
        return ""


def _version_in(root: Path) -> str:
    """As the checkout's setup.py says; as installed where there is none."""
    path = root / "setup.py"
    found = VERSION.search(path.read_text(encoding="utf-8")) if path.is_file() else None
    return found[1] if found else _version(root.name)
