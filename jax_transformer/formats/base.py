"""A file format as a value, weights that it opened, and its destination. Loads no jax."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from jax_transformer.architectures.tensor_names import NameChanges
from jax_transformer.config import TransformerConfig
from jax_transformer.errors import CheckpointError, ConfigError, InputError
from jax_transformer.formats.contents import Contents
from jax_transformer.storage import tensors
from jax_transformer.storage.run_folder import RunFolder
from jax_transformer.storage.tensors import LazyState, Note, TensorInfo
from jax_transformer.weights import rules

if TYPE_CHECKING:
    from jax_transformer.architectures.base import Architecture
    from jax_transformer.data.tokenizer import Tokenizer, TokenizerPair
    from jax_transformer.generate.generation_config import GenerationConfig
    from jax_transformer.transformer import Transformer

CONVERTED = "ctranslate2"
"""A folder in that of a model, with what ``--engine ctranslate2`` has converted of it."""
_NARROWEST = 16
Check = Callable[[LazyState], Any]
"""Is called with tensors that were written, none of them read; may refuse them by an exception."""


class Settled(NamedTuple):
    """The configuration of weights that do not bring it, and where its sizes are from."""

    config: TransformerConfig
    sizes: Mapping[str, Any]
    """Sizes that the shapes show."""
    from_preset: Mapping[str, Any]
    """Sizes that no shape shows, taken from the preset."""


@dataclass(frozen=True)
class Pretrained:
    """Opened weights, read on demand, with their configuration, tokenizer and generation settings.
    A format whose files know more has a subclass.
    """

    format: "Format"
    path: Path
    """The file or folder on this machine."""
    title: str
    """The path and the selected weights, for messages: ``runs/phrases (best, step 2000)``."""
    tensors: Mapping[str, TensorInfo]
    """Shapes and dtypes, under PyTorch's names if ``format.has_torch_names``, otherwise ours."""
    scan: Callable[[], LazyState]
    """Return the tensors, none of them read; names that are tied have one LazyTensor."""
    config: TransformerConfig | None = None
    """The model's configuration; None for a bare file, which does not have one."""
    weights: str = ""
    """``averaged``, ``best``, ``last``, a step's number, or the name of a file of the folder."""
    step: int = 0
    """The training step of the weights, in a run."""
    run: RunFolder | None = None
    files: tuple[Path, ...] = ()
    """Files that change with the weights: a checkpoint's manifest, an index, shards, the file."""
    extra_files: Mapping[str, Path] = field(default_factory=dict)
    """A Hugging Face folder's other files by name: configuration, tokenizer, card."""
    ties: tuple[tuple[str, ...], ...] = ()
    """Groups of names of one tensor."""
    dropped: tuple[Note, ...] = ()
    """Entries of the file or folder that are not weights of the model."""
    derived: tuple[Note, ...] = ()
    """Tensors that are not stored, but copies of others or computed."""
    stored_names: Mapping[str, str] = field(default_factory=dict)
    """The names of tensors in the files, if they are stored under others than here."""
    config_gives_way: ClassVar[bool] = False
    """True if a configuration that the user names wins over that of the files."""

    def with_names(self, changes: NameChanges) -> "Pretrained":
        """Return the same weights under other names, without the ignored ones. Raises as
        :meth:`.NameChanges.apply`, and ConfigError for a folder.
        """
        if changes == NameChanges():
            return self
        if not self.format.is_file:
            source = "transformers" if self.format.has_torch_names else "this project"
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

    # The model

    def read(self) -> dict[str, np.ndarray]:
        """Read all tensors into memory; names that are tied have one array."""
        return tensors.arrays(self.scan())

    def state(
        self,
        config: TransformerConfig | None = None,
        names: str = "flax",
        *,
        architecture: "Architecture | str | None" = None,
    ) -> dict[str, np.ndarray]:
        """Return the weights as ``{name: array}``, under this project's names or
        (``names="torch"``) under PyTorch's.

        ``config`` is the configuration of a bare file's model, ``architecture`` the one that its
        tensors are named after, if not the configuration's own. Raises InputError (CheckpointError
        for a run) with everything that is missing, unexpected, mis-shaped, or tied and different.
        """
        from jax_transformer import transformer
        from jax_transformer.architectures import registry

        config = self.config or config
        if config is None:
            raise ConfigError(f"{self.path} does not tell its architecture: give a configuration")
        aliases: dict[str, str] = {}
        if names == "flax" and not self.format.has_torch_names:  # a run needs no weight table
            stored = names
            shapes: Mapping[str, tuple[int, ...]] = transformer.shapes(config)
        else:
            weights = registry.model_weights(config, architecture)
            stored = "torch" if self.format.has_torch_names else "flax"
            shapes, aliases = weights.shapes[stored], rules.aliases(weights.table)
        try:
            tensors.refuse(tensors.problems(self.tensors, shapes))
            state = tensors.arrays(self.scan())
            tensors.refuse(tensors.differing_ties(aliases, state))
        except InputError as error:
            if self.run is None:
                raise
            raise CheckpointError(f"{self.title}: {error}") from None
        if stored == names:
            return state
        if names == "flax":
            return rules.to_flax(weights.table, state, weights.shapes["flax"])
        return rules.to_torch(weights.table, state)

    def model(
        self,
        config: TransformerConfig | None = None,
        *,
        dtype: Any = None,
        architecture: "Architecture | str | None" = None,
    ) -> "Transformer":
        """Return the model in its files' dtypes or in ``dtype``. Raises as :meth:`arrays`."""
        import jax

        from jax_transformer import transformer

        arrays = self.arrays(config, dtype=dtype, architecture=architecture)
        # Of copies JAX may use the memory as it is; jnp.array compiles a program for each shape
        on_device = {name: jax.device_put(np.array(array)) for name, array in arrays.items()}
        return transformer.unflatten(self.config or config, on_device)  # type: ignore[arg-type]

    def arrays(
        self,
        config: TransformerConfig | None = None,
        *,
        dtype: Any = None,
        architecture: "Architecture | str | None" = None,
    ) -> dict[str, np.ndarray]:
        """Return the model's arrays by path, on the host, in its files' dtypes or in ``dtype``.

        Raises as :meth:`state`, and for float64 in JAX's 32-bit mode.
        """
        import jax

        from jax_transformer.weights import arrays as weight_arrays

        arrays = self.state(config, architecture=architecture)
        for name, array in arrays.items():
            is_wide = array.dtype == np.float64 and not jax.config.read("jax_enable_x64")
            if is_wide and dtype is None and self.run is not None:
                raise CheckpointError(
                    f"{self.title}: holds float64 and JAX is in 32-bit mode: set JAX_ENABLE_X64=1"
                )
            arrays[name] = weight_arrays.as_numpy(name, array, dtype)
        return arrays

    # Tokenizer and generation

    @property
    def has_tokenizer(self) -> bool:
        """True if there is a tokenizer next to the weights."""
        return False

    def tokenizer(
        self, source_lang: str | None = None, target_lang: str | None = None
    ) -> "Tokenizer | TokenizerPair":
        """Return the tokenizer, for these two languages if it is multilingual.

        Raises InputError if there is none, ConfigError for languages if it is not multilingual.
        """
        raise InputError(f"{self.path}: is a {self.format.title}, which {self.without_tokenizer}")

    without_tokenizer: ClassVar[str] = "has no tokenizer"

    def generation_config(self, tokenizer: Any = None) -> "GenerationConfig":
        """Return the settings of transformers' ``generate`` in the folder's files, with the target
        language of ``tokenizer``; this project's defaults if there are no such files.

        Raises InputError, naming the file, for settings that are not supported.
        """
        from jax_transformer.generate.generation_config import GenerationConfig

        file = self.extra_files.get("config.json")
        if file is None or self.config is None:
            return GenerationConfig()
        from jax_transformer.generate import transformers_config

        return transformers_config.of_folder(file.parent, self.config, tokenizer)

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths that batches of sources are padded to: those of training, otherwise powers of
        two from 16 up to less than the model's length, so that few programs are compiled.
        """
        if self.config is None:
            raise ConfigError(f"{self.path} does not tell its architecture")
        powers = (_NARROWEST << i for i in range(self.config.longest.bit_length()))
        return tuple(width for width in powers if width < self.config.longest)

    # As the source of a conversion

    def settle(self, description: Any) -> Settled | None:
        """Return the model of a ``ModelDescription`` and these weights; None if shapes decide."""
        return None

    def converted_to(self, destination: "Format") -> "Pretrained":
        """Return the weights as a destination of this format needs them."""
        return self

    def files_for(self, to: "Destination") -> Mapping[str, bytes] | None:
        """Return the files to write with the weights, by name; None if the format knows them."""
        return None

    def files_layout(self) -> Mapping[str, str]:
        """Return how a Hugging Face folder of the same tensors is written: see
        :func:`.huggingface_folder.layout`.
        """
        return {}

    def notes_for(self, to: "Destination") -> tuple[Note, ...]:
        """Return notes on what the destination does not have."""
        return ()


@dataclass(frozen=True)
class Checked:
    """Result of a check that passed."""

    method: str
    """The kind of check, and the reason if the models were not run."""
    errors: dict[str, float] = field(default_factory=dict)
    """Largest absolute difference of each output."""


class Written(NamedTuple):
    """The result of writing a file or folder."""

    sha256: str
    """Hash of the file, or of a folder's weights."""
    summary: str | None = None
    """The content in a few words; None for the count of tensors."""
    checked: Checked | None = None
    """The check of a format that other programs run; None if weights were read back."""


