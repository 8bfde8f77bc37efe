"""Tables of what an edit makes of a function: rewrites, leaves alone, refuses."""

from __future__ import annotations

import pytest

from slime_ext.errors import DataError
from slime_ext.host.contract import REQUIRED
from slime_ext.tools.patching.declared import load_patches, select
from slime_ext.tools.patching.plan import apply, revert, status
from slime_ext.tools.patching.tree import Tree
from tests.tools.patching.host import LOSS, LOSS_FILE, NEW, make

TARGET = select(load_patches(), ["0001"])
OURS = (
    '            "cur_log_probs": log_probs_and_entropy["log_probs"],  # slime-ext patch 0001\n'
    '            "advantages": batch["advantages"],  # slime-ext patch 0001\n'
)
ANCHOR = '            "response_lengths"'
CALL = "tis_func(**tis_kwargs)"
CUR, ADVANTAGES = 'log_probs_and_entropy["log_probs"]', 'batch["advantages"]'


def loss(*replacements):
    text = LOSS
    for before, after in replacements:
        assert before in text
        text = text.replace(before, after)
    return text


def patched(folder, text, **options):
    tree = Tree(make(folder, NEW | {LOSS_FILE: text}))
    apply(tree, TARGET, **options)
    return tree.read(LOSS_FILE).decode()


REWRITES = {
    "as_is": loss(),
    "no_trailing_comma": loss(('["response_lengths"],  #', '["response_lengths"]  #')),
    "single_quotes": loss(('"pg_loss"', "'pg_loss'"), ('"response_lengths":', "'response_lengths':")),
    "annotated": loss(("tis_kwargs = {", "tis_kwargs: dict[str, object] = {")),
    "module_function": loss(("= get_log_probs_and_entropy(", "= ops.get_log_probs_and_entropy(")),
    "straight_into_the_call": loss(
        ("tis_kwargs = {", "pg_loss, masks, metrics = tis_func(**{"),
        ("        }\n        pg_loss, masks, metrics = tis_func(**tis_kwargs)", "        })"),
    ),
    "other_dicts": loss(("    return", '    metrics = {"advantages": 1}\n    return')),
    "other_stores": loss(("    return", '    metrics["cur_log_probs"] = 1\n    return')),
    "tabs": loss().replace("    ", "\t"),
    "no_newline_at_the_end": loss().removesuffix("\n"),
    "byte_order_mark": "\ufeff" + loss(),
    "wide_text_before": loss(("Losses.", "損失 \\ufeff 🙂")),
}


def test_two_lines_come_in_nothing_else_changes_and_revert_gives_back_the_text(tmp_path):
    for name, text in REWRITES.items():
        after = patched(tmp_path / name, text)
        anchor = next(line for line in text.splitlines() if line.strip().startswith(('"resp', "'resp")))
        indent = anchor[: len(anchor) - len(anchor.lstrip())]
        ours = "".join(indent + line.strip() + "\n" for line in OURS.splitlines())
        assert after == text.replace(anchor, ours + anchor), name
        compile(after.encode(), "loss.py", "exec")
        tree = Tree(tmp_path / name)
        revert(tree, TARGET)
        assert tree.read(LOSS_FILE).decode() == text, name


def before_last(*entries):
    return loss(('"response_lengths":', "\n            ".join([*entries, '"response_lengths":'])))


def before_call(*statements):
    call = "pg_loss, masks, metrics ="
    return loss((call, "\n        ".join([*statements, call])))


NO_OPS = {
    "by_hand": before_last(f'"cur_log_probs": {CUR},', f'"advantages": {ADVANTAGES},'),
    "pull_request_2084": before_last('"cur_log_probs": cur,', f'"advantages": {ADVANTAGES},'),
    "pull_request_1912": before_last('"current_log_probs": cur,', '"advantages": advantages,'),
    "stored": before_call('tis_kwargs["cur_log_probs"] = c', 'tis_kwargs["advantages"] = a'),
    "updated": before_call("tis_kwargs.update(cur_log_probs=c, advantages=a)"),
    "at_the_call": loss((CALL, "tis_func(**tis_kwargs, cur_log_probs=c, advantages=a)")),
}


def test_a_host_that_has_it_is_recognised_and_left_alone(tmp_path):
    for name, text in NO_OPS.items():
        assert patched(tmp_path / name, text) == text, name
        assert status(Tree(tmp_path / name), TARGET[0]).state == "in the host", name


def test_only_what_is_missing_is_added(tmp_path):
    text = before_last('"cur_log_probs": cur,')
    after = patched(tmp_path, text)
    assert after.count("cur_log_probs") == text.count("cur_log_probs")
    assert '"advantages": batch["advantages"],  # slime-ext patch 0001' in after


def test_revert_keeps_what_the_host_has_of_its_own(tmp_path):
    text = before_last('"cur_log_probs": cur,')
    tree = Tree(make(tmp_path, NEW | {LOSS_FILE: text}))
    apply(tree, TARGET)
    revert(tree, TARGET)
    assert tree.read(LOSS_FILE).decode() == text


REFUSED = {
    "another_function": (loss(("policy_loss_function", "policy_loss")), "found 0 times"),
    "a_call_of_dict": (
        loss(
            *[(f'"{key}": ', f"{key}=") for key in REQUIRED], ("= {", "= dict("), ("        }", "        )")
        ),
        "found 0 times",
    ),
    "other_keys": (loss(('"pg_loss":', '"loss":')), "found 0 times"),
    "defined_twice": (loss() + "\n\n" + loss(), "found 2 times"),
    "one_line": (
        loss(("\n            ", " "), ("  # ünïcode", ""), ("  # rebound", "")),
        "not at the beginning",
    ),
    "rebound_forward": (loss(("= get_log_probs", "= fused_log_probs")), "is not the result of"),
    "no_batch": (loss(("args, batch, logits", "args, data, logits")), "batch is not a parameter"),
    "syntax_error": (loss(("tis_kwargs = {", "tis_kwargs = {{")), "expected Python"),
    "merge_conflict": (loss(("    return", "<<<<<<< HEAD\n    return")), "expected Python"),
}


def test_an_unknown_shape_is_refused_with_file_and_reason(tmp_path):
    for name, (text, reason) in REFUSED.items():
        with pytest.raises(DataError, match=rf"^slime/backends/megatron_utils/loss.py: .*{reason}[^\n]*$"):
            patched(tmp_path / name, text)


def test_a_refusal_names_anchor_and_tested_commits(tmp_path):
    with pytest.raises(DataError) as refusal:
        patched(tmp_path, REFUSED["other_keys"][0])
    for words in (
        "anchor policy_loss_function > dict with pg_loss",
        "patch 0001",
        "v0.2.0 to 624b824a8",
        "31f1ca961",
    ):
        assert words in str(refusal.value)


def test_text_that_is_not_utf8_is_refused(tmp_path):
    tree = Tree(make(tmp_path, NEW))
    (tmp_path / LOSS_FILE).write_bytes(LOSS.encode("latin-1"))
    with pytest.raises(DataError, match="expected Python"):
        apply(tree, TARGET)


def test_a_line_of_ours_that_somebody_changed_is_not_deleted(tmp_path):
    tree = Tree(make(tmp_path, NEW | {LOSS_FILE: patched(tmp_path, LOSS).replace(CUR, "mine")}))
    with pytest.raises(DataError, match=r"loss.py:15: expected the line that patch 0001 inserted"):
        revert(tree, TARGET)
