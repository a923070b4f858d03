"""Shared by the descriptions of other toolkits' checkpoints: options, read strictly; what is known
of a checkpoint before its weights are read; and vocabularies as this project's tokenizers.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jax_transformer.architectures import registry
from jax_transformer.config import TransformerConfig
from jax_transformer.config.model import MOST_LAYERS
from jax_transformer.errors import InputError, nearest
from jax_transformer.formats.base import Destination, Format, Pretrained
from jax_transformer.storage import pt, run_files, safetensors
from jax_transformer.storage.tensors import LazyState, LazyTensor, Note, TensorInfo
from jax_transformer.storage.untrusted import shown
from jax_transformer.weights import rules
from jax_transformer.weights.rules import Alias, Table, embedding

T = TypeVar("T")
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
_REAL = re.compile(r"(\d{1,9}(\.\d{0,20})?|\.\d{1,20})([eE][-+]?\d{1,3})?", re.ASCII)


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


@dataclass(frozen=True)
class Description:
    """A checkpoint without its weights."""

    config: TransformerConfig
    states: Mapping[str, tuple[str, ...]]
    """The keys that lead to each state_dict, by the prefix that its names get."""
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Reasons for tensors that are not weights, by name."""
    vocabularies: Vocabularies | None = None
    files: tuple[Path, ...] = ()
    """Other files next to the checkpoint that were read."""
    weights: tuple[Path, ...] = ()
    """``.safetensors`` files next to the checkpoint that hold the weights, if it has none."""
    zero: tuple[str, ...] = ()
    """Biases that the toolkit's module does not have: they are zero here."""


@dataclass(frozen=True)
class ToolkitWeights(Pretrained):
    """The weights of a checkpoint under the toolkit's own names, and its vocabularies."""

    vocabularies: Vocabularies | None = None
    without_tokenizer = "gets its tokenizer in a run: jax-transformer convert FILE runs/NAME"

    def files_for(self, to: Destination) -> Mapping[str, bytes] | None:
        """Return the vocabularies as this project's tokenizers, for a folder that takes them."""
        if self.vocabularies is None:
            return None
        if not to.format.takes("tokenizer.json"):
            return {}
        return tokenizer_files(self.title, self.vocabularies)


class Toolkit(Format):
    """The checkpoints of one toolkit: PyTorch files with options and weights."""

    is_file = True
    toolkit: str
    """The toolkit's name."""

    @property
    def title(self) -> str:  # type: ignore[override]
        return f"checkpoint of {self.toolkit}"

    def describe(self, path: Path, content: Mapping[str, Any]) -> Description:
        """Describe a checkpoint. Raises InputError naming every option that no model here has."""
        raise NotImplementedError

    def open_content(self, path: Path, content: Mapping[str, Any]) -> Pretrained:
        described = self.describe(path, content)
        config = described.config
        ties = rules.aliases(registry.unchecked_table(config.architecture, config))

        def stored() -> LazyState:
            states = dict(pt.states(path, described.states))
            for file in described.weights:
                part = safetensors.scan(file)
                for name in part.keys() & states.keys():
                    raise InputError(f"{file}: has {shown(name)}, and so has another file")
                states |= part
            return {
                name: tensor for name, tensor in states.items() if name not in described.ignored
            }

        def scan() -> LazyState:
            """Add tied copies that the file leaves out, and biases that are zero."""
            tensors = stored()
            left_out = {name: tensors[of] for name, of in ties.items() if of in tensors}
            for name in described.zero:
                if (weight := tensors.get(name.removesuffix("bias") + "weight")) is not None:
                    info = TensorInfo(weight.shape[:1], weight.dtype)
                    zeros = partial(np.zeros, info.shape, info.numpy_dtype())
                    left_out[name] = LazyTensor(info, zeros)
            return left_out | dict(tensors)

        infos = {name: tensor.info for name, tensor in scan().items()}
        reasons = dict.fromkeys(described.zero, "is zero: the module has none")
        reasons |= {
            name: f"repeats {of}, with which the model ties it" for name, of in ties.items()
        }
        read = stored()
        derived = [Note(name, reasons[name]) for name in infos if name not in read]
        keys = {keys[0] for keys in described.states.values()}
        others = [
            Note(str(name), "not part of the weights") for name in content if name not in keys
        ]
        ignored = [Note(name, reason) for name, reason in described.ignored.items()]
        return ToolkitWeights(
            self,
            path,
            f"{path} ({self.toolkit})",
            infos,
            scan,
            config,
            files=(path, *described.weights, *described.files),
            dropped=(*ignored, *others),
            derived=tuple(derived),
            vocabularies=described.vocabularies,
        )


def equal(name: str, values: Sequence[T]) -> T:
    """Return the value of encoder and decoder. Raises InputError if they differ."""
    if len(set(values)) > 1:
        raise InputError(f"{name} of encoder and decoder differ: {values[0]} and {values[1]}")
    return values[0]


