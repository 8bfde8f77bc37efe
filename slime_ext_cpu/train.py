"""Runs ``slime-ext train``: a model learns a task on the real host, without a GPU.

The host is miles from its wheel or a checkout of slime or miles, unedited and with its own flags.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import slime_ext
from slime_ext.config.files import text_of
from slime_ext.errors import ConfigError, SlimeExtError, check_known, cut, quoted
from slime_ext.hosts import contract
from slime_ext.tools.commands.script_flags import apart
from slime_ext.tools.folders import free_name, is_file, is_folder, new_folder
from slime_ext.tools.launch.launch import WrittenFlag
from slime_ext_cpu import driver, host_log, machine, progress, shortcuts, tiny
from slime_ext_cpu.rehearsal import preflight
from slime_ext_cpu.stand_ins import HOSTS, bfloat16
from slime_ext_cpu.tasks import Task, letters, sums

TASKS: Mapping[str, Task] = {"sums": sums.TASK, "letters": letters.TASK}
ARGS, CORRECTION, CHECKPOINT, DUMP = "args.json", "correction.yaml", "checkpoint", "dump"
STEPS = "--num-steps-per-rollout"
LARGEST_SEED = 2**31 - 1
LATEST = "latest_checkpointed_iteration.txt"
MEASURE = "metrics_only"
# By default the hosts pad a micro-batch to a multiple of 128 tokens. The padding is a sequence, to whose
# length packed attention pads all others. Without it attention sums in another order.
UNPADDED = ("--data-pad-size-multiplier", "1")
GPUS = 4  # Ray counts them; none has to exist
NO_END_S = 7 * 24 * 3600.0
START_S = 90  # seconds until the first rollout, at `machine.GFLOPS`
KINDS = {str: "a text", int: "a whole number", list: "a list"}  # how messages name the types in args.json
DEFAULTS = {"task": "sums", "correction": "token_tis", "lag": 1, "seed": 1, "host": driver.WHEEL}


def main(argv: Sequence[str]) -> int:
    """Trains, and returns the host's exit status, which is 0 if the run is complete.

    Raises:
        SlimeExtError: something is wrong. Most mistakes are found before anything starts.
    """
    words, flags = apart(argv)
    options = command_line().parse_args(words, argparse.Namespace(flags=flags))
    for name in (*DEFAULTS, "out"):
        if options.load and (value := getattr(options, name)) is not None:
            raise ConfigError(
                f"--{name}: expected none beside --load, got {value}: remove it, because a run keeps its own"
            )
    with driver.ended_by_signals():
        return _go_on(options) if options.load else _begin(options)


def command_line() -> argparse.ArgumentParser:
    """Returns the flags of the command."""
    parser = argparse.ArgumentParser(
        prog="slime-ext train",
        description="Trains a model on the real miles (or a checkout of slime or miles) without a GPU.",
        epilog="Words after -- are flags of the host, and override ours.",
    )
    add = parser.add_argument
    tasks = "; ".join(f"{name}: {task.what}" for name, task in TASKS.items())
    add("--task", choices=TASKS, help=f"{tasks}; default: {DEFAULTS['task']}")
    add(
        "--correction",
        metavar="NAME|YAML",
        help=f"a preset, or a file for --custom-config-path; default: {DEFAULTS['correction']}",
    )
    add(
        "--lag",
        type=_count,
        metavar="K",
        help=f"rollouts per push of weights; above 1 uses train_async.py; default: {DEFAULTS['lag']}",
    )
    add("--rollouts", type=_count, help="number of rollouts; default: the task's")
    add("--seed", type=_seed, help=f"seed of model, prompts and samples; default: {DEFAULTS['seed']}")
    add(
        "--threads",
        type=_count,
        help="threads for the trainer, and as many for the engine; default: the task's",
    )
    add("--host", help="'miles' for the wheel, which is the default, or the folder of a checkout")
    add("--out", type=Path, help="folder of the run; default: a new folder below runs")
    add("--load", type=Path, metavar="RUN", help="resume a run from its last checkpoint")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text}")
    return int(text)


def _seed(text: str) -> int:
    if (number := _count(text)) > LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"expected a seed of at most {LARGEST_SEED}, got {text}")
    return number


def _begin(options: argparse.Namespace) -> int:
    """Runs a new run in a new folder."""
    for name, value in DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.host and options.host != driver.WHEEL:
        options.host = str(Path(options.host).absolute())  # --load may be called elsewhere
    options.flags = _whole_paths(options.flags)
    correction = _correction(options.correction)
    _check_flags(options.flags, options.host, TASKS[options.task])
    if options.out and is_file(options.out / ARGS):
        raise ConfigError(
            f"--out: expected a new folder, got {options.out} with a run in it: name another folder, or "
            f"resume with {_program()} train --load {options.out}"
        )
    out = new_folder(options.out, Path("runs", options.task))
    task = TASKS[options.task]
    args = {
        **{name: getattr(options, name) for name in (*DEFAULTS, "flags")},
        "num_rollout": options.rollouts or task.rollouts,
        "threads": options.threads,
        "num_steps_per_rollout": _steps(task, options.flags),  # slime-ext analyze reads this and the next
        "update_weights_interval": options.lag,
        "slime_ext": slime_ext.__version__,
    }
    run = _host_run(args, out)
    run.check()
    print(_plan(args, task, out), flush=True)
    (out / CORRECTION).write_text(correction)
    (out / ARGS).write_text(json.dumps(args, indent=2) + "\n")
    return _run(args, run)


def _go_on(options: argparse.Namespace) -> int:
    """Resumes a run in its folder."""
    out = options.load
    if not is_file(out / ARGS):
        raise ConfigError(f"--load: expected the folder of a run, got {out}: it has no {ARGS}")
    if not (out / CHECKPOINT / LATEST).is_file():
        raise ConfigError(
            f"--load: expected a checkpoint in {out / CHECKPOINT}, got none: start the run anew"
        )
    args = _args_of(out / ARGS)
    args["num_rollout"] = options.rollouts or args["num_rollout"]
    args["threads"] = options.threads or args.get("threads")
    options.flags = _whole_paths(options.flags)
    _check_flags(options.flags, args["host"], TASKS[args["task"]])
    run = _host_run(args, out)
    run.check()
    if (log := out / "log").exists():
        log.rename(free_name(log))  # the host's next log does not overwrite it
    print(f"slime-ext: resuming {out}, up to rollout {args['num_rollout']}", flush=True)
    saved = str((out / CHECKPOINT).absolute())
    args["flags"] = [*args["flags"], "--load", saved, "--override-opt-param-scheduler", *options.flags]
    return _run(args, run)


def _args_of(path: Path) -> dict[str, Any]:
    """Reads the arguments of a run from its file.

    Raises:
        ConfigError: the file is damaged.
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
            raise ConfigError(f"{path}: {name}: expected {wanted}, got {quoted(value)}: start the run anew")
    check_known(f"{path}: task", "task", args["task"], TASKS)
    return dict(args)


