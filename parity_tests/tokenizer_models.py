"""Folders of tokenizers of the Hugging Face families, with models trained on a few lines."""

import functools
import io
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from jax_transformer.architectures import m2m_100 as m2m_100_family

CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog isn't amused.",
    "Der schnelle braune Fuchs springt über den faulen Hund!",
    "le renard brun 1234567890 saute par-dessus: est-ce vrai ? oui.",
    "съешь же ещё этих мягких французских булок",
    "素早い茶色の狐がのろまな犬を飛び越える",
    "it's 10:30 on 5 May 2024; they've paid €1,250.50 & don't care",
    "file ﬁ ligature offline",
] * 8
# Control pieces of each family's model, in the order of its ids
_SPECIALS: dict[str, dict[str, Any]] = {
    "fairseq": {"unk_id": 0, "bos_id": 1, "eos_id": 2, "pad_id": -1},
    "t5": {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    "marian": {"eos_id": 0, "unk_id": 1, "bos_id": -1, "pad_id": -1},
}


@functools.cache
def model(
    specials: str = "fairseq",
    algorithm: str = "unigram",
    size: int = 220,
    part: int = 0,
    **more: Any,
) -> bytes:
    """Return a SentencePiece model; another ``part`` gives another model of the same kind."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS[part:]),
        model_writer=model,
        vocab_size=size,
        model_type=algorithm,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
        **_SPECIALS[specials],
        **more,
    )
    return model.getvalue()


def pieces(content: bytes) -> list[str]:
    """Return the pieces of a model in the order of their ids."""
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(content)
    return [processor.IdToPiece(i) for i in range(processor.GetPieceSize())]


def write(folder: Path, files: dict[str, Any]) -> Path:
    """Write a folder of these files: bytes unchanged, other values as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / name).write_bytes(content)
    return folder


def _vocabulary(names: list[str], *more: str) -> dict[str, int]:
    return {name: i for i, name in enumerate(dict.fromkeys([*names, *more]))}


def _config(model_type: str, size: int, **ids: int) -> dict[str, Any]:
    names = {name: f"{'decoder_' if name == 'start' else ''}{name}_token_id" for name in ids}
    own = {names[name]: value for name, value in ids.items()}
    return {"model_type": model_type, "vocab_size": size} | own


def _files(name: str, config: dict[str, Any], files: dict[str, Any], settings: dict[str, Any]):
    """Return the files of a tokenizer of that class, with its two configurations."""
    own = {"tokenizer_class": f"{name}Tokenizer", **settings}
    return files | {"config.json": config, "tokenizer_config.json": own}


def marian(**settings: Any) -> dict[str, Any]:
    """Return Marian's files, whose vocabulary is ordered otherwise and lacks some pieces."""
    source, target = model("marian"), model("marian", part=1)
    words = sorted(
        name for name in {*pieces(source), *pieces(target)} if name not in ("<unk>", "</s>")
    )
    vocab = _vocabulary(["</s>", "<unk>", *words[3:]], ">>fra<<", ">>zlm_Latn<<", "<pad>")
    config = _config("marian", 600, pad=vocab["<pad>"], eos=0)
    files = {"source.spm": source, "target.spm": target, "vocab.json": vocab}
    return _files("Marian", config, files, settings)


def marian_separate() -> dict[str, Any]:
    """Return Marian's files with a vocabulary for each side."""
    files = marian(separate_vocabs=True)
    source = _vocabulary(["</s>", "<unk>", *reversed(pieces(files["source.spm"])[5:])], "<pad>")
    target = _vocabulary(["</s>", "<unk>", *pieces(files["target.spm"])[5 : len(source) + 2]])
    target = {name: i for i, name in enumerate([*list(target)[: len(source) - 1], "<pad>"])}
    sizes = {"vocab_size": len(source), "decoder_vocab_size": len(target)}
    config = files["config.json"] | sizes | {"pad_token_id": source["<pad>"]}
    return files | {"vocab.json": source, "target_vocab.json": target, "config.json": config}


