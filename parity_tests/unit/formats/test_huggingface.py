"""Hugging Face folders without transformers: detection, files, export, and the hub."""

import dataclasses
import json
import shutil
import sys
import types
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tokenizers

from jax_transformer.architectures import huggingface_config, huggingface_state
from jax_transformer.architectures.registry import model_weights, usual_length
from jax_transformer.config import codec
from jax_transformer.convert.models import ModelDescription
from jax_transformer.data.tokenizer import Tokenizer
from jax_transformer.errors import ConfigError, DifferentError, InputError, UnsafeFileError
from jax_transformer.formats import huggingface_folders, registry
from jax_transformer.formats.base import Pretrained
from jax_transformer.storage import huggingface_folder, pt, run_files, safetensors, tensors
from jax_transformer.training.options import TrainOptions
from jax_transformer.weights import rules
from parity_tests.unit import helpers, runs
from parity_tests.unit.conversions import convert, prepare

T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "dtype": "float32"}
T5 |= dict(vocab_size=11, d_model=8, d_kv=5, d_ff=12, num_heads=3, num_layers=1)
T5 |= dict(num_decoder_layers=2, relative_attention_num_buckets=4)
T5 |= dict(relative_attention_max_distance=6, pad_token_id=0, eos_token_id=1)
T5 |= dict(decoder_start_token_id=0)
DOWNLOADED = "README.md config.json generation_config.json model.safetensors spiece.model".split()
CARD = "---\nlicense: mit\n---\n\n# A model\n"


def weights() -> dict[str, np.ndarray]:
    """Return the tensors that transformers writes for the model of ``T5``, with random numbers."""
    config = huggingface_config.from_config(T5)
    arrays = helpers.random_arrays(config, dtype="float32")
    tensors = rules.to_torch(model_weights(config).table, arrays)
    return huggingface_state.saved(tensors, config)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    """A folder as transformers saves one, with more files than transformers reads."""
    path = tmp_path_factory.mktemp("hub") / "theirs"
    extra_files = {"config.json": json.dumps(T5).encode(), "spiece.model": b"\0\1"}
    extra_files |= {"generation_config.json": b'{"eos_token_id": 1}', "README.md": CARD.encode()}
    huggingface_folder.write(path, tensors.in_memory(weights()), extra_files)
    (path / "modeling_t5.py").write_text("raise SystemExit('this file was run')")
    (path / "tf_model.h5").write_bytes(b"no")
    return path


def copied(theirs: Path, path: Path, **changes: bytes | None) -> Path:
    """A copy without some files (None), or with others."""
    shutil.copytree(theirs, path)
    for name, content in changes.items():
        (path / name).unlink() if content is None else (path / name).write_bytes(content)
    return path


def files(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


def test_a_folder_is_recognised_by_model_type(theirs, tmp_path):
    assert registry.of(theirs).name == "hf"
    message = r"neither a run folder .* nor a Hugging Face folder \(config.json with model_type\)"
    with pytest.raises(InputError, match=message) as error:
        registry.of(copied(theirs, tmp_path / "other", **{"config.json": b"{}"}))
    assert "()" not in str(error.value) and "safetensors" not in str(error.value)


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b'{"model_type": "t5", "model_type": "t5"}', b"[" * 100_000],
    ids=["cut", "list", "twice", "deep"],
)
def test_a_damaged_configuration_is_one_line_that_names_it(content, theirs, tmp_path):
    with pytest.raises((InputError, UnsafeFileError), match=r"config\.json") as error:
        convert(copied(theirs, tmp_path / "bad", **{"config.json": content}), tmp_path / "run")
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_a_folder_without_weights_names_the_expected_files(theirs, tmp_path):
    bare = copied(theirs, tmp_path / "bare", **{"model.safetensors": None})
    message = r"none of model\.safetensors, .*pytorch_model\.bin.*tf_model\.h5 cannot be read"
    with pytest.raises(InputError, match=message):
        convert(bare, tmp_path / "run")


def test_safetensors_are_preferred_and_the_plan_names_the_other_file(theirs, tmp_path):
    both = copied(theirs, tmp_path / "both", **{"pytorch_model.bin": b"not even a zip"})
    plan = prepare(both, tmp_path / "run").plan
    dropped = {note.name: note.reason for note in plan.dropped}
    assert plan.source.endswith("(model.safetensors)")
    assert dropped["pytorch_model.bin"] == "weights again, next to model.safetensors, which is read"
    assert dropped["modeling_t5.py"] == "a program; programs are neither run nor copied"
    assert not set(dropped) & {"config.json", "spiece.model", "README.md"}