def _host_run(args: Mapping[str, Any], out: Path) -> driver.HostRun:
    """Returns the run without its flags. They name files that are written after the checks."""
    task = TASKS[args["task"]]
    installed = [progress, shortcuts] if args["host"] == driver.WHEEL else [progress]
    environment = machine.KEEP_MEMORY | {
        "OMP_NUM_THREADS": str(args.get("threads") or task.threads),
        "TENSORBOARD_DIR": str(out.absolute() / "tensorboard"),
        driver.INSTALL: " ".join(module.__name__ for module in installed),
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
    """Returns the optimizer steps of a rollout: the last value that a flag gives.

    Raises:
        ConfigError: the value is no number.
    """
    flags = [part for word in (*task.flags, *words) for part in word.split("=", word.startswith(f"{STEPS}="))]
    text = [after for word, after in pairwise([*flags, ""]) if word == STEPS][-1]
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"-- {STEPS}: expected a whole number of at least 1, got {cut(text) or 'none'}")
    return int(text)


def _whole_paths(words: Sequence[str]) -> list[str]:
    """Makes relative paths after -- absolute, because the host runs in another folder.

    Raises:
        ConfigError: --load does not name a folder. The host would silently train the original model.
    """
    absolute = [
        str(path.absolute()) if "/" in word and (is_file(path) or is_folder(path)) else word
        for word, path in ((word, Path(word)) for word in words)
    ]
    for flag, word in pairwise(absolute):
        if flag == "--load" and not is_folder(Path(word)):
            raise ConfigError(f"-- --load: expected a folder with a checkpoint, got none at {cut(word)}")
    return absolute


