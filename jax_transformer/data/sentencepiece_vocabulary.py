"""Vocabularies of SentencePiece models, which are read by their own library; some are taken apart
and rebuilt for ``tokenizers``.

What is rebuilt is as transformers 5.23 builds it (``convert_from_spm`` of
``convert_slow_tokenizer.py`` and the families' classes), so that ids are the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jax_transformer.architectures.tokenizer_recipe import Algorithm, Languages, RebuiltPieces
from jax_transformer.data import vocabulary
from jax_transformer.data.piece_vocabulary import PieceVocabulary
from jax_transformer.data.tokenizer import guarded
from jax_transformer.data.vocabulary import FastVocabulary, TokenizerSettings, Vocabulary
from jax_transformer.errors import ConfigError, InputError
from jax_transformer.storage.untrusted import shown

UNIGRAM, BPE = 1, 2
"""Algorithms of a model, by the numbers of its file."""
_CONTROL, _USER_DEFINED = 3, 4


def vocabularies(
    contents: Mapping[str, bytes], settings: TokenizerSettings
) -> tuple[Vocabulary, Vocabulary]:
    """Return the source's and the target's, which are one object if they are one vocabulary."""
    folder, recipe = settings.folder, settings.recipe
    sampling = settings.values.get("sp_model_kwargs")
    if sampling:
        raise InputError(
            f"{folder / vocabulary.FILE}: sp_model_kwargs is {shown(sampling)}; remove it"
        )
    names = [name for name in recipe.files if name.endswith((".spm", ".model"))]
    models = [load(folder / name, contents[name]) for name in names]
    if recipe.algorithm not in (Algorithm.ARRANGED_PIECES, Algorithm.REBUILT_PIECES):
        return _with_ids(models, contents, settings)
    path = folder / names[0]
    pieces = take_apart(path, models[0])
    both: Vocabulary
    if recipe.algorithm is Algorithm.REBUILT_PIECES:
        both = from_pieces(path, pieces, settings)
    else:
        both = _arranged(path, models[0], pieces.scored, settings)
    return both, both


def _arranged(
    path: Path, model: Any, scored: list[tuple[str, float]], settings: TokenizerSettings
) -> Vocabulary:
    """Return the vocabulary with ids in the family's order of the model's pieces and languages."""
    layout, languages = settings.recipe.pieces, settings.recipe.languages
    assert layout is not None and languages is not None, "of every recipe with ARRANGED_PIECES"
    codes = [languages.token.format(code) for code in _language_set(languages, settings)]
    texts = {role: token.content for role, token in settings.special_tokens.items()}
    arranged = layout.arrange(scored, texts, codes)
    ids = {text: i for i, (text, _) in enumerate(arranged)}
    # A special token that has no place is unknown, but still never cut
    ids = dict.fromkeys(texts.values(), ids[texts["unk_token"]]) | ids
    own = [AddedToken(code, special=True, normalized=False) for code in codes]
    settings = replace(settings, extra_tokens=[*own, *settings.extra_tokens])
    return _cut_by(path, ids, settings, model, model)


def _with_ids(
    models: list[Any], contents: Mapping[str, bytes], settings: TokenizerSettings
) -> tuple[Vocabulary, Vocabulary]:
    """Return vocabularies with the ids of ``vocab.json``; one model for both sides or one each."""
    path = settings.folder / "vocab.json"
    ids = vocabulary.read_ids(path, contents["vocab.json"])
    languages = settings.recipe.languages
    if languages is not None and languages.sets:
        codes = _language_set(languages, settings)
        ids = {languages.token.format(code): len(ids) + i for i, code in enumerate(codes)} | ids
    reads = models[0]
    source = _cut_by(path, ids, settings, reads, reads)
    if len(models) == 1:
        return source, source
    writes = models[1]
    if not settings.flag("separate_vocabs"):
        # transformers then joins the pieces of a target by the source's model
        return source, _cut_by(path, ids, settings, writes, reads)
    path = settings.folder / "target_vocab.json"
    target_ids = vocabulary.read_ids(path, contents[path.name])
    return source, _cut_by(path, target_ids, settings, writes, writes)


def _cut_by(
    path: Path, ids: dict[str, int], settings: TokenizerSettings, cuts: Any, joins: Any
) -> Vocabulary:
    """Return the vocabulary of pieces that one SentencePiece model cuts and another joins."""
    cut = partial(cuts.encode, out_type=str)
    return PieceVocabulary(path, ids, settings, cut, joins.decode_pieces)


def _language_set(languages: Languages, settings: TokenizerSettings) -> list[str]:
    """Return the codes that follow the vocabulary, of the set that the folder names."""
    name = settings.text("language_codes") or next(iter(languages.sets))
    if name not in languages.sets:
        raise InputError(
            f"{settings.folder / vocabulary.FILE}: language_codes is {shown(name)}, not"
            f" {' or '.join(languages.sets)}"
        )
    return list(languages.sets[name])


def load(path: Path, content: bytes) -> Any:
    """Return the processor of a SentencePiece model's file.

    Raises InputError if it is not a model, ConfigError if SentencePiece is not installed.
    """
    try:
        import sentencepiece
    except ImportError:
        raise ConfigError(
            f"{path}: needs SentencePiece: pip install 'jax-seq2seq[sentencepiece]'"
        ) from None
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(content)
    except (RuntimeError, ValueError, TypeError) as error:
        raise InputError(
            f"{path}: not a SentencePiece model: {shown(str(error).splitlines()[0], 120)}"
        ) from None
    return processor


@dataclass(frozen=True)
class Pieces:
    """The parts of a SentencePiece model."""

    scored: list[tuple[str, float]]
    """Every piece with its score, in the order of ids."""
    control: list[str]
    """Pieces that no text is cut into."""
    user_defined: list[str]
    """Pieces that are never cut."""
    charsmap: bytes | None
    """The normalization of characters, compiled."""
    algorithm: int
    """``UNIGRAM`` or ``BPE``, or another number."""


def take_apart(path: Path, processor: Any) -> Pieces:
    """Return the parts of a model as the library writes it, without what else a file holds.

    Raises InputError naming the file for a piece that is not text.
    """
    from google.protobuf import message
    from sentencepiece import sentencepiece_model_pb2

    prototype: Any = sentencepiece_model_pb2
    try:
        model = prototype.ModelProto.FromString(processor.serialized_model_proto())
        scored = [(piece.piece, piece.score) for piece in model.pieces]
        if not all(isinstance(text, str) for text, _ in scored):  # bytes that are not UTF-8
            raise ValueError("a piece is not valid UTF-8")
    except (ValueError, message.DecodeError) as error:
        reason = shown(str(error), 120)
        raise InputError(f"{path}: not a SentencePiece model that can be read: {reason}") from None
    control = [piece.piece for piece in model.pieces if piece.type == _CONTROL]
    user_defined = [piece.piece for piece in model.pieces if piece.type == _USER_DEFINED]
    charsmap = model.normalizer_spec.precompiled_charsmap or None
    return Pieces(scored, control, user_defined, charsmap, model.trainer_spec.model_type)


def from_pieces(path: Path, pieces: Pieces, settings: TokenizerSettings) -> FastVocabulary:
    """Return the vocabulary that transformers rebuilds from a SentencePiece model."""
    layout = settings.recipe.pieces
    assert layout is not None, "asked only for recipes with Algorithm.REBUILT_PIECES"
    own_tokens = settings.recipe.own_tokens(settings)
    with guarded(path):
        _check_algorithm(pieces, settings)
        texts = {role: token.content for role, token in settings.special_tokens.items()}
        arranged = layout.arrange(pieces.scored, texts, own_tokens)
        unknown = texts["unk_token"]
        if layout.bpe:
            core = _merged(arranged, pieces, unknown)
        else:
            core = _unigram(arranged, layout, unknown)
        model = tokenizers.Tokenizer(core)
        metaspace = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
        words: list[Any] = [pre_tokenizers.WhitespaceSplit()] if layout.splits_words else []
        model.pre_tokenizer = pre_tokenizers.Sequence([*words, metaspace]) if words else metaspace
        normal = _normalizers(pieces, layout)
        if normal:
            model.normalizer = normalizers.Sequence(normal) if len(normal) > 1 else normal[0]
        model.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always", split=True)
        if not settings.lists_extra_tokens:
            own = [text for text in own_tokens if text not in pieces.user_defined]
            for texts_of_kind, special in (
                ([*pieces.control, *own], True),
                (pieces.user_defined, False),
            ):
                model.add_tokens(
                    [AddedToken(t, normalized=False, special=special) for t in texts_of_kind]
                )
    return FastVocabulary(path, model, settings)


def _check_algorithm(pieces: Pieces, settings: TokenizerSettings) -> None:
    bpe = settings.recipe.pieces is not None and settings.recipe.pieces.bpe
    if pieces.algorithm != (BPE if bpe else UNIGRAM):
        kind = "BPE" if bpe else "unigram"
        raise InputError(
            f"not a {kind} model, which {settings.recipe.name}'s is; give the folder a"
            " tokenizer.json"
        )


def _unigram(scored: list[tuple[str, float]], layout: RebuiltPieces, unknown: str) -> Any:
    unknown_id = layout.unknown_id
    if unknown_id is None:
        unknown_id = next((i for i, (text, _) in enumerate(scored) if text == unknown), 0)
    return models.Unigram(scored, unk_id=unknown_id, byte_fallback=False)


def _merged(scored: list[tuple[str, float]], pieces: Pieces, unknown: str) -> Any:
    ids = {text: i for i, text in enumerate(dict.fromkeys(text for text, _ in scored))}
    order = {text: i for i, (text, _) in enumerate(pieces.scored)}
    # The file has no merges: every cut of a piece into two others is one, earlier pieces first
    merges = [
        (text[:at], text[at:])
        for text in order
        for at in range(1, len(text))
        if text[:at] in order and text[at:] in order
    ]
    merges.sort(key=lambda p: (order[p[0] + p[1]], len(p[0]), len(p[1]), order[p[0]], order[p[1]]))
    return models.BPE(
        ids, merges, dropout=None, unk_token=unknown, fuse_unk=True, byte_fallback=False
    )


def _normalizers(pieces: Pieces, layout: RebuiltPieces) -> list[Any]:
    if not layout.normalizes:
        return []
    mapped = [normalizers.Precompiled(pieces.charsmap)] if pieces.charsmap else []
    replaces = layout.replaces if mapped else layout.replaces_without_map
    return [*mapped, *(normalizers.Replace(Regex(old), new) for old, new in replaces)]
