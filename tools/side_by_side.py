"""The made parts of docs/side-by-side: code, weights, numbers and pictures of both frameworks.

    python tools/side_by_side.py            # prints the pages
    python tools/side_by_side.py --write    # writes them

What stands between a comment ``<!-- KIND ARGUMENTS -->`` and ``<!-- end -->`` is made by the
function KIND of this file. All numbers are of small models with random weights, in float64, that
both frameworks run. Code is cut to the statements that these models run.
"""

import argparse
import itertools
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jax_transformer.architectures import registry
from jax_transformer.nn import attention
from jax_transformer.nn.dropout import Dropout
from jax_transformer.nn.embeddings import Frozen
from jax_transformer.transformer import flatten
from tools import excerpts
from tools.paired_models import PairedModels

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs/side-by-side").glob("*.md"))
BLOCK = re.compile(
    r"^<!-- (?!end)(\w+)((?:(?!-->).)*?)\s-->\n((?:(?!<!--).)*\n)?<!-- end -->$", re.S | re.M
)
LETTERS = {7: "s", 5: "t", 12: "d", 36: "i", 48: "f", 13: "v"}
BELOW = 1e-13
"""Rounding of the two frameworks stays below; no fault does."""
NN = [f"nn/{name}.py" for name in ("embeddings", "attention", "layers", "blocks", "stacks")]
OTHERS = ("transformer.py", "training/loss.py", "config/fields.py")
FLAX = [f"jax_transformer/{name}" for name in (*NN, *OTHERS)]
HEAD = "| | faithful | repaired |\n|---|---|---|"


# What a page is made of, each from a preset and the comment's arguments


def code(preset: str, arguments: str) -> str:
    """Return definitions of the twin and, after ``|``, of Flax, next to each other."""
    names = (preset, "lesson10", "decoding", "training")
    files = [f"torch_reference/{name}.py" for name in names], FLAX
    sides = []
    for title, each, names in zip(("PyTorch", "Flax"), files, arguments.split("|"), strict=True):
        shown = "\n\n".join(excerpt(preset, each, name) for name in names.split())
        sides.append(f"<div markdown>\n\n**{title}**\n\n{shown}\n\n</div>")
    return '<div class="sides" markdown>\n' + "\n".join(sides) + "\n</div>"


def excerpt(preset: str, files: Iterable[str], name: str) -> str:
    """Return a definition, such as ``Transformer.encode``, with the statements that run."""
    file = next(file for file in files if excerpts.definition(file, name) is not None)
    text = excerpts.running(file, name, PairedModels(preset).lines)
    return f"`{name}` in [{Path(file).name}](../../{file})\n\n```py\n{text}\n```"


def weights(preset: str, arguments: str) -> str:
    """Return the rules of the weight table whose Flax arrays have one of these prefixes."""
    both, prefixes = PairedModels(preset), tuple(arguments.split())
    named = {**flatten(both.model), **both.twin.state_dict()}
    table = registry.weight_table(both.config)
    pairs = [(r, [name for name in r.flax if name.startswith(prefixes)]) for r in table]
    pairs = [(rule, names) for rule, names in pairs if names]
    heads = _common(r.torch for r, _ in pairs), _common(n for _, names in pairs for n in names)
    titles = [f" `{head}…`" if head else "" for head in heads]
    lines = [f"| PyTorch{titles[0]} | rule | Flax{titles[1]} |", "|---|---|---|"]
    for rule, names in pairs:
        left, right = (
            "<br>".join(f"`{n[len(head) :]}` {tuple(named[n].shape)}" for n in group)
            for head, group in zip(heads, ([rule.torch], names), strict=True)
        )
        frozen = ", frozen" if names[0] in flatten(both.model, Frozen) else ""
        axes = f"`{rule.axes}`" if rule.axes else "the same"
        lines.append(f"| {left} | {axes}{frozen} | {right} |")
    return "\n".join(lines)


