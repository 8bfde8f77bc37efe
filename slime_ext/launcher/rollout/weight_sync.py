"""The trainer's weights on their way to the rollout engine: written, loaded, verified."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from slime_ext.launcher.rollout.client import EngineClient

_NAME = re.compile(r"version_(\d+)")
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth"}


def push_weights(
    client: EngineClient,
    state: Mapping[str, Tensor],
    template_dir: str | Path,
    directory: str | Path,
    version: int,
    keep: int = 2,
) -> Path:
    """Writes one version of the weights, makes the engine load it and checks that it did.

    Args:
        state: tensors under their Hugging Face names; any device, any layout.
        template_dir: a model directory whose configuration and tokenizer files go beside the weights.
        directory: where `version_<version>` is made.
        keep: how many versions stay there; an engine that starts again is told to read the latest.

    Returns:
        The directory of this version.

    Raises:
        EngineError: the engine refused the weights, or reports another version.
    """
    path = write_weights(state, template_dir, directory, version)
    client.update_weights_from_disk(path, version)
    for _, stale in versions(directory)[:-keep]:
        shutil.rmtree(stale, ignore_errors=True)
    return path


def write_weights(
    state: Mapping[str, Tensor], template_dir: str | Path, directory: str | Path, version: int
) -> Path:
    """Writes `directory/version_<version>`; it appears whole or not at all."""
    from safetensors.torch import save_file

    target = Path(directory) / f"version_{version}"
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=target.parent))
    try:
        for file in Path(template_dir).iterdir():
            if file.is_file() and file.suffix not in _WEIGHTS and not file.name.endswith(".index.json"):
                shutil.copyfile(file, draft / file.name)
        tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}
        save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
        draft.chmod(0o755)
        shutil.rmtree(target, ignore_errors=True)  # a run that was continued writes a version a second time
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def versions(directory: str | Path) -> list[tuple[int, Path]]:
    """The versions in a directory, lowest first."""
    named = [(_NAME.fullmatch(path.name), path) for path in Path(directory).glob("version_*")]
    return sorted((int(match[1]), path) for match, path in named if match)