def _check_flags(words: Sequence[str], host: str, task: Task) -> None:
    """Raises ConfigError if the host lacks a flag after --, because slime would ignore it."""
    _steps(task, words)
    if not words:
        return
    places = (driver.wheel_folder(), *([] if host == driver.WHEEL else [Path(host)]))
    packages = [place / name for place in places for name in HOSTS if (place / name).is_dir()]
    known = preflight.known_flags(packages[-1], driver.wheel_folder() / "megatron")
    flags = [WrittenFlag(word.partition("=")[0]) for word in words if word.startswith("--")]
    for flag, near in preflight.unknown_flags(flags, known):
        hint = f"; did you mean {near}?" if near else ": remove it"
        raise ConfigError(f"-- {flag.name}: expected a flag of the host, got a flag that it lacks{hint}")


def _correction(name: str) -> str:
    """Returns the text of the file for --custom-config-path.

    For a file, this is its own text. For a preset, these are three keys; a preset that centers also gets the
    function that asks for the sampler's head.

    Raises:
        ConfigError: the name is neither a file nor a preset, or the file is wrong.
    """
    from slime_ext.presets import find  # imports torch, which takes two seconds
    from slime_ext.tools.check.run import check_file

    if name.endswith((".yaml", ".yml")):
        text = text_of(name, f"--correction {name}")
        check_file(name)
        return text
    preset = find(name, "--correction")
    switch = "get_mismatch_metrics" if name == MEASURE else "use_tis"
    keys = {switch: "true", "custom_tis_function_path": f"{contract.TIS}.{name}", **contract.OURS}
    centers = ("custom_generate_function_path",) if preset.correction.center is not None else ()
    ours = ("custom_tis_function_path", "custom_megatron_init_path", *centers, switch)
    return "".join(f"{key}: {keys[key]}\n" for key in ours)


def _plan(args: Mapping[str, Any], task: Task, out: Path) -> str:
    """Says what the run will do, and how long that takes."""
    in_float32 = bfloat16.multiplies_in_float32()
    speed = machine.gflops(args["threads"] or task.threads, in_float32)
    minutes = (START_S + args["num_rollout"] * task.rollout_s) / 60 * machine.GFLOPS / speed
    how = "in float32" if in_float32 else "with its instructions"
    host = "miles of the package index" if args["host"] == driver.WHEEL else args["host"]
    lag = f", weights pushed every {args['lag']} rollouts" if args["lag"] > 1 else ""
    lines = [
        f"{task.what}: {args['num_rollout']} rollouts, {args['correction']}{lag}",
        f"on {host}, with its Ray, SGLang and Megatron-LM, without a GPU",
        f"about {minutes:.0f} min: this CPU computes bfloat16 {how}, now at {speed:.0f} GFLOPS",
        f"run in {out}; the host's log: {out / 'log'}",
        *machine.notes(),
    ]
    return "\n".join(f"slime-ext: {line}" for line in lines)


def _run(args: Mapping[str, Any], run: driver.HostRun) -> int:
    """Runs the host to its end. Says how it ended, and what to do next."""
    task, out = TASKS[args["task"]], Path(run.out)
    folder = out.absolute()
    with _saying_how_to_go_on(out), machine.room_or_one_line(out):
        flags = [*_flags(args, task, folder, task.write(folder, args["seed"])), *args["flags"]]
        steps = _steps(task, args["flags"])
        began = time.monotonic()
        watched = progress.Progress(folder, args["num_rollout"], steps, _say)
        with progress.following(watched):
            status = replace(run, flags=flags).run()
        if status:
            raise SlimeExtError(f"{host_log.ending(status, folder / 'log')}: log in {out / 'log'}")
    _say_end(out, args, (time.monotonic() - began) / 60)
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
    """Returns the host's flags. If a flag is there twice, the last one counts."""
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
        *(UNPADDED if bfloat16.is_widened() else ()),
        *(("--update-weights-interval", str(args["lag"])) if args["lag"] > 1 else ()),
    ]


