"""Options from a YAML file, read strictly: unknown keys, repeated keys and wrong types are refused.

JSON is YAML, so the train_config.json of a run is read too. Three traps of YAML 1.1 are left out:
``1e-3`` is a number, ``010`` is not 8, and a date is text. ``yes``, ``no``, ``on`` and ``off`` stay
true and false; an option of text refuses them.
"""

import re
import sys
import typing
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml

from jax_transformer.cli import arguments
from jax_transformer.config import codec
from jax_transformer.errors import ConfigError, InputError, nearest

T = TypeVar("T")


def read(cls: type[T], path: str | Path) -> T:
    """Return the dataclass ``cls`` with the values of a file over its defaults, unchecked.

    A key of an earlier version works, with a line on stderr that names the new one. Raises
    InputError if the file cannot be read or is not YAML, ConfigError for an unknown key or a value
    of the wrong type.
    """
    data = _load(path)
    try:
        unknown: list[str] = []
        checked = _checked(data, cls, unknown, cls)
        if unknown:
            raise ConfigError(f"unknown key{'s' * (len(unknown) > 1)} {', '.join(unknown)}")
        return codec.from_dict(cls, checked, checked=False)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _load(path: str | Path) -> Any:
    from jax_transformer.storage import run_files, run_folder

    if Path(path).name == run_files.TRAIN_CONFIG:
        run_folder.verify(Path(path).parent)
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    try:
        data = yaml.load(content.decode("utf-8"), Loader=_Loader)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path}: line {line} is not valid UTF-8 (byte 0x{error.object[error.start]:02x})"
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line_number = f"line {mark.line + 1}: " if mark else ""
        raise InputError(f"{path}: {line_number}{error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, LookupError, RecursionError) as error:
        # the last three: a value that does not fit its explicit tag, and brackets without end
        raise InputError(f"{path}: is not YAML: {str(error).splitlines()[0]}") from None
    return {} if data is None else data


def _checked(data: Any, cls: type, unknown: list[str], root: type, section: str = "") -> Any:
    """Return the data of a section under today's keys, without empty sections.

    Unknown keys of a file of ``root``, each with a suggestion, are added to ``unknown``.
    """
    if not isinstance(data, dict):
        return data
    names, renamed, checked = codec.names(root), getattr(cls, "RENAMED", {}), {}
    for key, value in data.items():
        name = f"{section}{key}"
        if key in renamed:
            print(f"{name} is now called {section}{renamed[key]}", file=sys.stderr)
            name = f"{section}{renamed[key]}"
        is_section = any(known.startswith(f"{name}.") for known in names)
        if name not in names and not is_section:
            sections = sorted({known.rpartition(".")[0] for known in names} - {""})
            hint = nearest(name, sections)
            if not isinstance(value, dict):
                hint = arguments.did_you_mean(name, list(arguments.listed(root)))
            unknown.append(f"{name!r}{hint}")
            continue
        if "." in str(key):
            parent, _, child = str(key).rpartition(".")
            raise ConfigError(f"{name!r} has a dot: write {child!r} under {parent!r}")
        last = name.rpartition(".")[2]
        if is_section and value is not None:
            kind = typing.get_type_hints(cls)[last]
            checked[last] = _checked(value, kind, unknown, root, f"{name}.")
        elif not is_section:
            checked[last] = value
    return checked


class _Loader(yaml.SafeLoader):
    """Builds plain data. A repeated key is refused, and so is every tag that is not plain data."""

    # in place of YAML 1.1's; filled below, as are the constructors
    yaml_implicit_resolvers: ClassVar[dict] = {}
    yaml_constructors: ClassVar[dict] = {None: yaml.SafeLoader.yaml_constructors[None]}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else key)
        return super().construct_mapping(node, deep)

    def construct_text(self, node: yaml.ScalarNode) -> str:
        """Return text with surrogate pairs joined.

        JSON writes a character beyond U+FFFF as two escapes, which YAML reads as two characters.
        """
        text = self.construct_scalar(node)
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


_PLAIN = {
    "null": r"~|null|Null|NULL|",
    "bool": r"(?i:yes|no|on|off|true|false)",
    "int": r"[-+]?(0|[1-9][0-9_]*)",
    "float": r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?"
    r"|[-+]?(?i:\.inf)|(?i:\.nan)",
}
for _name in ("map", "seq", "str", *_PLAIN):
    _tag = f"tag:yaml.org,2002:{_name}"
    _Loader.yaml_constructors[_tag] = (
        _Loader.construct_text if _name == "str" else yaml.SafeLoader.yaml_constructors[_tag]
    )
    if _name in _PLAIN:
        _Loader.add_implicit_resolver(_tag, re.compile(rf"({_PLAIN[_name]})\Z"), None)
