"""Every field of the configuration and every option of training, for docs/config-fields.md.

    python benchmarks/config_fields.py            # prints the page
    python benchmarks/config_fields.py --write    # writes it

The meaning of a field is its docstring, or that of its enum; who needs another value than the
default is read from the presets and from the default ``config.json`` of each Hugging Face family.
"""

import argparse
import ast
import dataclasses
import enum
import inspect
import io
import re
import sys
import textwrap
import tokenize
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax_transformer as jt
from jax_transformer.architectures import huggingface
from jax_transformer.cli import arguments
from jax_transformer.config import Branch, StackConfig, TransformerConfig
from jax_transformer.runtime.distributed import DistributedOptions
from jax_transformer.training.options import TrainOptions

PAGE = Path(__file__).resolve().parent.parent / "docs/config-fields.md"
KINDS: tuple[type, ...] = (TransformerConfig, StackConfig, Branch)
VARIANTS = {
    "T5 v1.1": ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
}
"""Published models with other attributes than the defaults of their family."""
BY_MODEL = set(
    """source_vocab_size target_vocab_size d_model num_heads d_ff max_length encoder decoder layers
    branches unused architecture source_pad_id target_pad_id bos_id eos_id parts""".split()
)
"""Fields whose value says nothing about who needs the field."""
OURS = {
    "relative_buckets": "T5 folders with other numbers than T5's own",
    "relative_max_distance": "T5 folders with other numbers than T5's own",
    "dropout_masks": "`threefry`: the masks of `jax.random.bernoulli`",
    "compute_dtype": "`bfloat16`: `train --model.precision bfloat16`",
    "padding_frozen": "`true`: the preset `marian`",
    "matmul_precision": "`medium`: `train --model.matmul-precision medium`",
    "attention_backend": "`sdpa`, `cudnn`: `train --model.attention-backend sdpa`",
    "remat": "`minimal`, `full`: `train --model.remat full`",
    "scan_layers": "`true`: `train --model.scan-layers`",
    "unused": "deep_dive, whose decoder blocks own an encoder block",
}
"""Fields that no preset and no family sets, or sets to a value that is too long to print."""
HEAD = """# Every field of the configuration

This page is made from the docstrings of the code, by `python benchmarks/config_fields.py --write`.
A field is here because two published references differ in it; the last column names those that need
another value than the default. `jt.preset(NAME, field=value)` sets a field,
`**{"encoder.field": value}` that of a stack, and `convert --set field=value` does it on the command
line. [Options of training](#options-of-training) come last.
"""


def references() -> dict[str, TransformerConfig]:
    """Return the configuration of each preset of no family and each family, by a short name."""
    families = huggingface.families()
    presets = {name: jt.preset(name) for name in jt.preset_names()}
    configs = {
        name: config for name, config in presets.items() if config.architecture not in families
    }
    for family in families.values():
        title = re.split(r"[,(]", family.title)[0].strip()
        configs[title] = family.to_transformer_config(family.complete(family.defaults))
    for title, (name, attributes) in VARIANTS.items():
        family = families[name]
        values = {**family.defaults, **attributes}
        configs[title] = family.to_transformer_config(family.complete(values))
    return configs


def parts_of(config: TransformerConfig, kind: type) -> list[Any]:
    """Return the objects of that kind within a configuration."""
    if kind is TransformerConfig:
        return [config]
    stacks = [config.encoder, config.decoder]
    return stacks if kind is StackConfig else [b for stack in stacks for b in stack.branches]