def test_missing_and_unknown_tensors_are_one_error(theirs, tmp_path):
    tensors = weights()
    tensors["shared.wieght"] = tensors.pop("shared.weight")
    bad = copied(theirs, tmp_path / "bad", **{"model.safetensors": None})
    safetensors.write(bad / "model.safetensors", tensors)
    with pytest.raises(InputError, match=r"missing shared\.weight.*unexpected shared\.wieght"):
        convert(bad, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"d_kv": "4"}, "d_kv"),
    ],
    ids=["family", "quantized", "text"],
)
def test_an_unknown_model_is_refused_by_file_and_key(change, key, theirs, tmp_path):
    bad = copied(theirs, tmp_path / "bad", **{"config.json": json.dumps(T5 | change).encode()})
    with pytest.raises(InputError, match=rf"{bad}/config\.json.*{key}"):
        convert(bad, tmp_path / "run")


def test_a_run_keeps_the_extra_files_for_export(theirs, tmp_path):
    outcome = convert(theirs, tmp_path / "run")
    assert outcome.files == ("README.md", "config.json", "generation_config.json", "spiece.model")
    extra_files = {name: files(theirs)[name] for name in outcome.files}
    assert files(tmp_path / "run/huggingface") == extra_files
    assert "model_type" not in json.loads((tmp_path / "run/config.json").read_text())
    convert(tmp_path / "run", tmp_path / "back", to="hf")
    weights = {"model.safetensors": (theirs / "model.safetensors").read_bytes()}
    assert files(tmp_path / "back") == extra_files | weights


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_a_weights_file_and_a_configuration_are_a_folder(suffix, theirs, tmp_path):
    """The file has all of PyTorch's names, the folder those that transformers writes."""
    path, run = tmp_path / f"model.{suffix}", tmp_path / "run"
    outcome = convert(theirs, path)
    assert {note.name for note in outcome.prepared.plan.dropped} >= {"config.json", "spiece.model"}
    read = {"safetensors": safetensors, "pt": pt}[suffix].read(path)
    assert {"lm_head.weight", "encoder.embed_tokens.weight"} < read.keys()
    convert(theirs, run)
    for where in (theirs, run):
        target = tmp_path / f"from-{where.name}"
        description = ModelDescription(str(where / "config.json"))
        convert(path, target, to="hf", description=description)
        assert runs.differing(safetensors.read(target / "model.safetensors"), weights()) == []
        data = json.loads((target / "config.json").read_text())
        assert huggingface_config.from_config(data) == huggingface_config.from_config(T5)


def test_an_index_counts_the_parameters_of_the_module(theirs, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_state, "parameters", lambda *_: 7)
    convert(theirs, tmp_path / "out", to="hf", shard_size="1KB")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_parameters"] == 7
    assert list(index["weight_map"]) == sorted(weights())


def test_shards_are_whole_tensors_and_an_index_that_is_read_back(theirs, tmp_path):
    convert(theirs, tmp_path / "out", to="hf", shard_size="1KB")
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    tensors = weights()
    size = sum(array.size for array in tensors.values())
    assert index["metadata"] == {"total_parameters": size, "total_size": 4 * size}
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    count = len(shards)
    assert shards == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert count > 2
    for name in shards:
        part = safetensors.read(tmp_path / "out" / name)
        assert len(part) == 1 or sum(array.nbytes for array in part.values()) <= 1000
    again = safetensors.read(tmp_path / "out/model.safetensors.index.json")
    assert runs.differing(again, tensors) == []
    (tmp_path / "out" / shards[1]).unlink()
    with pytest.raises(InputError, match=f"names '{shards[1]}', which is missing"):
        convert(tmp_path / "out", tmp_path / "run")


def test_runs_of_names_fill_the_shards_in_order():
    def shards(**sizes: int) -> list[list[str]]:
        state = {name: np.zeros(size, np.int8) for name, size in sizes.items()}
        return [list(part) for part in huggingface_folder.split(tensors.in_memory(state), 10)]

    assert shards(a=6, b=6, c=2, d=6, e=2, f=2) == [["a"], ["b", "c"], ["d", "e", "f"]]
    assert shards(a=20, b=1) == [["a"], ["b"]]
    # As huggingface_hub.split_torch_state_dict_into_shards
    assert shards(a=6, b=20, c=4, d=10, e=11) == [["b"], ["a", "c"], ["e"], ["d"]]


