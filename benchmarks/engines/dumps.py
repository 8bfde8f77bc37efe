"""Makes two dumps per sampling setting with SGLang: a healthy one, and one with the setting.

    python -m benchmarks.engines dumps                      # in the environment of `make train`
    python -m benchmarks.engines dumps --keep FOLDER        # keeps the dumps
    python -m benchmarks.engines dumps --record             # writes dumps.yaml

SGLang samples in bfloat16, and transformers computes the trainer's log-probs of the same tokens in
bfloat16. The table says what ``slime-ext check`` says of the launch, what ``slime-ext analyze`` finds in both
dumps, and k3. It exits with status 1 if a row differs from dumps.yaml.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.engines import model, sglang
from benchmarks.engines.model import Answer, Trainer
from benchmarks.engines.rows import findings, line
from benchmarks.engines.settings import BIASED, LONGEST, ORIGINAL, SETTINGS, Setting
from slime_ext.errors import SlimeExtError
from slime_ext.rules import of_engines
from slime_ext.rules.rule import HINT, HOST, REFUSE, WARN
from slime_ext.tools.check.lines import line_of
from slime_ext.tools.check.run import check_launch
from slime_ext.tools.launch.read import read_script

RECORDED = Path(__file__).with_name("dumps.yaml")
VERBS = {REFUSE: "refuses", HOST: "refuses", WARN: "warns", HINT: "hints"}
SAME = 2.0  # factor by which k3 of two runs may differ, since answers are random
LAUNCH = (
    "python3 train.py --rollout-batch-size 16 --n-samples-per-prompt 8 --global-batch-size 128 --use-tis "
    "--custom-tis-function-path slime_ext.tis.token_tis --custom-megatron-init-path slime_ext.host.init"
)
FUNCTION = "async def generate(args, sample, sampling_params):\n    sampling_params['temperature'] = 0.7\n"


@dataclass(frozen=True)
class Planted:
    """A launch with a setting that the trainer does not know of.

    Args:
        flags: what the setting adds to the launch.
        trained_at: the temperature that the trainer divides logits by.
        function: the source of a user's function for --custom-generate-function-path.
    """

    setting: Setting
    flags: str = ""
    trained_at: float = 1.0
    function: str = ""

    @property
    def title(self) -> str:
        """The name of the row."""
        return f"{self.setting.text}, set by a generate function" if self.function else self.setting.text


def _preferred(**params: object) -> str:
    return f"--sglang-preferred-sampling-params '{json.dumps(params)}'"


def _of(name: str, flags: str, **more: Any) -> Planted:
    return Planted(SETTINGS[name], flags, **more)


PLANTED = {
    "temperature": _of("temperature", "--custom-generate-function-path sampled.generate", function=FUNCTION),
    "greedy": _of("greedy", "--rollout-temperature 0"),
    "top_p": _of("top_p", "--rollout-top-p 0.8"),
    "top_k": _of("top_k", "--rollout-top-k 20"),
    "min_p": _of("min_p", _preferred(min_p=0.1)),
    "repetition_penalty": _of("repetition_penalty", _preferred(repetition_penalty=1.2)),
    "frequency_penalty": _of("frequency_penalty", _preferred(frequency_penalty=0.5)),
    "presence_penalty": _of("presence_penalty", _preferred(presence_penalty=0.5)),
    "logit_bias": _of("logit_bias", _preferred(logit_bias={str(BIASED): 3.0})),
    "minimum": _of("minimum", _preferred(min_new_tokens=LONGEST)),
    "minimum_exceeded": Planted(
        Setting("minimum length of 8, which answers exceed", SETTINGS["minimum"].parameters, minimum=8),
        _preferred(min_new_tokens=8),
    ),
    "regex": _of("regex", _preferred(regex="[a-z ]+")),
    "original": Planted(
        Setting("temperature 0.7, SGLANG_RETURN_ORIGINAL_LOGPROB=1", {"temperature": 0.7}, original=True),
        "--rollout-temperature 0.7",
        trained_at=0.7,
    ),
    "original_penalty": _of("original_penalty", _preferred(presence_penalty=0.5)),
}


@dataclass(frozen=True)
class Row:
    """What is known before the launch and after it.

    Args:
        check: the engine's rules in what ``check`` says of the launch; it ``asks`` for the host's checkout.
        healthy: what ``analyze`` finds in a dump without the setting, errors and warnings.
        analyze: what it finds in the dump with the setting.
        k3: mean of r - 1 - log r over the tokens of both dumps; r is trainer / recorded.
    """

    check: tuple[str, ...]
    healthy: tuple[str, ...]
    analyze: tuple[str, ...]
    k3_healthy: float
    k3: float

    def agrees(self, other: Row) -> bool:
        """Whether two runs say the same."""
        less, more = sorted((self.k3, other.k3))
        names = [(row.check, row.healthy, row.analyze) for row in (self, other)]
        return names[0] == names[1] and more <= SAME * less


def said(planted: Planted) -> tuple[str, ...]:
    """Returns what ``check`` says about the engine, such as ``warns: rule``."""
    with tempfile.TemporaryDirectory(prefix="slime-ext-engines-") as folder:
        script = Path(folder, "run.sh")
        variables = f"export {of_engines.ORIGINAL}=1\n" if planted.setting.original else ""
        script.write_text(f"{variables}{LAUNCH} {planted.flags}\n")
        Path(folder, "sampled.py").write_text(planted.function)
        try:
            verdict = check_launch(read_script(str(script)))
            lines = [(VERBS[line.rule.severity], line) for line in verdict.broken if line.rule]
            lines += [("asks", line) for line in verdict.unasked if line.rule]
        except SlimeExtError as error:
            lines = [("refuses", line_of(error))]
    names = [(verb, line.rule.name) for verb, line in lines if line.rule]
    return tuple(f"{verb}: {name}" for verb, name in names if hasattr(of_engines, name))


def measure(folder: Path) -> Iterator[tuple[str, Row]]:
    """Yields a row per setting. Leaves the dumps ``healthy_T.jsonl`` and ``SETTING.jsonl`` in a folder."""
    model.write(folder / "model")
    trainer = Trainer(folder / "model", torch.bfloat16)
    healthy: dict[float, tuple[tuple[str, ...], float]] = {}
    for is_original in (False, True):
        variables = ORIGINAL if is_original else {}
        with sglang.served(folder / "model", folder / "log", ("--dtype", "bfloat16"), variables) as url:
            for temperature in () if is_original else sorted({each.trained_at for each in PLANTED.values()}):
                plain = Setting("", {"temperature": temperature})
                dump = folder / f"healthy_{temperature:g}.jsonl"
                healthy[temperature] = _judged(dump, sglang.sampled(url, plain), trainer, temperature)
            for name, planted in PLANTED.items():
                if planted.setting.original == is_original:
                    answers = sglang.sampled(url, planted.setting)
                    names, k3 = _judged(folder / f"{name}.jsonl", answers, trainer, planted.trained_at)
                    yield name, Row(said(planted), healthy[planted.trained_at][0], names,
                                    healthy[planted.trained_at][1], k3)  # fmt: skip


def _judged(
    dump: Path, answers: Sequence[Answer], trainer: Trainer, temperature: float
) -> tuple[tuple[str, ...], float]:
    """Writes a dump, and returns what ``analyze`` finds in it, and its k3."""
    lines, ratios = [], []
    for number, answer in enumerate(answers):
        values = trainer.log_probs(answer, temperature).gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
        ratios.append(values.double() - torch.tensor(answer.recorded, dtype=torch.float64))
        lines.append(line(number, answer, values.tolist()))
    dump.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    ratio = torch.cat(ratios)
    return findings(dump), float(f"{(ratio.expm1() - ratio).mean().item():.1g}")


def read() -> dict[str, Row]:
    """Returns the recorded rows."""
    content = yaml.safe_load(RECORDED.read_text())
    return {
        name: Row(**{key: tuple(value) if isinstance(value, list) else value for key, value in row.items()})
        for name, row in content["rows"].items()
    }


def table(rows: Mapping[str, Row]) -> str:
    """Returns the rows as a table in Markdown."""
    head = ("planted", "check before", "analyze after", "k3", "analyze, healthy", "k3, healthy")
    lines = [head, ("---",) * len(head)]
    for name, row in rows.items():
        words = [
            ", ".join(f"`{each}`" for each in names) or "-" for names in (row.check, row.analyze, row.healthy)
        ]
        k3, healthy = f"{row.k3:.0e}", f"{row.k3_healthy:.0e}"
        lines.append((PLANTED[name].title, words[0], words[1], k3, words[2], healthy))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main(keep: Path | None, record: bool) -> int:
    """Prints the table. Returns 1 if a row differs from the recorded one."""
    with tempfile.TemporaryDirectory(prefix="slime-ext-engines-") as temporary:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rows = dict(measure(folder))
    print(table(rows))
    if record:
        content = {"version": sglang.release(), "rows": {name: _plain(row) for name, row in rows.items()}}
        text = yaml.safe_dump(content, sort_keys=False)
        RECORDED.write_text(f"# Written by `python -m benchmarks.engines dumps --record`.\n{text}")
        return 0
    recorded = read()
    differing = [name for name, row in rows.items() if name not in recorded or not row.agrees(recorded[name])]
    for name in differing:
        print(f"{name}: expected {recorded.get(name)}, got {rows[name]}", file=sys.stderr)
    return bool(differing)


def _plain(row: Row) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(row).items()}
