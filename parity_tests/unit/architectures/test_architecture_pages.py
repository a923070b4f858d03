"""The pages of docs/architectures agree with the code: diagrams and tables."""

import functools
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import jax_transformer as jt
from jax_transformer.config import Branch, StackConfig, TransformerConfig
from jax_transformer.transformer import Transformer

PAGES = Path(__file__).parents[3] / "docs" / "architectures"
DOCUMENTS = sorted(path.stem for path in PAGES.glob("*.md") if path.stem != "index")

# No two letters of the axis legend have the same size, and none is a multiple of another but i =
# h·e.
SIZES = {"b": 3, "s": 5, "t": 7, "h": 2, "e": 11, "i": 22, "d": 26, "f": 17, "v": 19}


def page(document: str) -> str:
    return (PAGES / f"{document}.md").read_text(encoding="utf-8")


def forms(document: str) -> list[str]:
    """The presets that a page is about."""
    return [document, f"{document}_repaired"]


def test_every_page_is_of_a_document():
    names = jt.preset_names()
    assert len(DOCUMENTS) >= 5 and {each for name in DOCUMENTS for each in forms(name)} <= {*names}


# Diagrams

TEXT = r'(?:\["(?P<{0}box>[^"]*)"\]|\(\["(?P<{0}oval>[^"]*)"\]\)|\(\("(?P<{0}round>[^"]*)"\)\))?'
NODE = r"(?P<{0}id>\w+)" + TEXT
EDGE = re.compile(rf'{NODE.format("a_")} -->(?:\|"(?P<label>[^"]*)"\|)? {NODE.format("b_")}')
ALONE = re.compile(NODE.format("a_"))


class Diagram:
    """A flowchart: the text of every node, and (node, label, node) of every edge."""

    def __init__(self, lines: list[str]):
        self.texts: dict[str, str] = {}
        self.edges: list[tuple[str, str | None, str]] = []
        for line in filter(None, map(str.strip, lines)):
            if line == "flowchart TB" or line == "end" or line.startswith("subgraph "):
                continue
            match = EDGE.fullmatch(line) or ALONE.fullmatch(line)
            assert match is not None, f"cannot read {line!r}"
            groups = match.groupdict()
            for side in ("a_", "b_") if "label" in groups else ("a_",):
                node = groups[f"{side}id"]
                for text in (groups[f"{side}{kind}"] for kind in ("box", "oval", "round")):
                    if text is not None:
                        assert node not in self.texts, f"{node} has two texts"
                        self.texts[node] = text
            if "label" in groups:
                self.edges.append((groups["a_id"], groups["label"], groups["b_id"]))
        unknown = {end for a, _, b in self.edges for end in (a, b)} - self.texts.keys()
        assert not unknown, f"nodes without a text: {', '.join(sorted(unknown))}"

    def modules(self) -> dict[str, str]:
        """The path of each node that stands for a module."""
        paths_of = {
            node: re.findall("<code>(.*?)</code>", text) for node, text in self.texts.items()
        }
        assert all(len(paths) < 2 for paths in paths_of.values()), paths_of
        return {node: paths[0] for node, paths in paths_of.items() if paths}


def diagrams(document: str) -> list[Diagram]:
    blocks = re.findall(r"^```mermaid\n(.*?)^```$", page(document), flags=re.DOTALL | re.MULTILINE)
    assert blocks and page(document).count("```mermaid") == len(blocks)
    return [Diagram(text.splitlines()) for text in blocks]


Shapes = dict[str, tuple[int, ...]]


@functools.cache
def outputs(preset: str) -> tuple[dict[str, Shapes], dict[str, int]]:
    """Return every module's output shape by path, with attention's weights, and letters."""
    letters = dict(SIZES)
    if jt.preset(preset).equal_lengths:
        letters["t"] = letters["s"]
    config = jt.preset(
        preset,
        source_vocab_size=23,
        target_vocab_size=letters["v"],
        d_model=letters["d"],
        num_heads=letters["h"],
        head_dim=letters["e"],
        d_ff=letters["f"],
        num_layers=1,
        max_length=20,
    )
    calls: list[tuple[nnx.Module, Shapes]] = []

    def recorded(call):
        def wrapped(self, *args, **kwargs):
            result = call(self, *args, **kwargs)
            arrays = result if isinstance(result, tuple) else (result,)
            named = zip(("", "weights"), arrays, strict=False)
            calls.append((self, {kind: a.shape for kind, a in named if hasattr(a, "shape")}))
            return result

        return wrapped

    def run() -> jax.Array:
        model = Transformer(config, rngs=nnx.Rngs(0))
        modules = {id(module): ".".join(map(str, path)) for path, module in nnx.iter_modules(model)}
        with pytest.MonkeyPatch.context() as patch:
            for kind in {type(module) for _, module in nnx.iter_modules(model) if callable(module)}:
                patch.setattr(kind, "__call__", recorded(kind.__call__))
            logits = model(*(np.ones((letters["b"], letters[n]), np.int32) for n in ("s", "t")))
        for module, shapes in calls:
            path = modules[id(module)]
            assert shapes_of.setdefault(path, shapes) == shapes, f"{path} has outputs of two shapes"
        return logits

    shapes_of: dict[str, Shapes] = {}
    jax.eval_shape(run)
    return shapes_of, letters


