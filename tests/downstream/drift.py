"""Which doors, keywords and fields of a host's tree fit what this package works by, and what is new in it.

    python -m tests.downstream.drift DIR [DIR ...]

Ten lines for each tree, read off its source; nothing of it is imported. Status 1 where a door does not fit.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from slime_ext.host import contract, hosts
from slime_ext.host.rollout_data import KEYS, OF_CALL

# What slime from v0.2.0 to 2e5cd7c and miles to 1718d16 have beside what we read.
PASSED = (*contract.REQUIRED, *contract.OPTIONAL, "max_seq_lens", "weight_versions", "parallel_state")
STEP = (
    *(*hosts.LEADING[hosts.STEP], "optimizer", "opt_param_scheduler", "num_microbatches"),
    *("step_global_batch_size", "microbatch_pbar", "num_rollouts", "witness_info", "attempt"),
    "ft_test_action_executor",
)
FIELDS = (
    *("tokens", "multimodal_train_inputs", "packed_seq_params", "ref_log_probs", "values", "returns"),
    *("teacher_log_probs", "witness_ids", "opd_reverse_kl", "partition", *KEYS),
    *("rollout_topk_token_ids", "rollout_topk_log_probs", "loss_weights", "target_tokens"),
    "rollout_top_p_log_probs",
)
NEWS = {  # word of a policy loss -> what it brings
    "get_pg_loss_type": "--pg-loss-type",
    "use_score_centering": "--use-score-centering",
    "dynamic_cp_size": "--dynamic-context-parallel (refused)",
    "TensorRef": "fields of rollout data on disk",
    "loss_fn": "a client's own loss (Tinker): not measured",
    "score_centering_loss_function": "--loss-type score_centering: not measured",
}
Names = Sequence[str]


@dataclass(frozen=True)
class Found:
    """A function of a tree, and where it is."""

    module: str
    node: ast.FunctionDef
    tree: ast.Module

    @property
    def parameters(self) -> list[str]:
        arguments = self.node.args
        return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


@dataclass(frozen=True)
class Tree:
    """A host's source."""

    folder: Path

    @cached_property
    def texts(self) -> dict[str, str]:
        """Module -> its text, of every package of the tree that has a ``backends`` room."""
        rooms = {path.parent for path in self.folder.glob("*/backends")}
        paths = [path for room in sorted(rooms) for path in sorted(room.rglob("*.py"))]
        return {self._module(path): path.read_text("utf-8", "ignore") for path in paths}

    def _module(self, path: Path) -> str:
        parts = path.relative_to(self.folder).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def defining(self, name: str) -> Found | None:
        """The function of a name that fits best; None where the tree has none at a module's top."""
        found = []
        for module, text in self.texts.items():
            if f"\ndef {name}(" in text:
                tree = ast.parse(text)
                nodes = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
                found += [Found(module, node, tree) for node in nodes]
        wanted = list(hosts.LEADING.get(name, ()))
        return max(found, key=lambda f: f.parameters[: len(wanted)] == wanted, default=None)

    @property
    def loss(self) -> Found | None:
        return self.defining(hosts.LOSS)

    @property
    def step(self) -> Found | None:
        return self.defining(hosts.STEP)

    @property
    def iterator(self) -> str:
        """The module of the class whose micro-batches are read ahead; empty where there is none."""
        found = (m for m, text in self.texts.items() if "def get_next(" in text and "self.offset" in text)
        return next(found, "")

    def has(self, word: str) -> bool:
        """Whether any module says it."""
        return any(word in text for text in self.texts.values())

    def says(self, name: str) -> bool:
        """Whether any module has it as a whole name, not as a part of a longer one."""
        return any(re.search(rf"\b{name}\b", text) for text in self.texts.values())


def door(tree: Tree, name: str) -> tuple[bool, str]:
    """A door, and whether it fits."""
    found, wanted = tree.defining(name), hosts.LEADING[name]
    if found is None:
        return False, f"no function of that name in {len(tree.texts)} modules of {tree.folder}"
    got = tuple(found.parameters[: len(wanted)])
    if got != wanted:
        return False, f"{found.module}: expected ({', '.join(wanted)}, ...), got ({', '.join(got)})"
    return True, f"{found.module}({', '.join(wanted)}, ...)"


def looked_up(tree: Tree) -> tuple[bool, str]:
    """Whether the policy loss takes its log-probs from a global of its own module."""
    ok, text = door(tree, hosts.TARGET)
    loss = tree.loss
    if not ok or loss is None:
        return ok, text
    names = {node.id for node in ast.walk(loss.node) if isinstance(node, ast.Name)}
    is_global = hosts.TARGET in names
    return is_global, f"{text}, {'' if is_global else 'not '}looked up by {loss.module}"