def _rewritten(path: Path, seed: int, count: int) -> None:
    """Divide a folder's weights anew, at random: order, metadata and spaces of headers, an index
    with other spaces."""
    random, state = np.random.default_rng(seed), weights()
    (path / "model.safetensors").unlink()
    names, shards = random.permutation(list(state)), {}
    for i in range(count):
        name = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        shards |= dict.fromkeys(names[i::count], name)
        entries, at = {"__metadata__": {"total": str(seed), "format": "pt", "é": "\\n"}}, 0
        for tensor in names[i::count]:
            array = state[tensor]
            span = [at, at := at + array.nbytes]
            entries[tensor] = {"shape": array.shape, "data_offsets": span, "dtype": "F32"}
        entries = {name: entries[name] for name in random.permutation(list(entries))}
        header = json.dumps(entries, indent=seed).encode()
        data = b"".join(state[tensor].tobytes() for tensor in names[i::count])
        content = len(header).to_bytes(8, "little") + header + data
        (path / (name if count > 1 else "model.safetensors")).write_bytes(content)
    if count > 1:
        index = {"weight_map": shards, "metadata": {"total_size": at, "seed": seed}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=3))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_any_files_of_weights_come_back_byte_for_byte(count, theirs, tmp_path):
    source = copied(theirs, tmp_path / "source", **{"modeling_t5.py": None, "tf_model.h5": None})
    _rewritten(source, 1 + count, count)
    convert(source, tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "again")
    convert(tmp_path / "again", tmp_path / "back", to="hf")
    convert(source, tmp_path / "straight", to="hf")
    assert files(source) == files(tmp_path / "back") == files(tmp_path / "straight")
    assert "huggingface/layout.json" in run_files.read_sums(tmp_path / "again")
    if count > 1:  # files of other names would not be replaced
        index = (source / "model.safetensors.index.json").read_text()
        (source / "model.safetensors.index.json").write_text(index.replace("model-00002", "other"))
        for path in source.glob("model-00002-*"):
            path.rename(path.with_name(path.name.replace("model-00002", "other")))
        assert huggingface_folder.layout(huggingface_folder.find(source).files) == {}
    # Other numbers in other files: cast, of one's own size
    convert(tmp_path / "run", tmp_path / "half", to="hf", dtype="bfloat16")
    assert "model.safetensors" in files(tmp_path / "half")
    convert(tmp_path / "run", tmp_path / "1KB", to="hf", shard_size="1KB")
    assert len(list((tmp_path / "1KB").glob("model-*"))) > 5
    # As the files are usually: a run records nothing
    convert(theirs, tmp_path / "usual")
    assert not (tmp_path / "usual/huggingface/layout.json").exists()


@pytest.fixture(scope="module")
def laid_out(theirs, tmp_path_factory) -> dict[int, Path]:
    """Runs that record the layout of one file, and of two."""
    recorded, folder = {}, tmp_path_factory.mktemp("layouts")
    for count in (1, 2):
        _rewritten(copied(theirs, folder / f"source{count}"), 2, count)
        recorded[count] = folder / f"run{count}"
        convert(folder / f"source{count}", recorded[count])
    return recorded


def _relaid(run: Path, path: Path, change) -> Path:
    """Export a copy of a run whose layout is changed."""
    shutil.copytree(run, path / "run")
    layout = json.loads((run / "huggingface/layout.json").read_text())
    run_files.replace(path / "run", "huggingface/layout.json", json.dumps(change(layout)))
    convert(path / "run", path / "out", to="hf")
    return path / "out"


@pytest.mark.parametrize(
    "damage",
    [
        lambda layout: [],
        lambda layout: {name: {} for name in layout},
        lambda layout: dict.fromkeys(layout, "{"),
        lambda layout: dict.fromkeys(layout, "[]"),
        lambda layout: {name: text.replace('"F32"', '"F99"') for name, text in layout.items()},
        lambda layout: {name: text.replace("metadata", "neta") for name, text in layout.items()},
    ],
    ids=["list", "no texts", "cut", "no object", "dtype", "metadata"],
)
def test_a_layout_that_cannot_be_read_is_refused_in_one_line(damage, laid_out, tmp_path):
    with pytest.raises(InputError) as error:
        _relaid(laid_out[2], tmp_path, damage)
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


