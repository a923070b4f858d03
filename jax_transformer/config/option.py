"""Properties of a command line's options, each beside its field and in the field's type::

    steps: Annotated[int, Option(group="run", synonyms="epochs max_steps")] = 1600
    \"""Optimizer updates.\"""

Name, type and default are the field's, and the text under it is the help. Nothing lists options
elsewhere: help, parsing, YAML files, suggestions and completion read the dataclass.
"""

from dataclasses import dataclass
from typing import Annotated, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Option:
    """Properties of an option that its type does not show. An outer annotation wins."""

    group: str = ""
    """Title of its group in the help, and of the options after it until one names another.

    A nested dataclass without one has its field's name, unless it is ``Inline``.
    """
    metavar: str = ""
    """Placeholder of a text in the help."""
    synonyms: str = ""
    """Names in other projects, for which this option is suggested."""
    flag: str = ""
    """Short name of its flag; the field's name works as well."""
    rare: bool | str = False
    """``--help`` lists it without its meaning, which ``--help-all`` has. On a nested dataclass:
    true for all of its options, or a pattern for each option that is rare in this command."""
    positional: bool = False
    """It has no flag."""
    inline: bool = False
    """The flags of a nested dataclass do not begin with its field's name."""
    repeatable: bool = False
    """Each of several values has a flag of its own."""


Positional = Annotated[T, Option(positional=True)]
Inline = Annotated[T, Option(inline=True)]
Repeatable = Annotated[T, Option(repeatable=True)]
Rare = Annotated[T, Option(rare=True)]

# Texts that several commands take
PathText = Annotated[str, Option(metavar="PATH")]
ModelPath = Annotated[
    PathText,
    Option(synonyms="output_dir save_dir model_dir model model_name_or_path checkpoint run_dir"),
]
Weights = Annotated[str, Option(metavar="WHICH")]
Architecture = Annotated[str, Option(metavar="FILE.py:NAME")]
Name = Annotated[str, Option(metavar="NAME")]
Dtype = Annotated[str, Option(metavar="DTYPE")]
FieldName = Annotated[str, Option(metavar="FIELD")]
SourceLanguage = Annotated[str, Option(metavar="TAG", synonyms="src_lang")]
TargetLanguage = Annotated[str, Option(metavar="TAG", synonyms="tgt_lang")]
