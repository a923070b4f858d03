"""Open any kind of file or folder with weights: :func:`open` returns its weights, configuration and
tokenizer.

No code in a file is run. Importing this module loads no jax, and neither does opening a file.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_transformer.architectures.tensor_names import NameChanges
from jax_transformer.config import TransformerConfig
from jax_transformer.errors import CheckpointError, ConfigError, InputError
from jax_transformer.formats import pretrained_files
from jax_transformer.formats.kinds import Kind
from jax_transformer.formats.stored_weights import StoredWeights
from jax_transformer.storage import huggingface_folder as folders
from jax_transformer.storage import tensors
from jax_transformer.storage.run_folder import parsed
from jax_transformer.weights import rules

if TYPE_CHECKING:
    import numpy as np

    from jax_transformer.architectures.base import Architecture
    from jax_transformer.data.tokenizer import Tokenizer, TokenizerPair
    from jax_transformer.generate.generation_config import GenerationConfig
    from jax_transformer.transformer import Transformer

_NARROWEST = 16


class Pretrained(StoredWeights):
    """Stored weights, with their configuration, tokenizer and generation settings.

    Arrays are read on demand.
    """

    # The model

    def state(
        self,
        config: TransformerConfig | None = None,
        names: str = "flax",
        *,
        architecture: "Architecture | str | None" = None,
    ) -> "dict[str, np.ndarray]":
        """The weights as ``{name: array}``, under this project's names or (``names="torch"``) under
        PyTorch's.

        ``config`` is the configuration of a bare file's model, ``architecture`` the one that its
        tensors are named after, if not the configuration's own. Raises InputError
        (CheckpointError for a run) with everything that is missing, unexpected, mis-shaped, or
        tied and different.
        """
        from jax_transformer import state_dict, transformer

        if names == "flax" and not self.kind.has_torch_names:  # a run needs no weight table
            return self._checked(transformer.shapes(self._config(config)), {})
        weights = state_dict.model_weights(self._config(config), architecture)
        stored = "torch" if self.kind.has_torch_names else "flax"
        state = self._checked(weights.shapes[stored], rules.aliases(weights.table))
        if stored == names:
            return state
        if names == "flax":
            return rules.to_flax(weights.table, state, weights.shapes["flax"])
        return rules.to_torch(weights.table, state)

    def _checked(
        self, shapes: Mapping[str, tuple[int, ...]], ties: Mapping[str, str]
    ) -> "dict[str, np.ndarray]":
        """Read the arrays. Raises InputError, or CheckpointError for a run, unless they have these
        shapes and tied ones are equal.
        """
        try:
            tensors.refuse(tensors.problems(self.tensors, shapes))
            state = self.read()
            tensors.refuse(tensors.differing_ties(ties, state))
        except InputError as error:
            if self.run is None:
                raise
            raise CheckpointError(f"{self.title}: {error}") from None
        return state

    def model(
        self,
        config: TransformerConfig | None = None,
        *,
        dtype: Any = None,
        architecture: "Architecture | str | None" = None,
    ) -> "Transformer":
        """The model, in the dtypes of its files or in ``dtype``. Raises as :meth:`arrays`."""
        import jax.numpy as jnp

        from jax_transformer import transformer

        arrays = self.arrays(config, dtype=dtype, architecture=architecture)
        on_device = {name: jnp.array(array, copy=True) for name, array in arrays.items()}
        return transformer.unflatten(self._config(config), on_device)

    def arrays(
        self,
        config: TransformerConfig | None = None,
        *,
        dtype: Any = None,
        architecture: "Architecture | str | None" = None,
    ) -> "dict[str, np.ndarray]":
        """The model's arrays by path, on the host, in the dtypes of its files or in ``dtype``.

        Raises as :meth:`state`, and for float64 in JAX's 32-bit mode.
        """
        import jax

        from jax_transformer import state_dict

        wide = any(tensor.dtype == "float64" for tensor in self.tensors.values())
        if self.run and wide and dtype is None and not jax.config.read("jax_enable_x64"):
            raise CheckpointError(
                f"{self.title}: holds float64 and JAX is in 32-bit mode: set JAX_ENABLE_X64=1"
            )
        return {
            name: state_dict.as_numpy(name, array, dtype)
            for name, array in self.state(config, architecture=architecture).items()
        }

    def _config(self, config: TransformerConfig | None) -> TransformerConfig:
        """The configuration of the files, or ``config`` for a bare file."""
        if self.config is None and config is None:
            raise ConfigError(f"{self.path} does not tell its architecture: give a configuration")
        return self.config or config  # type: ignore[return-value]

    # Tokenizer and generation

    @property
    def has_tokenizer(self) -> bool:
        """True if there is a tokenizer next to the weights."""
        from jax_transformer.data import run_tokenizer

        if self.kind is Kind.HUGGINGFACE:
            return any(name in self.extra_files for name in folders.TOKENIZER)
        return self.run is not None and run_tokenizer.has_tokenizer(self.run.path)

    def tokenizer(
        self, source_lang: str | None = None, target_lang: str | None = None
    ) -> "Tokenizer | TokenizerPair":
        """The tokenizer, for these two languages if it is multilingual.

        Raises InputError if there is none, ConfigError for languages if it is not multilingual.
        """
        from jax_transformer.data import huggingface_tokenizer, run_tokenizer

        languages = {"source_lang": source_lang, "target_lang": target_lang}
        if self.kind is Kind.HUGGINGFACE:
            return huggingface_tokenizer.load_huggingface(self.path, **languages)
        if self.run is None:
            where = "has no tokenizer"
            if self.vocabularies is not None or self.marian is not None:
                where = "gets its tokenizer in a run: jax-transformer convert FILE runs/NAME"
            raise InputError(f"{self.path}: is a {self.kind.value}, which {where}")
        loaded = run_tokenizer.load_tokenizer(self.run.path)
        if source_lang is None and target_lang is None:
            return loaded
        if not isinstance(loaded, huggingface_tokenizer.HuggingFaceTokenizer):
            raise ConfigError(
                f"--source-lang and --target-lang are for tokenizers of several languages; "
                f"that of {self.path} has none"
            )
        return loaded.with_languages(source_lang, target_lang)

    def generation_config(self, tokenizer: Any = None) -> "GenerationConfig":
        """The settings of transformers' ``generate`` in the folder's files, with the target
        language of ``tokenizer``; this project's defaults if there are no such files.

        Raises InputError, naming the file, for settings that are not supported.
        """
        from jax_transformer.generate.generation_config import GenerationConfig

        config_file = self.extra_files.get(folders.CONFIG)
        if config_file is None or self.config is None:
            return GenerationConfig()
        return generation_config(config_file.parent, self.config, tokenizer)

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths that batches of sources are padded to: those of training, otherwise powers of
        two up to the model's length.
        """
        if self.run is not None and (self.run.data.exists() or self.run.train_config.exists()):
            return parsed(self.run.data, lambda text: tuple(json.loads(text)["widths"]))
        if self.config is None:
            raise ConfigError(f"{self.path} does not tell its architecture")
        return powers_of_two(self.config.longest)


