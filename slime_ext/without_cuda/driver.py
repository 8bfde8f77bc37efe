"""Runs slime or miles, unedited, on a machine without CUDA, in a child process.

    python -m slime_ext.without_cuda.driver --host miles|DIR [--async] [--megatron DIR] [--gpus N] [--nodes N]
        [--out FOLDER] -- FLAGS OF THE HOST

`--host miles` is the wheel miles-rl that `install.py` puts into the environment; a folder is a checkout of
slime or miles, whose train.py is run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import slime_ext
from slime_ext.errors import ConfigError, SlimeExtError
from slime_ext.folders import make_folder
from slime_ext.launcher.rollout.processes import MARK, kill_marked, spawn_bound
from slime_ext.without_cuda.stand_ins import free_ports

PACKAGE = Path(slime_ext.__file__).parent
SITE = Path(__file__).with_name("site")
CHILD = "slime_ext.without_cuda.host_process"
WHEEL = "miles"
HOW_TO_INSTALL = "run `make install`, or see docs/without_cuda.md"
TIMED_OUT = 124  # as coreutils' timeout
DEFAULT_TIMEOUT_S = 1800.0

ENVIRONMENT = {
    "SLIME_EXT_WITHOUT_CUDA": "1",
    "SLIME_ACCELERATOR": "cpu",
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron asks for it with tensor parallelism
    "PYTHONUNBUFFERED": "1",
    "WANDB_MODE": "disabled",
    "SLIME_HOST_IP": "127.0.0.1",  # by default the hosts listen on the machine's own address
    "MILES_HOST_IP": "127.0.0.1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow's; a fork wants one thread (fork_server.py)
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray listens on the loopback address alone
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_raylet_start_wait_time_s": "90",  # its 30 s are few on a busy machine
    "RAY_prestart_worker_first_driver": "0",  # workers that no actor will use import for seconds
    "RAY_enable_worker_prestart": "0",
}
# Without compiled files each of seven processes imports for 30 s; an address would join another run's Ray.
REMOVED = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONHOME", "RAY_ADDRESS", "VIRTUAL_ENV")


def host_python() -> Path:
    """The interpreter of an environment with the wheel: SLIME_EXT_HOST_PYTHON, else this one, else .venv's.

    Raises:
        ConfigError: there is none.
    """
    if given := os.environ.get("SLIME_EXT_HOST_PYTHON"):
        if not Path(given).exists():
            raise ConfigError(f"SLIME_EXT_HOST_PYTHON: expected an interpreter, got {given}: check the path")
        return Path(given).absolute()
    others = [folder.absolute() / ".venv" for folder in (Path.cwd(), PACKAGE.parent)]
    pythons = [(Path(sys.prefix), Path(sys.executable)), *((place, place / "bin/python") for place in others)]
    for prefix, python in pythons:
        if (prefix / WHEEL / "miles").is_dir():
            return python
    raise ConfigError(
        f"host environment: expected the wheel of miles in {sys.prefix} or .venv, got none: {HOW_TO_INSTALL}"
    )


def wheel_folder() -> Path:
    """The folder of the host environment in which miles and its Megatron lie."""
    return host_python().parents[1] / WHEEL


def run_host(
    host: str | Path,
    flags: Sequence[str],
    out: str | Path,
    asynchronous: bool = False,
    gpus: int = 4,
    timeout: float = DEFAULT_TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
    megatron: str | Path | None = None,
    nodes: int = 1,
) -> int:
    """The exit status of a run of `host` with `flags`; its log is OUT/log, OUT its working directory.

    The run has a Ray of its own, so several can stand side by side; none of its processes outlives it.

    Args:
        host: "miles" for the wheel of the host environment, else the folder of a checkout.
        asynchronous: train_async.py instead of train.py.
        gpus: how many GPUs each Ray node counts; they are only numbers.
        timeout: seconds after which the run is ended with status 124.
        environment: further variables; PYTHONPATH is put behind ours.
        megatron: a checkout of Megatron-LM, by default the one of the miles wheel.
        nodes: Ray nodes, all on this machine.

    Raises:
        ConfigError: no host environment, or no train.py in the folder.
    """
    script = "train_async.py" if asynchronous else "train.py"
    if str(host) != WHEEL:
        host = Path(host).absolute()
        if not (host / script).is_file():
            raise ConfigError(
                f"--host: expected 'miles' or a folder with {script}, got {host}: check the path"
            )
    out = Path(out).absolute()
    make_folder(out)
    given = {"host": str(host), "asynchronous": asynchronous, "gpus": gpus, "nodes": nodes}
    command = ["env", "-C", str(out), str(host_python()), "-m", CHILD, json.dumps(given), *flags]
    with (
        free_ports.own_range() as port,
        _environment(host, megatron, environment or {}) as env,
        (out / "log").open("w") as log,
    ):
        process = spawn_bound(command, env | {free_ports.VARIABLE: str(port)}, log)
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return TIMED_OUT
        finally:
            kill_marked(env[MARK])
            process.kill()
            process.wait()


@contextlib.contextmanager
def _environment(
    host: str | Path, megatron: str | Path | None, further: Mapping[str, str]
) -> Iterator[dict[str, str]]:
    """The variables of a run, and the short-lived folder that two of them name."""
    # Ray's sockets have 107 characters.
    with tempfile.TemporaryDirectory(prefix="slime-ext-", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "python").mkdir()
        (folder / "ray").mkdir()
        (folder / "python/slime_ext").symlink_to(PACKAGE)  # nothing that is installed beside it
        paths = [SITE, folder / "python", megatron, None if str(host) == WHEEL else host]
        paths += [further.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
        env = {name: value for name, value in os.environ.items() if name not in REMOVED}
        env |= ENVIRONMENT | {
            MARK: uuid.uuid4().hex,
            "RAY_TMPDIR": str(folder),  # Ray writes below its folder "ray"
            # SGLang takes Ray's GPU number for a NUMA node and wants the cores of each: all of them, for 16.
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join([f"0-{(os.cpu_count() or 1) - 1}"] * 16),
        }
        env |= further
        env["PYTHONPATH"] = os.pathsep.join(str(path) for path in paths if path)
        yield env


def main(argv: list[str]) -> int:
    """The command line; prints where the log is, and returns the host's exit status."""
    parser = argparse.ArgumentParser(prog="python -m slime_ext.without_cuda.driver")
    parser.add_argument("--host", required=True, help="'miles' for the wheel, or the folder of a checkout")
    parser.add_argument("--async", dest="asynchronous", action="store_true", help="train_async.py")
    parser.add_argument("--megatron", type=Path, help="a checkout of Megatron-LM; default: the wheel's")
    parser.add_argument("--gpus", type=int, default=4, help="GPUs that each Ray node counts")
    parser.add_argument("--nodes", type=int, default=1, help="Ray nodes, all on this machine")
    parser.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT_S, help="seconds")
    parser.add_argument("--out", type=Path, default=Path("runs/host"), help="folder of the run, with its log")
    end = argv.index("--") if "--" in argv else len(argv)
    given = parser.parse_args(argv[:end])
    print(f"slime-ext: log in {given.out / 'log'}", flush=True)
    try:
        status = run_host(flags=argv[end + 1 :], **vars(given))
    except SlimeExtError as error:
        print(f"slime-ext: {error}", file=sys.stderr)
        return 2
    print(f"slime-ext: exit status {status}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
