"""Vocabularies that ``tokenizers`` encodes with: of a ``tokenizer.json``, of byte-level BPE's two files, or built of a SentencePiece model.

What is built is as transformers 5.23 builds it (``tokenization_t5.py``, ``_pegasus.py``, ``_mbart.py``, ``_mbart50.py``, ``_nllb.py``,
``_roberta.py`` and the ``convert_from_spm`` of ``convert_slow_tokenizer.py``), so that ids are the same.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jax_transformer.data import huggingface_files, language_codes, sentencepiece_model
from jax_transformer.data.huggingface_files import Described, Kind
from jax_transformer.data.sentencepiece_model import Pieces
from jax_transformer.data.tokenizer import guarded
from jax_transformer.errors import InputError
from jax_transformer.storage.untrusted import shown

_SPACES = normalizers.Replace(Regex(" {2,}"), " ")
# What transformers' ``clean_up_tokenization`` replaces, in its order
_CLEANED = [(" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'")] + [
    (f" {end}", end) for end in "n't 'm 's 've 're".split()
]


class FastWords:
    """Text to ids and back by a model of ``tokenizers``."""

    def __init__(self, path: Path, model: tokenizers.Tokenizer, told: Described) -> None:
        model.no_truncation()
        model.no_padding()
        model.encode_special_tokens = told.flag("split_special_tokens")
        self._path, self._model = path, model
        with guarded(path):
            _add(model, told)
            self._ids = model.get_vocab(with_added_tokens=True)
        self.size = max(self._ids.values(), default=-1) + 1
        self._clean = told.flag("clean_up_tokenization_spaces") and not isinstance(
            model.model, models.BPE
        )

    def encode(self, line: str) -> list[int]:
        """The ids of a line, without those around it."""
        return self.encode_batch([line])[0]

    def encode_batch(self, lines: Sequence[str]) -> list[list[int]]:
        """``encode`` of each line, on all cores."""
        with guarded(self._path):
            return [
                encoding.ids
                for encoding in self._model.encode_batch_fast(list(lines), add_special_tokens=False)
            ]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        with guarded(self._path):
            text = self._model.decode(list(ids), skip_special_tokens=True)
        return cleaned(text) if self._clean else text

    def id_of(self, token: str) -> int | None:
        """The id of a token by its text."""
        return self._ids.get(token)

    def names(self) -> list[str]:
        """The tokens that are found in text whole, in the order of their ids."""
        return [
            token.content for _, token in sorted(self._model.get_added_tokens_decoder().items())
        ]


def cleaned(text: str) -> str:
    """Text without the spaces before punctuation, as transformers' ``clean_up_tokenization`` makes it."""
    for found, instead in _CLEANED:
        text = text.replace(found, instead)
    return text


