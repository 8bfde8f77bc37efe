"""``slime-ext train``: a task learned on the real host, without a GPU.

The host is miles from its wheel or a checkout of slime or miles, unedited; the flags are its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import slime_ext
from slime_ext.config.files import text_of
from slime_ext.errors import ConfigError, SlimeExtError, check_known, cut, shown
from slime_ext.host import contract
from slime_ext.tools.commands.script_flags import apart
from slime_ext.tools.folders import free_name, is_file, is_folder, new_folder
from slime_ext.tools.scripts.launch import WrittenFlag
from slime_ext_cpu import driver, host_log, machine, progress, tiny
from slime_ext_cpu.rehearsal import preflight
from slime_ext_cpu.stand_ins import HOSTS
from slime_ext_cpu.tasks import Task, letters, sums

TASKS: Mapping[str, Task] = {"sums": sums.TASK, "letters": letters.TASK}
ARGS, CORRECTION, CHECKPOINT, DUMP = "args.json", "correction.yaml", "checkpoint", "dump"
STEPS = "--num-steps-per-rollout"
LARGEST_SEED = 2**31 - 1
LATEST = "latest_checkpointed_iteration.txt"
MEASURE = "metrics_only"
GPUS = 4  # numbers to Ray
NO_END_S = 7 * 24 * 3600.0
START_S = 90  # until the first rollout
KINDS = {str: "a text", int: "a whole number", list: "a list"}  # of a run's arguments
DEFAULTS = {"task": "sums", "correction": "token_tis", "lag": 1, "seed": 1, "host": driver.WHEEL}


def main(argv: Sequence[str]) -> int:
    """Trains, and returns the exit status of the host, 0 when the run is complete.

    Raises:
        SlimeExtError: one line that says what is wrong, before anything is started where that is possible.
    """
    words, flags = apart(argv)
    given = command_line().parse_args(words, argparse.Namespace(flags=flags))
    for name in (*DEFAULTS, "out"):
        if given.load and (value := getattr(given, name)) is not None:
            raise ConfigError(
                f"--{name}: expected none beside --load, got {value}: a run goes on with its own"
            )
    with driver.ended_by_signals():
        return _go_on(given) if given.load else _begin(given)


def command_line() -> argparse.ArgumentParser:
    """Returns the flags of the command."""
    parser = argparse.ArgumentParser(
        prog="slime-ext train",
        description="Trains a model on the real miles (or a checkout of slime or miles) without a GPU.",
        epilog="Words behind -- are flags of the host, and count over ours.",
    )
    add = parser.add_argument
    tasks = "; ".join(f"{name}: {task.what}" for name, task in TASKS.items())
    add("--task", choices=TASKS, help=f"{tasks}; default: {DEFAULTS['task']}")
    add(
        "--correction",
        metavar="NAME|YAML",
        help=f"a preset, or a file of --custom-config-path; default: {DEFAULTS['correction']}",
    )
    add(
        "--lag",
        type=_count,
        metavar="K",
        help=f"rollouts between two pushes of weights; above 1 train_async.py; default: {DEFAULTS['lag']}",
    )
    add("--rollouts", type=_count, help="how many; default: the task's")
    add("--seed", type=_seed, help=f"default: {DEFAULTS['seed']}")
    add("--threads", type=_count, help="of trainer and engine each; default: the task's")
    add("--host", help="'miles' for the wheel, the default, or the folder of a checkout")
    add("--out", type=Path, help="folder of the run; default: a new one below runs")
    add("--load", type=Path, metavar="RUN", help="go on with a run at its last checkpoint")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return int(text)


def _seed(text: str) -> int:
    if (number := _count(text)) > LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"expected a seed of at most {LARGEST_SEED}, got {text}")
    return number


def _begin(given: argparse.Namespace) -> int:
    """A new run, in a folder of its own."""
    for name, value in DEFAULTS.items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    if given.host and given.host != driver.WHEEL:
        given.host = str(Path(given.host).absolute())  # --load may be called elsewhere
    given.flags = _whole_paths(given.flags)
    correction = _correction(given.correction)
    _check_flags(given.flags, given.host, TASKS[given.task])
    if given.out and is_file(given.out / ARGS):
        raise ConfigError(
            f"--out: expected a new folder, got {given.out} with a run in it: name another, or go on with "
            f"slime-ext train --load {given.out}"
        )
    out = new_folder(given.out, Path("runs", given.task))
    task = TASKS[given.task]
    args = {
        **{name: getattr(given, name) for name in (*DEFAULTS, "flags")},
        "num_rollout": given.rollouts or task.rollouts,
        "threads": given.threads,
        "slime_ext": slime_ext.__version__,
    }
    run = _host_run(args, out)
    run.check()
    print(_plan(args, task, out), flush=True)
    (out / CORRECTION).write_text(correction)
    (out / ARGS).write_text(json.dumps(args, indent=2) + "\n")
    return _run(args, run)


def _go_on(given: argparse.Namespace) -> int:
    """The rest of a run, in its folder."""
    out = given.load
    if not is_file(out / ARGS):
        raise ConfigError(f"--load: expected the folder of a run, got {out}: it has no {ARGS}")
    if not (out / CHECKPOINT / LATEST).is_file():
        raise ConfigError(
            f"--load: expected a checkpoint in {out / CHECKPOINT}, got none: start the run anew"
        )
    args = _args_of(out / ARGS)
    args["num_rollout"] = given.rollouts or args["num_rollout"]
    args["threads"] = given.threads or args.get("threads")
    given.flags = _whole_paths(given.flags)
    _check_flags(given.flags, args["host"], TASKS[args["task"]])
    run = _host_run(args, out)
    run.check()
    if (log := out / "log").exists():
        log.rename(free_name(log))  # the host's next log does not overwrite it
    print(f"slime-ext: going on with {out} to rollout {args['num_rollout']}", flush=True)
    saved = str((out / CHECKPOINT).absolute())
    args["flags"] = [*args["flags"], "--load", saved, "--override-opt-param-scheduler", *given.flags]
    return _run(args, run)


def _args_of(path: Path) -> dict[str, Any]:
    """What a run's file says of it.

    Raises:
        ConfigError: it is damaged.
    """
    text = text_of(str(path))
    try:
        args = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}: expected JSON, got an error: {error}: start the run anew") from None
    for name, example in {**DEFAULTS, "flags": [], "num_rollout": 1}.items():
        value = args.get(name) if isinstance(args, dict) else None
        if not isinstance(value, type(example)):
            wanted = KINDS[type(example)]
            raise ConfigError(f"{path}: {name}: expected {wanted}, got {shown(value)}: start the run anew")
    check_known(f"{path}: task", "task", args["task"], TASKS)
    return dict(args)


def _host_run(args: Mapping[str, Any], out: Path) -> driver.HostRun:
    """The run, but for its flags: those name files that are written when the rest has been checked."""
    task = TASKS[args["task"]]
    environment = machine.KEEP_MEMORY | {
        "OMP_NUM_THREADS": str(args.get("threads") or task.threads),
        "TENSORBOARD_DIR": str(out.absolute() / "tensorboard"),
        driver.INSTALL: progress.__name__,
        progress.FILE: str(out.absolute() / progress.TRACKED),
    }
    return driver.HostRun(
        args["host"],
        out,
        asynchronous=args["lag"] > 1,
        gpus=GPUS,
        timeout=NO_END_S,
        environment=environment,
        room=task.room,
    )


def _steps(task: Task, words: Sequence[str]) -> int:
    """Optimizer steps of a rollout: the host's last word on them, of the task's flags and those behind --.

    Raises:
        ConfigError: it is no number.
    """
    flags = [part for word in (*task.flags, *words) for part in word.split("=", word.startswith(f"{STEPS}="))]
    text = [after for word, after in pairwise([*flags, ""]) if word == STEPS][-1]
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"-- {STEPS}: expected a whole number of at least 1, got {cut(text) or 'none'}")
    return int(text)


def _whole_paths(words: Sequence[str]) -> list[str]:
    """Words behind -- with relative paths of files and folders made whole: the host runs in another folder.

    Raises:
        ConfigError: --load names no folder; the host would train the model as it was, and say nothing.
    """
    found = [
        str(path.absolute()) if "/" in word and (is_file(path) or is_folder(path)) else word
        for word, path in ((word, Path(word)) for word in words)
    ]
    for flag, word in pairwise(found):
        if flag == "--load" and not is_folder(Path(word)):
            raise ConfigError(f"-- --load: expected a folder with a checkpoint, got none at {cut(word)}")
    return found


def _check_flags(words: Sequence[str], host: str, task: Task) -> None:
    """Raises ConfigError at a flag behind -- that the host's parser does not have: slime passes over it."""
    _steps(task, words)
    if not words:
        return
    places = (driver.wheel_folder(), *([] if host == driver.WHEEL else [Path(host)]))
    packages = [place / name for place in places for name in HOSTS if (place / name).is_dir()]
    known = preflight.known_flags(packages[-1], driver.wheel_folder() / "megatron")
    given = [WrittenFlag(word.partition("=")[0]) for word in words if word.startswith("--")]
    for flag, near in preflight.unknown_flags(given, known):
        hint = f"; did you mean {near}?" if near else ""
        raise ConfigError(f"-- {flag.name}: expected a flag of the host, got one that it does not have{hint}")