@dataclass(frozen=True)
class Destination:
    """A file or folder that is written, and what its format may need to know for it."""

    format: "Format"
    path: Path
    source: Pretrained | None = None
    """The weights that are converted; None for a model in memory."""
    config: TransformerConfig | None = None
    """The model; None if a file is copied under its names."""
    frozen: frozenset[str] = frozenset()
    """Names of the arrays that are never trained."""
    dtype: str | None = None
    """The dtype that the weights are cast to; None keeps their own."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the format, such as ``shard_size``; None for those that were not given."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files that go into a folder with the weights, by name."""
    self_check: bool = True
    """Check a folder that other programs run by running it."""


class Layout(NamedTuple):
    """The differences between what a destination stores and what the model has."""

    names: Mapping[str, str] = MappingProxyType({})
    """The names of tensors in the destination, if they are stored under others."""
    computed: Mapping[str, str] = MappingProxyType({})
    """Why tensors are left out: their reader computes them."""
    notes: tuple[Note, ...] = ()
    """Parts of the source that the destination cannot hold."""


class Format:
    """A format of files or folders with weights; everything that depends on it is a method.

    A format is a subclass in one file, whose instance ``FORMAT`` the registry finds.
    """

    name: str
    """The name in the registry, and of a folder's format for ``convert --to``."""
    title: str
    """The name in messages: ``run folder``."""
    mark: str = ""
    """The sign that it is recognised by, for messages; empty if it is only written."""
    suffixes: tuple[str, ...] = ()
    is_file: bool = False
    """True for a file, or the index of several; False for a folder."""
    has_torch_names: bool = True
    """True if the weights have PyTorch's names, False for this project's."""
    open_options: tuple[str, ...] = ()
    """Options of :meth:`open` that only some formats have: ``weights``, ``key``, ``scan_axis``."""
    write_options: tuple[str, ...] | None = None
    """Options of ``convert`` for a destination of this format; None if it is only read."""
    has_extra_files: bool = False
    """True if files of a Hugging Face folder go into a folder of this format."""
    makes_parent: bool = True
    """True if the parent of a new folder may be missing."""

    # Reading

    def recognises(self, path: Path) -> bool:
        """Return True if the existing file or folder has this format, by a quick look."""
        return False

    def recognises_content(self, content: Mapping[str, Any]) -> bool:
        """Return True for the content of a PyTorch file that is a checkpoint of this format."""
        return False

    def open_content(self, path: Path, content: Mapping[str, Any]) -> Pretrained:
        """Open the weights of a PyTorch file whose content was recognised."""
        raise NotImplementedError

    def hint(self, path: Path) -> str:
        """Return a question for a path next to one of no known format, or an empty text."""
        return ""

    def open(self, path: Path, **options: Any) -> Pretrained:
        """Open the weights; no array is read. The options are those of ``open_options``."""
        raise ConfigError(f"{path}: a {self.title} is written and not read")

    def scan(self, path: Path) -> LazyState:
        """Return the tensors of a file by name, none of them read."""
        raise NotImplementedError

    def inspect(self, path: Path) -> Contents:
        """Return the content of the file or folder, without the values of its arrays."""
        raise ConfigError(f"{path}: a {self.title} is written and not read")

    # Writing

    def check_options(self, to: Destination) -> None:
        """Raise ConfigError, before the source is opened, for missing libraries, wrong options."""

    def own_config(self, path: Path) -> TransformerConfig | None:
        """Return the configuration of a destination that is a part of a folder, such as a run."""
        return None

    def check(self, to: Destination) -> None:
        """Raise ConfigError or InputError if the format cannot hold the source or its model."""

    def is_written(self, name: str) -> bool:
        """Return True for names of a folder's files that a conversion may write."""
        return False

    def files(self, to: Destination) -> Mapping[str, bytes]:
        """Return the files that go into the folder with the weights, by name."""
        return {}

    def takes(self, name: str) -> bool:
        """Return True if this file of a Hugging Face folder goes into the destination."""
        return self.has_extra_files

    def layout(self, to: Destination, names: Iterable[str]) -> "Layout":
        """Return how a model of these names is stored. Raises ConfigError if it cannot be."""
        return Layout()

    def stored(self, state: LazyState, config: TransformerConfig) -> LazyState:
        """Return the tensors that are stored, of all that the model has."""
        return state

    def completed(
        self, read_back: LazyState, state: LazyState, config: TransformerConfig, tied: Iterable[str]
    ) -> LazyState:
        """Return the tensors read back, with those of ``state`` that a reader computes or ties."""
        return read_back

    def write(self, to: Destination, state: LazyState, check: Check) -> Written:
        """Write ``state``, read it back, compare, check, and then replace ``to.path``. One tensor
        is in memory at a time, or for a checkpoint a few small ones.
        """
        raise ConfigError(f"{to.path}: a {self.title} is read and not written")

    def check_replaceable(self, target: Path) -> None:
        """Raise InputError unless the folder ``target`` has only files that a conversion writes."""
        names = sorted(path.name for path in target.iterdir() if path.name != CONVERTED)
        if others := [name for name in names if not self.is_written(name)]:
            raise InputError(
                f"{target}: holds more than weights ({', '.join(others)}), "
                "and --force does not replace that"
            )