def checked_edges(document: str) -> list[tuple[str, str | None, dict[str, int], Shapes]]:
    """List (path, label, letters, true shapes) of every edge from a module, by preset."""
    edges = []
    for diagram in diagrams(document):
        for node, path in diagram.modules().items():
            owners = [outputs(preset) for preset in forms(document) if path in outputs(preset)[0]]
            assert owners, (
                f"{path}: neither {document} nor its repaired form computes such a module"
            )
            leaving = [label for a, label, _ in diagram.edges if a == node]
            assert leaving, f"{path}: nothing leaves it"
            edges += [
                (path, label, letters, shapes[path])
                for shapes, letters in owners
                for label in leaving
            ]
    return edges


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_shapes_in_a_diagram_are_those_of_the_modules(document):
    edges = checked_edges(document)
    assert len(edges) > 20
    for path, label, letters, shapes in edges:
        form = re.fullmatch(r"(?:(weights) )?\(([a-z](?:, [a-z])*)\)", label or "")
        assert form is not None, f"{path}: {label!r} is no shape"
        shape = tuple(letters[letter] for letter in form[2].split(", "))
        assert shape == shapes[form[1] or ""], (
            f"{path}: {label} is {shape}, and the module's {shapes}"
        )


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_module_of_a_block_is_missing_from_a_diagram(document):
    """Each module is drawn, or its parts are."""
    drawn = {path for diagram in diagrams(document) for path in diagram.modules().values()}
    computed = outputs(document)[0]
    inner = re.compile(
        r"(encoder|decoder|)(\.blocks\.0(\.residuals\.\d+)?)?|.*\.(query|key|value|out|up|down)|"
        r".*feed_forward\.positions"
    )
    missing = [
        p
        for p in computed
        if not inner.fullmatch(p) and not any(d == p or d.startswith(f"{p}.") for d in drawn)
    ]
    assert not missing and len(computed) > 20


def test_a_wrong_diagram_is_detected():
    lines = """flowchart TB
        ids["source ids"] -->|"(b, s)"| words["embedding<br/><code>source_embedding</code>"]
        words -->|"(b, s, d)"| sum(("+"))
        subgraph block ["a block"]
        rest(["the rest"])
        end
        sum --> rest"""
    diagram = Diagram(lines.splitlines())
    edges = [("ids", "(b, s)", "words"), ("words", "(b, s, d)", "sum"), ("sum", None, "rest")]
    assert diagram.edges == edges
    assert diagram.modules() == {"words": "source_embedding"}
    assert diagram.texts["rest"] == "the rest"
    for line in (
        "words --> nowhere",
        'a["x"] ==> b["y"]',
        'a["x"] --> a["y"]',
        'a["x"] -->|(b, s)| b["y"]',
    ):
        with pytest.raises(AssertionError):
            Diagram([line])


def test_the_recorded_shapes_are_the_model_s():
    shapes, letters = outputs("deep_dive_repaired")
    b, s, t, h, d = (letters[letter] for letter in "bsthd")
    assert shapes["decoder.blocks.0.cross_attention"] == {"": (b, t, d), "weights": (b, h, t, s)}
    assert shapes["encoder.blocks.0.feed_forward.up"] == {"": (b, s, letters["f"])}
    assert shapes["decoder.blocks.0.self_attention.key"] == {"": (b, t, letters["i"])}
    assert shapes["output"] == {"": (b, t, letters["v"])}
    assert not any(".unused." in path for path in shapes)


# Tables of fields


def rows(document: str) -> list[list[str]]:
    """Return the cells of the table under "Configuration", without its head."""
    section = page(document).split("\n## Configuration\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def value_at(config: TransformerConfig, field: str) -> object:
    """Return a field's value by a path such as ``decoder.branches[1].residual``."""
    value: object = config
    for name, index in re.findall(r"(\w+)(?:\[(\d+)\])?", field):
        value = getattr(value, name)
        value = value[int(index)] if index else value
    return value


def cell_text(value: object) -> str | None:
    """Return a value as the tables write it, or None if only prose can describe it."""
    if isinstance(value, tuple) and not any(isinstance(item, Branch) for item in value):
        return ", ".join(f"`{item.value}`" for item in value) or "none"
    if isinstance(value, (tuple, StackConfig, type(None))):
        return None
    if isinstance(value, (bool, int, float)) and not hasattr(value, "value"):
        return str(value).lower()
    return f"`{value}`"


def table(document: str) -> list[tuple[str, str, str]]:
    """List (preset, field, cell text) of every cell with a value."""
    cells_of = []
    for fields, faithful, repaired, *_ in rows(document):
        names = re.findall("`([^`]*)`", fields)
        cells = (faithful, faithful if repaired == "the same" else repaired)
        for preset, cell in zip(forms(document), cells, strict=True):
            one_each = len(names) > 1 and len(cell.split(", ")) == len(names)
            parts = cell.split(", ") if one_each else [cell] * len(names)
            cells_of += [(preset, name, part) for name, part in zip(names, parts, strict=True)]
    return cells_of


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_fields_in_a_table_have_the_documented_values(document):
    compared = 0
    for preset, field, cell in table(document):
        expected = cell_text(value_at(jt.preset(preset), field))
        if expected is not None and re.fullmatch(r"none|true|false|[\d.]+|`\w+`(, `\w+`)*", cell):
            assert expected in (cell, f"{cell}.0"), (
                f"{preset}: {field} is {expected}, the page says {cell}"
            )
            compared += 1
    assert compared > 10
