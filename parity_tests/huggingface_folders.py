"""Folders of Hugging Face's families that transformers saves: small models and tokenizers."""

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from jax_transformer.architectures import huggingface
from jax_transformer.architectures.huggingface import HuggingFaceFamily
from parity_tests import tokenizer_models

# Only the values that a family's config.json has are used
SIZES = dict(d_model=16, max_position_embeddings=64, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
SIZES |= {
    f"{stack}_{name}": size
    for stack in ("encoder", "decoder")
    for name, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))
}


@dataclass(frozen=True)
class FolderCase:
    """A family's folder: the files of its tokenizer, and a source and target language."""

    model_type: str
    files: Callable[[], dict[str, Any]]
    languages: tuple[str, str] | None = None

    @property
    def family(self) -> HuggingFaceFamily:
        return huggingface.families()[self.model_type]

    @property
    def model_class(self) -> Any:
        return getattr(transformers, self.family.model_class)

    @property
    def tokenizer_class(self) -> Any:
        settings = self.files().get("tokenizer_config.json", {})
        name = settings.get("tokenizer_class", self.family.tokenizers[0].class_name)
        return getattr(transformers, name)


FOLDERS = {
    "marian": FolderCase("marian", tokenizer_models.marian),
    "bart": FolderCase("bart", tokenizer_models.bart),
    "mvp": FolderCase("mvp", tokenizer_models.bart),
    "blenderbot": FolderCase("blenderbot", tokenizer_models.blenderbot),
    "blenderbot-small": FolderCase("blenderbot-small", tokenizer_models.blenderbot_small),
    "t5": FolderCase("t5", tokenizer_models.t5),
    "mt5": FolderCase("mt5", tokenizer_models.t5),
    "longt5": FolderCase("longt5", tokenizer_models.t5),
    "umt5": FolderCase("umt5", tokenizer_models.t5),
    "pegasus": FolderCase("pegasus", tokenizer_models.pegasus),
    "mbart": FolderCase(
        "mbart", lambda: tokenizer_models.fairseq("MBart", "mbart"), ("en_XX", "de_DE")
    ),
    "mbart50": FolderCase(
        "mbart", lambda: tokenizer_models.fairseq("MBart50", "mbart"), ("en_XX", "de_DE")
    ),
    "plbart": FolderCase("plbart", tokenizer_models.plbart, ("java", "en_XX")),
    "fsmt": FolderCase("fsmt", tokenizer_models.fsmt),
    "m2m_100": FolderCase("m2m_100", tokenizer_models.m2m_100, ("en", "de")),
}


def save_model(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Save a random model of a family and its tokenizer as transformers does; return the model."""
    case = FOLDERS[name]
    tokenizer_models.write(folder, case.files())
    config = json.loads((folder / "config.json").read_text())
    config.setdefault("decoder_start_token_id", config["pad_token_id"])
    sizes = {key: value for key, value in SIZES.items() if key in case.family.defaults}
    config = {key: value for key, value in config.items() if key != "model_type"} | sizes
    torch.manual_seed(0)
    module = case.model_class(case.model_class.config_class(**config)).to(dtype).eval()
    module.generation_config.bad_words_ids = [[module.config.pad_token_id]]
    module.save_pretrained(folder)
    return module


def tokenizer(name: str, folder: Path) -> Any:
    """Return transformers' tokenizer of a folder."""
    case = FOLDERS[name]
    languages = dict(zip(("src_lang", "tgt_lang"), case.languages or (), strict=False))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Recommended: pip install sacremoses")
        return case.tokenizer_class.from_pretrained(folder, **languages)


def ended(words: Any, ids: list[int]) -> list[int]:
    """Return a line's ids with an end, without which a trained model would never stop."""
    return ids if words.num_special_tokens_to_add() else [*ids, words.eos_token_id]


def language_id(name: str, words: Any) -> int | None:
    """Return the id of a family's target language; None if it has no languages."""
    languages = FOLDERS[name].languages
    if languages is None:
        return None
    recipe = huggingface.find_recipe(type(words).__name__, FOLDERS[name].family)
    return words.convert_tokens_to_ids(recipe.languages.token.format(languages[1]))


def mean_loss(name: str, folder: Path, lines: Path) -> float:
    """Return the mean loss over the tokens of ``lines``' two files, computed by transformers."""
    module = FOLDERS[name].model_class.from_pretrained(folder, dtype=torch.float32).eval()
    words = tokenizer(name, folder)
    sources, targets = (read(lines, side) for side in ("source", "target"))
    encoded = words(sources, text_target=targets, padding=True, return_tensors="pt")
    encoded["labels"][encoded["labels"] == words.pad_token_id] = -100
    with torch.no_grad():
        return module(**encoded).loss.item()


def generated(name: str, folder: Path, lines: list[str], **more: Any) -> list[str]:
    """Return the output of transformers' ``generate`` for each line separately."""
    module = FOLDERS[name].model_class.from_pretrained(folder, dtype=torch.float32).eval()
    words = tokenizer(name, folder)
    rows = [module.generate(**words([line], return_tensors="pt"), **more)[0] for line in lines]
    return [words.decode(row, skip_special_tokens=True) for row in rows]


def read(lines: Path, side: str) -> list[str]:
    """Return the lines of one side that ``runs.write_text`` wrote."""
    return Path(f"{lines}.{side}").read_text(encoding="utf-8").splitlines()
