"""Prepares a rehearsal: chooses the host, writes files, and sets flags and environment."""

from __future__ import annotations

import dataclasses
import json
import os
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slime_ext.errors import ConfigError
from slime_ext.tools.folders import is_file, is_folder
from slime_ext.tools.launch.launch import Launch, Unread, WrittenFlag
from slime_ext_cpu.driver import INSTALL, WHEEL, wheel_folder
from slime_ext_cpu.rehearsal import observe, prompts, replace, rewards, twin
from slime_ext_cpu.tiny import write_weights

TIMEOUT_S = 900.0
OF_A_CLUSTER = tuple(
    "CUDA NCCL NVTE NVSHMEM CUBLAS GLOO TP_SOCKET PYTORCH MASTER MC_ RAY no_proxy NO_PROXY PYTHONPATH "
    "PYTHONUNBUFFERED TORCH OMP WANDB SGLANG HF_".split()
)


@dataclass(frozen=True)
class RehearsalHost:
    """The host that runs the rehearsal.

    Args:
        name: "miles" for the wheel, or a checkout's folder.
        package: folder of the package slime or miles.
        is_own: whether the script belongs to this host.
    """

    name: str
    package: Path
    is_own: bool

    def __str__(self) -> str:
        if self.name == WHEEL:
            return "miles of the package index (miles-rl)"
        return f"{self.package.name} in {self.name}"


def host_of(launch: Launch, name: str | None) -> RehearsalHost:
    """Returns the host that --host names, or the script's checkout, or the wheel.

    Raises:
        ConfigError: --host names a folder without train.py or without slime or miles.
    """
    folders = [Path(name).absolute()] if name not in (None, "", WHEEL) else []
    if name is None:
        folders = [f for f in Path(launch.script).resolve().parents if (f / "train.py").is_file()]
    for folder in folders:
        for kind in ("slime", "miles"):
            if (folder / kind / "utils/arguments.py").is_file():
                return RehearsalHost(str(folder), folder / kind, is_own=True)
    if name not in (None, WHEEL):
        raise ConfigError(
            f"--host: expected 'miles' or a checkout of slime or miles, got {name or 'none'}: name the "
            "folder that git cloned, with train.py in it"
        )
    return RehearsalHost(WHEEL, wheel_folder() / "miles", is_own=name == WHEEL)


def user_paths(launch: Launch) -> list[Path]:
    """Returns where Python looks for the user's functions, before it looks into the host's folders."""
    of_launch = [Path(path) for path in launch.environment.get("PYTHONPATH", "").split(":") if path]
    of_process = [Path(path) for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    paths = [Path.cwd(), Path(launch.script).resolve().parent, *of_launch, *of_process]
    return [path for path in paths if is_folder(path) and "megatron" not in path.name.lower()]


def module_paths(launch: Launch, host: RehearsalHost) -> list[Path]:
    """Returns where Python looks for the functions that flags name."""
    site = Path(sysconfig.get_path("purelib"))
    more = [host.package.parent, Path(__file__).parents[2], wheel_folder(), site]
    return [*user_paths(launch), *(path for path in more if path.is_dir())]


def with_found_files(launch: Launch, host: RehearsalHost) -> Launch:
    """Makes the relative paths of files absolute, because the run has another working directory.

    The first folder to look in is the one where the script's program runs.
    """
    runs_in = [launch.runs_in] if launch.folder and not isinstance(launch.folder, Unread) else []
    of_host = [host.package.parent] if host.is_own else []
    roots = [*runs_in, *of_host, Path.cwd(), Path(launch.script).resolve().parent, host.package.parent]

    def absolute(value: str) -> str:
        name, *part = value.partition("@[")  # the range of a data file's rows
        plain = Path(name)
        is_written = value in launch.files  # the script writes it, even if an earlier run left such a file
        if not value or is_written or plain.is_absolute() or ("/" not in name and not plain.suffix):
            return value
        paths = (root / plain for root in roots)
        whole = next((str(path) for path in paths if is_file(path) or is_folder(path)), name)
        return "".join([whole, *part])

    return _with_values(launch, absolute)


def with_written_files(launch: Launch, out: Path) -> Launch:
    """Writes the script's own files below a folder, and makes the flags name those."""
    paths = {name: out / f"written/{i}-{Path(name).name}" for i, name in enumerate(launch.files)}
    for name, path in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(launch.files[name])
    return _with_values(launch, lambda value: str(paths.get(value, value)))


def _with_values(launch: Launch, changed: Callable[[str], str]) -> Launch:
    flags = (WrittenFlag(f.name, tuple(map(changed, f.values)), f.where) for f in launch.flags)
    return dataclasses.replace(launch, flags=tuple(flags))


def prepare(
    launch: Launch, rows: tuple[list[prompts.Row], list[prompts.Row]], out: Path
) -> tuple[list[str], dict[str, str]]:
    """Writes the twin and the rows below a folder.

    Args:
        rows: what ``prompts.all_rows`` returned.

    Returns:
        the host's command line, and what was replaced by what.
    """
    from transformers import AutoTokenizer

    flag, model = launch.flag("--prompt-data"), Path(launch.value("--hf-checkpoint"))
    folder = out / replace.TWIN
    is_real = twin.write_tokenizer(folder, model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    small = twin.twin_of(launch, max(len(tokenizer), launch.number("--vocab-size", 0) if is_real else 0))
    config = small.config | {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_weights(folder, seed=0)
    train, held_out = rows[0], rows[1][: replace.PROMPTS * 2]
    prompts.write_rows(train, out / replace.TRAIN)
    prompts.write_rows(held_out, out / replace.HELD_OUT)
    longest = prompts.longest_prompt(launch, [*train, *held_out], tokenizer)
    is_here = flag and is_file(prompts.file_of(flag.values[-1])[0])
    data = "first {} rows" if is_here else "not on this machine: {} made-up rows with the same keys"
    why = "code, which is not run" if twin.is_code(model) else "not on this machine"
    words = "its own tokenizer" if is_real else f"its tokenizer is {why}: a tokenizer of bytes instead"
    account = replace.account(launch, f"{small}; {words}", data.format(len(train)))
    return replace.replaced_flags(launch, small.flags, longest, out), account


def environment_of(launch: Launch, out: Path) -> dict[str, str]:
    """Returns the variables of the run: the launch's, without those for a cluster, and ours."""
    environment = {n: v for n, v in launch.environment.items() if not n.startswith(OF_A_CLUSTER)}
    (out / "events").mkdir(parents=True, exist_ok=True)
    environment |= {
        INSTALL: observe.__name__,
        observe.FOLDER: str(out / "events"),
        "TENSORBOARD_DIR": str(out / "tensorboard"),
    }
    # Not `module_paths`, because the wheel's folder contains another sglang.
    environment["PYTHONPATH"] = ":".join(map(str, user_paths(launch)))
    if flag := launch.flag("--custom-reward-post-process-path"):
        environment[rewards.THEIRS] = flag.values[0]
    return environment
