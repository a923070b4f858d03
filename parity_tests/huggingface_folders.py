"""Folders of Hugging Face's families that transformers saves on the spot: a small random model with a tokenizer that was trained on a few lines."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from parity_tests import tokenizer_models

_BART_SIZES = {
    f"{stack}_{name}": size
    for stack in ("encoder", "decoder")
    for name, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))
}
SIZES: dict[str, dict[str, Any]] = {
    "bart": _BART_SIZES | {"d_model": 16, "max_position_embeddings": 64},
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2},
}
# What a family's folder has, its classes of model and tokenizer, and languages
FAMILIES: dict[str, tuple[Any, str, str, tuple[str, str] | None]] = {
    "marian": (tokenizer_models.marian, "MarianMTModel", "MarianTokenizer", None),
    "bart": (tokenizer_models.bart, "BartForConditionalGeneration", "BartTokenizer", None),
    "t5": (tokenizer_models.t5, "T5ForConditionalGeneration", "T5Tokenizer", None),
    "mt5": (tokenizer_models.t5, "MT5ForConditionalGeneration", "T5Tokenizer", None),
    "umt5": (tokenizer_models.t5, "UMT5ForConditionalGeneration", "T5Tokenizer", None),
    "pegasus": (
        tokenizer_models.pegasus,
        "PegasusForConditionalGeneration",
        "PegasusTokenizer",
        None,
    ),
    "mbart": (
        lambda: tokenizer_models.fairseq("MBart", "mbart"),
        "MBartForConditionalGeneration",
        "MBartTokenizer",
        ("en_XX", "de_DE"),
    ),
    "mbart50": (
        lambda: tokenizer_models.fairseq("MBart50", "mbart"),
        "MBartForConditionalGeneration",
        "MBart50Tokenizer",
        ("en_XX", "de_DE"),
    ),
    "m2m_100": (
        tokenizer_models.m2m_100,
        "M2M100ForConditionalGeneration",
        "M2M100Tokenizer",
        ("en", "de"),
    ),
}


def made(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A folder with a random model of a family, as transformers saves it, and its tokenizer; the model."""
    files, model, _, _ = FAMILIES[name]
    tokenizer_models.write(folder, files())
    told = json.loads((folder / "config.json").read_text())
    kind = getattr(transformers, model)
    own = {key: value for key, value in told.items() if key != "model_type"}
    if name == "marian":
        own["decoder_start_token_id"] = own["pad_token_id"]
    torch.manual_seed(0)
    module = (
        kind(kind.config_class(**own, **SIZES["t5" if name.endswith("t5") else "bart"]))
        .to(dtype)
        .eval()
    )
    module.generation_config.bad_words_ids = [[module.config.pad_token_id]]
    module.save_pretrained(folder)
    return module


def tokenizer(name: str, folder: Path) -> Any:
    """transformers' tokenizer of a folder."""
    _, _, kind, languages = FAMILIES[name]
    told = dict(zip(("src_lang", "tgt_lang"), languages or (), strict=False))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Recommended: pip install sacremoses")
        return getattr(transformers, kind).from_pretrained(folder, **told)


def language_id(name: str, words: Any) -> int | None:
    """The token of a family's target language, of its tokenizer; None where it has no languages."""
    languages = FAMILIES[name][3]
    if languages is None:
        return None
    return words.convert_tokens_to_ids(
        words.lang_code_to_token[languages[1]] if name == "m2m_100" else languages[1]
    )


def mean_loss(name: str, folder: Path, lines: Path) -> float:
    """The mean loss over the tokens of ``lines``' two files, all of it transformers' own."""
    module = (
        getattr(transformers, FAMILIES[name][1]).from_pretrained(folder, dtype=torch.float32).eval()
    )
    words = tokenizer(name, folder)
    sources, targets = (read(lines, side) for side in ("source", "target"))
    found = words(sources, text_target=targets, padding=True, return_tensors="pt")
    found["labels"][found["labels"] == words.pad_token_id] = -100
    with torch.no_grad():
        return module(**found).loss.item()


def generated(name: str, folder: Path, lines: list[str], **more: Any) -> list[str]:
    """What transformers' ``generate`` makes of each line by itself."""
    module = (
        getattr(transformers, FAMILIES[name][1]).from_pretrained(folder, dtype=torch.float32).eval()
    )
    words = tokenizer(name, folder)
    rows = [module.generate(**words([line], return_tensors="pt"), **more)[0] for line in lines]
    return [words.decode(row, skip_special_tokens=True) for row in rows]


def read(lines: Path, side: str) -> list[str]:
    """One side of what ``runs.write_text`` wrote."""
    return Path(f"{lines}.{side}").read_text(encoding="utf-8").splitlines()