OTHERS = ["fewer", {"dtype": "I32"}, {"shape": [1] * 4}]
OTHERS += ["../outside.safetensors", "config.json", "/tmp/outside"]


@pytest.mark.parametrize("change", OTHERS, ids=str)
def test_a_layout_of_other_tensors_or_files_is_left(change, theirs, laid_out, tmp_path):
    def changed(layout: dict) -> dict:
        name = max(name for name in layout if name.endswith(".safetensors"))
        if change == "fewer":
            return {other: text for other, text in layout.items() if other != name}
        if isinstance(change, str):
            return {change: layout[name]}
        header = json.loads(layout[name])
        header[[*header][-1]] |= change
        return layout | {name: json.dumps(header)}

    is_name = isinstance(change, str) and change != "fewer"
    out = _relaid(laid_out[1 if is_name else 2], tmp_path, changed)
    assert files(out).keys() == files(theirs).keys() - {"modeling_t5.py", "tf_model.h5"}
    assert runs.differing(safetensors.read(out / "model.safetensors"), weights()) == []


@pytest.mark.parametrize("written", ["", "5", "0", "-1KB", "5.5GB", "GB", "5 GB", "²GB"])
def test_max_shard_size_is_an_integer(written):
    if written == "5":
        assert huggingface_folder.size(written) == 5
        for power, unit in enumerate("KMGT", 1):
            for text in (f"2{unit}B", f"2{unit}b".lower()):
                assert huggingface_folder.size(text) == 2 * 1000**power
    else:
        with pytest.raises(ConfigError, match="--shard-size"):
            huggingface_folder.size(written)


def test_a_cast_changes_only_the_dtype_of_the_configuration(theirs, tmp_path):
    convert(theirs, tmp_path / "half", to="hf", dtype="bfloat16")
    assert json.loads((tmp_path / "half/config.json").read_text()) == T5 | {"dtype": "bfloat16"}
    read = safetensors.read(tmp_path / "half/model.safetensors")
    assert {array.dtype for array in read.values()} == {np.dtype(ml_dtypes.bfloat16)}
    old = json.dumps({k: v for k, v in T5.items() if k != "dtype"} | {"torch_dtype": "float32"})
    old_folder = copied(theirs, tmp_path / "old", **{"config.json": old.encode()})
    convert(old_folder, tmp_path / "half2", to="hf", dtype="float16")
    assert json.loads((tmp_path / "half2/config.json").read_text())["torch_dtype"] == "float16"


def test_a_dry_run_reads_and_writes_nothing(theirs, tmp_path, console):
    code, out, _ = console.say("convert", theirs, tmp_path / "run", "--dry-run")
    assert code == 0 and "nothing was written" in out and not (tmp_path / "run").exists()
    # a copy that is not in the file is not counted
    assert "encoder.embed_tokens.weight" not in out.split("tied")[0]


def test_force_replaces_an_export_and_nothing_that_holds_more(theirs, tmp_path):
    out = tmp_path / "out"
    convert(theirs, out, to="hf", shard_size="1KB")
    with pytest.raises(InputError, match="exists already"):
        convert(theirs, out, to="hf")
    convert(theirs, out, to="hf", force=True)
    assert not list(out.glob("model-*")) and (out / "model.safetensors").is_file()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds more than weights \(notes\.txt\)"):
        convert(theirs, out, to="hf", force=True)
    assert (out / "notes.txt").read_text() == "mine"


def test_two_vocabularies_are_not_exported_and_the_plan_says_so(theirs, tmp_path):
    convert(copied(theirs, tmp_path / "bare", **{"spiece.model": None}), tmp_path / "run")
    for name in run_files.SIDE_FILES:
        (tmp_path / "run" / name).write_text("{}")
    prepared = prepare(tmp_path / "run", tmp_path / "out", to="hf")
    assert {note.name for note in prepared.plan.dropped} == set(run_files.SIDE_FILES)
    assert not set(prepared.to.files) & set(huggingface_folder.TOKENIZER)


