"""Rehearses real launch scripts of slime and miles, and copies with one planted mistake each.

    python -m benchmarks.rehearsals --hosts ../shared/hosts --out runs/rehearsals [--only NAME ...]
    [--table]

HOSTS contains the checkouts (slime-624b824, slime-v0.3.1, miles-31f1ca9). A case adds a line to
OUT/results.jsonl when it ends. A case with a line is not run again. --table prints the lines as the table of
benchmarks/RESULTS.md and runs nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.lines import complete, read

SLIME, PAST, MILES = "slime-624b824", "slime-v0.3.1", "miles-31f1ca9"
PLAIN = f"{SLIME}/scripts/run-qwen3-4B.sh"
TIS = f"{SLIME}/examples/train_infer_mismatch_helper/run-qwen3-4b-mis.sh"

GENERATE = """
from slime.rollout.sglang_rollout import generate as host_generate

async def generate(args, sample, sampling_params):
    sample = await host_generate(args, sample, sampling_params)
    {}
    return sample
"""
SHIFTED = "sample.rollout_log_probs = [*sample.rollout_log_probs[1:], sample.rollout_log_probs[-1]]"
SPOILT = "sample.rollout_log_probs[3] = float('nan')"
FORGOTTEN = "sample.rollout_log_probs = None"
REWARD = """
async def reward(args, sample, **kwargs):
    return float(sample.metadata["answer"] == sample.response)
"""
REWARD_FLAG = ("--rm-type deepscaler", "--custom-rm-path planted.reward")
GENERATE_FLAG = ("--use-tis", "--use-tis --custom-generate-function-path planted.generate")
OURS = """use_tis: true
custom_tis_function_path: slime_ext.tis.correct
custom_megatron_init_path: slime_ext.host.init
slime_ext:
  preset: decoupled_geo_rs
  guards: {kept_fraction: {minimum: 0.1}}
