"""The model card of an exported folder: README.md, with front matter that the hub reads. Standard library only.

The licence is not guessed: who publishes a model chooses one. Keys of the front matter are those of the hub's documentation of model cards.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_SCORES = {"bleu": ("bleu", "BLEU"), "chrf": ("chrf", "chrF"), "ter": ("ter", "TER"), "exact_match": ("exact_match", "exact match")}


@dataclass(frozen=True)
class Training:
    """What a run tells of how its weights were made."""

    step: int
    data: tuple[str, ...]
    """Names of files or of the data set."""
    counts: Mapping[str, Any]
    """``train_pairs`` and so on."""
    options: Mapping[str, Any]
    """The options, by their dotted names."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Of the validation text: ``bleu``, ``signatures`` and so on; empty where there was no validation."""
    languages: tuple[str, ...] = ()
    """Codes, source first, where they are known."""


def new(name: str, family: str, parameters: int, training: Training | None) -> str:
    """The whole card of a model without one. ``name`` is the folder's, ``family`` the model_type."""
    front: dict[str, Any] = {
        "language": list(training.languages) if training else [],
        "library_name": "transformers",
        "pipeline_tag": "translation",
        "tags": ["translation", family],
        "model-index": [{"name": name, "results": [_result(training)]}] if training and _metrics(training) else [],
    }
    lines = [
        "---",
        *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in front.items() if value),
        "---",
        "",
        f"# {name}",
        "",
        f"An encoder-decoder of the family `{family}` with {parameters:,} parameters, exported by jax-transformer.",
        "",
        "No licence is given yet: add `license:` to the front matter above before publishing.",
        "",
        "```python",
        "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer",
        "",
        f"model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained({json.dumps(name)}), AutoTokenizer.from_pretrained({json.dumps(name)})",
        'print(tokenizer.batch_decode(model.generate(**tokenizer(["..."], return_tensors="pt")), skip_special_tokens=True))',
        "```",
        *(_section("Training", training) if training else ()),
    ]
    return "\n".join(lines) + "\n"


def appended(card: str, training: Training) -> str:
    """A card that the model came with, kept as it is, and behind it how the model was trained further."""
    return card.rstrip("\n") + "\n" + "\n".join(_section("Fine-tuning", training)) + "\n"


def _metrics(training: Training) -> list[dict[str, Any]]:
    return [
        {"type": kind, "name": name, "value": round(float(training.figures[key]), 4)}
        for key, (kind, name) in _SCORES.items()
        if key in training.figures
    ]


def _result(training: Training) -> dict[str, Any]:
    dataset = {"name": ", ".join(training.data) or "validation", "type": "text", "split": "validation"}
    return {"task": {"type": "translation", "name": "Translation"}, "dataset": dataset, "metrics": _metrics(training)}


def _section(title: str, training: Training) -> Iterator[str]:
    yield from ("", f"## {title}", "")
    told = [f"{training.step:,} steps with jax-transformer"]
    told += [f"on {', '.join(training.data)}"] if training.data else []
    yield f"{' '.join(told)}."
    yield ""
    yield from (f"- {key}: {value:,}" for key, value in training.counts.items())
    if training.figures:
        signatures = training.figures.get("signatures", {})
        yield from ("", "On the validation text:", "", "| | |", "|---|---|")
        for key, (_, name) in _SCORES.items():
            if key in training.figures:
                said = f" (`{signatures[key]}`)" if key in signatures else ""
                yield f"| {name}{said} | {training.figures[key]:.2f} |"
    yield from ("", "Options:", "", "```json", json.dumps(training.options, indent=2, ensure_ascii=False), "```")
