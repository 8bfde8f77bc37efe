"""Every mutation still finds the text that it replaces; the mutations themselves take minutes."""

import ast
from pathlib import Path

import slime_ext
from tests.mutations import MUTATIONS

PACKAGE = Path(slime_ext.__file__).parent


def test_each_mutation_replaces_one_piece_of_text():
    found = {name: (PACKAGE / m.file).read_text().count(m.before) for name, m in MUTATIONS.items()}
    assert {name: count for name, count in found.items() if count != 1} == {}


def test_each_mutation_leaves_python():
    """A file that does not compile fails every test, whatever the test looks at."""
    broken = []
    for name, mutation in MUTATIONS.items():
        text = (PACKAGE / mutation.file).read_text().replace(mutation.before, mutation.after)
        try:
            if mutation.file.endswith(".py"):
                ast.parse(text)
        except SyntaxError:
            broken.append(name)
    assert broken == []
