"""Which doors, keywords and fields of a host's tree fit what this package works by, and what is new in it.

    python -m tests.downstream.drift DIR [DIR ...]

One line for each door, read off a tree's source; nothing is imported. Status 1 where a door does not fit.
A field or keyword that comes with ``*x`` or ``**x`` counts if the source says its name; else the line ends
with "not read" and the expression. What ``append`` or ``update`` adds later is not seen.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from slime_ext.host.rollout_data import KEYS, OF_CALL
from slime_ext.hosts import contract
from slime_ext.hosts.code import LEADING, LOSS, STEP, TARGET, TRAIN

# What slime from v0.2.0 to 2e5cd7c and miles to 1718d16 have beside what we read.
PASSED = (*contract.REQUIRED, *contract.OPTIONAL, "max_seq_lens", "weight_versions", "parallel_state")
STEP_PARAMETERS = (
    *(*LEADING[STEP], "optimizer", "opt_param_scheduler", "num_microbatches"),
    *("step_global_batch_size", "microbatch_pbar", "num_rollouts", "witness_info", "attempt"),
    "ft_test_action_executor",
)
FIELDS = (
    *("tokens", "multimodal_train_inputs", "packed_seq_params", "ref_log_probs", "values", "returns"),
    *("teacher_log_probs", "witness_ids", "opd_reverse_kl", "partition", *KEYS),
    *("rollout_topk_token_ids", "rollout_topk_log_probs", "loss_weights", "target_tokens"),
    *("rollout_top_p_log_probs", "rollout_top_p_token_ids", "rollout_top_p_token_offsets"),
)
NEWS = {  # word of a policy loss -> what it brings
    "get_pg_loss_type": "--pg-loss-type",
    "use_score_centering": "--use-score-centering",
    "dynamic_cp_size": "--dynamic-context-parallel (refused)",
    "TensorRef": "fields of rollout data on disk",
    "loss_fn": "a client's own loss (Tinker): not measured",
    "score_centering_loss_function": "--loss-type score_centering: not measured",
}
Texts = Sequence[str]
Name = tuple[bool, str]  # whether the source says it, and the name, or the expression that makes it
Scope = Mapping[str, ast.AST]


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
        wanted = list(LEADING.get(name, ()))
        return max(found, key=lambda f: f.parameters[: len(wanted)] == wanted, default=None)

    @property
    def loss(self) -> Found | None:
        return self.defining(LOSS)

    @property
    def step(self) -> Found | None:
        return self.defining(STEP)

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
    found, wanted = tree.defining(name), LEADING[name]
    if found is None:
        return False, f"no function of that name in {len(tree.texts)} modules of {tree.folder}"
    got = tuple(found.parameters[: len(wanted)])
    if got != wanted:
        return False, f"{found.module}: expected ({', '.join(wanted)}, ...), got ({', '.join(got)})"
    return True, f"{found.module}({', '.join(wanted)}, ...)"


def looked_up(tree: Tree) -> tuple[bool, str]:
    """Whether the policy loss takes its log-probs from a global of its own module."""
    ok, text = door(tree, TARGET)
    loss = tree.loss
    if not ok or loss is None:
        return ok, text
    names = {node.id for node in ast.walk(loss.node) if isinstance(node, ast.Name)}
    is_global = TARGET in names
    return is_global, f"{text}, {'' if is_global else 'not '}looked up by {loss.module}"


def keywords(tree: Tree) -> tuple[bool, str]:
    """The keywords of the hook call."""
    loss, made = tree.loss, None
    if loss:
        scope = assigned(loss.tree.body) | assigned(ast.walk(loss.node))
        made = scope.get("tis_kwargs")
    return compared(names(made, scope) if made else (), contract.REQUIRED, PASSED, "keywords")


def parameters(tree: Tree) -> tuple[bool, str]:
    """The parameters of the train step."""
    found = tree.step
    got = [(True, name) for name in (found.parameters if found else ())]
    if found:
        starred = {"*": found.node.args.vararg, "**": found.node.args.kwarg}
        got += [(False, star + argument.arg) for star, argument in starred.items() if argument]
    return compared(got, (*STEP_PARAMETERS[:5], "num_microbatches"), STEP_PARAMETERS, "parameters")


def fields(tree: Tree) -> tuple[bool, str]:
    """The fields that the train step's module asks its iterator for, the most at once.

    A list counts with what a function of that module adds to it.
    """
    found, lists = tree.step, list[list[Name]]()
    if found:
        elsewhere = (constants(text) for text in tree.texts.values())
        scope = dict(pair for one in elsewhere for pair in one.items())
        scope |= assigned(found.tree.body) | assigned(ast.walk(found.node))
        makers = (n for n in ast.walk(found.tree) if isinstance(n, ast.List) or _is_call(n, scope))
        lists = [list(names(node, scope)) for node in makers]
    asked = max((one for one in lists if (True, "loss_masks") in one), key=len, default=[])
    read = [OF_CALL[name] for name in contract.REQUIRED[2:]]
    return compared(asked, read, FIELDS, "fields")


def _is_call(node: ast.AST, scope: Scope) -> bool:
    function = node.func if isinstance(node, ast.Call) else None
    return isinstance(scope.get(getattr(function, "id", "")), ast.FunctionDef)


def compared(got: Iterable[Name], wanted: Texts, known: Texts, what: str) -> tuple[bool, str]:
    """Whether all that we read is there, what is new beside it, and what could not be read."""
    pairs = dict.fromkeys(got)
    texts, unread = ([text for is_known, text in pairs if is_known is kind] for kind in (True, False))
    missing, new = [n for n in wanted if n not in texts], [n for n in texts if n not in known]
    text = f"{len(texts)} {what}" + (f", without {', '.join(missing)}" if missing else "")
    text += f"; new: {', '.join(new)}" if new else ""
    return not missing, text + (f"; not read: {', '.join(unread)}" if unread else "")


def assigned(nodes: Iterable[ast.AST]) -> dict[str, ast.AST]:
    """Name -> its function or its last value, of the functions and assignments among ``nodes``."""
    found: dict[str, ast.AST] = {}
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
    return found


def constants(text: str) -> dict[str, ast.AST]:
    """The lists and tuples of a module in capital letters, which others import."""
    top = ast.parse(text).body if re.search(r"^[A-Z_]+ = [(\[]", text, re.M) else ()
    return {name: node for name, node in assigned(top).items() if isinstance(node, ast.List | ast.Tuple)}


def names(node: ast.AST, scope: Scope) -> Iterator[Name]:
    """Each name in an expression that makes a list or a dict, over all its branches.

    A name of a variable is looked up in ``scope``, and a call of a function there is what it returns. The
    others are not known: the source alone does not tell what ``*keys_of(args)`` of another module has.
    """
    parts = _parts(node)
    name = getattr(node, "id", None)
    if isinstance(node, ast.Constant):
        yield from [(True, node.value)] if isinstance(node.value, str) else []
    elif parts is not None:
        for part in parts:
            yield from names(part, scope)
    elif isinstance(scope.get(name), ast.expr):
        yield from names(scope[name], {n: value for n, value in scope.items() if n != name})
    elif isinstance(node, ast.Call):
        yield from _returned(node, scope)
    else:
        yield False, ast.unparse(node)


def _parts(node: ast.AST) -> list[ast.expr] | None:
    """The expressions whose names an expression has; None where it does not say."""
    match node:
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.BoolOp(values=parts):
            return parts
        case ast.Dict(keys=keys, values=values):
            return [key or value for key, value in zip(keys, values, strict=True)]  # no key: **value
        case ast.Starred(value=value):
            return [value]
        case ast.IfExp(body=one, orelse=other) | ast.BinOp(left=one, op=ast.Add(), right=other):
            return [one, other]
        case ast.Call(func=ast.Name(id="list" | "tuple"), args=parts):
            return parts
    return None


def _returned(call: ast.Call, scope: Scope) -> Iterator[Name]:
    """The names in what a function of the scope returns."""
    function = scope.get(getattr(call.func, "id", ""))
    if not isinstance(function, ast.FunctionDef):
        yield False, ast.unparse(call)
        return
    passed = dict(zip((a.arg for a in function.args.args), call.args, strict=False))
    inside = {name: node for name, node in scope.items() if node is not function} | passed
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value:
            yield from names(node.value, inside)


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


def training(tree: Tree) -> tuple[bool, str]:
    """The methods that score and train a rollout."""
    starts = {name: re.compile(rf"def {name}\(\s*self,\s*rollout_id\b") for name in TRAIN}
    found = [
        f"{m}: {name}" for m, text in tree.texts.items() for name, at in starts.items() if at.search(text)
    ]
    return bool(found), ", ".join(found) or f"no method {' or '.join(TRAIN)}(self, rollout_id, ...)"


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
    LOSS: lambda tree: door(tree, LOSS),
    TARGET: looked_up,
    STEP: lambda tree: door(tree, STEP),
    "hook call": keywords,
    "train step": parameters,
    "its batches": fields,
    "data iterator": iterator,
    "training": training,
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
    """Prints the lines of each tree."""
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
