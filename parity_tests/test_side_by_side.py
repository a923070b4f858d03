"""The pages that show a document's two sides have the code, rules and numbers of both."""

import ast
from pathlib import Path

import jax
import pytest

import jax_transformer as jt
from jax_transformer.architectures import registry
from tools import excerpts, paired_models, side_by_side

DOCUMENTS = [path for path in side_by_side.PAGES if path.stem != "index"]
PARTS = "Embedding Positions Attention Masks Block Stack Loss Decoding".split()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_a_page_is_that_of_the_code(path: Path):
    """`python tools/side_by_side.py --write` was run."""
    text = path.read_text(encoding="utf-8")
    assert side_by_side.page(path) == text
    assert f"below {side_by_side.BELOW:.0e}" in text


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_a_page_has_every_part_with_code_and_numbers(path: Path):
    parts = path.read_text(encoding="utf-8").split("\n## ")[1:]
    assert [part.partition("\n")[0] for part in parts][:8] == PARTS
    for part in parts[:8]:
        kinds = [match[1] for match in side_by_side.BLOCK.finditer(part)]
        assert kinds[:2] == ["flow", "code"] and "numbers" in kinds, part[:40]
    blocks = side_by_side.BLOCK.finditer(path.read_text(encoding="utf-8"))
    faults = [match[3] for match in blocks if match[1] == "fault"]
    assert faults and all("```map\nfaithful | repaired\n" in fault for fault in faults)
    assert parts[8].count("<!-- cost -->") == 1


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_every_function_of_the_twin_that_runs_is_on_the_page_in_its_order(path: Path):
    file = f"torch_reference/{path.stem}.py"
    with jax.enable_x64(True):
        lines = paired_models.PairedModels(path.stem).lines
    ran = {line for name, line in lines if name.endswith(file)}
    tree = ast.parse((side_by_side.ROOT / file).read_text(encoding="utf-8"))
    own = {
        ".".join(filter(None, (getattr(parent, "name", ""), node.name)))
        for parent in (tree, *tree.body)
        for node in ast.iter_child_nodes(parent)
        if isinstance(node, ast.FunctionDef)
        and not ran.isdisjoint(range(node.body[0].lineno, (node.end_lineno or 0) + 1))
    }
    blocks = side_by_side.BLOCK.finditer(path.read_text(encoding="utf-8"))
    shown = [m[2].partition("|")[0].split() for m in blocks if m[1] == "code"]
    assert len(own) > 5 and own <= {name for names in shown for name in names}
    for names in shown:
        nodes = [excerpts.definition(file, name) for name in names if name in own]
        assert nodes == sorted(nodes, key=lambda node: node.lineno), names


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_the_rule_of_every_weight_is_on_the_page(path: Path):
    """The first layer of each stack stands for all."""
    blocks = side_by_side.BLOCK.finditer(path.read_text(encoding="utf-8"))
    prefixes = [name for m in blocks if m[1] == "weights" for name in m[2].split()]
    table = registry.weight_table(jt.preset(path.stem, **paired_models.SIZES))
    names = [name for rule in table for name in rule.flax if ".blocks.1." not in name]
    assert not [name for name in names if not name.startswith(tuple(prefixes))]
    assert len(names) > 30
