"""Facts about the training of a run's weights, for the model card; read from the run folder."""

import json
import re
from pathlib import Path
from typing import Any

from jax_transformer.architectures.huggingface import published_codes
from jax_transformer.config import codec
from jax_transformer.convert.card import Training
from jax_transformer.data.options import DataOptions
from jax_transformer.errors import InputError
from jax_transformer.pretrained import Pretrained
from jax_transformer.storage import kinds
from jax_transformer.storage.huggingface import CONFIG, IN_RUN
from jax_transformer.storage.run_folder import RunFolder, parsed

# The name of a model that was loaded from a local folder is the folder's path, and a checkpoint of
# a training is not on the hub
_HUB_NAME = re.compile(r"(?!.*checkpoint-\d+$)[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def of(source: Pretrained) -> Training | None:
    """Return facts about the training of a run; None if its weights were not trained here."""
    if source.run is None or not source.run.train_config.is_file():
        return None
    return _training(source.run, source.step)


def _training(folder: RunFolder, step: int) -> Training:
    options = folder.train_options()
    init = options.get("init")
    data = parsed(
        folder.train_config,
        lambda text: codec.from_dict(DataOptions, json.loads(text).get("data", {}), "data"),
    )
    on_hub = data.dataset is not None and not (
        Path(data.dataset).exists() or data.dataset.startswith(("/", ".", "~"))
    )
    dataset = data.dataset if data.dataset is None or on_hub else Path(data.dataset).name
    names, valid = (
        tuple(dict.fromkeys(Path(name).name for name in files)) or (dataset or data.kind.value,)
        for files in (
            (*data.train_source, *data.train_target, *data.train),
            (*data.valid_source, *data.valid_target, *data.valid),
        )
    )
    flags = {
        name: value
        for group in ("model", "optimizer")
        for name, value in _dotted(group, options.get(group))
        if value is not None
    }
    flags |= {name: options[name] for name in ("steps", "seed") if options.get(name) is not None}
    counts = {
        name: value
        for name, value in _json(folder.data).items()
        if name in ("train_pairs", "valid_pairs")
    }
    tokenizer_languages = (
        (data.source_lang, data.target_lang) if data.source_lang and data.target_lang else None
    )
    return Training(
        step,
        names,
        counts,
        flags,
        folder.validations().get(step, {}),
        _languages(data),
        tokenizer_languages,
        begun_from="" if init is None else _on_hub(init) or Path(init).absolute().name,
        base_model=_base_model(folder, init),
        datasets=names if on_hub else (),
        validated_on=valid,
    )


def _languages(data: DataOptions) -> tuple[str, ...]:
    """Return the languages in the options, or the suffixes of the files: train.en, train.de.gz."""
    if data.builtin:
        return ("en", "de", "fr", "es")
    languages = []
    for option, files in (
        (data.source_lang, data.train_source),
        (data.target_lang, data.train_target),
    ):
        suffixes = {Path(name.removesuffix(".gz")).suffix[1:] for name in files}
        is_code = len(suffixes) == 1 and suffixes <= published_codes()
        code = option or (suffixes.pop() if is_code else None)
        languages += [code] if code else []
    return tuple(languages)


def _on_hub(init: str) -> str:
    return init.removeprefix(kinds.HUB).partition("@")[0] if kinds.is_hub_name(init) else ""


def _base_model(folder: RunFolder, init: str | None) -> str:
    """Return the hub name of the model that training began from; empty if it is not known.

    It is in ``hf:owner/name``, in the options of the earlier run, or in config.json.
    """
    if init is None:
        return ""
    earlier = RunFolder(Path(init))
    if (
        not kinds.is_hub_name(init)
        and earlier.train_config.is_file()
        and earlier.path.resolve() != folder.path.resolve()
    ):
        return _base_model(earlier, earlier.train_options().get("init"))
    name = _json(folder.path / IN_RUN / CONFIG).get("_name_or_path")
    return _on_hub(init) or (name if isinstance(name, str) and _HUB_NAME.fullmatch(name) else "")


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def _dotted(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [
            pair for name, inner in value.items() for pair in _dotted(f"{prefix}.{name}", inner)
        ]
    return [(prefix, value)]