def _common(names: Iterable[str]) -> str:
    """Return the modules that all names begin with."""
    parts = zip(*(name.split(".")[:-1] for name in names), strict=False)
    same = itertools.takewhile(lambda each: len(set(each)) == 1, parts)
    return "".join(f"{each[0]}." for each in same)


def numbers(preset: str, arguments: str) -> str:
    """Return values that both frameworks computed, as ``TORCH=FLAX``, and how far they differ."""
    both, lines = PairedModels(preset), ["| PyTorch | Flax | largest difference |", "|---|---|---|"]
    for pair in arguments.split():
        names = pair.split("=")
        theirs, ours = both.torch[names[0]], both.flax[names[-1]]
        if theirs.shape != ours.shape:
            theirs = theirs.swapaxes(0, 1)  # "Lesson 10" has the sequence first
        assert theirs.shape == ours.shape, f"{pair}: {theirs.shape} and {ours.shape}"
        left, right = (
            f"`{name}`<br>{_values(x)}"
            for name, x in zip((names[0], names[-1]), (theirs, ours), strict=True)
        )
        lines.append(f"| {left} | {right} | {_size(np.abs(theirs - ours).max())} |")
    return "\n".join(lines)


def _values(array: np.ndarray) -> str:
    """Return the first values of the first matrix's second row, or of all tokens."""
    while array.ndim > 2:
        array = array[0]
    is_matrix = array.ndim > 1 and array.dtype.kind == "f"
    row = array[1] if is_matrix else array.ravel()
    return " ".join(f"{x:d}" if row.dtype.kind == "i" else _rounded(x, 4) for x in row[:5])


def _rounded(x: float, digits: int) -> str:
    return f"{round(float(x), digits) + 0.0:.{digits}f}"


def _size(x: float) -> str:
    exact = isinstance(x, np.integer) or float(x).is_integer()
    return f"{x:.0f}" if exact and x else f"below {BELOW:.0e}" if x < BELOW else _rounded(x, 4)


def flow(preset: str, arguments: str) -> str:
    """Return chains of nodes, perhaps after ``PREFIX: ``; ``NAME=MODULE`` gets its shape."""
    *before, chains = arguments.split(": ")
    prefix = "".join(before)
    lines = []
    for chain in chains.split(";"):
        nodes = []
        for node in map(str.strip, chain.split("->")):
            name, _, module = node.partition("=")
            if module:
                path = prefix + module
                letters = ["b", *(LETTERS[n] for n in PairedModels(preset).flax[path].shape[1:])]
                if path.startswith(("decoder", "target", "output")):
                    letters[1] = "t"
                node = f"{name} · {module} ({', '.join(letters)})"
            nodes.append(node)
        lines.append(" -> ".join(nodes))
    return "```flow\n" + "\n".join(lines) + "\n```"


def fault(preset: str, arguments: str) -> str:
    """Return ``FIELDS | MEASURES`` of the document's model and of the repaired one."""
    fields, _, measures = arguments.partition("|")
    pair = [PairedModels(preset), PairedModels(f"{preset}_repaired")]
    lines, maps = [HEAD], []
    for field in fields.split():
        lines.append(f"| `{field}` | {' | '.join(_field(both.config, field) for both in pair)} |")
    for measure in filter(None, map(str.split, measures.split(";"))):
        text, function = MEASURES[measure[0]]
        results = [function(both, *measure[1:]) for both in pair]
        if text:
            lines.append(f"| {text} | {' | '.join(map(_size, results))} |")
            continue
        rows = [
            " | ".join(" ".join(f"{_rounded(x, 2):>5}" for x in row) for row in rows)
            for rows in zip(*results, strict=True)
        ]
        maps.append("\n\n```map\nfaithful | repaired\n" + "\n".join(rows) + "\n```")
    return "\n".join(lines) + "".join(maps)


def _field(value: Any, path: str) -> str:
    for name, index in re.findall(r"(\w+)(?:\[(\d+)\])?", path):
        value = getattr(value, name)[int(index)] if index else getattr(value, name)
    values = value if isinstance(value, tuple) else (value,)
    parts = [" + ".join(getattr(each, "parts", (str(each).lower(),))) for each in values]
    return ", ".join(f"`{part}`" for part in parts) or "none"