def _eval_every(rollouts: int, wanted: int) -> int:
    """Returns the divisor of `rollouts` nearest to `wanted`, so that the last rollout is evaluated.

    Returns `rollouts` itself if no divisor is between half and twice `wanted`.

    >>> [_eval_every(n, 6) for n in (24, 25, 40, 23)]
    [6, 5, 5, 23]
    """
    near = [n for n in range(1, rollouts + 1) if rollouts % n == 0 and wanted / 2 <= n <= 2 * wanted]
    return min(near, key=lambda n: abs(n - wanted), default=rollouts)


@contextlib.contextmanager
def _saying_how_to_go_on(out: Path) -> Iterator[None]:
    """Adds what to do next to the line that ends a run."""
    try:
        yield
    except (SlimeExtError, KeyboardInterrupt, SystemExit) as error:
        is_saved = (out / CHECKPOINT / LATEST).is_file()
        how = (
            f"resume with {_program()} train --load {out}"
            if is_saved
            else "no checkpoint yet: start it again"
        )
        if isinstance(error, SlimeExtError):
            raise SlimeExtError(f"{error}; {how}") from None
        print(f"slime-ext train: stopped before the host ended: {how}", file=sys.stderr)
        raise


def _say(line: str) -> None:
    print(f"slime-ext: {line}", flush=True)


def _say_end(out: Path, args: Mapping[str, Any], minutes: float) -> None:
    """Prints the reward before and after, the picture, and the next command."""
    from slime_ext.tools.report.run_picture import draw

    picture = out / "report.png"
    draw([str(out)], picture, title=_title(args, progress.read(out)))
    _say(f"{_learned(progress.read(out))}; {minutes:.1f} min; picture: {picture}")
    _say(f"next: {_program()} analyze {out / DUMP}")


def _program() -> str:
    """Returns what to type for ``slime-ext``: the name if the PATH has this environment's, else its path."""
    script = Path(sys.executable).with_name("slime-ext")
    if not script.exists() or shutil.which("slime-ext") == str(script):
        return "slime-ext"
    return str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script)


def _title(args: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the title of the picture: model and task, correction and lag, and what was learned.

    >>> rows = [{"rollout": -1, "eval/heldout": 0.109}, {"rollout": 15, "eval/heldout": 0.594}]
    >>> print(_title({"task": "letters", "correction": "token_tis", "lag": 4}, rows))
    a model of 0.5 million random weights learns to copy four letters
    token_tis, lag 4: 11% -> 59% of the held-out questions
    """
    how = Path(args["correction"]).stem + (f", lag {args['lag']}" if args["lag"] > 1 else "")
    scores = [f"{row[progress.HELDOUT]:.0%}" for row in rows if row.get(progress.HELDOUT) is not None]
    learned = f": {' -> '.join([scores[0], *scores[1:][-1:]])} of the held-out questions" if scores else ""
    return f"{TASKS[args['task']].what}\n{how}{learned}"


def _learned(rows: Sequence[Mapping[str, Any]]) -> str:
    """Says the first and the last reward, and when each was measured. Prefers held-out rewards.

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
    texts = [f"{row[name]:.3f} {_when(row['rollout'], name)}" for row in measured]
    from_to = " -> ".join([texts[0], *texts[1:][-1:]])
    lacks_first = name == progress.HELDOUT and measured[0]["rollout"] != progress.BEFORE
    return f"{name} {from_to}{' (none before training)' if lacks_first else ''}"


def _when(rollout: int, name: str) -> str:
    if rollout == progress.BEFORE:
        return "before training"
    return f"{'after' if name == progress.HELDOUT else 'in'} rollout {rollout + 1}"
