"""The vocabularies of a Hugging Face folder, from the files that its recipe names."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tokenizers import AddedToken

from jax_transformer.architectures.tokenizer_recipe import Algorithm, Languages
from jax_transformer.data import (
    fast_vocabulary,
    moses_bpe,
    piece_vocabulary,
    tokenizer_settings,
)
from jax_transformer.data.moses_bpe import MosesBpe
from jax_transformer.data.piece_vocabulary import PieceVocabulary, SentencePieceModel
from jax_transformer.data.subword_vocabulary import SubwordVocabulary
from jax_transformer.data.tokenizer_settings import TokenizerSettings
from jax_transformer.data.word_bpe import WordBpe
from jax_transformer.errors import InputError
from jax_transformer.storage.untrusted import shown


def vocabularies(
    contents: Mapping[str, bytes], settings: TokenizerSettings
) -> tuple[SubwordVocabulary, SubwordVocabulary]:
    """Return the source's and the target's, which are one object if they are one vocabulary."""
    folder, algorithm = settings.folder, settings.recipe.algorithm
    if algorithm is Algorithm.BYTE_BPE:
        fast = fast_vocabulary.from_merges(
            folder / "vocab.json", contents["vocab.json"], contents["merges.txt"], settings
        )
        return fast, fast
    if algorithm is Algorithm.MOSES_BPE:
        return _moses_vocabularies(contents, settings)
    if algorithm is Algorithm.WORD_BPE:
        return _word_vocabulary(contents, settings)
    sampling = settings.values.get("sp_model_kwargs")
    if sampling:
        raise InputError(
            f"{folder / tokenizer_settings.FILE}: sp_model_kwargs is {shown(sampling)}; remove it"
        )
    models = {
        name: piece_vocabulary.load_sentencepiece(folder / name, contents[name])
        for name in settings.recipe.files
        if name.endswith((".spm", ".model"))
    }
    if algorithm is Algorithm.ARRANGED_PIECES:
        ((name, model),) = models.items()
        arranged = _arranged_vocabulary(folder / name, model, settings)
        return arranged, arranged
    if algorithm is Algorithm.REBUILT_PIECES:
        ((name, model),) = models.items()
        pieces = piece_vocabulary.take_apart(folder / name, model)
        fast = fast_vocabulary.from_pieces(folder / name, pieces, settings)
        return fast, fast
    return _piece_vocabularies(list(models.values()), contents, settings)


def _word_vocabulary(
    contents: Mapping[str, bytes], settings: TokenizerSettings
) -> tuple[SubwordVocabulary, SubwordVocabulary]:
    path, merges = settings.folder / "merges.txt", contents["merges.txt"]
    # transformers skips the first line, and what follows the last line's end
    if not merges.startswith(b"#version") or not merges.endswith(b"\n"):
        raise InputError(f"{path}: does not begin with #version, or its last line has no end")
    model = WordBpe(fast_vocabulary.read_merges(path, merges))
    path = settings.folder / "vocab.json"
    ids = tokenizer_settings.read_vocabulary(path, contents[path.name])
    vocabulary = PieceVocabulary(path, ids, model, settings)
    return vocabulary, vocabulary


def _moses_vocabularies(
    contents: Mapping[str, bytes], settings: TokenizerSettings
) -> tuple[SubwordVocabulary, SubwordVocabulary]:
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
    merges = fast_vocabulary.read_merges(path, contents[path.name], counted=True)
    names = ("vocab-src.json", "vocab-tgt.json")
    ids = [tokenizer_settings.read_vocabulary(folder / name, contents[name]) for name in names]
    moses = moses_bpe.load_sacremoses(path)
    source, target = (
        PieceVocabulary(
            folder / name,
            own,
            MosesBpe(moses, merges, lang, lowers=settings.flag("do_lower_case")),
            settings,
        )
        for name, own, lang in zip(names, ids, langs, strict=True)
    )
    return source, target


def _arranged_vocabulary(
    path: Path, model: SentencePieceModel, settings: TokenizerSettings
) -> PieceVocabulary:
    """The vocabulary whose ids are the family's order of the model's pieces and its languages."""
    layout, languages = settings.recipe.pieces, settings.recipe.languages
    assert layout is not None and languages is not None, "of every recipe with ARRANGED_PIECES"
    codes = [languages.token.format(code) for code in _language_set(languages, settings)]
    texts = {role: token.content for role, token in settings.special_tokens.items()}
    arranged = layout.arrange(piece_vocabulary.take_apart(path, model).scored, texts, codes)
    ids = {text: i for i, (text, _) in enumerate(arranged)}
    # A special token that has no place is unknown, but still never cut
    ids = dict.fromkeys(texts.values(), ids[texts["unk_token"]]) | ids
    own = [AddedToken(code, special=True, normalized=False) for code in codes]
    settings = replace(settings, extra_tokens=[*own, *settings.extra_tokens])
    return PieceVocabulary(path, ids, model, settings)


def _piece_vocabularies(
    models: list[SentencePieceModel], contents: Mapping[str, bytes], settings: TokenizerSettings
) -> tuple[SubwordVocabulary, SubwordVocabulary]:
    """Vocabularies whose ids are in ``vocab.json``, with one model for both sides or
    one for each.
    """
    path = settings.folder / "vocab.json"
    ids = tokenizer_settings.read_vocabulary(path, contents["vocab.json"])
    languages = settings.recipe.languages
    if languages is not None and languages.sets:
        codes = _language_set(languages, settings)
        ids = {languages.token.format(code): len(ids) + i for i, code in enumerate(codes)} | ids
    if len(models) == 1:
        vocabulary = PieceVocabulary(path, ids, models[0], settings)
        return vocabulary, vocabulary
    reads, writes = models
    source = PieceVocabulary(path, ids, reads, settings)
    if not settings.flag("separate_vocabs"):
        # transformers then joins the pieces of a target by the source's model
        return source, PieceVocabulary(path, ids, writes, settings, joined_by=reads)
    path = settings.folder / "target_vocab.json"
    target_ids = tokenizer_settings.read_vocabulary(path, contents[path.name])
    return source, PieceVocabulary(path, target_ids, writes, settings)


def _language_set(languages: Languages, settings: TokenizerSettings) -> list[str]:
    """The codes that follow the vocabulary, of the set that the folder names."""
    name = settings.text("language_codes") or next(iter(languages.sets))
    if name not in languages.sets:
        raise InputError(
            f"{settings.folder / tokenizer_settings.FILE}: language_codes is {shown(name)}, not"
            f" {' or '.join(languages.sets)}"
        )
    return list(languages.sets[name])
