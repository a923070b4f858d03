"""The model card of an exported folder: README.md, with the front matter of the hub's
documentation, and what a run's folder records of its training. No licence is guessed: the publisher
of a model chooses it.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax_transformer.architectures.huggingface import published_codes
from jax_transformer.config import codec
from jax_transformer.data.options import DataOptions
from jax_transformer.formats import registry
from jax_transformer.formats.base import Pretrained
from jax_transformer.storage import run_folder
from jax_transformer.storage.huggingface_folder import CONFIG, IN_RUN
from jax_transformer.storage.run_folder import RunFolder, parsed

_SCORES = {"bleu": "BLEU", "chrf": "chrF", "ter": "TER", "exact_match": "exact match"}
_KEY = re.compile(r"([A-Za-z][\w-]*)\s*:")
# The name of a model that was loaded from a local folder is the folder's path, and a checkpoint of
# a training is not on the hub
_HUB_NAME = re.compile(r"(?!.*checkpoint-\d+$)[A-Za-z0-9][\w-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class Training:
    """Facts about a run's training."""

    step: int
    data: tuple[str, ...]
    """File names, or the name of the data set."""
    counts: Mapping[str, Any]
    """Numbers of sentence pairs: ``train_pairs``, ``valid_pairs``."""
    options: Mapping[str, Any]
    """Training options by dotted name."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Validation metrics: ``bleu``, ``signatures`` and others; empty without a validation."""
    languages: tuple[str, ...] = ()
    """Language codes that are known, source first."""
    tokenizer_languages: tuple[str, str] | None = None
    """Source and target as the tokenizer names them."""
    begun_from: str = ""
    """The name of the model that was fine-tuned."""
    base_model: str = ""
    """The name of that model on the hub, ``owner/name``, if it is known to be there."""
    datasets: tuple[str, ...] = ()
    """Names of data sets on the hub."""
    validated_on: tuple[str, ...] = ()
    """Names of the texts that ``figures`` were measured on."""

    @property
    def translates(self) -> bool:
        """False for a model that learned from text without translations."""
        return "bleu" in self.figures or "valid_loss" not in self.figures


def new(name: str, family: str, parameters: int, training: Training | None) -> str:
    """Write a card for a model without one, in a folder of this name; ``family`` is its
    ``model_type``, ``parameters`` the number of weights, ``training`` what is known of it.
    """
    task = "translation" if training is None or training.translates else "text2text-generation"
    front: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": task,
        "tags": [task, family],
    }
    languages, section = "", []
    if training is not None:
        front |= _front_matter(name, training)
        section = _section("Training", training)
        if training.tokenizer_languages is not None:
            source, target = map(json.dumps, training.tokenizer_languages)
            languages = f", src_lang={source}, tgt_lang={target}"
    lines = [
        "---",
        *_yaml(front),
        "---",
        "",
        f"# {name}",
        "",
        f"An encoder-decoder of the family `{family}` with {parameters:,} parameters, exported by "
        "jax-transformer.",
        "",
        "No licence is given yet: add `license:` to the front matter above before publishing.",
        "",
        "```python",
        "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer",
        "",
        f"model = AutoModelForSeq2SeqLM.from_pretrained({json.dumps(name)})",
        f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(name)}{languages})",
        'ids = model.generate(**tokenizer(["..."], return_tensors="pt"))',
        "print(tokenizer.batch_decode(ids, skip_special_tokens=True))",
        "```",
        *section,
    ]
    return "\n".join(lines) + "\n"


def appended(card: str, name: str, training: Training) -> str:
    """Add a section on fine-tuning to the end of the original model's card.

    The card's text stays as it is. In its front matter the new scores replace those of the original
    weights, and ``base_model`` becomes the model that training began from, if that is known.
    Languages and data sets are added if it has none.
    """
    front, body = _split_front_matter(card)
    ours = _front_matter(name, training)
    replaced = {"model-index", *(["base_model"] if training.base_model else [])}
    original = [text for key, text in front if key not in replaced]
    present = {key for key, _ in front} - {"model-index", "base_model"}
    added = {key: value for key, value in ours.items() if key not in present}
    lines = [*original, *_yaml(added)]
    head = "\n".join(["---", *lines, "---", ""]) if lines else ""
    return head + body.rstrip("\n") + "\n" + "\n".join(_section("Fine-tuning", training)) + "\n"


def _split_front_matter(card: str) -> tuple[list[tuple[str, str]], str]:
    """Split a card into its front matter, as keys with the lines of their values, and its text."""
    lines = card.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    marks = [i for i, line in enumerate(lines) if line.rstrip() == "---"]
    ends = marks[1] if len(marks) > 1 and marks[0] == 0 else 0
    parts: list[tuple[str, str]] = []
    for line in lines[1:ends]:
        if (match := _KEY.match(line)) or not parts:
            parts.append((match[1] if match else "", line))
        else:
            parts[-1] = (parts[-1][0], f"{parts[-1][1]}\n{line}")
    return parts, "\n".join(lines[ends + 1 :] if ends else lines)