def test_a_failed_check_of_an_export_leaves_the_old_folder(theirs, tmp_path, monkeypatch):
    out = tmp_path / "out"
    convert(theirs, out, to="hf")
    before = files(out)

    def faulty(path, state, extra_files, **more):
        return real(path, state, dict(extra_files) | {"spiece.model": b"another"}, **more)

    real = huggingface_folder.write
    monkeypatch.setattr(huggingface_folder, "write", faulty)
    with pytest.raises(InputError, match=r"spiece\.model reads back different"):
        convert(theirs, out, to="hf", force=True)
    assert files(out) == before and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_export_of_other_tensors_does_not_come_back(theirs, tmp_path, monkeypatch):
    def exchanged(state, config):
        stored = real(state, config)
        one, other = (f"encoder.block.0.layer.0.SelfAttention.{name}.weight" for name in "qk")
        return stored | {one: stored[other], other: stored[one]}

    real = huggingface_state.saved
    monkeypatch.setattr(huggingface_state, "saved", exchanged)
    with pytest.raises(DifferentError, match=r"self-check: .*\.q\.weight, .*\.k\.weight do not"):
        convert(theirs, tmp_path / "out", to="hf", check=True)


def test_the_parent_folder_is_created_and_removed_after_a_refusal(theirs, tmp_path, monkeypatch):
    """A refused first run leaves no runs/ folder."""
    convert(theirs, tmp_path / "runs/first")
    convert(tmp_path / "runs/first", tmp_path / "models/back", to="hf")
    back = tmp_path / "models/back/model.safetensors"
    assert back.read_bytes() == (theirs / "model.safetensors").read_bytes()
    for name in ("a/b/c", "a/b.safetensors"):
        with pytest.raises(InputError, match="no such folder"):
            convert(theirs, tmp_path / name)
    failing = lambda path, *more, **options: path.mkdir() or sys.exit("no room")  # noqa: E731
    monkeypatch.setattr(huggingface_folder, "write", failing)
    with pytest.raises(SystemExit):
        convert(theirs, tmp_path / "a/b", to="hf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["models", "runs"]


def test_inspecting_a_folder_loads_no_jax(theirs, tmp_path):
    code = (
        "import sys, jax_transformer.cli as cli; cli.main(['inspect', sys.argv[1], '--json']);"
        " sys.exit('jax' in sys.modules)"
    )
    done = runs.python("-c", code, theirs)
    assert done.returncode == 0, done.stderr
    description = json.loads(done.stdout)
    assert description["kind"] == "Hugging Face folder"
    assert description["values"]["model_type"] == "t5"
    assert description["tensors"].keys() == weights().keys()
    assert set(description["sha256"]) == set(DOWNLOADED)


def test_inspect_prints_the_values_of_a_configuration_that_it_has(theirs, tmp_path):
    numbers = {name: value for name, value in T5.items() if name != "architectures"}
    content = json.dumps(T5 | {"prefix": None, "task_specific_params": {"a": 1}, "languages": []})
    folder = copied(theirs, tmp_path / "a", **{"config.json": content.encode()})
    assert registry.inspect(folder).values == numbers


def test_inspect_shows_the_ties_of_the_files_of_a_folder(theirs, tmp_path):
    convert(theirs, tmp_path / "model.pt")
    changes = {"pytorch_model.bin": (tmp_path / "model.pt").read_bytes(), "model.safetensors": None}
    folder = copied(theirs, tmp_path / "a")
    assert registry.inspect(folder).ties == []
    expected = registry.inspect(tmp_path / "model.pt").ties
    assert expected
    assert registry.inspect(copied(theirs, tmp_path / "b", **changes)).ties == expected


def test_the_card_of_a_new_folder_counts_tied_weights_once(theirs, tmp_path):
    with_card = copied(theirs, tmp_path / "a", **{"README.md": None})
    convert(with_card, tmp_path / "b", to="hf")
    count = sum(array.size for array in weights().values())
    assert f"with {count:,} parameters" in (tmp_path / "b/README.md").read_text()


def test_a_run_that_was_trained_records_the_dtype_of_its_weights(theirs, tmp_path):
    """Training has made float32 of what the folder had in 16 bits."""
    before = json.dumps(T5 | {"dtype": "float16"}).encode()
    convert(copied(theirs, tmp_path / "a", **{"config.json": before}), tmp_path / "run")
    for name, dtype in (("as it was", "float16"), ("trained", "float32")):
        convert(tmp_path / "run", tmp_path / name, to="hf")
        assert json.loads((tmp_path / name / "config.json").read_text())["dtype"] == dtype
        (tmp_path / "run/train_config.json").write_text(codec.to_json(TrainOptions(init="t5")))


@pytest.mark.parametrize("other", ["source_pad_id", "eos_id"])
def test_a_tokenizer_with_other_special_ids_is_not_exported(other, tmp_path):
    own = Tokenizer.train(["a b"], 300, pad_id=0, bos_id=0, eos_id=1)
    own.save(tmp_path / run_files.SHARED_FILE)
    config = huggingface_config.from_config(T5)
    source = helpers.stand_in(Pretrained, path=tmp_path)
    assert len(huggingface_folders._own_tokenizer(source, config)) == 2
    with pytest.raises(InputError, match="its special ids do not belong"):
        huggingface_folders._own_tokenizer(source, dataclasses.replace(config, **{other: 5}))


@pytest.mark.parametrize("bos", [0, 2])
def test_an_exported_tokenizer_ends_each_line_as_the_run_s_own(bos, tmp_path):
    own = Tokenizer.train(["a b"], 300, pad_id=0, bos_id=bos, eos_id=1)
    own.save(tmp_path / run_files.SHARED_FILE)
    config = huggingface_config.from_config(T5)
    source = helpers.stand_in(Pretrained, path=tmp_path)
    content = huggingface_folders._own_tokenizer(source, config)
    library = tokenizers.Tokenizer.from_buffer(content["tokenizer.json"])
    one, other = ([*own.encode(text), 1] for text in ("a b", "ba"))
    assert library.encode("a b").ids == one and library.encode("a b", "ba").ids == one + other
    settings = json.loads(content["tokenizer_config.json"])
    names = {0: "<pad>", 1: "<eos>", bos: settings.get("bos_token", "<pad>")}
    assert all(library.token_to_id(name) == index for index, name in names.items())
    assert ("bos_token" in settings) == (bos != 0)
    assert (settings["pad_token"], settings["eos_token"]) == ("<pad>", "<eos>")
    assert settings["model_max_length"] == usual_length(config)
    assert settings["clean_up_tokenization_spaces"] is False


@pytest.fixture
def client(theirs, monkeypatch):
    """A stand-in for huggingface_hub that has one model and records requests."""
    asked: list[tuple] = []

    class HfApi:
        def list_repo_files(self, repository, *, revision):
            if repository != "owner/name" or revision not in (None, "v1.0"):
                raise OSError("404 Client Error.\nRepository Not Found")
            return [path.name for path in theirs.iterdir()]

    def snapshot_download(repository, *, revision, allow_patterns):
        asked.append((repository, revision, sorted(allow_patterns)))
        return str(theirs)

    library = types.SimpleNamespace(HfApi=HfApi, snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", library)
    return asked


def test_a_hub_model_is_downloaded_by_file_names(client, theirs, tmp_path):
    convert("hf:owner/name@v1.0", tmp_path / "run")
    # no code, and no second form of the weights
    assert client == [("owner/name", "v1.0", DOWNLOADED)]
    model = registry.open("hf:owner/name").model()
    assert client[1:] == [("owner/name", None, DOWNLOADED)]
    assert model.config == huggingface_config.from_config(T5)


def test_the_shards_of_a_hub_model_are_downloaded_by_their_index():
    index, shard = "model.safetensors.index.json", "model-00001-of-00002.safetensors"
    others = ("x-1-of-2.safetensors", "model-1-of-2.fp16.safetensors", "model-1-of-2.gguf")
    listed = ["config.json", "pytorch_model.bin", index, shard, *others]
    assert registry._to_download("hf:a/b", listed) == [index, shard, "config.json"]


@pytest.mark.parametrize("name", ["hf:", "hf:a/b/c", "hf:../x", "hf:a b", "hf:a/b@"])
def test_an_invalid_hub_name_is_refused_before_any_request(name, client):
    with pytest.raises(ConfigError, match="hf:owner/name"):
        registry.download(name)
    assert client == []


def test_hub_errors_are_one_line(client, console):
    message = "hf:owner/other: cannot be downloaded: 404 Client Error. Repository Not Found"
    console.refused(3, [message], "inspect", "hf:owner/other")


def test_without_the_library_the_extra_is_named(monkeypatch, console):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    console.refused(2, ["pip install 'jax-seq2seq[hub]'"], "inspect", "hf:owner/name")
