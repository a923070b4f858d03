"""The model card of an exported folder: README.md, with front matter that the hub reads.

Standard library only. No licence is guessed: the publisher of a model chooses it. The keys of the
front matter are those of the hub's documentation of model cards.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_SCORES = {
    "bleu": ("bleu", "BLEU"),
    "chrf": ("chrf", "chrF"),
    "ter": ("ter", "TER"),
    "exact_match": ("exact_match", "exact match"),
}


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


def new(name: str, family: str, parameters: int, training: Training | None) -> str:
    """Write a card for a model without one.

    Args:
        name: the name of the folder.
        family: its ``model_type``.
        parameters: number of weights.
        training: facts about the training, if it is known.
    """
    front = {
        "library_name": "transformers",
        "pipeline_tag": "translation",
        "tags": ["translation", family],
    }
    codes = training.tokenizer_languages if training else None
    languages = (
        f", src_lang={json.dumps(codes[0])}, tgt_lang={json.dumps(codes[1])}" if codes else ""
    )
    lines = [
        "---",
        *_yaml_lines(front | (_front_matter(name, training) if training else {})),
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
        *(_section("Training", training) if training else ()),
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
    original = [
        text
        for key, text in front
        if key != "model-index" and (key != "base_model" or not training.base_model)
    ]
    present = {key for key, _ in front} - {"model-index", "base_model"}
    added = {key: value for key, value in ours.items() if key not in present}
    lines = [*original, *_yaml_lines(added)]
    head = "\n".join(["---", *lines, "---", ""]) if lines else ""
    return head + body.rstrip("\n") + "\n" + "\n".join(_section("Fine-tuning", training)) + "\n"


_KEY = re.compile(r"([A-Za-z][\w-]*)\s*:")


def _split_front_matter(card: str) -> tuple[list[tuple[str, str]], str]:
    """Split a card into its front matter, as keys with the lines of their values, and its text."""
    lines = card.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    ends = (
        next((i for i, line in enumerate(lines[1:], 1) if line.rstrip() == "---"), 0)
        if lines[0].rstrip() == "---"
        else 0
    )
    parts: list[tuple[str, str]] = []
    for line in lines[1:ends]:
        if (match := _KEY.match(line)) or not parts:
            parts.append((match[1] if match else "", line))
        else:
            parts[-1] = (parts[-1][0], f"{parts[-1][1]}\n{line}")
    return parts, "\n".join(lines[ends + 1 :] if ends else lines)


def _front_matter(name: str, training: Training) -> dict[str, Any]:
    """Front matter about training; a value that is not known is empty.

    The hub's language codes have no script or country: deu_Latn is deu.
    """
    return {
        "language": list(dict.fromkeys(code.partition("_")[0] for code in training.languages)),
        "base_model": training.base_model,
        "datasets": list(training.datasets),
        "model-index": [{"name": name, "results": [_result(training)]}]
        if _metrics(training)
        else [],
    }


def _yaml_lines(front: Mapping[str, Any]) -> Iterator[str]:
    """Yield the entries that are not empty as YAML; their values are JSON, a subset of YAML."""
    yield from (
        f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in front.items() if value
    )


def _metrics(training: Training) -> list[dict[str, Any]]:
    return [
        {"type": kind, "name": name, "value": round(float(training.figures[key]), 4)}
        for key, (kind, name) in _SCORES.items()
        if key in training.figures
    ]


def _result(training: Training) -> dict[str, Any]:
    dataset = {
        "name": ", ".join(training.validated_on) or "validation",
        "type": "text",
        "split": "validation",
    }
    return {
        "task": {"type": "translation", "name": "Translation"},
        "dataset": dataset,
        "metrics": _metrics(training),
    }


def _section(title: str, training: Training) -> Iterator[str]:
    yield from ("", f"## {title}", "")
    begun = f", from {training.begun_from}" if training.begun_from else ""
    data = f" on {', '.join(training.data)}" if training.data else ""
    yield f"{training.step:,} steps with jax-transformer{data}{begun}."
    yield ""
    yield from (f"- {key}: {value:,}" for key, value in training.counts.items())
    if training.figures:
        signatures = training.figures.get("signatures", {})
        yield from ("", "On the validation text:", "", "| | |", "|---|---|")
        for key, (_, name) in _SCORES.items():
            if key in training.figures:
                signature = f" (`{signatures[key]}`)" if key in signatures else ""
                yield f"| {name}{signature} | {training.figures[key]:.2f} |"
    yield from (
        "",
        "Options:",
        "",
        "```json",
        json.dumps(training.options, indent=2, ensure_ascii=False),
        "```",
    )
