"""Options from a YAML file, read strictly: every key is known, given once and of its field's type.

JSON is YAML, so a run's train_config.json can be given too. Three habits of YAML 1.1 are left out: ``1e-3`` is a number, ``010`` is not 8, and a
date is text. ``yes``, ``no``, ``on`` and ``off`` stay true and false; a field of text refuses them.
"""

import re
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml

from jax_transformer.config import codec
from jax_transformer.errors import ConfigError, InputError, nearest

T = TypeVar("T")


def read(cls: type[T], path: str | Path) -> T:
    """The dataclass ``cls`` with the values of a file; what the file does not give keeps its default. The class's own checks are not run.

    Raises InputError where the file cannot be read or is no YAML, ConfigError naming a key that is unknown or whose value is of another type.
    """
    data = _load(path)
    try:
        return codec.from_dict(cls, _known(data, codec.names(cls)), checked=False)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _load(path: str | Path) -> Any:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        data = yaml.load(content.decode("utf-8"), Loader=_Loader)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path}: line {line} is not valid UTF-8 (byte 0x{error.object[error.start]:02x})"
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise InputError(
            f"{path}: {f'line {mark.line + 1}: ' if mark else ''}{error.problem or error.context}"
        ) from None
    except (yaml.YAMLError, ValueError, LookupError, RecursionError) as error:
        # the last three: a value that its explicit tag does not fit, and brackets without end
        raise InputError(f"{path}: is not YAML: {str(error).splitlines()[0]}") from None
    return {} if data is None else data


def _known(data: Any, names: list[str], where: str = "") -> Any:
    """The data without empty sections. Raises ConfigError naming an unknown key, and the nearest of the dotted ``names``."""
    if not isinstance(data, dict):
        return data
    kept = {}
    for key, value in data.items():
        dotted = f"{where}{key}"
        section = any(name.startswith(f"{dotted}.") for name in names)
        if dotted not in names and not section:
            sections = sorted({name.rpartition(".")[0] for name in names} - {""})
            raise ConfigError(
                f"unknown key {dotted!r}{nearest(dotted, sections if isinstance(value, dict) else names)}"
            )
        if "." in str(key):
            raise ConfigError(
                f"{dotted!r} has a dot: write {key.rpartition('.')[2]!r} under {key.rpartition('.')[0]!r}"
            )
        if value is not None or not section:
            kept[key] = _known(value, names, f"{dotted}.") if section else value
    return kept


class _Loader(yaml.SafeLoader):
    """Plain data; a key that is given twice is refused, and so is every tag but those of :data:`_PLAIN`."""

    yaml_implicit_resolvers: ClassVar[
        dict
    ] = {}  # in place of YAML 1.1's; filled below, as are the constructors
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
        """Text. JSON writes a character beyond U+FFFF as two escapes, which YAML takes for two characters: they become one."""
        return (
            self.construct_scalar(node)
            .encode("utf-16", "surrogatepass")
            .decode("utf-16", "surrogatepass")
        )


_PLAIN = {
    "null": r"~|null|Null|NULL|",
    "bool": r"(?i:yes|no|on|off|true|false)",
    "int": r"[-+]?(0|[1-9][0-9_]*)",
    "float": r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?(?i:\.inf)|(?i:\.nan)",
}
for _name in ("map", "seq", "str", *_PLAIN):
    _tag = f"tag:yaml.org,2002:{_name}"
    _Loader.yaml_constructors[_tag] = (
        _Loader.construct_text if _name == "str" else yaml.SafeLoader.yaml_constructors[_tag]
    )
    if _name in _PLAIN:
        _Loader.add_implicit_resolver(_tag, re.compile(rf"({_PLAIN[_name]})\Z"), None)
