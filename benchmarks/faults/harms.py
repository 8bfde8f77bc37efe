"""What is done to the files of a run: by code between engine and trainer, by whoever copies them."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import torch

Row = dict
Change = Callable[[int, Sequence[Row]], None]  # of the samples of a dump, by the rollout's number


def edited(change: Change, *kinds: str) -> Callable[[Path], None]:
    """A function that changes the samples of every dump in a folder, of rollout_data and train_data."""

    def harm(folder: Path) -> None:
        for kind in kinds or ("rollout_data", "train_data"):
            for path in (folder / kind).glob("*.pt"):
                content = torch.load(path, weights_only=True)
                change(content["rollout_id"], content["samples"])
                torch.save(content, path)

    return harm


def mask_all(rollout_id: int, rows: Sequence[Row]) -> None:
    """A mask of another length was inverted: nothing is trained on, from the third rollout on."""
    for row in rows if rollout_id >= 2 else ():
        for name in {"loss_mask", "loss_masks"} & row.keys():
            row[name] = torch.zeros_like(torch.as_tensor(row[name]))


def append_twice(rollout_id: int, rows: Sequence[Row]) -> None:
    """A generate function that appends to one list more than to the others, in half of the samples."""
    for row in rows[::2]:
        row["rollout_log_probs"] = torch.cat([row["rollout_log_probs"], row["rollout_log_probs"][-1:]])


def copy_samples(rollout_id: int, rows: Sequence[Row]) -> None:
    """A retry that keeps both: every eighth sample has the content of the one before."""
    for i in range(1, len(rows), 8):
        mine = {key: rows[i][key] for key in ("rollout_position", "sample_index", "index") if key in rows[i]}
        rows[i].update({**rows[i - 1], **mine})


def copy_column(rollout_id: int, rows: Sequence[Row]) -> None:
    """From the third rollout on the trainer takes the sampler's log-probs for its own."""
    for row in rows if rollout_id >= 2 else ():
        row["log_probs"] = row["rollout_log_probs"].clone()


def without_reward(rollout_id: int, rows: Sequence[Row]) -> None:
    """The service that gives rewards does not answer from the ninth rollout on."""
    for row in rows if rollout_id >= 8 else ():
        row.update({key: 0.0 for key in ("reward", "rewards", "local_raw_reward") if key in row})


def few_rows(folder: Path) -> None:
    """The engine samples rows that only pad the embedding."""
    rows = torch.load(folder / "rollout_data/0.pt", weights_only=True)["samples"]
    largest = max(max(row["tokens"][-row["response_length"] :]) for row in rows)
    (folder / "args.json").write_text(json.dumps({"vocab_size": largest}))


def rounded_pass(folder: Path) -> None:
    """Training scores in bfloat16, in batches of another shape than the log-prob pass."""
    samples = [
        {
            "train_log_probs": row["log_probs"].bfloat16().float(),
            "old_log_probs": row["log_probs"],
            "rollout_log_probs": row["rollout_log_probs"],
            "local_loss_mask": row["loss_masks"].float(),
        }
        for row in torch.load(folder / "train_data/0.pt", weights_only=True)["samples"]
    ]
    (folder / "policy_loss_debug").mkdir()
    torch.save({"samples": samples}, folder / "policy_loss_debug/rank_0_call_0.pt")


def as_lines(folder: Path) -> None:
    """The same as JSONL, which can say by token which weights sampled."""
    interleaved(folder, writers=1)


def interleaved(folder: Path, writers: int = 2) -> None:
    """Several writers append to one file of lines."""
    lines: list[list[str]] = [[] for _ in range(writers)]
    for path in sorted((folder / "train_data").glob("*.pt"), key=lambda path: int(path.stem)):
        content = torch.load(path, weights_only=True)
        sampled = torch.load(folder / "rollout_data" / path.name, weights_only=True)["samples"]
        for i, row in enumerate(content["samples"]):
            line = {"rollout_id": content["rollout_id"], "reward": row["local_raw_reward"]}
            line |= {
                key: row[key].tolist() for key in ("rollout_log_probs", "log_probs", "advantages", "tokens")
            }
            line["token_weight_versions"] = sampled[row["rollout_position"]].get("token_weight_versions")
            lines[i % writers].append(json.dumps(line))
    for kind in ("rollout_data", "train_data"):
        shutil.rmtree(folder / kind)
    (folder / "run.jsonl").write_text("\n".join(chain.from_iterable(lines)) + "\n")


def of_other_run(write: Callable[[Path], Path]) -> Callable[[Path], None]:
    """The train dumps are those of another run, which ``write`` writes into a folder."""

    def harm(folder: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="slime_ext_faults_") as other:
            shutil.rmtree(folder / "train_data")
            shutil.copytree(write(Path(other)) / "train_data", folder / "train_data")

    return harm
