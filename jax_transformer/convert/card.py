"""The model card of an exported folder: README.md, with front matter that the hub reads. Standard
library only.

The licence is not guessed: who publishes a model chooses one. Keys of the front matter are those of
the hub's documentation of model cards.
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
    """Names of files or of the data set."""
    counts: Mapping[str, Any]
    """``train_pairs`` and so on."""
    options: Mapping[str, Any]
    """The options, by their dotted names."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Of the validation text: ``bleu``, ``signatures`` and so on; empty where there was no
    validation.
    """
    languages: tuple[str, ...] = ()
    """Codes, source first, as far as they are known."""
    tokenizer_languages: tuple[str, str] | None = None
    """Source and target as the tokenizer names them."""
    begun_from: str = ""
    """The name of the model that was fine-tuned."""
    base_model: str = ""
    """The same on the hub, ``owner/name``, if it is known to be there."""
    datasets: tuple[str, ...] = ()
    """Names of data sets on the hub."""
    validated_on: tuple[str, ...] = ()
    """Names of the texts that the figures are of."""


def new(name: str, family: str, parameters: int, training: Training | None) -> str:
    """A card for a model without one. ``name`` is the folder's, ``family`` the model_type."""
    front = {
        "library_name": "transformers",
        "pipeline_tag": "translation",
        "tags": ["translation", family],
    }
    named = training.tokenizer_languages if training else None
    languages = (
        f", src_lang={json.dumps(named[0])}, tgt_lang={json.dumps(named[1])}" if named else ""
    )
    lines = [
        "---",
        *_lines(front | (_front(name, training) if training else {})),
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
    """The card of the original model with a section on fine-tuning at its end.

    Its text stays as it is. In its front matter our scores replace those of the original weights,
    and ``base_model`` becomes the model that training began from, if that is known; languages and
    data sets are added if it has none.
    """
    front, body = _opened(card)
    ours = _front(name, training)
    original = [
        text
        for key, text in front
        if key != "model-index" and (key != "base_model" or not training.base_model)
    ]
    there = {key for key, _ in front} - {"model-index", "base_model"}
    lines = [*original, *_lines({key: value for key, value in ours.items() if key not in there})]
    head = "\n".join(["---", *lines, "---", ""]) if lines else ""
    return head + body.rstrip("\n") + "\n" + "\n".join(_section("Fine-tuning", training)) + "\n"


_KEY = re.compile(r"([A-Za-z][\w-]*)\s*:")


def _opened(card: str) -> tuple[list[tuple[str, str]], str]:
    """The front matter of a card, key by key with the lines that are its value, and the text after
    it.
    """
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


def _front(name: str, training: Training) -> dict[str, Any]:
    """Front matter about training, with empty values if unknown. The hub's languages have no script
    or country: deu_Latn is deu.
    """
    return {
        "language": list(dict.fromkeys(code.partition("_")[0] for code in training.languages)),
        "base_model": training.base_model,
        "datasets": list(training.datasets),
        "model-index": [{"name": name, "results": [_result(training)]}]
        if _metrics(training)
        else [],
    }


def _lines(front: Mapping[str, Any]) -> Iterator[str]:
    """YAML, of which JSON is a part."""
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
