"""Runs ``slime-ext doctor``: prints versions that a launch needs, and what is missing here.

Paste its output into a bug report, like the output of torch.utils.collect_env. ``slime-ext check`` checks a
launch. The command imports torch and no other package that it reports.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import platform
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from slime_ext import __version__
from slime_ext.errors import ConfigError, cut, printable
from slime_ext.tools.releases import RELEASES, is_newer, newest

APEX_HOW = "build it from github.com/NVIDIA/apex with its C++ and CUDA extensions"
HOSTS = {"slime": "THUDM/slime", "miles": "radixark/miles"}  # package -> repository on github.com
ROOM = "backends"  # a folder of each host's package, which an empty folder of its name lacks
VERSION = re.compile(r"^\s*version\s*=\s*[\"']([^\"']+)", re.M)


class Part(NamedTuple):
    """One part of the software that a launch needs.

    Args:
        version: the installed version; empty if it is not installed.
        note: a fact about the part, or how to install it.
        is_missing: whether a launch of slime or miles needs it and it is not usable here.
    """

    version: str = ""
    note: str = ""
    is_missing: bool = False


def command_line() -> argparse.ArgumentParser:
    """Returns the flags of the command."""
    parser = argparse.ArgumentParser(
        prog="slime-ext doctor",
        description="Prints the versions that a launch needs, and what is missing here.",
    )
    return parser


def main(argv: list[str]) -> int:
    """Prints a line for each part, and then what is missing. Returns 0."""
    _, others = command_line().parse_known_args(argv)
    if others:
        raise ConfigError(
            f"command line: expected no arguments, got {others[0]}: "
            f"run slime-ext check {others[0]} for a launch"
        )
    parts = {name: probe() for name, probe in PARTS.items()}
    print("\n".join(lines(parts)))
    return 0


def lines(parts: Mapping[str, Part]) -> list[str]:
    """Returns the lines that ``main`` prints."""
    width = max(map(len, parts))
    rows = [
        f"{name:<{width}}  {part.version or 'none'}{f' ({part.note})' if part.note else ''}"
        for name, part in parts.items()
    ]
    missing = [name for name, part in parts.items() if part.is_missing]
    missing += [] if any(parts[name].version for name in HOSTS) else [" or ".join(HOSTS)]
    return [*map(printable, (*rows, *tested())), f"missing for a launch: {', '.join(missing) or 'nothing'}"]


def tested() -> list[str]:
    """Returns the releases that this version was run against, and a warning for each newer one here."""
    versions: dict[str, list[str]] = {}
    for release in RELEASES:
        versions.setdefault(release.title, []).append(release.version)
    listed = ", ".join(f"{title} {' '.join(each)}" for title, each in versions.items())
    warnings = []
    for distribution, release in newest().items():
        version = installed(distribution, "")
        if is_newer(version, release.version):
            warnings.append(
                f"warning: {release.title} {version} is newer than {release.version}, which was run on "
                f"{release.run}: run python -m tests.releases in a checkout, or install {release.version}"
            )
    return [f"run against: {listed}", *warnings]


def pytorch() -> Part:
    """Looks for PyTorch, and imports it, because a broken installation is of no use."""
    installed_torch, fault = package("torch")(), fault_of_torch()
    if not fault:
        return installed_torch
    return Part(installed_torch.version, f"cannot be imported: {fault}", is_missing=True)


@functools.cache  # because a second import may say something else
def fault_of_torch() -> str:
    """Returns why torch cannot be imported; empty if it can, or if it is not installed."""
    if not has("torch"):
        return ""
    try:
        import torch  # noqa: F401
    except Exception as error:  # of any kind, such as an OSError for a missing library
        return cut(str(error).partition("\n")[0]) or type(error).__name__
    return ""


def cuda() -> Part:
    """Looks for a CUDA device with torch."""
    if not has("torch") or fault_of_torch():
        return Part(note="needs PyTorch", is_missing=True)
    import torch  # takes two seconds, but only torch knows

    if not torch.cuda.is_available():
        built = torch.version.cuda
        note = f"PyTorch for CUDA {built}, no device" if built else "PyTorch for CPU"
        return Part(note=note, is_missing=True)
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    return Part(str(torch.version.cuda), f"{torch.cuda.device_count()} x {', '.join(sorted(names))}")


def megatron() -> Part:
    """Looks for Megatron-LM. megatron-core alone lacks megatron.training, which the hosts import."""
    if not has("megatron.core"):
        return Part(note="put a checkout of Megatron-LM on PYTHONPATH", is_missing=True)
    version = installed("megatron-core")
    if not has("megatron.training"):
        note = "megatron-core alone, without megatron.training: put Megatron-LM on PYTHONPATH"
        return Part(version, note, is_missing=True)
    return Part(version, "Megatron-LM")


def apex() -> Part:
    """Looks for NVIDIA apex. The package apex on PyPI is a different project."""
    unless = "or launch with --no-gradient-accumulation-fusion"
    folder = folder_of("apex")
    if folder is None:
        return Part(note=f"{APEX_HOW}, {unless}", is_missing=True)
    if not (folder / "multi_tensor_apply").is_dir():
        note = f"apex from PyPI, a different project: pip uninstall apex, then {APEX_HOW}, {unless}"
        return Part(installed("apex"), note, is_missing=True)
    if not (has("amp_C") and has("fused_weight_gradient_mlp_cuda")):
        note = f"without its extensions: {APEX_HOW}, {unless}"
        return Part(installed("apex"), note, is_missing=True)
    return Part(installed("apex"))


def host(package: str, repository: str) -> Part:
    """Looks for one host. A launch needs only one of them, so no single host counts as missing."""
    folder = folder_of(package, ROOM)
    if folder is None:
        return Part(note=f"put a checkout of github.com/{repository} on PYTHONPATH, or install it")
    path = folder.parent / "setup.py"
    said = VERSION.search(path.read_text("utf-8", "ignore")) if path.is_file() else None
    return Part(said[1] if said else installed(package), str(folder.parent))


def package(
    module: str, how: str = "", *, distribution: str = "", is_needed: bool = True
) -> Callable[[], Part]:
    """Returns a probe that looks for a package without importing it. ``how`` says how to install it."""
    name = distribution or module.replace("_", "-")
    missing = Part(note=how or f"pip install {name}", is_missing=is_needed)
    return lambda: Part(installed(name)) if has(module) else missing


PARTS: dict[str, Callable[[], Part]] = {
    "slime_ext": lambda: Part(__version__, str(Path(__file__).parents[3])),
    "Python": lambda: Part(platform.python_version(), platform.platform()),
    "PyTorch": pytorch,
    "CUDA": cuda,
    "Megatron": megatron,
    "Transformer Engine": package(
        "transformer_engine",
        "pip install transformer-engine[pytorch], with CUDA, or launch with --transformer-impl local",
    ),
    "NVIDIA apex": apex,
    "Triton": package("triton", "comes with PyTorch for CUDA", is_needed=False),
    "transformers": package("transformers"),
    "Ray": package("ray"),
    "SGLang": package("sglang"),
    **{name: functools.partial(host, name, repository) for name, repository in HOSTS.items()},
    "PyYAML": package("yaml", distribution="PyYAML"),
}


def has(module: str) -> bool:
    """Whether Python finds a module."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def folder_of(module: str, inner: str = "") -> Path | None:
    """Returns the folder of a package that has an inner folder; None if there is none."""
    spec = importlib.util.find_spec(module) if has(module) else None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return next((Path(place) for place in places if (Path(place) / inner).is_dir()), None)


def installed(distribution: str, unknown: str = "a checkout") -> str:
    """Returns the version that pip knows, or ``unknown``."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return unknown
