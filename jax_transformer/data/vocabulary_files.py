"""The vocabularies of a Hugging Face folder, from the files that its recipe names."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from jax_transformer.architectures.huggingface import Algorithm, Languages
from jax_transformer.data import tokenizer_settings, vocabulary
from jax_transformer.data.tokenizer_settings import TokenizerSettings
from jax_transformer.data.vocabulary import Vocabulary
from jax_transformer.errors import InputError
from jax_transformer.storage.untrusted import shown

# What cuts and joins pieces is imported where a folder needs it
Vocabularies = tuple[Vocabulary, Vocabulary]


def vocabularies(contents: Mapping[str, bytes], settings: TokenizerSettings) -> Vocabularies:
    """Return the source's and the target's, which are one object if they are one vocabulary."""
    algorithm = settings.recipe.algorithm
    if algorithm is Algorithm.BYTE_BPE:
        path = settings.folder / "vocab.json"
        merges = contents["merges.txt"]
        fast = vocabulary.from_merges(path, contents[path.name], merges, settings)
        return fast, fast
    if algorithm is Algorithm.MOSES_BPE:
        return _moses(contents, settings)
    if algorithm is Algorithm.WORD_BPE:
        return _words(contents, settings)
    return _sentencepiece(contents, settings)


def _words(contents: Mapping[str, bytes], settings: TokenizerSettings) -> Vocabularies:
    from jax_transformer.data.piece_vocabulary import PieceVocabulary
    from jax_transformer.data.word_bpe import WordBpe

    path, merges = settings.folder / "merges.txt", contents["merges.txt"]
    # transformers skips the first line, and what follows the last line's end
    if not merges.startswith(b"#version") or not merges.endswith(b"\n"):
        raise InputError(f"{path}: does not begin with #version, or its last line has no end")
    model = WordBpe(vocabulary.read_merges(path, merges))
    path = settings.folder / "vocab.json"
    ids = vocabulary.read_ids(path, contents[path.name])
    both = PieceVocabulary(path, ids, settings, model.cut, model.join)
    return both, both


def _moses(contents: Mapping[str, bytes], settings: TokenizerSettings) -> Vocabularies:
    from jax_transformer.data import moses_bpe
    from jax_transformer.data.piece_vocabulary import PieceVocabulary

    folder = settings.folder
    langs = settings.values.get("langs")
    if (
        not isinstance(langs, list)
        or len(langs) != 2
        or not all(isinstance(lang, str) and lang.isalpha() and lang.isascii() for lang in langs)
    ):
        raise InputError(
            f"{folder / tokenizer_settings.FILE}: langs is {shown(langs)}, not the codes of a"
            " source's and a target's language"
        )
    path = folder / "merges.txt"
    if not contents[path.name].endswith(b"\n"):  # transformers skips what follows the last line
        raise InputError(f"{path}: its last line has no end")
    merges = vocabulary.read_merges(path, contents[path.name], counted=True)
    names = ("vocab-src.json", "vocab-tgt.json")
    ids = [vocabulary.read_ids(folder / name, contents[name]) for name in names]
    moses, lowers = moses_bpe.load_sacremoses(path), settings.flag("do_lower_case")
    models = [moses_bpe.MosesBpe(moses, merges, lang, lowers=lowers) for lang in langs]
    source, target = (
        PieceVocabulary(folder / name, own, settings, model.cut, model.join)
        for name, own, model in zip(names, ids, models, strict=True)
    )
    return source, target


def _sentencepiece(contents: Mapping[str, bytes], settings: TokenizerSettings) -> Vocabularies:
    from jax_transformer.data import sentencepiece_vocabulary

    folder, recipe = settings.folder, settings.recipe
    sampling = settings.values.get("sp_model_kwargs")
    if sampling:
        raise InputError(
            f"{folder / tokenizer_settings.FILE}: sp_model_kwargs is {shown(sampling)}; remove it"
        )
    names = [name for name in recipe.files if name.endswith((".spm", ".model"))]
    models = [sentencepiece_vocabulary.load(folder / name, contents[name]) for name in names]
    if recipe.algorithm not in (Algorithm.ARRANGED_PIECES, Algorithm.REBUILT_PIECES):
        return _with_ids(models, contents, settings)
    path = folder / names[0]
    pieces = sentencepiece_vocabulary.take_apart(path, models[0])
    both: Vocabulary
    if recipe.algorithm is Algorithm.REBUILT_PIECES:
        both = sentencepiece_vocabulary.from_pieces(path, pieces, settings)
    else:
        both = _arranged(path, models[0], pieces.scored, settings)
    return both, both


def _arranged(
    path: Path, model: Any, scored: list[tuple[str, float]], settings: TokenizerSettings
) -> Vocabulary:
    """Return the vocabulary whose ids are the family's order of the model's pieces and its
    languages.
    """
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
) -> Vocabularies:
    """Return vocabularies whose ids are in ``vocab.json``, with one model for both sides or one for
    each.
    """
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
    from jax_transformer.data.piece_vocabulary import PieceVocabulary

    cut = partial(cuts.encode, out_type=str)
    return PieceVocabulary(path, ids, settings, cut, joins.decode_pieces)


def _language_set(languages: Languages, settings: TokenizerSettings) -> list[str]:
    """Return the codes that follow the vocabulary, of the set that the folder names."""
    name = settings.text("language_codes") or next(iter(languages.sets))
    if name not in languages.sets:
        raise InputError(
            f"{settings.folder / tokenizer_settings.FILE}: language_codes is {shown(name)}, not"
            f" {' or '.join(languages.sets)}"
        )
    return list(languages.sets[name])
