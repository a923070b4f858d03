"""Vocabularies of another toolkit as this project's tokenizers: lines are tokens between spaces."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax_transformer.errors import InputError
from jax_transformer.storage import run_files
from jax_transformer.storage.untrusted import shown


@dataclass(frozen=True)
class Vocabularies:
    """The tokens of both sides in the order of their ids, and those with a role."""

    source: tuple[str, ...]
    target: tuple[str, ...]
    pad: str
    bos: str
    eos: str
    unknown: str
    source_ends: bool = True
    """A source ends with ``eos``."""

    def config_fields(self) -> dict[str, Any]:
        """Return the sizes and ids of a configuration with these vocabularies."""
        return {
            "source_vocab_size": len(self.source),
            "target_vocab_size": len(self.target),
            "source_pad_id": self.source.index(self.pad),
            "target_pad_id": self.target.index(self.pad),
            "bos_id": self.target.index(self.bos),
            "eos_id": self.target.index(self.eos),
        }


def files(title: str, vocabularies: Vocabularies) -> Mapping[str, bytes]:
    """Return ``tokenizer.source.json`` and ``tokenizer.target.json`` of the checkpoint ``title``.

    Every token has the id that it has in the checkpoint. Those that begin, end and pad a line get
    this project's names.

    Raises InputError if another token has such a name.
    """
    contents = {}
    for name, side in zip(run_files.SIDE_FILES, ("source", "target"), strict=True):
        ends = side == "target" or vocabularies.source_ends
        try:
            tokens = getattr(vocabularies, side)
            contents[name] = _tokenizer(vocabularies, tokens, ends=ends)
        except InputError as error:
            raise InputError(f"{title}: the {side} vocabulary {error}") from None
    return contents


def _tokenizer(vocabularies: Vocabularies, tokens: tuple[str, ...], *, ends: bool) -> bytes:
    import tokenizers
    from tokenizers import models, pre_tokenizers, processors

    from jax_transformer.data import tokenizer

    names = {vocabularies.pad: tokenizer.PAD, vocabularies.eos: tokenizer.EOS}
    if vocabularies.bos != vocabularies.eos:
        names[vocabularies.bos] = tokenizer.BOS
    clash = [name for old, name in names.items() if old != name and name in tokens]
    if clash:
        raise InputError(f"has a token {shown(clash[0])}, which has a role here")
    ids = {names.get(token, token): number for number, token in enumerate(tokens)}
    model: Any = tokenizers.Tokenizer(models.WordLevel(ids, unk_token=vocabularies.unknown))
    model.pre_tokenizer = pre_tokenizers.CharDelimiterSplit(" ")
    model.add_special_tokens([*names.values()])
    if not ends:  # nothing is added to a line
        model.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")
    return json.dumps(json.loads(model.to_str()), ensure_ascii=False, indent=2).encode()