def m2m_100(*, listed: bool = True, **settings: Any) -> dict[str, Any]:
    """Return M2M100's files; ``listed`` languages are special tokens, as published."""
    content = model()
    vocab = _vocabulary(["<s>", "<pad>", "</s>", "<unk>", *pieces(content)[3:-4]])
    languages = [f"__{code}__" for code in m2m_100_family.LANGUAGES]
    special = {"additional_special_tokens": languages} if listed else {}
    config = _config("m2m_100", len(vocab) + 108, pad=1, eos=2, start=2)
    files = {"sentencepiece.bpe.model": content, "vocab.json": vocab}
    return _files("M2M100", config, files | {"special_tokens_map.json": special}, settings)


def fairseq(name: str, model_type: str, **settings: Any) -> dict[str, Any]:
    """Return files of mBART, mBART-50 and NLLB with only their SentencePiece model."""
    content = model(algorithm="bpe" if name == "Nllb" else "unigram")
    config = _config(model_type, 1000, pad=1, eos=2, start=2)
    return _files(name, config, {"sentencepiece.bpe.model": content}, settings)


def plbart(**settings: Any) -> dict[str, Any]:
    """Return PLBART's SentencePiece model, whose pieces have ids one higher."""
    config = _config("plbart", 1000, pad=1, eos=2, start=2)
    return _files("PLBart", config, {"sentencepiece.bpe.model": model()}, settings)


def t5(**settings: Any) -> dict[str, Any]:
    """Return T5's model with a hundred sentinels, and an extra symbol that is never split."""
    config = _config("t5", 1000, pad=0, eos=1, start=0)
    content = model("t5", user_defined_symbols="<sym>")
    return _files("T5", config, {"spiece.model": content}, settings)


def t5_of(model_type: str) -> dict[str, Any]:
    """Return T5's files in the folder of another family, which names no tokenizer's class."""
    files = t5()
    config = files["config.json"] | {"model_type": model_type}
    return files | {"config.json": config, "tokenizer_config.json": {}}


def pegasus(**settings: Any) -> dict[str, Any]:
    """Return Pegasus' model, with 103 ids before its pieces."""
    config = _config("pegasus", 1000, pad=0, eos=1, start=0)
    return _files("Pegasus", config, {"spiece.model": model("t5")}, settings)


def bart() -> dict[str, Any]:
    """Byte-level BPE in two files."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    built.train_from_iterator(CORPUS, trainer)
    model_json = json.loads(built.to_str())["model"]
    vocab = model_json["vocab"] | {"<mask>": len(model_json["vocab"])}
    merges = "#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model_json["merges"]) + "\n"
    config = _config("bart", len(vocab), pad=1, eos=2, start=2)
    return {"vocab.json": vocab, "merges.txt": merges.encode(), "config.json": config}


TIMES = 40
"""Tokens of time in :func:`whisper`'s vocabulary."""


def whisper() -> dict[str, Any]:
    """Return files of byte-level BPE with Whisper's special tokens and tokens of time after it."""
    files = bart()
    special = [
        f"<|{name}|>"
        for name in (
            *("endoftext", "startoftranscript", "en", "de", "yue", "translate", "transcribe"),
            *("startoflm", "startofprev", "nospeech", "notimestamps"),
        )
    ]
    own = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    vocab = _vocabulary([token for token in files["vocab.json"] if token not in own], *special)
    times = [f"<|{i * 0.02:.2f}|>" for i in range(TIMES)]
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    added = {vocab[token]: flags | {"content": token, "special": True} for token in special}
    added |= {
        len(vocab) + i: flags | {"content": token, "special": False}
        for i, token in enumerate(times)
    }
    end = special[0]
    ids = dict.fromkeys(("pad", "bos", "eos"), vocab[end]) | {
        "start": vocab["<|startoftranscript|>"]
    }
    config = _config("whisper", len(vocab) + len(times), **ids)
    settings = {
        "added_tokens_decoder": {str(index): token for index, token in added.items()},
        "additional_special_tokens": special,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), end),
    }
    files = {"vocab.json": vocab, "merges.txt": files["merges.txt"]}
    return _files("Whisper", config, files, settings)


def blenderbot_files() -> dict[str, Any]:
    """Return files of byte-level BPE, with BART's special tokens in another order."""
    files = bart()
    tokens = ["<pad>", "<s>", "</s>", "<unk>"]
    others = [token for token in files["vocab.json"] if token not in tokens]
    vocab = _vocabulary(tokens, *others)
    config = _config("blenderbot", len(vocab), pad=0, bos=1, eos=2, start=1)
    return _files("Blenderbot", config, files | {"vocab.json": vocab}, {})