"""


@dataclass(frozen=True)
class Case:
    """A script, and the mistake that is planted into a copy of it.

    Args:
        script: path of the script below HOSTS.
        edits: (text, replacement) in the script, which contains each text once.
        files: additional files beside the copy.
        flags: flags of `slime-ext rehearse`; {hosts} and {here} stand for folders.

    """

    name: str
    script: str
    edits: tuple[tuple[str, str], ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()


ROWS = '{"question": "What is 1 + 1?", "answer": "2"}\n' * 8
REAL = [
    Case("qwen3-4B", PLAIN),
    Case("qwen3-4b-mis", TIS),
    Case("glm4-9B", f"{SLIME}/scripts/run-glm4-9B.sh"),
    Case("qwen2.5-0.5B-reproducibility", f"{SLIME}/scripts/run-qwen2.5-0.5B-reproducibility.sh"),
    Case("moonlight-16B-A3B", f"{SLIME}/scripts/run-moonlight-16B-A3B.sh"),
    Case("qwen3-4B-base-sft", f"{SLIME}/scripts/run-qwen3-4B-base-sft.sh"),
    Case("kimi-k2-Instruct", f"{SLIME}/scripts/run-kimi-k2-Instruct.sh"),
    Case("glm5.2-744B", f"{PAST}/scripts/run-glm5.2-744B-A40B.sh"),
    Case("qwen3-next-80B", f"{PAST}/scripts/run-qwen3-next-80B-A3B.sh"),
    Case("miles qwen3_4b", f"{MILES}/scripts/run_qwen3_4b.py"),
    Case("miles glm47_flash", f"{MILES}/scripts/run_glm47_flash.py"),
    Case("miles qwen3_30b_a3b", f"{MILES}/scripts/run_qwen3_30b_a3b.py"),
    Case("the tiny task", str(Path("examples/rehearse_tiny.sh").absolute()), flags=("--host", "miles")),
    Case("qwen3-4B on the miles wheel", PLAIN, flags=("--host", "miles")),
]
DATA = ("/root/dapo-math-17k/dapo-math-17k.jsonl", "{here}/rows.jsonl")
MODEL = ("--hf-checkpoint /root/Qwen3-4B\n", "--hf-checkpoint {tiny}\n")
MIS = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
NEVER = (
    ("-- python3 train.py", "-- python3 train_async.py"),
    ("   --colocate \\\n", "   --rollout-num-gpus 8 --update-weights-interval 1000 \\\n"),
)
OWN = (("examples/train_infer_mismatch_helper/mis.yaml", "{here}/ours.yaml"), (MIS, "slime_ext.tis.correct"))
PROMPTS = '{"prompt": "abc>", "label": "abc"}\n' * 8
TWICE = ("   --use-tis\n", "   --use-tis\n   --use-rollout-logprobs\n")
PLANTED = [
    Case("misspelt flag", TIS, (("--custom-tis-function-path", "--custom-tis-funtion-path"),)),
    Case("wrong hook path", TIS, (("mis.compute_mis_weights_with_cp", "mis.compute_mis_weight"),)),
    Case("batches that do not divide", PLAIN, (("--global-batch-size 256", "--global-batch-size 96"),)),
    Case("lost backslash", PLAIN, (("   ${CKPT_ARGS[@]} \\", "   ${CKPT_ARGS[@]}"),)),
    Case("data key missing", PLAIN, (DATA,), {"rows.jsonl": ROWS}),
    Case("no chat template", PLAIN, (DATA, MODEL), {"rows.jsonl": PROMPTS}),
    Case("wrong key of a guard", TIS, OWN, {"ours.yaml": OURS}),
    Case("TIS with --use-rollout-logprobs", TIS, (TWICE,)),
    Case("reward function that raises", PLAIN, (REWARD_FLAG,), {"planted.py": REWARD}),
    Case("log-probs shifted by one", TIS, (GENERATE_FLAG,), {"planted.py": GENERATE.format(SHIFTED)}),
    Case("NaN log-probs", TIS, (GENERATE_FLAG,), {"planted.py": GENERATE.format(SPOILT)}),
    Case("no log-probs", TIS, (GENERATE_FLAG,), {"planted.py": GENERATE.format(FORGOTTEN)}),
    Case("weights never pushed", PLAIN, NEVER),
]


def run(case: Case, hosts: Path, out: Path) -> dict[str, object]:
    """Runs a case and returns its line: printed text, exit status and seconds."""
    here = out / case.name.replace(" ", "_")
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir(parents=True)
    script = _planted(case, hosts, here)
    flags = [flag.format(hosts=hosts, here=here) for flag in case.flags]
    if case.edits and "--host" not in flags:
        flags += ["--host", str(hosts / Path(case.script).parts[0])]
    began = time.monotonic()
    command = [sys.executable, "-m", "slime_ext", "rehearse", str(script), "--out", str(here / "run"), *flags]
    path = os.pathsep.join([str(Path.cwd()), str(here)])
    environment = os.environ | {"PYTHONPATH": path, "MASTER_ADDR": "127.0.0.1"}
    environment |= {"BASE_DIR": "/data", "BASE_FOLDER": "/data"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    (here / "page.txt").write_text(done.stdout + done.stderr)
    page = here / "run/page.json"
    lines = json.loads(page.read_text())["lines"] if page.exists() else []
    said = [f"{line['name']}: {line['text']}" for line in lines if line["state"] == "WRONG"]
    if not lines:
        said = [done.stderr.strip().removeprefix("slime-ext rehearse: ")]
    for folder in (here, hosts, Path.cwd()):
        said = [text.replace(f"{folder}/", "") for text in said]
    return {
        "case": case.name,
        "script": case.script.removeprefix(f"{Path.cwd()}/"),
        "status": done.returncode,
        "seconds": round(time.monotonic() - began, 1),
        "ran": bool(lines),
        "ok": sum(line["state"] == "ok" for line in lines),
        "said": said,
    }


def _planted(case: Case, hosts: Path, here: Path) -> Path:
    """Returns the path of the script, or of a copy with the edits."""
    script = hosts / case.script
    if not case.edits:
        return script
    text, tiny = script.read_text(), Path("configs/tiny/model").absolute()
    for before, after in case.edits:
        assert before in text, f"{case.name}: {before!r} is not in {case.script}"
        text = text.replace(before, after.replace("{here}", str(here)).replace("{tiny}", str(tiny)))
    for name, content in case.files.items():
        (here / name).write_text(content)
    copy = here / script.name
    copy.write_text(text)
    return copy


def table(lines: list[dict[str, object]]) -> str:
    """Returns the lines as a table in Markdown."""
    rows = ["| case | status | ok | seconds | what it said |", "| --- | ---: | ---: | ---: | --- |"]
    for line in lines:
        said = "<br>".join(line["said"]).replace("|", "\\|").replace("\n", "<br>") or "-"
        ok = f"{line['ok']} of 10" if line["ran"] else "before Ray"
        rows.append(f"| {line['case']} | {line['status']} | {ok} | {line['seconds']:.0f} | {said} |")
    return "\n".join(rows)


def main() -> None:
    """Runs the cases that have no line yet, or prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=Path, default=Path("../shared/hosts"))
    parser.add_argument("--out", type=Path, default=Path("runs/rehearsals"))
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    out, hosts = options.out.absolute(), options.hosts.absolute()
    cases = {case.name: functools.partial(run, case, hosts, out) for case in (*REAL, *PLANTED)}
    if not options.table:
        asked = {name: case for name, case in cases.items() if options.only is None or name in options.only}
        complete(out / "results.jsonl", "case", asked)
    done = read(out / "results.jsonl", "case")
    print(table([done[name] for name in cases if name in done]))


if __name__ == "__main__":
    main()
