"""Models on the Hugging Face hub: ``hf:owner/name`` and ``hf:owner/name@revision``.

They are downloaded through ``huggingface_hub`` into its own cache. Configuration, weights in one
format, and tokenizer files are requested by name; programs never are.
"""

import re
from pathlib import Path

from jax_transformer.errors import ConfigError, InputError
from jax_transformer.storage import huggingface_folder
from jax_transformer.storage.huggingface_folder import CONFIG, EXTRA_FILES, WEIGHTS

PREFIX = "hf:"
# A letter, digit, underscore, dot or dash; the hub's own rule for names
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?", re.ASCII)
_OF_FILES = (".pt", ".pth", ".bin", ".safetensors", ".json")


def is_hub_name(path: str) -> bool:
    """Return True for a name on the hub, ``hf:...``."""
    return path.startswith(PREFIX)


def hint(path: Path) -> str:
    """Return a question for the hub's model of that name, if a missing path looks like one."""
    may_be = "/" in str(path) and _NAME.fullmatch(str(path)) and not path.parent.exists()
    return f" (did you mean {PREFIX}{path}?)" if may_be and path.suffix not in _OF_FILES else ""


def local(path: str | Path) -> Path:
    """Return the local folder of ``path``: itself, or the download for ``hf:owner/name``.

    Raises ConfigError if the name is invalid or ``huggingface_hub`` is not installed, InputError if
    the download fails.
    """
    name = str(path).removeprefix(PREFIX)
    if name == str(path):
        return Path(path)
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
    except Exception as error:  # of the library, of the network, and of its storage
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise InputError(f"{path}: cannot be downloaded: {reason}") from error


def _to_download(path: str, listed: list[str]) -> list[str]:
    """Return the files to download, of those that the repository has."""
    weights = next((name for name in WEIGHTS if name in listed), None)
    if weights is None or CONFIG not in listed:
        missing = CONFIG if CONFIG not in listed else f"any of {', '.join(WEIGHTS)}"
        raise InputError(f"{path}: is not a model that can be read: it lacks {missing}")
    shards = []
    if weights.endswith(huggingface_folder.INDEX):  # model-00001-of-00002.safetensors
        stem, _, suffix = weights.removesuffix(huggingface_folder.INDEX).rpartition(".")
        shard = re.compile(rf"{re.escape(stem)}-\d+-of-\d+\.{suffix}")
        shards = [name for name in listed if shard.fullmatch(name)]
    return [weights, *shards, *(name for name in EXTRA_FILES if name in listed)]
