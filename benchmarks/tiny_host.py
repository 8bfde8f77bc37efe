"""Prepares the tiny task for a real host: flags for slime and miles, and rollouts."""

from __future__ import annotations

import json
from pathlib import Path

from slime_ext_cpu import tiny
from slime_ext_cpu.tasks import letters

FLAGS = """
--hf-checkpoint {folder}/model --ref-load {folder}/model --prompt-data {folder}/train.jsonl --input-key input
--label-key label --custom-rm-path slime_ext_cpu.tiny.reward --rollout-shuffle
--rollout-temperature 1 --rollout-batch-size {prompts} --n-samples-per-prompt {samples}
--rollout-max-response-len 5 --num-rollout {rollouts} --num-steps-per-rollout {steps} --micro-batch-size 16
--lr 1e-3 --lr-decay-style constant --entropy-coef 0.0
--actor-num-nodes 1 --actor-num-gpus-per-node 1 --num-gpus-per-node 4
""".split()


def flags(folder: Path, prompts: int = 8, samples: int = 8, rollouts: int = 2, steps: int = 2) -> list[str]:
    """Returns the flags for GRPO on the task in a folder that `letters.write` made.

    Each of the `rollouts` has `prompts` x `samples` responses.
    """
    values = {"folder": folder, "prompts": prompts, "samples": samples, "rollouts": rollouts, "steps": steps}
    words = [word.format(**values) for word in FLAGS]
    return [*tiny.cpu_flags(), *letters.MODEL, *tiny.GRPO, *words]


def write_rollouts(
    folder: Path,
    out: Path,
    rollouts: int = 2,
    prompts: int = 8,
    samples: int = 8,
    noise: float = 0.1,
    seed: int = 0,
) -> None:
    """Writes rollouts in the hosts' dump format, for --load-debug-rollout-data OUT/{rollout_id}.pt.

    No engine runs. Every token is drawn from the model itself.

    Args:
        folder: the folder that `letters.write` made.
        noise: standard deviation of behavior log-probs - the model's log-probs, nats.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    generator = torch.Generator().manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    for rollout in range(rollouts):
        taken = [row for row in rows[rollout * prompts : (rollout + 1) * prompts] for _ in range(samples)]
        tokens = torch.tensor([tokenizer(row["input"])["input_ids"] for row in taken])
        tokens, log_probs = _sample(model, tokens, 5, generator)
        log_probs += noise * torch.randn(log_probs.shape, generator=generator)
        lengths = torch.randint(1, 6, (len(taken),), generator=generator).tolist()
        records = [
            _record(i, i // samples, row, t[: t.numel() - 5 + n], p[:n], tokenizer)
            for i, (row, t, p, n) in enumerate(zip(taken, tokens, log_probs, lengths, strict=True))
        ]
        torch.save({"rollout_id": rollout, "samples": records}, out / f"{rollout}.pt")


def _sample(model: object, tokens: object, count: int, generator: object) -> tuple[object, object]:
    """Draws `count` more tokens.

    Maps tokens [B, P] to tokens [B, P + count], and the log-probs [B, count] of the new tokens.
    """
    import torch

    drawn = []
    for _ in range(count):
        with torch.no_grad():
            log_probs = model(tokens).logits[:, -1].log_softmax(-1)
        token = torch.multinomial(log_probs.exp(), 1, generator=generator)
        drawn.append(log_probs.gather(1, token))
        tokens = torch.cat([tokens, token], 1)
    return tokens, torch.cat(drawn, 1)


def _record(index: int, group: int, row: dict, tokens: object, log_probs: object, tokenizer: object) -> dict:
    """Returns one sample in the form of the hosts' Sample.to_dict."""
    length = log_probs.numel()
    text = tokenizer.decode(tokens[-length:])
    return {
        "group_index": group,
        "index": index,
        "prompt": row["input"],
        "tokens": tokens.tolist(),
        "response": text,
        "response_length": length,
        "label": row["label"],
        "rollout_log_probs": log_probs.tolist(),
        "weight_versions": ["1"],
        "reward": sum(a == b for a, b in zip(text, row["label"], strict=False)) / 4,
        "status": "completed",
        "metadata": {},
    }