class Options:
    """Options of a model by name, as text or as values. Errors name the option."""

    def __init__(self, values: Any, title: str = ""):
        if not isinstance(values, Mapping):
            raise InputError(f"{title or 'the options'}: is not a map of options")
        self.values, self.title = values, title

    def named(self, name: str) -> str:
        return f"{self.title}.{name}" if self.title else name

    def section(self, name: str) -> "Options":
        """Return the options under a name; none without it."""
        return Options(self.values.get(name, {}), self.named(name))

    def number(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if isinstance(value, str) and _NUMBER.fullmatch(value):
            return int(value)
        if type(value) is int and 0 <= value < 10**9:
            return value
        raise InputError(f"{self.named(name)}={shown(value)} is not a whole number")

    def layers(self, name: str, default: int | None = None) -> int:
        """Return a number of layers, of which each is described before a tensor is looked at."""
        value = self.number(name, default)
        if not 0 < value <= MOST_LAYERS:
            raise InputError(f"{self.named(name)}={value:,}: from 1 to {MOST_LAYERS:,} are read")
        return value

    def real(self, name: str, default: float) -> float:
        """Return a number of 0 or more; of a list, its first."""
        value = self._value(name, default)
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, str) and _REAL.fullmatch(value):
            value = float(value)
        if type(value) not in (int, float) or not 0 <= value < 1e9:
            raise InputError(f"{self.named(name)}={shown(value)} is not a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if not isinstance(value, bool):
            raise InputError(f"{self.named(name)}={shown(value)} is not true or false")
        return value

    def choice(self, name: str, known: Mapping[str, Any], default: str) -> Any:
        value = self._value(name, default)
        if not isinstance(value, str) or value not in known:
            names = ", ".join(known)
            raise InputError(f"{self.named(name)}={shown(value)}: supported is {names}")
        return known[value]

    def check_fixed(self, fixed: Mapping[str, Collection[Any]]) -> None:
        """Raise InputError that names every option with another value than these."""
        wrong = []
        for name, accepted in fixed.items():
            first = next(iter(accepted))
            value = self.values.get(name, first)
            texts = [str(one).lower() for one in accepted]  # also as text: ``false`` is False
            if value not in accepted and not (isinstance(value, str) and value.lower() in texts):
                wrong.append(f"{self.named(name)}={shown(value)}: only {shown(first)} is supported")
        if wrong:
            raise InputError("; ".join(wrong))

    def check_known(self, known: Iterable[str]) -> None:
        """Raise InputError that names every option which is none of these."""
        names = sorted(known)
        unknown = [
            f"unknown option {shown(self.named(str(name)))}{nearest(str(name), names)}"
            for name in self.values
            if name not in names
        ]
        if unknown:
            raise InputError(f"{'; '.join(unknown)}: the effect is not known")

    def _value(self, name: str, default: Any) -> Any:
        if name not in self.values and default is None:
            raise InputError(f"{self.named(name)} is missing")
        return self.values.get(name, default)


def embeddings(config: TransformerConfig, source: str, target: str) -> Table:
    """Return the rules for both embeddings of a state_dict; one may be a copy of the other."""
    written = embedding(target, "target_embedding")
    if config.tying.one_embedding:
        return [*written, Alias(f"{source}.weight", f"{target}.weight")]
    return [*written, *embedding(source, "source_embedding")]


# Tokenizers


def tokenizer_files(title: str, vocabularies: Vocabularies) -> Mapping[str, bytes]:
    """Return ``tokenizer.source.json`` and ``tokenizer.target.json`` of the checkpoint ``title``.

    Every token has the id that it has in the checkpoint. Those that begin, end and pad a line get
    this project's names.

    Raises InputError if another token has such a name.
    """
    import tokenizers
    from tokenizers import models, pre_tokenizers, processors

    from jax_transformer.data import tokenizer

    names = {vocabularies.pad: tokenizer.PAD, vocabularies.eos: tokenizer.EOS}
    if vocabularies.bos != vocabularies.eos:
        names[vocabularies.bos] = tokenizer.BOS
    contents = {}
    for file, side in zip(run_files.SIDE_FILES, ("source", "target"), strict=True):
        tokens = getattr(vocabularies, side)
        clash = [name for old, name in names.items() if old != name and name in tokens]
        if clash:
            raise InputError(
                f"{title}: the {side} vocabulary has a token {shown(clash[0])}, which has a role "
                "here"
            )
        ids = {names.get(token, token): number for number, token in enumerate(tokens)}
        model: Any = tokenizers.Tokenizer(models.WordLevel(ids, unk_token=vocabularies.unknown))
        model.pre_tokenizer = pre_tokenizers.CharDelimiterSplit(" ")
        model.add_special_tokens([*names.values()])
        if side == "source" and not vocabularies.source_ends:  # nothing is added to a line
            model.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")
        data = json.loads(model.to_str())
        contents[file] = json.dumps(data, ensure_ascii=False, indent=2).encode()
    return contents
