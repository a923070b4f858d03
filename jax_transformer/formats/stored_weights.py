"""Stored weights of a file or folder: names, shapes, and the files next to them.

Loads no jax.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jax_transformer.architectures.tensor_names import NameChanges
from jax_transformer.config import TransformerConfig
from jax_transformer.errors import ConfigError
from jax_transformer.extras.toolkits.marian import marian_model as marian_files
from jax_transformer.extras.toolkits.t5x import t5x_names
from jax_transformer.extras.toolkits.toolkit import Vocabularies
from jax_transformer.formats.kinds import Kind
from jax_transformer.storage import lazy
from jax_transformer.storage.lazy import LazyState
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.storage.tensors import Note, TensorInfo

Stored = TypeVar("Stored", bound="StoredWeights")


@dataclass(frozen=True)
class StoredWeights:
    """Stored weights; see :class:`jax_transformer.formats.pretrained.Pretrained`."""

    kind: Kind
    path: Path
    """The file or folder on this machine."""
    title: str
    """The path and the selected weights, for messages: ``runs/phrases (best, step 2000)``."""
    tensors: Mapping[str, TensorInfo]
    """Shapes and dtypes, under PyTorch's names if ``kind.has_torch_names``, otherwise under this
    project's.
    """
    scan: Callable[[], LazyState]
    """Return the tensors, none of them read; names that are tied have one LazyTensor."""
    config: TransformerConfig | None = None
    """The model's configuration; None for a bare file, which does not have one."""
    weights: str = ""
    """The selected weights of the folder: ``averaged``, ``best``, ``last``, a step's number, or a
    file's name.
    """
    step: int = 0
    """The training step that the weights are of, in a run."""
    run: RunFolder | None = None
    """The run that the weights are from."""
    files: tuple[Path, ...] = ()
    """Files that change with the weights: the manifest of a checkpoint, the index and shards of a
    folder, or the file.
    """
    extra_files: Mapping[str, Path] = field(default_factory=dict)
    """Files of a Hugging Face folder that go with the weights, by name: configuration, tokenizer,
    card.
    """
    ties: tuple[tuple[str, ...], ...] = ()
    """Groups of names of one tensor."""
    dropped: tuple[Note, ...] = ()
    """The entries of the file or folder that are no weights of the model."""
    derived: tuple[Note, ...] = ()
    """Those of ``tensors`` that are not stored, but copies of others or computed."""
    t5x: t5x_names.Layout | None = None
    """The layout of a checkpoint of T5X."""
    marian: marian_files.Model | None = None
    """The files of a model of Marian."""
    vocabularies: Vocabularies | None = None
    """The vocabularies of another toolkit's checkpoint."""

    def read(self) -> dict[str, np.ndarray]:
        """Read all tensors into memory; names that are tied have one array."""
        return lazy.arrays(self.scan())

    def with_names(self: Stored, changes: NameChanges) -> Stored:
        """The same weights under other names, without the ignored ones.

        Raises as :meth:`.NameChanges.apply`, and ConfigError for a folder.
        """
        if changes == NameChanges():
            return self
        if not self.kind.is_file:
            source = "transformers" if self.kind.has_torch_names else "this project"
            raise ConfigError(f"{changes}: {self.path} has the names of {source}")
        changed = changes.apply(self.tensors)

        def renamed(tensors: Mapping[str, Any]) -> dict[str, Any]:
            return {changed[name]: value for name, value in tensors.items() if name in changed}

        ties = [tuple(changed[name] for name in names if name in changed) for names in self.ties]
        ignored = [name for name in self.tensors if name not in changed]
        return replace(
            self,
            tensors=renamed(self.tensors),
            scan=lambda: renamed(self.scan()),
            ties=tuple(names for names in ties if len(names) > 1),
            dropped=(*self.dropped, *(Note(name, changes.why_ignored(name)) for name in ignored)),
        )
