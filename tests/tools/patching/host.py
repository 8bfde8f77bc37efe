"""A small host in the shape of slime's current one, and one in the shape of its first supported release.
Written for these tests: only the shapes are the host's."""

from __future__ import annotations

LOSS = '''\
"""Losses."""


def policy_loss_function(args, batch, logits, reducer):
    _, log_probs_and_entropy = get_log_probs_and_entropy(logits, args=args)
    log_probs = torch.cat(log_probs_and_entropy["log_probs"])  # rebound
    if args.use_tis:
        tis_kwargs = {
            "args": args,
            "pg_loss": pg_loss,
            "train_log_probs": batch["log_probs"],
            "rollout_log_probs": batch["rollout_log_probs"],
            "loss_masks": batch["loss_masks"],
            "total_lengths": batch["total_lengths"],
            "response_lengths": batch["response_lengths"],  # ünïcode
        }
        pg_loss, masks, metrics = tis_func(**tis_kwargs)
    return pg_loss
'''
LOSS_FILE = "slime/backends/megatron_utils/loss.py"
CONVERT = """\
    def _convert_samples_to_train_data(self, samples):
        if self.convert is not None:
            return self.convert(samples)
        train_data = {"tokens": [s.tokens for s in samples]}
        return train_data
"""
SPLIT = "    def _split_train_data_by_dp(self, data):"
WHITELIST = """
        for key in [
            "tokens",
            "loss_masks",
            "sample_indices",
            "rollout_log_probs",
        ]:
            rollout_data[key] = data[key]
        return rollout_data
"""
LOG = """
def log_rollout_data(rollout_id, args, rollout_data):
    ignored = {
        "tokens",
        "loss_masks",
        "sample_indices",
    }
    return {key: sum(value) for key, value in rollout_data.items() if key not in ignored}
"""
STEP = """
def train_one_step(args, iterator):
    def forward_step(iterator):
        return get_batch(
            iterator,
            [
                "tokens",
                "loss_masks",
                "advantages",
                "rollout_log_probs",
            ],
        )
"""
NEW = {
    LOSS_FILE: LOSS,
    "slime/observability/train_metric_utils.py": LOG,
    "slime/backends/megatron_utils/model.py": STEP,
    "slime/backends/megatron_utils/data.py": "def get_batch(): ...\n",
    "slime/ray/rollout.py": f"class RolloutManager:\n{CONVERT}\n{SPLIT}{WHITELIST}",
    "slime/utils/data.py": "def process_rollout_data(args, ref):\n    return ref\n",
}
FIRST = {
    LOSS_FILE: LOSS.replace("_, log_probs_and_entropy", "log_probs_and_entropy"),
    "slime/backends/megatron_utils/data.py": LOG.replace("{\n", "[\n").replace("    }\n", "    ]\n"),
    "slime/backends/megatron_utils/model.py": STEP,
    "slime/ray/rollout.py": f"class RolloutController:\n{CONVERT}",
    "slime/utils/data.py": f"def process_rollout_data(args, ref):\n    if ref:{WHITELIST}",
}
HOSTS = {"new": NEW, "first": FIRST, "crlf": {file: text.replace("\n", "\r\n") for file, text in NEW.items()}}


def make(folder, files):
    """Writes a host's files under ``folder`` and gives the folder."""
    for file, text in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return folder


def contents(folder):
    """file -> bytes, of everything under ``folder``."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".git" not in path.parts
    }
