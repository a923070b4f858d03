"""``hf:owner/name`` and ``hf:owner/name@revision``: a model on the Hugging Face hub, downloaded through ``huggingface_hub`` into its own cache.

Configuration, weights in one form, and tokenizer files are asked for by name; programs never are.
"""

import re
from pathlib import Path

from jax_transformer.errors import ConfigError, InputError
from jax_transformer.storage import huggingface

PREFIX = "hf:"
# A letter, digit, underscore, dot or dash; the hub's own rule for names
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?", re.ASCII)


def is_source(path: str) -> bool:
    """Whether this is meant to be on the hub."""
    return path.startswith(PREFIX)


def local(path: str | Path) -> Path:
    """The folder that ``path`` names: itself, or what is downloaded for ``hf:owner/name``.

    Raises ConfigError where the name is none or ``huggingface_hub`` is not installed, InputError in one line where the hub does not give it.
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
            f"{path}: models of the hub need huggingface_hub: pip install 'jax-transformer[hub]'"
        ) from None
    repository, _, revision = name.partition("@")
    try:
        listed = huggingface_hub.HfApi().list_repo_files(repository, revision=revision or None)
        wanted = _wanted(str(path), listed)
        return Path(
            huggingface_hub.snapshot_download(
                repository, revision=revision or None, allow_patterns=wanted
            )
        )
    except (ConfigError, InputError):
        raise
    except (
        Exception
    ) as error:  # the library's own classes, network errors, and what its storage raises
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise InputError(f"{path}: cannot be downloaded: {reason}") from error


def _wanted(path: str, listed: list[str]) -> list[str]:
    """The files to download, of those that there are."""
    form = next((name for name in huggingface.WEIGHTS if name in listed), None)
    if form is None or huggingface.CONFIG not in listed:
        missing = (
            huggingface.CONFIG
            if huggingface.CONFIG not in listed
            else f"any of {', '.join(huggingface.WEIGHTS)}"
        )
        raise InputError(f"{path}: is no model that is read: it has not {missing}")
    shards = [
        name
        for name in listed
        if form.endswith(huggingface.INDEX)
        and _is_shard(name, form.removesuffix(huggingface.INDEX))
    ]
    return [form, *shards, *(name for name in huggingface.KEPT if name in listed)]


def _is_shard(name: str, whole: str) -> bool:
    """Whether this is named as a part of ``whole`` is: model-00001-of-00002.safetensors."""
    stem, _, suffix = whole.rpartition(".")
    return re.fullmatch(rf"{re.escape(stem)}-\d+-of-\d+\.{suffix}", name) is not None
