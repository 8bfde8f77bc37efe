"""Runs slime or miles, unedited, on a machine without CUDA, in separate processes."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import slime_ext
from slime_ext.errors import ConfigError, check_known
from slime_ext.tools.folders import make_folder, working_folder
from slime_ext_cpu import host_log, machine
from slime_ext_cpu.install import how_to_install
from slime_ext_cpu.processes import MARK, guarded
from slime_ext_cpu.stand_ins import bfloat16
from slime_ext_cpu.stand_ins.hosts import (
    FIRST_PORT,
    LOWEST_PORT,
    ROUND,
    SCORE,
    SCORES,
    UNROUNDED,
)

PACKAGES = (Path(slime_ext.__file__).parent, Path(__file__).parent)
SITE = Path(__file__).with_name("site")
CHILD = "slime_ext_cpu.host_process"
WHEEL = "miles"
INSTALL = "SLIME_EXT_INSTALL"  # names modules whose `install` every process calls (site/sitecustomize.py)
OPEN_FILES = 4096  # per process: a rank opens 200, Ray's raylet opens more with every worker
TIMED_OUT = 124  # the status of `timeout` from coreutils
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
    # The tracker removes what killed processes leave. Its warning would be the last line of the log.
    "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker",
    "WANDB_MODE": "disabled",
    "SLIME_HOST_IP": "127.0.0.1",  # by default the hosts listen on the machine's public address
    "MILES_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",  # by default gloo resolves the machine's name, perhaps to another address
    "TP_SOCKET_IFNAME": "lo",
    # These devices do not exist: CUDA sees none, but Ray may still hand their numbers to workers.
    "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(1000, 1016))),
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # for pyarrow: fork_server.py needs a single thread
    "SPT_NOENV": "1",  # otherwise Ray's process titles overwrite the mark by which processes.py finds them
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray listens on the loopback address only
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_raylet_start_wait_time_s": "90",  # Ray's default of 30 s is too short on a busy machine
    "RAY_prestart_worker_first_driver": "0",  # prestarted workers import for seconds, and no actor uses them
    "RAY_enable_worker_prestart": "0",
    "RAY_worker_niceness": "0",  # at Ray's default of 15, other work starves the trainer but not the engine
}
COMPUTING = (ROUND, SCORE, bfloat16.VARIABLE)  # variables of a user that change what a run computes
# Variables that a run does not inherit. The first two would forbid compiled files, without which each of
# seven processes imports for 30 s. RAY_ADDRESS would join the Ray of another run.
REMOVED = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONHOME", "RAY_ADDRESS", "VIRTUAL_ENV")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def wheel_folder() -> Path:
    """Returns the folder of this environment that contains miles and its Megatron-LM.

    Raises:
        ConfigError: the environment has no such folder.
    """
    folder = Path(sys.prefix, WHEEL)
    if not (folder / "miles").is_dir():
        raise ConfigError(
            f"host environment: expected the wheel of miles in {sys.prefix}, got none: {how_to_install()}"
        )
    return folder


@dataclass(frozen=True)
class HostRun:
    """A run of slime or miles. Each run has a separate Ray, so several can run at once.

    Attributes:
        host: "miles" for the wheel that `install.py` installs, or the folder of a checkout of slime or miles,
            whose train.py is run.
        out: folder of the run, and its working directory; the log is OUT/log.
        flags: the host's command line.
        asynchronous: whether to run train_async.py instead of train.py.
        gpus: how many GPUs Ray counts; none has to exist.
        timeout: seconds after which the run is ended with status 124.
        environment: additional variables; its PYTHONPATH comes after ours.
        room: bytes that the run needs in `out`.
    """

    host: str | Path
    out: str | Path
    flags: Sequence[str] = ()
    asynchronous: bool = False
    gpus: int = 4
    timeout: float = DEFAULT_TIMEOUT_S
    environment: Mapping[str, str] = field(default_factory=dict)
    room: int = machine.ROOM

    def check(self) -> None:
        """Makes the folder of the run and checks what the run needs. Starts and writes nothing else.

        Raises:
            ConfigError: the host environment or the host's train.py is missing, SLIME_EXT_ROUND,
                SLIME_EXT_SCORE or SLIME_EXT_BFLOAT16 is unknown, a disk has no room, or another run writes
                to the folder.
        """
        working_folder()
        wheel_folder()
        if rounding := (os.environ | self.environment).get(ROUND):
            from slime_ext_cpu.rounding import ROUNDINGS

            check_known(ROUND, "format", rounding, ROUNDINGS)
        if kind := (os.environ | self.environment).get(bfloat16.VARIABLE):
            check_known(bfloat16.VARIABLE, "type", kind, bfloat16.TYPES)
        self._check_score()
        script = "train_async.py" if self.asynchronous else "train.py"
        if self.checkout and not (self.host and (self.checkout / script).is_file()):
            got = self.checkout if self.host else "none"
            raise ConfigError(
                f"--host: expected 'miles' or a folder with {script}, got {got}: check the path"
            )
        out = Path(self.out).absolute()
        make_folder(out)
        machine.check_room(out, self.room)
        host_log.check_unused(out / "log")

    def _check_score(self) -> None:
        if not (score := (os.environ | self.environment).get(SCORE)):
            return
        check_known(SCORE, "score", score, SCORES)
        if score == "both" and self.checkout:
            raise ConfigError(
                f"{SCORE}: expected served with a checkout, got both: give --host miles, because the loop of "
                "a checkout scores only once"
            )
        if score == "both" and self.asynchronous:
            raise ConfigError(
                f"{SCORE}: expected served with --lag above 1, got both: unset {SCORE}, because its pushes "
                "would change the weights in the middle of an answer"
            )

    @property
    def checkout(self) -> Path | None:
        """Returns the host's folder, or None for the wheel."""
        return None if str(self.host) == WHEEL else Path(self.host).absolute()

    def run(self) -> int:
        """Runs the host to its end and returns its exit status. No process of the run outlives this call.

        SIGTERM and SIGHUP raise SystemExit, and SIGINT raises KeyboardInterrupt, once all processes of the
        run have ended.

        Raises:
            ConfigError: `check` raises it.
        """
        self.check()
        _raise_open_files()
        out, folder = Path(self.out).absolute(), machine.TEMPORARY / f"slime-ext-{secrets.token_hex(4)}"
        settings = {"host": str(self.checkout or WHEEL), "asynchronous": self.asynchronous, "gpus": self.gpus}
        env = self._variables(folder)
        with ended_by_signals(), host_log.opened(out / "log") as log, guarded(env[MARK], folder):
            _fill(folder)
            python = _without_blanks(Path(sys.executable), folder)
            process = subprocess.Popen(
                ["env", "-C", str(out), str(python), "-m", CHILD, json.dumps(settings), *self.flags],
                env=env,
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
        paths = [SITE, folder / "python", self.checkout]
        paths += [self.environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
        env = {name: value for name, value in os.environ.items() if name not in REMOVED}
        env |= ENVIRONMENT | {
            MARK: uuid.uuid4().hex,
            FIRST_PORT: str(LOWEST_PORT + 100 * (os.getpid() % 120)),  # runs at the same time get other ports
            "RAY_TMPDIR": str(folder),  # Ray writes below its subfolder "ray"
            "TMPDIR": str(folder / "tmp"),
            UNROUNDED: str(folder / "unrounded"),
            # SGLang reads Ray's GPU number as a NUMA node and wants a list of cores for each node. We list
            # all cores for each of 16 nodes.
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join([f"0-{(os.cpu_count() or 1) - 1}"] * 16),
        }
        env |= self.environment
        env["PYTHONPATH"] = os.pathsep.join(str(path) for path in paths if path)
        return around_proxies(env)


def _fill(folder: Path) -> None:
    """Makes the temporary folder of a run, with links to our packages only.

    On PYTHONPATH the folder above a package would also add everything that is installed next to it.
    """
    folder.mkdir(mode=0o700)
    for part in ("python", "ray", "tmp"):
        (folder / part).mkdir()
    for package in PACKAGES:
        (folder / "python" / package.name).symlink_to(package)


def _without_blanks(python: Path, folder: Path) -> Path:
    """Returns a path of the interpreter without blanks. It is a link if the interpreter's own path has some.

    Ray starts workers with that path in a shell, without quotes, and waits forever if they do not start.
    """
    if not any(map(str.isspace, str(python))):
        return python
    (folder / "env").symlink_to(python.parents[1])
    return folder / "env/bin" / python.name


def _raise_open_files() -> None:
    """Lets this process and its children open OPEN_FILES files, if the system permits so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES, hard), hard))


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into exceptions inside the block, as Python does with Ctrl-C.

    After the first signal, further ones are ignored until the block ends. Signals that were already ignored,
    for example by nohup, stay ignored.
    """
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
    """Returns the variables so that clients bypass proxies for loopback addresses.

    SOCKS proxies are removed, because the clients lack the package that they need for them.
    """
    kept = {
        name: value
        for name, value in env.items()
        if not (name.lower().endswith("_proxy") and value.lower().startswith("socks"))
    }
    addresses = f"{env.get('no_proxy', '')},{env.get('NO_PROXY', '')}".replace(" ", "").split(",")
    named = "*" if "*" in addresses else ",".join(dict.fromkeys([*LOOPBACK, *filter(None, addresses)]))
    return kept | {"no_proxy": named, "NO_PROXY": named}