def shown(value: Any) -> str:
    """Return a value as it is written in JSON."""
    if isinstance(value, tuple):
        return ", ".join(shown(each) for each in value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(value.value if isinstance(value, enum.Enum) else value)


def cell(value: Any) -> str:
    """Return a default as a cell of a table."""
    return "–" if value is None or value == () else f"`{shown(value)}`"


def named(names: set[str]) -> str:
    """Return the names in order, a repaired preset with its faithful one, at most seven of them."""
    shorter = sorted(
        {name for name in names if name.removesuffix("_repaired") not in names - {name}},
        key=str.lower,
    )
    rest = f" and {len(shorter) - 6} more" if len(shorter) > 7 else ""
    return ", ".join(shorter[:6] if rest else shorter) + rest


def users(field: "dataclasses.Field[Any]", kind: type, configs: Mapping[str, Any]) -> str:
    """Return who needs another value than the default, by value."""
    if field.name in OURS:
        return OURS[field.name]
    if field.name in BY_MODEL:
        return "each its own"
    by_value: dict[str, set[str]] = {}
    for name, config in configs.items():
        for part in parts_of(config, kind):
            if (value := getattr(part, field.name)) != field.default:
                by_value.setdefault(shown(value), set()).add(name)
    return "; ".join(f"`{value}`: {named(names)}" for value, names in sorted(by_value.items()))


def members(kind: type[enum.Enum]) -> dict[str, str]:
    """Return the comment of each member of an enum, before it or at its end."""
    source = textwrap.dedent(inspect.getsource(kind))
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    texts = {}
    (body,) = [node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    last = 1
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            lines = range(last + 1, (node.end_lineno or 0) + 1)
            name = kind[node.targets[0].id].value
            texts[name] = " ".join(comments[line] for line in lines if line in comments)
        last = node.end_lineno or last
    return texts


def code(text: str) -> str:
    """Return a docstring as Markdown within a table."""
    return re.sub(r":\w+:`([^`]+)`", r"`\1`", text).replace("``", "`").replace("|", "\\|")


def table(kind: type, configs: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rows of a dataclass's table."""
    yield "| field | default | meaning | other values, and who needs them |"
    yield "|---|---|---|---|"
    texts = {k: v for base in kind.__mro__[:-1] for k, v in arguments.docstrings(base).items()}
    for field in dataclasses.fields(kind):
        default = "required" if field.default is MISSING else cell(field.default)
        enumerated = type(field.default) if isinstance(field.default, enum.Enum) else None
        meaning = texts.get(field.name, "")
        if not meaning and enumerated:
            meaning = f"[{first_sentence(enumerated)}](#{enumerated.__name__.lower()})"
        assert meaning, f"{kind.__name__}.{field.name} has no docstring"
        yield f"| `{field.name}` | {default} | {code(meaning)} | {users(field, kind, configs)} |"


def first_sentence(kind: type) -> str:
    """Return the first sentence of an enum's docstring."""
    text = " ".join((inspect.getdoc(kind) or "").split())
    return re.split(r"(?<! al)\. ", text)[0].rstrip(".")


def values(kind: type[enum.Enum]) -> Iterator[str]:
    """Yield a section with the members of an enum."""
    yield f"### {kind.__name__}"
    yield ""
    yield from textwrap.wrap(code(" ".join((inspect.getdoc(kind) or "").split())), 100)
    yield ""
    texts = members(kind)
    if any(texts.values()):
        yield "| value | |"
        yield "|---|---|"
        yield from (f"| `{value}` | {code(text)} |" for value, text in texts.items())
    else:
        yield f"Values: {', '.join(f'`{value}`' for value in texts)}."
    yield ""


def enums() -> list[type[enum.Enum]]:
    """Return the enums of the fields, in order of first use."""
    kinds: dict[type[enum.Enum], None] = {}
    for kind in KINDS:
        for hint in typing.get_type_hints(kind).values():
            for each in (hint, *getattr(hint, "__args__", ())):
                if isinstance(each, type) and issubclass(each, enum.Enum):
                    kinds[each] = None
    return list(kinds)


def options() -> Iterator[str]:
    """Yield the options of training, by section."""
    section = None
    distributed = arguments.listed(DistributedOptions, prefix="distributed.")
    for option in (*arguments.listed(TrainOptions), *distributed):
        if (prefix := option.name.rpartition(".")[0]) != section:
            section = prefix
            yield from ("", f"### {f'`--{prefix}.`' if prefix else 'The run'}", "")
            yield from ("| flag | default | meaning |", "|---|---|---|")
        choices = ""
        if isinstance(option.type, type) and issubclass(option.type, enum.Enum):
            choices = f" ({', '.join(f'`{member.value}`' for member in option.type)})"
        yield f"| `{option.flags[0]}` | {cell(option.default)} | {code(option.text)}{choices} |"


def page() -> str:
    """Return the whole page."""
    configs = references()
    lines = [HEAD, "## The model", "", *table(TransformerConfig, configs), ""]
    lines += ["## A stack: `encoder` and `decoder`", "", *table(StackConfig, configs), ""]
    lines += ["## A branch", "", *table(Branch, configs), "", "## Values", ""]
    for kind in enums():
        lines += values(kind)
    lines += ["## Options of training", ""]
    lines += [
        "`jax-transformer train --help-all` prints the same list. In a file of options the dots"
    ]
    lines += ["are levels ([configuration](configuration.md)).", *options()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write docs/{PAGE.name}")
    if parser.parse_args().write:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