def added(both: Any, *names: str) -> np.ndarray:
    """Return what positions add to the first row, where the model adds them first."""
    name = next(name for name in names if name in both.flax)
    return (both.flax[name] - both.flax[f"{name}<"])[0]


def changed(both: Any, before: str, after: str) -> np.ndarray:
    """Return how far an array of the first row is from an earlier one."""
    return (both.flax[after] - both.flax[before])[0]


def attended(both: Any, name: str, row: str) -> np.ndarray:
    """Return the weights of a row's first head. The second row's source ends in padding."""
    return both.flax[f"{name}:weights"][int(row), 0]


def influence(both: Any, name: str) -> np.ndarray:
    """Return how far each target token (across) moves an output at each position (down)."""
    count = both.target.shape[1]
    source, target = (np.repeat(x[:1], count, axis=0) for x in (both.source, both.target))
    np.fill_diagonal(target, 3 + (np.diag(target) - 2) % 8)
    moved = both.outputs(source, target)[name] - both.flax[name][:1]
    return np.abs(moved).max(axis=-1).T.round(12)


def padded(both: Any) -> float:
    """Return how far two more tokens of padding move the logits of the first row."""
    more = ((0, 0), (0, 2))
    source = np.pad(both.source, more, constant_values=both.config.source_pad_id)
    target = np.pad(both.target, more if both.config.equal_lengths else ((0, 0), (0, 0)))
    logits = both.outputs(source, target)["logits"][:, : both.target.shape[1]]
    return np.abs(logits - both.flax["logits"])[0].max()


def merged(both: Any) -> np.ndarray:
    """Return the position whose value lands in each place of attention's output, if every query
    attends to itself only."""
    module = both.model.encoder.blocks[0].self_attention
    x = jnp.asarray(both.flax["encoder.blocks.0<"])

    def attend(q: jax.Array, *_: Any, **__: Any) -> tuple[jax.Array, None]:
        return jnp.zeros_like(q) + jnp.arange(1, 8, dtype=q.dtype)[None, :, None, None], None

    with (
        mock.patch.object(attention, "attend", attend),
        mock.patch.object(module, "out", lambda y: y),
    ):
        return np.asarray(module(x, module.keys_values(x), None, Dropout())[0])[0]


def unused(both: Any) -> int:
    """Return the number of weights that the model never reads."""
    arrays = flatten(both.model, Frozen).items()
    return sum(x.size for name, x in arrays if ".unused." in name)


MEASURES: dict[str, tuple[str, Callable[..., Any]]] = {
    "padded": ("two more tokens of source padding move the logits by", padded),
    "unused": ("weights that nothing reads", unused),
    **{f.__name__: ("", f) for f in (added, attended, changed, influence, merged)},
}
"""Functions by name; those with a text return a number, the others a matrix."""


def cost(preset: str, _: str) -> str:
    """Return what training measured, from docs/faults.md."""
    text = (ROOT / "docs/faults.md").read_text(encoding="utf-8")
    table = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    row = next(row for row in table if row[0] == f"`{preset}`")
    cells = zip(table[0][2:], row[2:], strict=True)
    return "\n".join([HEAD, *(f"| {x} | {' | '.join(y.split(' → '))} |" for x, y in cells)])


def page(path: Path) -> str:
    """Return the page with its parts as they are now."""
    kinds = {f.__name__: f for f in (code, weights, numbers, flow, fault, cost)}

    def made(match: re.Match[str]) -> str:
        part = kinds[match[1]](path.stem, " ".join(match[2].split()))
        return f"{match[0].partition('-->')[0]}-->\n{part}\n<!-- end -->"

    with jax.enable_x64(True):
        return BLOCK.sub(made, path.read_text(encoding="utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the pages")
    write = parser.parse_args().write
    for path in PAGES:
        text = page(path)
        if write:
            path.write_text(text, encoding="utf-8")
        else:
            print(text, end="")


if __name__ == "__main__":
    main()