def open(
    path: str | Path,
    weights: str = "auto",
    *,
    key: str | None = None,
    strip_prefix: str = "",
    scan_axis: int | None = None,
) -> Pretrained:
    """Open the weights at ``path``: a run folder, one checkpoint, a Hugging Face folder,
    ``hf:owner/name``, a checkpoint of T5X, a model of Marian (.npz, or its folder), a .safetensors
    file or the index of several, or a PyTorch file. The kind is detected from the content.

    A checkpoint is verified against its manifest here, once; everything else is read on demand.

    Args:
        path: a file, a folder or ``hf:owner/name``.
        weights: ``auto``, ``averaged``, ``best``, ``last`` or the number of a step, in a run. If a
            checkpoint is damaged, ``auto`` names it on stderr and takes the next.
        key: the key of the state_dict in a PyTorch file, such as ``model``; not needed if there is
            only one.
        strip_prefix: removed from the beginning of every name of a file, such as ``module.``.
        scan_axis: T5X's ``param_scan_axis``, if the shapes of a checkpoint fit several.

    Raises:
        InputError: the file is missing, damaged, or of no known kind.
        CheckpointError: a run has no intact checkpoint, or not the one that ``weights`` selects.
        ConfigError: an argument does not apply to this kind.
        UnsafeFileError: the file would run code, or needs more memory than it has bytes.
    """
    stored = pretrained_files.find(path, weights, key, scan_axis)
    return Pretrained(**vars(stored.with_names(NameChanges(strip_prefix))))


def load(
    path: str | Path,
    weights: str = "auto",
    *,
    source_lang: str | None = None,
    target_lang: str | None = None,
) -> "tuple[Transformer, Tokenizer | TokenizerPair | None]":
    """Load the model and the tokenizer of a run folder, a Hugging Face folder or ``hf:owner/name``;
    the tokenizer is None if there is none.

    The model knows none of the folder's settings of generation: the functions of
    :mod:`jax_transformer.generate` decode as their arguments say, and only
    :class:`jax_transformer.Translator` translates as the folder says. Arrays keep the dtypes of the
    files. The languages are for a multilingual tokenizer.
    ``weights`` and errors are those of :func:`open`.
    """
    opened = open(path, weights)
    if not opened.has_tokenizer and source_lang is None and target_lang is None:
        return opened.model(), None
    return opened.model(), opened.tokenizer(source_lang, target_lang)


# Generation


def generation_config(
    folder: Path, config: TransformerConfig, tokenizer: Any = None
) -> "GenerationConfig":
    """The settings of transformers' ``generate`` in the files of ``folder``, with the target
    language of ``tokenizer``.

    Raises InputError, naming the file, for settings that are not supported.
    """
    from jax_transformer.data.huggingface_tokenizer import HuggingFaceTokenizer
    from jax_transformer.generate import transformers_config

    data, file = transformers_config.read(folder)
    generation = transformers_config.from_generation_config(data, config, where=str(file))
    if not isinstance(tokenizer, HuggingFaceTokenizer) or tokenizer.target_lang is None:
        return generation
    forced = tokenizer.forced_bos_id()
    return dataclasses.replace(
        generation,
        decoder_start_token_id=tokenizer.bos_id,
        forced_bos_token_id=generation.forced_bos_token_id if forced is None else forced,
    )


def powers_of_two(longest: int) -> tuple[int, ...]:
    """Powers of two from 16 up to less than ``longest``, so that few programs are compiled."""
    widths = [_NARROWEST]
    while widths[-1] < longest:
        widths.append(2 * widths[-1])
    return tuple(width for width in widths if width < longest)
