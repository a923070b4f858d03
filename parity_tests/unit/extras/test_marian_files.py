"""Files of Marian: what is read, named and refused, without PyTorch."""

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_transformer import cli
from jax_transformer.errors import InputError, UnsafeFileError
from jax_transformer.extras.toolkits.marian import marian_format, marian_model, marian_names
from jax_transformer.formats import registry
from jax_transformer.formats.base import Destination
from jax_transformer.storage import safetensors, yaml_data
from jax_transformer.storage.tensors import LazyTensor, TensorInfo
from parity_tests import marian_files

WORDS = ["</s>", "<unk>", "no", "▁the", "'", '"', ":", "#", "1", "~", "null"]
IDS = {word: number for number, word in enumerate(WORDS)}


def content(**changes: Any) -> bytes:
    chosen = marian_files.options(dec_depth=1)
    return marian_files.model(marian_files.weights(chosen), chosen | changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return marian_files.opus(tmp_path / "en-fr", content(), IDS)


def test_arrays_of_cnpy_and_of_numpy_are_read_bit_for_bit(tmp_path):
    draw = np.random.default_rng(0)
    arrays = {
        "special:a": draw.normal(size=(3, 5)).astype(np.float32),
        "b": draw.normal(size=7).astype(np.float16),
        "c": np.arange(6, dtype=np.int8),
        "empty": np.zeros((0, 2)),
        "many axes": np.ones([1] * 32, np.int8),
    }
    members = {f"{name}.npy": marian_files.npy(array) for name, array in arrays.items()}
    (tmp_path / "cnpy.npz").write_bytes(marian_files.npz(members))
    np.savez(tmp_path / "numpy.npz", scalar=np.float32(3), **arrays)
    for name in ("cnpy.npz", "numpy.npz"):
        for key, tensor in marian_model.scan_npz(tmp_path / name).items():
            expected = arrays.get(key, np.float32(3))
            read = tensor.read()
            assert (read.dtype, read.shape) == (expected.dtype, expected.shape)
            assert read.tobytes() == expected.tobytes()


def test_the_ids_of_a_vocabulary_stay_text_and_come_back(folder):
    opened = registry.open(folder)
    assert opened.marian is not None and opened.config is not None
    assert [marian_model.read_vocabulary(path) for path in opened.marian.vocabularies] == [IDS, IDS]
    assert (opened.config.bos_id, opened.config.eos_id) == (11, 0)
    table = opened.read()["model.shared.weight"]
    assert table.shape == (12, 6) and not table[11].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": "s2s"}, "type='s2s'"),
        ({"type": "amun"}, "type='amun'"),
        ({"transformer-decoder-autoreg": "average-attention"}, "transformer-decoder-autoreg"),
        ({"transformer-decoder-autoreg": "rnn"}, "transformer-decoder-autoreg='rnn'"),
        ({"transformer-tied-layers": ["1", "1"]}, "transformer-tied-layers"),
        ({"transformer-train-position-embeddings": "true"}, "transformer-train-position-embedd"),
        ({"transformer-attention-mask": "alibi"}, "transformer-attention-mask='alibi'"),
        ({"transformer-ffn-depth": "3"}, "transformer-ffn-depth='3'"),
        ({"transformer-postprocess": "dhn"}, "transformer-postprocess='dhn'"),
        ({"transformer-postprocess": "dar"}, "transformer-postprocess='dar'"),
        ({"transformer-preprocess": "n"}, "transformer-postprocess='dan'"),
        ({"transformer-preprocess": "da"}, "transformer-preprocess='da'"),
        ({"lemma-dim-emb": "5"}, "lemma-dim-emb='5'"),
        ({"right-left": "true"}, "right-left='true'"),
        ({"input-types": ["class", "sequence"]}, "input-types"),
        ({"dim-vocabs": [11, 11, 11]}, "a model of two vocabularies"),
        ({"transformer-gates": "7"}, "unknown option 'transformer-gates'"),
        ({"transformer-heads": "4"}, "d_model=6 is not divisible by num_heads=4"),
        ({"enc-depth": "999999999"}, "encoder.layers=999999999 must be at most 1,000"),
        ({"enc-depth": "999"}, "enc-depth and dec-depth are 1,000, of 44 arrays"),
        ({"dim-emb": "12"}, "mis-shaped"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_name(changes, message, tmp_path, capsys):
    path = tmp_path / "model.npz"
    path.write_bytes(content(**changes))
    assert cli.main(["convert", str(path), str(tmp_path / "run")]) == 3
    error = capsys.readouterr().err
    assert message in error and str(path) in error and not (tmp_path / "run").exists()


@pytest.mark.parametrize("all_tied", ["false", "true"])
def test_an_option_that_is_left_out_has_marian_s_default(all_tied):
    options = {
        name: str(value) if isinstance(value, int) else value
        for name, value in marian_files.options(tied_embeddings_all=all_tied).items()
    }
    options |= {"transformer-ffn-activation": "relu", "transformer-decoder-dim-ffn": "0"}
    options |= {"dim-vocabs": ["11", "11"], "output-omit-bias": "false"}
    options |= {"transformer-postprocess-emb": "", "transformer-postprocess": "an"}
    expected, needed = marian_names.configuration(options), set()
    for name in options:
        rest = {other: value for other, value in options.items() if other != name}
        try:
            assert marian_names.configuration(rest) == expected or name == "tied-embeddings-all"
        except InputError as error:
            assert name.removeprefix("transformer-") in str(error)
            needed.add(name)
    depths = {"enc-depth", "dec-depth", "dim-emb", "dim-vocabs"}
    sizes = {f"transformer-{name}" for name in ("dim-ffn", "heads", "postprocess")}
    assert needed == depths | sizes


def test_missing_and_unexpected_arrays_are_named(tmp_path, capsys):
    chosen = marian_files.options()
    arrays = marian_files.weights(chosen)
    arrays["Wpos"] = arrays.pop("encoder_l1_self_Wq")
    (tmp_path / "model.npz").write_bytes(marian_files.model(arrays, chosen))
    assert cli.main(["convert", str(tmp_path / "model.npz"), str(tmp_path / "run")]) == 3
    error = capsys.readouterr().err
    assert "missing encoder_l1_self_Wq" in error and "unexpected Wpos" in error


def test_a_run_is_no_model_of_transformers(folder, tmp_path, capsys):
    """No folder is written for a class that computes something else."""
    assert cli.main(["convert", str(folder), str(tmp_path / "run"), "--no-check"]) == 0
    assert cli.main(["convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "hf"]) == 2
    error = capsys.readouterr().err
    assert "norm_epsilon=1e-06" in error and "sinusoids" in error


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_an_export_says_the_dtype_that_its_weights_have(dtype, folder, tmp_path):
    cast = [] if dtype == "float32" else ["--dtype", dtype]
    command = ["convert", str(folder), str(tmp_path / "hf"), "--to", "hf", "--no-check", *cast]
    assert cli.main(command) == 0
    assert json.loads((tmp_path / "hf/config.json").read_text())["dtype"] == dtype
    written = safetensors.describe(tmp_path / "hf/model.safetensors")
    assert {info.dtype for info in written.values()} == {dtype}


def test_only_a_folder_of_transformers_has_what_it_computes_and_others_their_files(tmp_path):
    folder = marian_files.opus(tmp_path / "en-fr", content(), IDS, source=b"s", target=b"t")
    opened = registry.open(folder)
    for name in ("hf", "run", "ct2", "stablehlo", "safetensors"):
        to = Destination(registry.get(name), tmp_path / "My model", opened)
        source, of_hf = opened.converted_to(to.format), name == "hf"
        files = source.files_for(to)
        assert (source is opened) != of_hf
        assert source.config.encoder.sinusoids.value == ("halves" if of_hf else "tensor2tensor")
        notes = [note.name for note in opened.notes_for(to)]
        assert ("Marian's positions and norms" in notes) == of_hf
        assert ("vocab.json" in files) == (name != "safetensors")
        assert ("generation_config.json" in files) == (name in ("hf", "run"))
        if of_hf:
            card = files["README.md"].decode()
            assert "# My model\n" in card and "the family `marian`" in card


def test_folders_of_several_models_need_a_choice(folder, capsys):
    (folder / "decoder.yml").write_text("models: [a.npz, b.npz]\n")
    assert cli.main(["inspect", str(folder)]) == 3
    assert "an ensemble" in capsys.readouterr().err
    (folder / "decoder.yml").unlink()
    (folder / "other.npz").write_bytes(content())
    (folder / "other.npz.optimizer.npz").write_bytes(b"")
    assert cli.main(["inspect", str(folder)]) == 3
    assert "has 2 models" in capsys.readouterr().err
    assert cli.main(["inspect", str(folder / "other.npz")]) == 0


def test_a_model_that_decoder_yml_names_and_that_is_missing_is_not_replaced(folder):
    (folder / "decoder.yml").write_text("models: [best.npz]\n")
    with pytest.raises(InputError, match=r"best\.npz: missing, and decoder\.yml names it"):
        marian_model.find(folder)


def test_the_decoder_yml_of_a_model_goes_before_the_one_of_its_folder(folder):
    (path,), shared = folder.glob("*.npz"), folder / "decoder.yml"
    own = shared.rename(path.with_name(f"{path.name}.decoder.yml"))
    assert marian_model.find(path).decoder_file == own
    shared.write_text("beam-size: 3\n")
    assert marian_model.find(path).decoder_file == own
    assert marian_model.find(folder).decoder_file == shared
    own.unlink()
    assert marian_model.find(path).decoder_file == shared


def test_the_end_of_a_vocabulary_in_text_is_its_own(folder):
    tokens = sorted(IDS, key=lambda token: token == marian_model.END)
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")
    decoder = (folder / "decoder.yml").read_text()
    decoder = decoder.replace("opus.spm32k-spm32k.vocab.yml", "vocab.txt")
    (folder / "decoder.yml").write_text(decoder)
    assert marian_model.end_id(marian_model.find(folder)) == len(IDS) - 1
    (folder / "vocab.txt").write_text("\n".join([*"abcdefghijklmnop", *tokens]))
    with pytest.raises(InputError, match=r"vocab\.txt: eos_id=26 is outside the vocabulary of 1"):
        registry.open(folder)


def test_end_and_unknown_word_are_the_target_vocabulary_s(folder, tmp_path):
    for name, tokens in (("source", WORDS), ("target", [*WORDS[1:], WORDS[0]])):
        (folder / f"{name}.txt").write_text("\n".join(tokens) + "\n")
    decoder = (folder / "decoder.yml").read_text()
    for name in ("source", "target"):
        decoder = decoder.replace("opus.spm32k-spm32k.vocab.yml", f"{name}.txt", 1)
    (folder / "decoder.yml").write_text(decoder)
    assert registry.open(folder).config.eos_id == len(WORDS) - 1
    assert cli.main(["convert", str(folder), str(tmp_path / "run"), "--no-check"]) == 0
    data = json.loads((tmp_path / "run/huggingface/generation_config.json").read_text())
    assert data["bad_words_ids"] == [[len(WORDS)], [WORDS.index("<unk>") - 1]]
    for name in ("source", "target"):
        (folder / f"{name}.spm").write_bytes(name.encode())
    files = marian_format._tokenizer(marian_model.find(folder), len(WORDS))
    assert (files["source.spm"], files["target.spm"]) == (b"source", b"target")
    assert json.loads(files["tokenizer_config.json"])["separate_vocabs"]
    of_sides = [json.loads(files[name]) for name in ("vocab.json", "target_vocab.json")]
    assert [ids[marian_model.END] for ids in of_sides] == [0, len(WORDS) - 1]
    assert [ids["<pad>"] for ids in of_sides] == [len(WORDS)] * 2


def test_a_run_of_two_vocabulary_sizes_has_both_and_no_tokenizer(tmp_path, capsys):
    chosen = marian_files.options(dec_depth=1, tied_embeddings_all="false", dim_vocabs=[11, 9])
    model = marian_files.model(marian_files.weights(chosen), chosen)
    folder = marian_files.opus(tmp_path / "a", model, IDS, source=b"s", target=b"t")
    assert cli.main(["convert", str(folder), str(tmp_path / "run"), "--no-check"]) == 0
    output = capsys.readouterr().out
    assert "the tokenizer: has vocabularies of two lengths" in output
    assert "mini-batch='1' of decoder.yml: is not read" in output and "beam-size" not in output
    data = json.loads((tmp_path / "run/huggingface/config.json").read_text())
    assert (data["vocab_size"], data["decoder_vocab_size"]) == (12, 10)
    assert not [*(tmp_path / "run/huggingface").glob("*.spm")]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("mini-batch: 1\n", {"num_beams": 12, "length_penalty": 0.0}),
        ("beam-size: 1\nnormalize: 0.6\n", {"num_beams": 1, "length_penalty": 0.6}),
        ("allow-unk: true\nbeam-size: 999\n", {"num_beams": 999, "length_penalty": 0.0}),
    ],
)
def test_settings_of_decoding_and_marian_s_defaults(settings, expected, folder, tmp_path):
    (folder / "decoder.yml").write_text(settings)
    assert cli.main(["convert", str(folder), str(tmp_path / "run"), "--no-check"]) == 0
    data = json.loads((tmp_path / "run/huggingface/generation_config.json").read_text())
    assert {name: data[name] for name in expected} == expected
    unknown = [] if "allow-unk: true" in settings else [[IDS["<unk>"]]]
    assert data["bad_words_ids"] == [[len(WORDS)], *unknown]


@pytest.mark.parametrize(
    ("name", "text", "refused"),
    [
        ("vocab.txt", "</s>\na\nb\na\n", "has a token twice"),
        ("vocab.yml", "</s>: 0\na: 1\nb: 1\n", "two tokens have one id"),
        ("vocab.json", '{"</s>": 0, "a": 1, "b": 1}', "two tokens have one id"),
    ],
)
def test_a_vocabulary_with_a_token_or_an_id_twice_is_refused(name, text, refused, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=f"{name}: {refused}"):
        marian_model.read_vocabulary(tmp_path / name)


@pytest.mark.parametrize(
    ("old", "word", "number", "refused"),
    [
        ("null", "null", 11, "does not belong to"),
        ("null", "null", 12, "does not belong to"),
        ("null", "<pad>", 10, "does not belong to"),
        ("</s>", "</S>", 0, "has no </s> or no <unk>"),
    ],
)
def test_a_vocabulary_has_the_words_of_its_model(old, word, number, refused, tmp_path, capsys):
    ids = {token: i for token, i in IDS.items() if token != old} | {word: number}
    folder = marian_files.opus(tmp_path / "a", content(), ids, source=b"s", target=b"t")
    code = cli.main(["convert", str(folder), str(tmp_path / "run"), "--no-check"])
    assert code == 3 and f"vocab.yml: {refused}" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["0", "4.5", "٣"])
def test_a_beam_of_no_size_is_refused(size, folder, tmp_path, capsys):
    decoder = (folder / "decoder.yml").read_text().replace("beam-size: 6", f"beam-size: {size}")
    (folder / "decoder.yml").write_text(decoder, encoding="utf-8")
    assert cli.main(["convert", str(folder), str(tmp_path / "run"), "--no-check"]) == 3
    assert "decoder.yml: beam-size=" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# Hostile files


def header(text: str, numbers: bytes = b"") -> bytes:
    raw = f"{text}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(raw).to_bytes(2, "little") + raw + numbers


def of(member: bytes) -> bytes:
    return marian_files.npz({"a.npy": member})


def saved(save: Any, **arrays: Any) -> bytes:
    file = io.BytesIO()
    save(file, **arrays)
    return file.getvalue()


def deflated() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb.npy", marian_files.npy(np.zeros(1_000_000, np.float32)))
    return file.getvalue()


def npy(dtype: str, shape: str, numbers: bytes = b"", *, by_columns: bool = False) -> bytes:
    fields = f"'descr': '{dtype}', 'fortran_order': {by_columns}, 'shape': {shape}, "
    return header(f"{{{fields}}}", numbers)


PROGRAM = header("{'descr': __import__('os').system('id')}")
OTHER_MEMBER = marian_files.npz({"a.npy": npy("<f4", "(0,)"), "a.pkl": b"x"})
TOO_LARGE = "declares 154,618,822,656 bytes, and has 0"
HOSTILE = {
    "objects": (saved(np.savez, a=np.array([{}], object)), UnsafeFileError, "Python objects"),
    "compressed": (saved(np.savez_compressed, a=np.zeros(9)), UnsafeFileError, "compressed"),
    "bomb": (deflated(), UnsafeFileError, "compressed"),
    "too large": (of(npy("<f4", "(4294967296, 9)")), UnsafeFileError, TOO_LARGE),
    "by columns": (
        of(npy("<f4", "(1, 1)", bytes(4), by_columns=True)),
        InputError,
        "column by column",
    ),
    "axes": (of(npy("<i1", f"({', '.join('1' * 33)})", bytes(1))), InputError, "has 33 axes"),
    "other byte order": (of(npy(">f4", "(1,)", bytes(4))), InputError, "dtype '>f4'"),
    "a program": (of(PROGRAM), InputError, "has the header"),
    "digits": (of(npy("<f4", f"({'1' * 3000}")), InputError, "has the header"),
    "no array": (of(b"\x80\x04]."), InputError, "does not begin"),
    "other member": (OTHER_MEMBER, InputError, "not an array"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_npz_files_are_refused(name, tmp_path):
    file, error, message = HOSTILE[name]
    (tmp_path / "model.npz").write_bytes(file)
    with pytest.raises(error, match="model.npz.*" + message.replace("(", "\\(")):
        marian_model.scan_npz(tmp_path / "model.npz")


@pytest.mark.parametrize(("dtype", "more"), [("float32", -9), ("int8", 1), ("uint8", 0)])
def test_options_are_bytes_and_not_very_many(dtype, more):
    length = marian_model._LONGEST_OPTIONS + more
    text = np.frombuffer(b"a: b".ljust(length, b"\0"), np.uint8)
    tensor = LazyTensor(TensorInfo((length,), dtype), lambda: text)
    if not more:
        assert marian_model._options(Path("a"), tensor) == {"a": "b"}
        return
    with pytest.raises(InputError, match=f"a: special:model.yml is .* bytes of {dtype}"):
        marian_model._options(Path("a"), tensor)


def test_a_file_of_arrays_without_options_is_no_model(tmp_path):
    np.savez(tmp_path / "model.npz", a=np.zeros(3, np.float32))
    with pytest.raises(InputError, match=r"model\.npz: has no special:model\.yml, which Marian"):
        marian_model.find(tmp_path / "model.npz")


def test_inspect_reads_every_byte(folder, capsys):
    (path,) = folder.glob("*.npz")
    data = path.read_bytes()
    at = data.rindex(b" \n", 0, len(data) // 2) + 9  # in the numbers of an array
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    assert cli.main(["inspect", str(folder)]) == 3
    assert "is damaged" in capsys.readouterr().err


def test_a_flipped_bit_is_seen(tmp_path):
    file = bytearray(content())
    file[len(file) // 3] ^= 1
    (tmp_path / "model.npz").write_bytes(file)
    with pytest.raises(InputError, match="is damaged"):
        registry.open(tmp_path / "model.npz").read()


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("a: !!python/object/apply:os.system [id]", UnsafeFileError, "line 1: refused: the tag"),
        ("a: &x [b]\nc: *x", UnsafeFileError, "line 1: refused: an anchor"),
        ("a: *x", UnsafeFileError, "line 1: refused: an anchor or alias"),
        ("a: 1\na: 2", UnsafeFileError, "the key 'a' appears twice"),
        ("[" * 3000, UnsafeFileError, "more than 20 deep"),
        ("a: [b", InputError, "not readable YAML .line 2"),
        ("--- a\n--- b", InputError, "2 YAML documents"),
        ("? [a]\n: b", InputError, "a key that is not text"),
        ("", InputError, "0 YAML documents"),
    ],
)
def test_hostile_yaml_is_refused(text, error, message):
    with pytest.raises(error, match=message):
        yaml_data.parse("some.yml", text.encode())


def test_yaml_stays_text():
    text = b'a: no\nb: [1, 0x10, ~, "\\u20ac"]\n"</s>": {null: 1.0}\n'
    expected = {"a": "no", "b": ["1", "0x10", "~", "€"], "</s>": {"null": "1.0"}}
    assert yaml_data.parse("some.yml", text) == expected
    assert yaml_data.parse("some.yml", b"a: ! b") == {"a": "b"}
    yaml_data.parse("some.yml", b"[" * 20 + b"]" * 20)
    with pytest.raises(UnsafeFileError, match="more than 20 deep"):
        yaml_data.parse("some.yml", b"[" * 21 + b"]" * 21)


@pytest.mark.parametrize("named", [None, "a", ["a"], ["a", "b", "c"], [["a"], "b"]])
def test_vocabularies_are_found_by_their_names_unless_two_are_named(named, folder):
    usual = marian_model._vocabularies(folder, {})
    assert marian_model._vocabularies(folder, {"vocabs": named}) == usual
    with pytest.raises(InputError, match=r"missing, and decoder\.yml names it"):
        marian_model._vocabularies(folder, {"vocabs": ["a", usual[0].name]})
    sides = tuple(folder / f"opus.{side}.vocab.yml" for side in ("src", "trg"))
    for path in (*usual, *sides):
        path.touch()
    usual[0].unlink()
    assert marian_model._vocabularies(folder, {"vocabs": named}) == sides
    (folder / "other.src.vocab.yml").touch()  # it is not known which is the model's
    assert marian_model._vocabularies(folder, {"vocabs": named}) == ()


@pytest.mark.parametrize("vocabularies", ["a.spm b.spm", "a.spm b.yml", "a.yml b.yml"])
def test_sentencepiece_models_are_those_of_vocabularies_if_both_are(vocabularies, folder):
    for name in (*(names := vocabularies.split()), "source.spm", "target.spm"):
        (folder / name).touch()
    (folder / "decoder.yml").write_text(f"vocabs: [{', '.join(names)}]\n")
    model = marian_model.find(folder)
    assert [path.name for path in model.vocabularies] == names
    pair = names if vocabularies == "a.spm b.spm" else ["source.spm", "target.spm"]
    assert [path.name for path in model.sentencepiece] == pair


@pytest.mark.parametrize("named", ["..", "a" * 300, '"\\x1b[2J"'])
def test_names_in_decoder_yml_are_plain_names(named, folder):
    (folder / "decoder.yml").write_text(f"models: [{named}]\nvocabs: [a, b]\n")
    with pytest.raises(UnsafeFileError, match="is not a name of a file"):
        marian_model.find(folder)


def test_other_folders_are_not_read(folder):
    (folder.parent / "secret.yml").write_text("a: 1\n")
    (folder / "decoder.yml").write_text("vocabs: [../secret.yml, ../secret.yml]\n")
    with pytest.raises(InputError, match=r"en-fr.secret\.yml: missing"):
        marian_model.find(folder)