def _correction(name: str) -> str:
    """What --custom-config-path is given: a file's own text, or a preset's three keys, and for one that
    centers the function that asks for the sampler's head.

    Raises:
        ConfigError: neither a file nor a preset, or a file that is wrong.
    """
    from slime_ext.presets import NAMES, get  # imports torch, which takes two seconds
    from slime_ext.tools.check.answer import check_file

    if name.endswith((".yaml", ".yml")):
        text = text_of(name, f"--correction {name}")
        check_file(name)
        return text
    check_known("--correction", "preset", name, NAMES)
    switch = "get_mismatch_metrics" if name == MEASURE else "use_tis"
    keys = {switch: "true", "custom_tis_function_path": f"{contract.TIS}.{name}", **contract.OURS}
    centers = ("custom_generate_function_path",) if get(name).center is not None else ()
    ours = ("custom_tis_function_path", "custom_megatron_init_path", *centers, switch)
    return "".join(f"{key}: {keys[key]}\n" for key in ours)


def _plan(args: Mapping[str, Any], task: Task, out: Path) -> str:
    """What will be done, and for how long."""
    minutes = (START_S + args["num_rollout"] * task.rollout_s) / 60
    host = "miles of the package index" if args["host"] == driver.WHEEL else args["host"]
    lag = f", weights pushed every {args['lag']} rollouts" if args["lag"] > 1 else ""
    lines = [
        f"{task.what}: {args['num_rollout']} rollouts, {args['correction']}{lag}",
        f"on {host}, with its Ray, SGLang and Megatron-LM: about {minutes:.0f} min on two idle cores, no GPU",
        f"run in {out}; the host's log: {out / 'log'}",
        *machine.notes(),
    ]
    return "\n".join(f"slime-ext: {line}" for line in lines)


