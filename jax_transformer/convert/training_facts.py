"""How a run's weights were trained, for the model card: read from the run folder."""

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
from jax_transformer.storage import hub
from jax_transformer.storage.huggingface import CONFIG, IN_RUN
from jax_transformer.storage.run_folder import RunFolder, parsed

# A folder that was loaded from this machine is named by its path there; a step of a training is not
# on the hub
_HUB_NAME = re.compile(r"(?!.*checkpoint-\d+$)[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def of(source: Pretrained) -> Training | None:
    """How the weights of a run were trained; None if they were not trained here."""
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
    """The languages that the tokenizer was given, or the suffixes of the files by custom: train.en
    and train.de.gz.
    """
    if data.builtin:
        return ("en", "de", "fr", "es")
    languages = []
    for given, files in (
        (data.source_lang, data.train_source),
        (data.target_lang, data.train_target),
    ):
        named = {Path(name.removesuffix(".gz")).suffix[1:] for name in files}
        code = given or (named.pop() if len(named) == 1 and named <= published_codes() else None)
        languages += [code] if code else []
    return tuple(languages)


def _on_hub(init: str) -> str:
    return init.removeprefix(hub.PREFIX).partition("@")[0] if hub.is_source(init) else ""


def _base_model(folder: RunFolder, init: str | None) -> str:
    """The name on the hub of the model that training began from: by ``hf:owner/name``, by the
    earlier run, or by config.json.
    """
    if init is None:
        return ""
    before = RunFolder(Path(init))
    if (
        not hub.is_source(init)
        and before.train_config.is_file()
        and before.path.resolve() != folder.path.resolve()
    ):
        return _base_model(before, before.train_options().get("init"))
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