def _front_matter(name: str, training: Training) -> dict[str, Any]:
    """Return front matter about training, empty if not known; deu_Latn is the hub's deu."""
    metrics = []
    for kind, title in _SCORES.items():
        if kind in training.figures:
            value = round(float(training.figures[kind]), 4)
            metrics.append({"type": kind, "name": title, "value": value})
    text = ", ".join(training.validated_on) or "validation"
    dataset = {"name": text, "type": "text", "split": "validation"}
    task = {"type": "translation", "name": "Translation"}
    result = {"task": task, "dataset": dataset, "metrics": metrics}
    return {
        "language": list(dict.fromkeys(code.partition("_")[0] for code in training.languages)),
        "base_model": training.base_model,
        "datasets": list(training.datasets),
        "model-index": [{"name": name, "results": [result]}] if metrics else [],
    }


def _yaml(front: Mapping[str, Any]) -> list[str]:
    """Return the entries that are not empty as YAML; their values are JSON, a subset of YAML."""
    return [
        f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in front.items() if value
    ]


def _section(title: str, training: Training) -> list[str]:
    begun = f", from {training.begun_from}" if training.begun_from else ""
    data = f" on {', '.join(training.data)}" if training.data else ""
    lines = ["", f"## {title}", ""]
    lines += [f"{training.step:,} steps with jax-transformer{data}{begun}.", ""]
    for key, value in training.counts.items():
        lines.append(f"- {key}: {value:,}")
    if training.figures:
        signatures = training.figures.get("signatures", {})
        lines += ["", "On the validation text:", "", "| | |", "|---|---|"]
        scores = _SCORES if training.translates else {"valid_loss": "loss, nats a token"}
        for key, name in scores.items():
            if key in training.figures:
                signature = f" (`{signatures[key]}`)" if key in signatures else ""
                lines.append(f"| {name}{signature} | {training.figures[key]:.2f} |")
    options = json.dumps(training.options, indent=2, ensure_ascii=False)
    return [*lines, "", "Options:", "", "```json", options, "```"]


# Facts about a run's training


def training_of(source: Pretrained) -> Training | None:
    """Return facts about the training of a run; None if its weights were not trained here."""
    folder = source.run
    if folder is None or not folder.train_config.is_file():
        return None
    run_folder.verify_metrics(folder.path)
    options = folder.train_options()
    init = options.get("init")
    data = parsed(
        folder.train_config,
        lambda text: codec.from_dict(DataOptions, json.loads(text).get("data", {}), "data"),
    )
    dataset, on_hub = data.dataset, False
    if dataset is not None:
        on_hub = not (Path(dataset).exists() or dataset.startswith(("/", ".", "~")))
        dataset = dataset if on_hub else Path(dataset).name
    files = (*data.train_source, *data.train_target, *data.train)
    valid_files = (*data.valid_source, *data.valid_target, *data.valid)
    text = (dataset or data.kind.value,)
    names = tuple(dict.fromkeys(map(os.path.basename, files))) or text
    shown = {name: options.get(name) for name in ("model", "optimizer", "steps", "seed")}
    flags = {name: value for name, value in codec.flat(shown).items() if value is not None}
    if init is not None:
        flags.pop("model.preset", None)  # the model is that of init
    pairs = ("train_pairs", "valid_pairs")
    counts = {name: value for name, value in _json(folder.data).items() if name in pairs}
    first, second = data.source_lang, data.target_lang
    return Training(
        source.step,
        names,
        counts,
        flags,
        (folder.validations() | folder.figures()).get(source.step, {}),
        _languages(data),
        (first, second) if first and second else None,
        begun_from="" if init is None else _on_hub(init) or Path(init).absolute().name,
        base_model=_base_model(folder, init),
        datasets=names if on_hub else (),
        validated_on=tuple(dict.fromkeys(map(os.path.basename, valid_files))) or text,
    )


def _languages(data: DataOptions) -> tuple[str, ...]:
    """Return the languages in the options, or the suffixes of the files: train.en, train.de.gz."""
    if data.builtin:
        return ("en", "de", "fr", "es")
    languages = []
    pairs = ((data.source_lang, data.train_source), (data.target_lang, data.train_target))
    for option, files in pairs:
        suffixes = {Path(name.removesuffix(".gz")).suffix[1:] for name in files}
        is_code = len(suffixes) == 1 and suffixes <= published_codes()
        code = option or (suffixes.pop() if is_code else None)
        languages += [code] if code else []
    return tuple(languages)


def _on_hub(init: str) -> str:
    name = init.removeprefix(registry.HUB).partition("@")[0]
    return name if init.startswith(registry.HUB) else ""


def _base_model(folder: RunFolder, init: str | None) -> str:
    """Return the hub name of the model that training began from: in ``hf:owner/name``, the earlier
    run's options, or config.json; empty if it is not known.
    """
    if init is None:
        return ""
    earlier = RunFolder(Path(init))
    if (
        not init.startswith(registry.HUB)
        and earlier.train_config.is_file()
        and earlier.path.resolve() != folder.path.resolve()
    ):
        run_folder.verify(earlier.path)
        return _base_model(earlier, earlier.train_options().get("init"))
    name = _json(folder.path / IN_RUN / CONFIG).get("_name_or_path")
    return _on_hub(init) or (name if isinstance(name, str) and _HUB_NAME.fullmatch(name) else "")


def _json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a run; an empty one without the file."""
    return parsed(path, lambda text: dict(json.loads(text))) if path.exists() else {}