def blenderbot() -> dict[str, Any]:
    """Return Blenderbot's files with transformers 4's ``tokenizer.json``, which ends lines."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    files = blenderbot_files()
    merges = files["merges.txt"].decode().split("\n")[1:-1]
    built = Tokenizer(models.BPE(files["vocab.json"], [tuple(line.split()) for line in merges]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    built.decoder = decoders.ByteLevel()
    built.post_processor = processors.TemplateProcessing(
        single="$A:0 </s>:0", pair="$A:0 </s>:0 $B:0 </s>:0", special_tokens=[("</s>", 2)]
    )
    return files | {"tokenizer.json": json.loads(built.to_str())}


def blenderbot_small(**settings: Any) -> dict[str, Any]:
    """Byte-pair encoding of lower-cased words."""
    merges = word_merges()
    letters = sorted({letter for line in CORPUS for letter in line.lower() if not letter.isspace()})
    symbols = [symbol for letter in letters for symbol in (letter, f"{letter}</w>")]
    symbols += [first + second for first, second in merges]
    pieces = [
        symbol.removesuffix("</w>") if symbol.endswith("</w>") else f"{symbol}@@"
        for symbol in symbols
    ]
    special = ["__null__", "__start__", "__end__", "__unk__", "__newln__"]
    vocab = _vocabulary(special, *pieces)
    lines = "".join(f"{first} {second}\n" for first, second in merges)
    config = _config("blenderbot-small", len(vocab), pad=0, bos=1, eos=2, start=1)
    files = {"vocab.json": vocab, "merges.txt": f"#version: 0.2\n{lines}".encode()}
    return _files("BlenderbotSmall", config, files, settings)


def fsmt(**settings: Any) -> dict[str, Any]:
    """Return :func:`fsmt_files`; skips a test if sacremoses is not installed."""
    pytest.importorskip("sacremoses")
    return fsmt_files(**settings)


def fsmt_files(**settings: Any) -> dict[str, Any]:
    """Byte-pair encoding of Moses' tokens, one vocabulary in both files, counted merges."""
    merges = word_merges(cased=True)
    letters = sorted({letter for line in CORPUS for letter in line if not letter.isspace()})
    symbols = [symbol for letter in letters for symbol in (letter, f"{letter}</w>")]
    symbols += [first + second for first, second in merges]
    vocab = _vocabulary(["<s>", "<pad>", "</s>", "<unk>"], *symbols)
    lines = "".join(f"{first} {second} {300 - i}\n" for i, (first, second) in enumerate(merges))
    config = {"model_type": "fsmt", "src_vocab_size": len(vocab), "tgt_vocab_size": len(vocab)}
    config |= {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    files = {"vocab-src.json": vocab, "vocab-tgt.json": vocab, "merges.txt": lines.encode()}
    return _files("FSMT", config, files, {"langs": ["en", "de"]} | settings)


def fsmt_separate() -> dict[str, Any]:
    """Return FSMT's files with other ids in the target's vocabulary."""
    files = fsmt(langs=["en", "ru"])
    special = list(files["vocab-tgt.json"])[:4]
    target = _vocabulary(special, *reversed(list(files["vocab-tgt.json"])[4:-9]))
    sizes = files["config.json"] | {"tgt_vocab_size": len(target)}
    return files | {"vocab-tgt.json": target, "config.json": sizes}


@functools.cache
def word_merges(size: int = 300, cased: bool = False) -> list[tuple[str, str]]:
    """Merges of words, the most frequent pair first, lower-cased unless asked."""
    text = " ".join(CORPUS)
    text = text if cased else text.lower()
    words = [[*word[:-1], f"{word[-1]}</w>"] for word in text.split()]
    merges: list[tuple[str, str]] = []
    while len(merges) < size:
        pairs = Counter(pair for word in words for pair in itertools.pairwise(word))
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        words = [_merge(word, best) for word in words]
    return merges


def _merge(word: list[str], pair: tuple[str, str]) -> list[str]:
    merged: list[str] = []
    for symbol in word:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return merged
