"""``hf:owner/name`` and ``hf:owner/name@revision``: a model on the Hugging Face hub, downloaded
through ``huggingface_hub`` into its own cache.

Configuration, weights in one format, and tokenizer files are requested by name; programs never are.
"""

import re
from pathlib import Path

from jax_transformer.errors import ConfigError, InputError
from jax_transformer.storage import huggingface

PREFIX = "hf:"
# A letter, digit, underscore, dot or dash; the hub's own rule for names
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?", re.ASCII)


def is_source(path: str) -> bool:
    """True for a name on the hub, ``hf:...``."""
    return path.startswith(PREFIX)


def local(path: str | Path) -> Path:
    """The local folder of ``path``: itself, or the download for ``hf:owner/name``.

    Raises ConfigError if the name is invalid or ``huggingface_hub`` is not installed, InputError if
    the download fails.
    """
    if not is_source(str(path)):
        return Path(path)
    name = str(path).removeprefix(PREFIX)
    if not _NAME.fullmatch(name) or ".." in name:
        raise ConfigError(
            f"{path}: give a model of the hub as hf:owner/name or hf:owner/name@revision"
        )
    try:
        import huggingface_hub
    except ImportError:
        raise ConfigError(
            f"{path}: models of the hub need huggingface_hub: pip install 'jax-seq2seq[hub]'"
        ) from None
    repository, _, revision = name.partition("@")
    try:
        listed = huggingface_hub.HfApi().list_repo_files(repository, revision=revision or None)
        patterns = _to_download(str(path), listed)
        return Path(
            huggingface_hub.snapshot_download(
                repository, revision=revision or None, allow_patterns=patterns
            )
        )
    except (ConfigError, InputError):
        raise
    except (
        Exception
    ) as error:  # the library's own classes, network errors, and what its storage raises
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise InputError(f"{path}: cannot be downloaded: {reason}") from error


def _to_download(path: str, listed: list[str]) -> list[str]:
    """The files to download, of those that the repository has."""
    form = next((name for name in huggingface.WEIGHTS if name in listed), None)
    if form is None or huggingface.CONFIG not in listed:
        missing = (
            huggingface.CONFIG
            if huggingface.CONFIG not in listed
            else f"any of {', '.join(huggingface.WEIGHTS)}"
        )
        raise InputError(f"{path}: is no model that can be read: it lacks {missing}")
    shards = [
        name
        for name in listed
        if form.endswith(huggingface.INDEX)
        and _is_shard(name, form.removesuffix(huggingface.INDEX))
    ]
    return [form, *shards, *(name for name in huggingface.KEPT if name in listed)]


def _is_shard(name: str, file: str) -> bool:
    """True for the name of a shard of ``file``: model-00001-of-00002.safetensors."""
    stem, _, suffix = file.rpartition(".")
    return re.fullmatch(rf"{re.escape(stem)}-\d+-of-\d+\.{suffix}", name) is not None
