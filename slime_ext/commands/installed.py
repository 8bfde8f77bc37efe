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


def torch() -> Part:
    """PyTorch, without importing it."""
    return _package("PyTorch", "torch", "pip install torch")


def cuda() -> Part:
    """Whether torch sees a device."""
    if not torch().found:
        return Part("CUDA", "", False, "needs PyTorch")
    import torch as library  # two seconds, and the only one that knows

    if not library.cuda.is_available():
        built = library.version.cuda
        return Part("CUDA", "", False, f"PyTorch for CUDA {built}, no device" if built else "PyTorch for CPU")
    names = {library.cuda.get_device_name(i) for i in range(library.cuda.device_count())}
    return Part(
        "CUDA", str(library.version.cuda), True, f"{library.cuda.device_count()} x {', '.join(names)}"
    )


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


def transformer_engine() -> Part:
    """NVIDIA's layers."""
    return _package(
        "Transformer Engine",
        "transformer_engine",
        "pip install transformer-engine[pytorch], with CUDA",
        "transformer-engine",
    )


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


def triton() -> Part:
    """The compiler of the GPU kernels."""
    return _package("Triton", "triton", "comes with PyTorch for CUDA")


def ray() -> Part:
    """What slime starts its processes with."""
    return _package("Ray", "ray", "pip install ray")


def transformers() -> Part:
    """Tokenizers and model shapes."""
    return _package("transformers", "transformers", "pip install transformers")


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


PARTS: dict[str, Callable[[], Part]] = {
    probe.__name__: probe
    for probe in (python, torch, cuda, megatron, transformer_engine, apex, triton, transformers, ray, sglang)
}


def _package(name: str, module: str, how: str, distribution: str | None = None) -> Part:
    if not _has(module):
        return Part(name, "", False, how)
    return Part(name, _version(distribution or module) or "a checkout", True)


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