def _run(args: Mapping[str, Any], run: driver.HostRun) -> int:
    """Runs the host to the end; says how the run ended, and what to do next."""
    task, out = TASKS[args["task"]], Path(run.out)
    folder = out.absolute()
    with _saying_how_to_go_on(out), machine.room_or_one_line(out):
        flags = [*_flags(args, task, folder, task.write(folder, args["seed"])), *args["flags"]]
        steps = _steps(task, args["flags"])
        began = time.monotonic()
        watched = progress.Progress(folder, args["num_rollout"], steps, _say)
        with progress.shown(watched):
            status = replace(run, flags=flags).run()
        if status:
            raise SlimeExtError(f"{host_log.ending(status, folder / 'log')}: log in {out / 'log'}")
    _say_end(out, (time.monotonic() - began) / 60)
    return 0


FLAGS = """
--hf-checkpoint {model} --ref-load {model} --prompt-data {folder}/train.jsonl --input-key input
--label-key label --rollout-shuffle --rollout-temperature 1
--actor-num-nodes 1 --actor-num-gpus-per-node 1 --num-gpus-per-node {gpus}
--eval-prompt-data heldout {folder}/heldout.jsonl --eval-temperature 0 --n-samples-per-eval-prompt 1
--eval-interval {eval_every} --num-rollout {num_rollout} --seed {seed} --rollout-seed {seed}
--custom-config-path {folder}/{correction} --dump-details {folder}/{dump} --save {folder}/{checkpoint}
--save-interval {save_every} --use-tensorboard --tb-project-name slime_ext --tb-experiment-name {name}
"""