def keywords(tree: Tree) -> tuple[bool, str]:
    """The keywords of the hook call."""
    loss = tree.loss
    made = [
        node.value
        for node in ast.walk(loss.node if loss else ast.Module([], []))
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "tis_kwargs"
    ]
    passed = [key.value for value in made for key in value.keys if isinstance(key, ast.Constant)]
    return compared(passed, contract.REQUIRED, PASSED, "keywords")


def parameters(tree: Tree) -> tuple[bool, str]:
    """The parameters of the train step."""
    found = tree.step
    return compared(found.parameters if found else [], (*STEP[:5], "num_microbatches"), STEP, "parameters")


def fields(tree: Tree) -> tuple[bool, str]:
    """The fields that the train step's module asks its iterator for, the most at once."""
    found = tree.step
    lists = (n for n in ast.walk(found.tree) if isinstance(n, ast.List)) if found else ()
    texts = [[e.value for e in one.elts if isinstance(e, ast.Constant)] for one in lists]
    asked = max((one for one in texts if "loss_masks" in one), key=len, default=[])
    read = [OF_CALL[name] for name in contract.REQUIRED[2:]]
    return compared(asked, read, FIELDS, "fields")


def compared(got: Names, wanted: Names, known: Names, what: str) -> tuple[bool, str]:
    """Whether all that we read is there, and what is new beside it."""
    missing, new = [n for n in wanted if n not in got], [n for n in got if n not in known]
    text = f"{len(got)} {what}" + (f", without {', '.join(missing)}" if missing else "")
    return not missing, text + (f"; new: {', '.join(new)}" if new else "")


def iterator(tree: Tree) -> tuple[bool, str]:
    """The class whose micro-batches are read ahead."""
    if tree.iterator:
        return True, f"{tree.iterator}: offset and get_next: can be read ahead"
    return False, "no class with offset and get_next: nothing couples the samples of a step here"


def updaters(tree: Tree) -> tuple[bool, str]:
    """The classes that count pushes."""
    names = []
    for text in tree.texts.values():
        if "self.weight_version" in text and "def update_weights(" in text:
            names += [n.name for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and _counts(n)]
    return bool(names), ", ".join(sorted(set(names))) or "none: no ages, no certificate"


def _counts(cls: ast.ClassDef) -> bool:
    makes = [n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    return any("self.weight_version" in ast.unparse(make) for make in makes)


def facts(tree: Tree) -> tuple[bool, str]:
    """What is read off the text at start-up."""
    skips = tree.has("can_reuse_log_probs_in_loss") or tree.has("skip_actor_forward_only")
    package = next(iter(tree.texts), "").partition(".")[0]
    files = (tree.folder / package).rglob("*.py")
    carried = any('train_data["weight_versions"]' in path.read_text("utf-8", "ignore") for path in files)
    return True, (
        f"proximal log-probs {'may be skipped' if skips else 'always there'}; weight versions "
        f"{'reach the trainer' if carried else 'stay in the rollout manager'}"
    )


def news(tree: Tree) -> tuple[bool, str]:
    """What its loss can do that releases did not."""
    found = [text for word, text in NEWS.items() if tree.says(word)]
    return True, ", ".join(found) or "nothing"


LINES: dict[str, Callable[[Tree], tuple[bool, str]]] = {
    hosts.LOSS: lambda tree: door(tree, hosts.LOSS),
    hosts.TARGET: looked_up,
    hosts.STEP: lambda tree: door(tree, hosts.STEP),
    "hook call": keywords,
    "train step": parameters,
    "its batches": fields,
    "data iterator": iterator,
    "weight pushes": updaters,
    "facts": facts,
    "new": news,
}


def report(folder: Path) -> Iterator[tuple[bool, str]]:
    """Whether each line's subject fits, and the line."""
    tree = Tree(folder.resolve())
    for name, look in LINES.items():
        fits, text = look(tree)
        yield fits, f"{'fits' if fits else 'NOT '}  {name}: {text}"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints ten lines for each tree."""
    parser = argparse.ArgumentParser(prog="python -m tests.downstream.drift", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="a checkout, or site-packages")
    status = 0
    for folder in parser.parse_args(argv).folders:
        print(folder)
        for fits, line in report(folder):
            status |= not fits
            print(f"  {line}")
    return status


if __name__ == "__main__":
    sys.exit(main())
