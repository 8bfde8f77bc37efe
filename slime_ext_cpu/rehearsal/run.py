"""A launch -> a rehearsal of it: what is written for it, the run of the real host, the page."""

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
from slime_ext.tools.scripts.launch import Launch, WrittenFlag
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
    """What runs the rehearsal.

    Args:
        name: "miles" for the wheel, or a checkout's folder.
        package: folder of slime or miles.
        is_own: whether it is the host that the script belongs to.
    """

    name: str
    package: Path
    is_own: bool

    def __str__(self) -> str:
        if self.name == WHEEL:
            return "miles of the package index (miles-rl)"
        return f"{self.package.name} in {self.name}"


def host_of(launch: Launch, given: str | None) -> RehearsalHost:
    """The host that --host names, else the checkout that the script lies in, else the wheel.

    Raises:
        ConfigError: a folder without train.py and slime or miles.
    """
    folders = [Path(given).absolute()] if given not in (None, "", WHEEL) else []
    if given is None:
        folders = [f for f in Path(launch.script).resolve().parents if (f / "train.py").is_file()]
    for folder in folders:
        for kind in ("slime", "miles"):
            if (folder / kind / "utils/arguments.py").is_file():
                return RehearsalHost(str(folder), folder / kind, is_own=True)
    if given not in (None, WHEEL):
        raise ConfigError(
            f"--host: expected 'miles' or a checkout of slime or miles, got {given or 'none'}: no train.py "
            "there"
        )
    return RehearsalHost(WHEEL, wheel_folder() / "miles", is_own=given == WHEEL)


def user_paths(launch: Launch) -> list[Path]:
    """Where Python finds the user's own functions, before everything of the host."""
    said = [Path(path) for path in launch.environment.get("PYTHONPATH", "").split(":") if path]
    given = [Path(path) for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    paths = [Path.cwd(), Path(launch.script).resolve().parent, *said, *given]
    return [path for path in paths if is_folder(path) and "megatron" not in path.name.lower()]


def module_paths(launch: Launch, host: RehearsalHost) -> list[Path]:
    """Where Python finds the functions that flags name."""
    site = Path(sysconfig.get_path("purelib"))
    more = [host.package.parent, Path(__file__).parents[2], wheel_folder(), site]
    return [*user_paths(launch), *(path for path in more if path.is_dir())]


def with_found_files(launch: Launch, host: RehearsalHost) -> Launch:
    """The launch with relative paths of files made absolute, as the run has another working directory. The
    folder in which the script's program runs is looked in first."""
    runs_in = [Path(launch.folder)] if launch.folder else []
    own = [host.package.parent] if host.is_own else []
    roots = [*runs_in, *own, Path.cwd(), Path(launch.script).resolve().parent, host.package.parent]

    def found(value: str) -> str:
        name, *part = value.partition("@[")  # of a data file's rows
        plain = Path(name)
        is_written = value in launch.files  # by the script, whatever an earlier run has left
        if not value or is_written or plain.is_absolute() or ("/" not in name and not plain.suffix):
            return value
        paths = (root / plain for root in roots)
        whole = next((str(path) for path in paths if is_file(path) or is_folder(path)), name)
        return "".join([whole, *part])

    return _with_values(launch, found)


def with_written_files(launch: Launch, out: Path) -> Launch:
    """The launch with files below a folder in place of those that its script would write."""
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
    """Writes the twin and the rows below a folder; the host's command line, and what was replaced by what.

    Args:
        rows: of ``prompts.all_rows``.
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
    data = "first {} rows" if is_here else "not on this machine: {} made rows with the same keys"
    why = "code of its own" if twin.is_code(model) else "not on this machine"
    words = "its own tokenizer" if is_real else f"its tokenizer is {why}: one of bytes"
    account = replace.account(launch, f"{small}; {words}", data.format(len(train)))
    return replace.replaced_flags(launch, small.flags, longest, out), account


def environment_of(launch: Launch, out: Path) -> dict[str, str]:
    """Variables of the run: those of the Ray job that no cluster needs, and ours."""
    own = {name: value for name, value in launch.environment.items() if not name.startswith(OF_A_CLUSTER)}
    (out / "events").mkdir(parents=True, exist_ok=True)
    own |= {
        INSTALL: observe.__name__,
        observe.FOLDER: str(out / "events"),
        "TENSORBOARD_DIR": str(out / "tensorboard"),
    }
    own["PYTHONPATH"] = ":".join(map(str, user_paths(launch)))  # the wheel's folder holds an sglang, too
    if flag := launch.flag("--custom-reward-post-process-path"):
        own[rewards.THEIRS] = flag.values[0]
    return own