def _flags(args: Mapping[str, Any], task: Task, folder: Path, model: Path) -> list[str]:
    """The host's flags; of two of one name the last counts."""
    values = {
        **{"model": model, "folder": folder, "name": folder.name, "gpus": GPUS, "seed": args["seed"]},
        **{"correction": CORRECTION, "dump": DUMP, "checkpoint": CHECKPOINT, "save_every": task.save_every},
        "num_rollout": args["num_rollout"],
        "eval_every": _eval_every(args["num_rollout"], task.eval_every),
    }
    return [
        *tiny.cpu_flags(),
        *tiny.engine_flags(task.context, concurrency=task.concurrency),
        *tiny.GRPO,
        *task.flags,
        *(word.format(**values) for word in FLAGS.split()),
        *(("--update-weights-interval", str(args["lag"])) if args["lag"] > 1 else ()),
    ]


def _eval_every(rollouts: int, wanted: int) -> int:
    """The divisor of `rollouts` nearest to `wanted`, or itself, so that the last rollout is evaluated.

    >>> [_eval_every(n, 6) for n in (24, 25, 40, 23)]
    [6, 5, 5, 23]
    """
    near = [n for n in range(1, rollouts + 1) if rollouts % n == 0 and wanted / 2 <= n <= 2 * wanted]
    return min(near, key=lambda n: abs(n - wanted), default=rollouts)


@contextlib.contextmanager
def _saying_how_to_go_on(out: Path) -> Iterator[None]:
    """Adds to the line that ends a run what to do next."""
    try:
        yield
    except (SlimeExtError, KeyboardInterrupt, SystemExit) as error:
        is_saved = (out / CHECKPOINT / LATEST).is_file()
        how = f"go on with slime-ext train --load {out}" if is_saved else "no checkpoint yet: start it anew"
        if isinstance(error, SlimeExtError):
            raise SlimeExtError(f"{error}; {how}") from None
        print(f"slime-ext train: ended before the host was: {how}", file=sys.stderr)
        raise


def _say(line: str) -> None:
    print(f"slime-ext: {line}", flush=True)


def _say_end(out: Path, minutes: float) -> None:
    """Says the reward from -> to, the picture, and the next command."""
    from slime_ext.tools.report.run_picture import draw

    picture = out / "report.png"
    draw([str(out)], picture)
    _say(f"{_learned(progress.read(out))}; {minutes:.1f} min; picture: {picture}")
    _say(f"next: slime-ext analyze {out / DUMP}")


def _learned(rows: Sequence[Mapping[str, Any]]) -> str:
    """The first and the last held-out reward, or reward of a rollout, and when each was measured.

    >>> _learned([{"rollout": -1, "eval/heldout": 0.0}, {"rollout": 15, "eval/heldout": 0.703}])
    'eval/heldout 0.000 before training -> 0.703 after rollout 16'
    >>> _learned([{"rollout": 0}, {"rollout": 7, "eval/heldout": 0.205}])  # train_async.py
    'eval/heldout 0.205 after rollout 8 (none before training)'
    """
    heldout = [row for row in rows if row.get(progress.HELDOUT) is not None]
    name = progress.HELDOUT if heldout else progress.REWARD
    measured = heldout or [row for row in rows if row.get(name) is not None]
    if not measured:
        return f"no {name} in {progress.METRICS}"
    shown = [f"{row[name]:.3f} {_when(row['rollout'], name)}" for row in measured]
    from_to = " -> ".join([shown[0], *shown[1:][-1:]])
    lacks_first = name == progress.HELDOUT and measured[0]["rollout"] != progress.BEFORE
    return f"{name} {from_to}{' (none before training)' if lacks_first else ''}"


def _when(rollout: int, name: str) -> str:
    if rollout == progress.BEFORE:
        return "before training"
    return f"{'after' if name == progress.HELDOUT else 'in'} rollout {rollout + 1}"
