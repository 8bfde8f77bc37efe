"""Runs slime or miles, unedited, on a machine without CUDA, in a child process.

    python -m slime_ext.tools.without_cuda.driver --host miles|DIR [--async] [--megatron DIR] [--gpus N]
        [--nodes N] [--out FOLDER] -- FLAGS OF THE HOST

`--host miles` is the wheel miles-rl that `install.py` puts into the environment; a folder is a checkout of
slime or miles, whose train.py is run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import slime_ext
from slime_ext.errors import ConfigError, SlimeExtError
from slime_ext.tools.folders import working_folder
from slime_ext.tools.without_cuda import host_log, machine
from slime_ext.tools.without_cuda.install import how_to_install
from slime_ext.tools.without_cuda.processes import MARK, guarded
from slime_ext.tools.without_cuda.stand_ins import HOSTS, free_ports, rounded_weights

PACKAGE = Path(slime_ext.__file__).parent
SITE = Path(__file__).with_name("site")
CHILD = "slime_ext.tools.without_cuda.host_process"
WHEEL = "miles"
INSTALL = "SLIME_EXT_INSTALL"  # modules whose `install` each process of the run calls (site/sitecustomize.py)
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
    "GLOO_SOCKET_IFNAME": "lo",  # where the machine's name stands for another address
    "TP_SOCKET_IFNAME": "lo",
    # No such devices: CUDA sees none, while Ray may give them to workers.
    "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(1000, 1016))),
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow's; a fork wants one thread (fork_server.py)
    "SPT_NOENV": "1",  # or the titles that Ray gives to processes overwrite the mark by which they are ended
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
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def host_python() -> Path:
    """The interpreter of an environment with the wheel: SLIME_EXT_HOST_PYTHON, else this one, else .venv's.

    Raises:
        ConfigError: there is none.
    """
    if given := os.environ.get("SLIME_EXT_HOST_PYTHON"):
        if not (Path(given).is_file() and os.access(given, os.X_OK)):
            raise ConfigError(f"SLIME_EXT_HOST_PYTHON: expected an interpreter, got {given}: check the path")
        return Path(given).absolute()
    others = [folder.absolute() / ".venv" for folder in (Path.cwd(), PACKAGE.parent)]
    pythons = [(Path(sys.prefix), Path(sys.executable)), *((place, place / "bin/python") for place in others)]
    for prefix, python in pythons:
        if (prefix / WHEEL / "miles").is_dir():
            return python
    raise ConfigError(
        f"host environment: expected the wheel of miles in {sys.prefix} or .venv, got none: "
        f"{how_to_install()}"
    )


def wheel_folder() -> Path:
    """The folder of the host environment in which miles and its Megatron-LM lie."""
    return host_python().parents[1] / WHEEL


@dataclass(frozen=True)
class HostRun:
    """A run of slime or miles with a Ray of its own, so that several can run side by side.

    Attributes:
        host: "miles" for the wheel of the host environment, else the folder of a checkout.
        out: folder of the run, its working directory; the log is OUT/log.
        flags: of the host.
        asynchronous: train_async.py instead of train.py.
        gpus: how many GPUs each Ray node counts; they are only numbers.
        nodes: Ray nodes, all on this machine.
        timeout: seconds after which the run is ended with status 124.
        environment: further variables; PYTHONPATH is put behind ours.
        megatron: a checkout of Megatron-LM, by default the one of the miles wheel.
        room: bytes that the run needs in `out`.
    """

    host: str | Path
    out: str | Path
    flags: Sequence[str] = ()
    asynchronous: bool = False
    gpus: int = 4
    nodes: int = 1
    timeout: float = DEFAULT_TIMEOUT_S
    environment: Mapping[str, str] = field(default_factory=dict)
    megatron: str | Path | None = None
    room: int = machine.ROOM

    def check(self) -> None:
        """Makes the folder of the run; nothing else is started or written.

        Raises:
            ConfigError: no host environment, no train.py in the folder, a host that this Megatron-LM does not
                fit, an unknown SLIME_EXT_ROUND, a machine without room, files or ports, or another run that
                writes to the folder.
        """
        working_folder()
        host_python()
        rounded_weights.check(os.environ | self.environment)
        if self.checkout:
            script = "train_async.py" if self.asynchronous else "train.py"
            if not (self.checkout / script).is_file():
                raise ConfigError(
                    f"--host: expected 'miles' or a folder with {script}, got {self.checkout}: check the path"
                )
            check_megatron(self.checkout, Path(self.megatron) if self.megatron else wheel_folder())
        machine.check(Path(self.out).absolute(), self.room)
        host_log.check_unused(Path(self.out, "log"))

    @property
    def checkout(self) -> Path | None:
        """The host's folder, None for the wheel."""
        return None if str(self.host) == WHEEL else Path(self.host).absolute()

    def run(self) -> int:
        """Runs the host to its end and returns its exit status; none of its processes outlives it.

        SIGTERM and SIGHUP raise SystemExit, as SIGINT raises KeyboardInterrupt, when all of them have ended.

        Raises:
            ConfigError: of `check`.
        """
        self.check()
        out, folder = Path(self.out).absolute(), machine.TEMPORARY / f"slime-ext-{secrets.token_hex(4)}"
        given = {"host": str(self.checkout or WHEEL), "asynchronous": self.asynchronous}
        given |= {"gpus": self.gpus, "nodes": self.nodes}
        env = self._variables(folder)
        with (
            ended_by_signals(),
            free_ports.own_range() as port,
            host_log.opened(out / "log") as log,
            guarded(env[MARK], folder),
        ):
            _fill(folder)
            python = _without_blanks(host_python(), folder)
            process = subprocess.Popen(
                ["env", "-C", str(out), str(python), "-m", CHILD, json.dumps(given), *self.flags],
                env=env | {free_ports.VARIABLE: str(port)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                return process.wait(self.timeout)
            except subprocess.TimeoutExpired:
                return TIMED_OUT
            finally:
                process.kill()
                process.wait()

    def _variables(self, folder: Path) -> dict[str, str]:
        paths = [SITE, folder / "python", self.megatron, self.checkout]
        paths += [self.environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
        env = {name: value for name, value in os.environ.items() if name not in REMOVED}
        env |= ENVIRONMENT | {
            MARK: uuid.uuid4().hex,
            "RAY_TMPDIR": str(folder),  # Ray writes below its folder "ray"
            "TMPDIR": str(folder / "tmp"),
            # SGLang takes Ray's GPU number for a NUMA node and wants the cores of each: all of them, for 16.
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join([f"0-{(os.cpu_count() or 1) - 1}"] * 16),
        }
        env |= self.environment
        env["PYTHONPATH"] = os.pathsep.join(str(path) for path in paths if path)
        return around_proxies(env)


def _fill(folder: Path) -> None:
    """Makes the short-lived folder of a run, with this package and nothing that is installed beside it."""
    folder.mkdir(mode=0o700)
    for part in ("python", "ray", "tmp"):
        (folder / part).mkdir()
    (folder / "python/slime_ext").symlink_to(PACKAGE)


def _without_blanks(python: Path, folder: Path) -> Path:
    """The interpreter; by a link in the run's folder where its path has a blank.

    Ray starts workers by that path in a shell, unquoted, and waits for ever for those that did not start.
    """
    if not any(map(str.isspace, str(python))):
        return python
    (folder / "env").symlink_to(python.parents[1])
    return folder / "env/bin" / python.name


def check_megatron(host: Path, megatron: Path) -> None:
    """Raises ConfigError if the host asks for an argument of Megatron-LM by a name that this one lacks.

    slime up to v0.2.4 compares `norm_epsilon`, which Megatron-LM has renamed; later ones know both names.
    """
    older, newer = "norm_epsilon", "layernorm_epsilon"
    files = [f for kind in HOSTS for f in host.glob(f"{kind}/**/arguments.py")]
    asked = {name for file in files for name in (older, newer) if f'"{name}"' in file.read_text()}
    configuration = megatron / "megatron/core/transformer/transformer_config.py"
    if asked == {older} and configuration.is_file() and f"    {newer}:" in configuration.read_text():
        raise ConfigError(
            f"--host {host}: expected a host that knows Megatron-LM's {newer}, got one that asks for "
            f"{older}: give the Megatron-LM of its release with --megatron DIR, or take --host miles"
        )


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise as Ctrl-C does; further signals are ignored until the end.

    Ignored signals, as under nohup, stay ignored. Does nothing in a thread, which gets no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.getsignal(number) for number in ENDING}
    former = {number: handler for number, handler in former.items() if handler != signal.SIG_IGN}

    def end(number: int, frame: object) -> None:
        for each in former:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    for number in former:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def around_proxies(env: Mapping[str, str]) -> dict[str, str]:
    """The variables with loopback around proxies, and without SOCKS, for which the clients lack a package."""
    kept = {
        name: value
        for name, value in env.items()
        if not (name.lower().endswith("_proxy") and value.lower().startswith("socks"))
    }
    said = f"{env.get('no_proxy', '')},{env.get('NO_PROXY', '')}".replace(" ", "").split(",")
    named = "*" if "*" in said else ",".join(dict.fromkeys([*LOOPBACK, *filter(None, said)]))
    return kept | {"no_proxy": named, "NO_PROXY": named}


def main(argv: list[str]) -> int:
    """The command line; prints where the log is, and returns the host's exit status, 128 + n for signal n."""
    parser = argparse.ArgumentParser(prog="python -m slime_ext.tools.without_cuda.driver")
    add = parser.add_argument
    add("--host", required=True, help="'miles' for the wheel, or the folder of a checkout")
    add("--async", dest="asynchronous", action="store_true", help="train_async.py")
    add("--megatron", type=Path, help="a checkout of Megatron-LM; default: the wheel's")
    add("--gpus", type=int, default=4, help="GPUs that each Ray node counts")
    add("--nodes", type=int, default=1, help="Ray nodes, all on this machine")
    add("--timeout", type=float, default=DEFAULT_TIMEOUT_S, help="seconds")
    add("--out", type=Path, default=Path("runs/host"), help="folder of the run, with its log")
    end = argv.index("--") if "--" in argv else len(argv)
    given = parser.parse_args(argv[:end])
    for line in (*machine.notes(), f"log in {given.out / 'log'}"):
        print(f"slime-ext: {line}", flush=True)
    try:
        status = HostRun(flags=argv[end + 1 :], **vars(given)).run()
    except SlimeExtError as error:
        print(f"slime-ext: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    print(f"slime-ext: exit status {status}")
    if status:
        print(f"slime-ext: {host_log.ending(status, given.out / 'log')}", file=sys.stderr)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
