"""``slime-ext patch status|apply|diff|revert DIR [PATCH ...]``."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence

from slime_ext.errors import ConfigError
from slime_ext.tools.patching import plan, third_party
from slime_ext.tools.patching.declared import Patch, load_patches, select
from slime_ext.tools.patching.tree import Tree

DONE, WOULD_CHANGE = 0, 1
EPILOG = """exit status: 0 done, or nothing to do; 2 refused.
status and diff write nothing; with --exit-code they end with 1 where apply would change something.
The lines that apply inserts end in '# slime-ext patch NUMBER'; revert removes exactly these."""


def parser() -> argparse.ArgumentParser:
    """The flags of the command."""
    made = argparse.ArgumentParser(
        prog="slime-ext patch",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    made.add_argument("action", choices=list(ACTIONS))
    made.add_argument("dir", metavar="DIR", help="checkout of slime or miles")
    made.add_argument(
        "patches", metavar="PATCH", nargs="*", default=[], help="numbers, as 0001 (default: all)"
    )
    made.add_argument(
        "--custom-tis-function-path",
        action="append",
        default=[],
        metavar="PKG.MOD.FN",
        help="your hook: warn if it does not take the patched host's keywords",
    )
    made.add_argument("--allow-dirty", action="store_true", help="edit files with uncommitted changes")
    made.add_argument(
        "--exit-code", action="store_true", help="status, diff: end with 1 where apply would change something"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """0 where it did what was asked; a refusal is a one-line error (2)."""
    args = parser().parse_args(argv)
    tree, patches = Tree(args.dir), select(load_patches(), args.patches)
    if args.exit_code and args.action not in ASKING:
        raise ConfigError(f"--exit-code: expected {' or '.join(ASKING)}, got {args.action}: it ends with 0")
    would_change = ACTIONS[args.action](tree, patches, args)
    return WOULD_CHANGE if args.exit_code and would_change else DONE


def status(tree: Tree, patches: tuple[Patch, ...], args: argparse.Namespace) -> bool:
    """What each patch is in the tree; true where one is not wholly there."""
    found = [plan.status(tree, patch) for patch in patches]
    for one in found:
        print(f"{one.patch.id}  {one.state:<14}  {one.patch.title}")
        for edit, where in one.edits:
            print(f"      {where.state:<14}  {where.file}: {edit.name}")
        if one.reason:
            print(f"      {one.reason}")
    _warn(tree, patches, args)
    return any(one.state not in plan.CLEAN for one in found)


def apply(tree: Tree, patches: tuple[Patch, ...], args: argparse.Namespace) -> bool:
    """Inserts what is missing; true where a file changed."""
    plan.apply(tree, patches, allow_dirty=args.allow_dirty)
    _warn(tree, patches, args)
    return _commit(tree, "patched")


def diff(tree: Tree, patches: tuple[Patch, ...], args: argparse.Namespace) -> bool:
    """Prints what apply would change; true where that is something."""
    plan.apply(tree, patches, allow_dirty=True)
    for file in tree.changed():
        before, after = (_lines(text) for text in (tree.before[file] or b"", tree.after[file]))
        sys.stdout.writelines(difflib.unified_diff(before, after, f"a/{file}", f"b/{file}"))
    return bool(tree.changed())


def revert(tree: Tree, patches: tuple[Patch, ...], args: argparse.Namespace) -> bool:
    """Removes what apply inserted; true where a file changed."""
    plan.revert(tree, patches)
    return _commit(tree, "reverted")


def _commit(tree: Tree, verb: str) -> bool:
    files = tree.commit()
    for file in files:
        print(f"{verb} {tree.root / file}")
    if not files:
        print(f"{tree.root}: nothing to do")
    return bool(files)


def _warn(tree: Tree, patches: tuple[Patch, ...], args: argparse.Namespace) -> None:
    keywords = tuple(keyword for patch in patches for keyword in patch.keywords)
    named = [
        w for path in args.custom_tis_function_path for w in third_party.by_path(path, tree.root, keywords)
    ]
    for warned in dict.fromkeys([*named, *third_party.in_tree(tree.root, keywords)]):
        print(warned, file=sys.stderr)


def _lines(source: bytes) -> list[str]:
    return [line + "\n" for line in source.decode("utf-8", "replace").removesuffix("\n").split("\n")]


ACTIONS = {"status": status, "apply": apply, "diff": diff, "revert": revert}
ASKING = ("status", "diff")