def from_json(path: Path, content: bytes, told: Described) -> FastWords:
    """The vocabulary of a ``tokenizer.json``, with all that it says of normalization and words."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a tokenizer file: not valid UTF-8") from None
    with guarded(path):
        model = tokenizers.Tokenizer.from_str(text)
    return FastWords(path, model, told)


def from_merges(path: Path, vocabulary: bytes, merges: bytes, told: Described) -> FastWords:
    """Byte-level BPE of ``vocab.json`` (``path``) and ``merges.txt``."""
    ids = huggingface_files.vocabulary(path, vocabulary)
    beside = path.with_name("merges.txt")
    try:
        lines = merges.decode("utf-8").split("\n")
    except UnicodeDecodeError:
        raise InputError(f"{beside}: not valid UTF-8") from None
    pairs = []
    for number, line in enumerate(lines, 1):
        words = line.split(" ")
        if line.startswith("#version") or not line.strip():
            continue
        if len(words) != 2:
            raise InputError(f"{beside}: line {number} is {shown(line)}, not two tokens")
        pairs.append((words[0], words[1].rstrip("\r")))
    with guarded(beside):
        model = tokenizers.Tokenizer(
            models.BPE(
                ids, pairs, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False
            )
        )
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=told.flag("add_prefix_space"))
    model.decoder = decoders.ByteLevel()
    return FastWords(path, model, told)


def from_pieces(path: Path, pieces: Pieces, told: Described) -> FastWords:
    """What transformers makes of a SentencePiece model of the families that are not Marian or M2M100."""
    with guarded(path):
        model = _unigram(pieces, told) if told.kind is not Kind.NLLB else _nllb(pieces, told)
        model.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always", split=True)
        if not told.lists_extra:
            whole = [
                *pieces.control,
                *(text for text in _own(told) if text not in pieces.user_defined),
            ]
            model.add_tokens([AddedToken(text, normalized=False, special=True) for text in whole])
            model.add_tokens(
                [AddedToken(text, normalized=False, special=False) for text in pieces.user_defined]
            )
    return FastWords(path, model, told)


def _unigram(pieces: Pieces, told: Described) -> tokenizers.Tokenizer:
    named = {name: token.content for name, token in told.named.items()}
    metaspace = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    words: Any = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])
    normal: list[Any] = [normalizers.Precompiled(pieces.charsmap)] if pieces.charsmap else []
    if pieces.algorithm != sentencepiece_model.UNIGRAM:
        raise InputError(
            f"not a unigram model, which {told.kind.value}'s is; give the folder a tokenizer.json"
        )
    if told.kind is Kind.T5:
        scored, unknown = pieces.scored + [(text, 0.0) for text in reversed(_own(told))], 2
    elif told.kind is Kind.PEGASUS:
        first = [
            (text, 0.0)
            for text in (named["pad_token"], named["eos_token"], "<mask_1>", named["mask_token"])
        ]
        unused = [(text, -100.0) for text in _own(told) if text.startswith("<unk_")]
        scored = first + unused + pieces.scored[2:]
        unknown = next((i for i, (text, _) in enumerate(scored) if text == named["unk_token"]), 0)
        normal = [*normal, _SPACES] if normal else [normalizers.Replace(Regex("\n"), " "), _SPACES]
        words = metaspace
    else:
        begin = [
            named["cls_token" if told.kind is Kind.MBART50 else "bos_token"],
            named["pad_token"],
            named["eos_token"],
            named["unk_token"],
        ]
        end = [*_own(told), named["mask_token"]]
        scored = [
            *((text, 0.0) for text in begin),
            *pieces.scored[3:],
            *((text, 0.0) for text in end),
        ]
        unknown = 3
        normal = (
            [*normal, _SPACES] if told.kind is Kind.MBART50 else []
        )  # mBART's class of transformers 5 has no normalizer
        words = metaspace if told.kind is Kind.MBART50 else words
    model = tokenizers.Tokenizer(models.Unigram(scored, unk_id=unknown, byte_fallback=False))
    if normal:
        model.normalizer = normalizers.Sequence(normal) if len(normal) > 1 else normal[0]
    model.pre_tokenizer = words
    return model


def _nllb(pieces: Pieces, told: Described) -> tokenizers.Tokenizer:
    if pieces.algorithm != sentencepiece_model.BPE:
        raise InputError("not a BPE model, which NLLB's is; give the folder a tokenizer.json")
    begin = [
        told.named[name].content for name in ("bos_token", "pad_token", "eos_token", "unk_token")
    ]
    ids = {
        text: i
        for i, text in enumerate(dict.fromkeys([*begin, *(text for text, _ in pieces.scored)]))
    }
    order = {text: i for i, (text, _) in enumerate(pieces.scored)}
    # A model of pieces has no merges: every way to cut a piece into two others is one, earlier pieces first
    found = [
        (text[:at], text[at:])
        for text in order
        for at in range(1, len(text))
        if text[:at] in order and text[at:] in order
    ]
    found.sort(
        key=lambda pair: (
            order[pair[0] + pair[1]],
            len(pair[0]),
            len(pair[1]),
            order[pair[0]],
            order[pair[1]],
        )
    )
    model = tokenizers.Tokenizer(
        models.BPE(ids, found, dropout=None, unk_token=begin[3], fuse_unk=True, byte_fallback=False)
    )
    if pieces.charsmap:
        model.normalizer = normalizers.Sequence([normalizers.Precompiled(pieces.charsmap), _SPACES])
    model.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="always", split=True
    )
    return model


def _own(told: Described) -> list[str]:
    """The special tokens that a family has beside those of its SentencePiece model."""
    match told.kind:
        case Kind.T5:
            return [f"<extra_id_{i}>" for i in range(told.number("extra_ids", 100))]
        case Kind.PEGASUS:
            return ["<mask_1>", *(f"<unk_{i}>" for i in range(2, told.number("offset", 103)))]
        case Kind.MBART:
            return language_codes.MBART
        case Kind.MBART50:
            return language_codes.MBART50
    return [] if told.extra or told.added else language_codes.NLLB


def _add(model: tokenizers.Tokenizer, told: Described) -> None:
    """Tell the model which of its tokens are special, and add those that it does not know, with the ids that the folder says."""
    model.add_tokens([token for _, token in sorted(told.added.items())])
    known = model.get_vocab(with_added_tokens=True)
    for index, token in told.added.items():
        if known.get(token.content) != index:
            found = (
                f"becomes {known[token.content]}" if token.content in known else "cannot be added"
            )
            raise InputError(
                f"the added token {shown(token.content)} has the id {index}, and {found}"
            )
    there = {token.content for token in model.get_added_tokens_decoder().values()}
    wanted = [*told.named.values(), *told.extra]
    if told.kind is Kind.NLLB:  # the mask stands behind the languages in the models' embeddings
        wanted.sort(key=lambda token: token is told.named.get("mask_token"))
    model.add_special_tokens([token for token in wanted if token.content not in there])
