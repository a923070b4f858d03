"""Exported programs give the model's own tokens, in a process that cannot import this package."""

import contextlib
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jax_transformer as jt
from jax_transformer import transformer
from jax_transformer.errors import ConfigError, DifferentError
from jax_transformer.extras.deploy.stablehlo import folder
from jax_transformer.extras.deploy.stablehlo.run import Model
from jax_transformer.generate import prepare
from jax_transformer.generate.generation_config import (
    BeamScorer,
    Constraints,
    EarlyStopping,
    GenerationConfig,
)
from parity_tests import preset_names
from parity_tests.unit import helpers, runs, speakers

pytest.importorskip("flatbuffers")

PAD = 4
SPECIAL = dict(source_pad_id=PAD, target_pad_id=0, bos_id=1, eos_id=2)
SOURCES = ["5 6 7 8 2", "9 2", "3 8 5 6 7 8 9 10 0 1 3 2"]
OUTSIDE = """
import runpy, sys
sys.modules.update(dict.fromkeys("jax_transformer flax safetensors tokenizers torch".split()))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a file as a program without this package: importing it raises ImportError."""


@pytest.fixture(scope="module")
def model() -> transformer.Transformer:
    """Its translations of the sources differ, by greedy decoding and by beam search."""
    config = helpers.tiny("lesson10_repaired", num_layers=1, **SPECIAL)
    return helpers.random_model(config, dtype="float32", seed=4)


@pytest.fixture(scope="module")
def exported(model, tmp_path_factory) -> Path:
    """The folder that the command writes of this model."""
    path = tmp_path_factory.mktemp("exported")
    jt.convert.save(model, path / "run")
    redirected = contextlib.redirect_stdout(io.StringIO())
    # Annotations say int, and sizes are symbolic
    with runs.as_a_user(), helpers.unchecked(), redirected as out:
        assert runs.main("convert", path / "run", path / "out", "--to", "stablehlo") == 0
    (path / "report").write_text(out.getvalue())
    return path / "out"


def test_an_export_is_run_next_to_its_model(exported):
    report = exported.with_name("report").read_text()
    assert "ran the program greedy next to the model: the same tokens" in report


def padded(rows: list[str]) -> np.ndarray:
    ids = [[int(word) for word in row.split()] for row in rows]
    width = max(map(len, ids))
    return np.array([[*row, *[PAD] * (width - len(row))] for row in ids], np.int32)


def cut(row: np.ndarray, eos: int = 2) -> list[int]:
    ids = row.tolist()
    return ids[: ids.index(eos) + 1] if eos in ids else ids


@pytest.mark.parametrize("program", [pytest.param("greedy", marks=pytest.mark.slow), "beam"])
def test_another_process_without_this_package_gives_the_same_tokens(model, exported, program):
    process = subprocess.run(
        [sys.executable, "-c", OUTSIDE, exported / "run.py", program],
        input="".join(f"{row}\n" for row in SOURCES),
        capture_output=True,
        text=True,
        env=runs.environment() | {"PYTHONPATH": ""},
    )
    assert process.returncode == 0, process.stderr
    with runs.as_a_user():
        if program == "greedy":
            ours = jt.generate.greedy(model, padded(SOURCES))
        else:
            ours, _ = jt.generate.beam(model, padded(SOURCES))
    printed = [[int(word) for word in line.split()] for line in process.stdout.splitlines()]
    assert printed == [cut(row) for row in np.asarray(ours)]
    assert len(set(map(tuple, printed))) == len(SOURCES)


def test_one_program_serves_every_batch_and_length_and_steps_equal_the_loop(model, exported):
    loaded = Model(exported)
    with runs.as_a_user():
        for rows in (SOURCES, SOURCES[:1]):
            source = padded(rows)
            cache, ids = loaded.encode(source), np.full((len(source), 1), 1)
            tokens = []
            for _ in range(4):
                logits, cache = loaded.decode_step(ids, cache)
                ids = np.asarray(logits).argmax(axis=-1)
                tokens.append(ids)
            greedy = jt.generate.greedy(model, source, max_length=4)
            for row, expected in zip(np.concatenate(tokens, axis=1), greedy, strict=True):
                assert cut(row) == cut(np.asarray(expected))


def test_the_manifest_names_files_sizes_and_ids(exported):
    manifest = json.loads((exported / folder.MANIFEST).read_text())
    assert manifest["platforms"] == ["cpu", "cuda", "tpu"] and manifest["jax"] == jax.__version__
    assert set(manifest["programs"]) == {"encode", "decode_step", "greedy", "beam"}
    assert manifest["programs"]["greedy"]["arguments"] == [["int32[b,s]"]]
    assert manifest["programs"]["beam"]["results"] == ["int32[b,20]", "float32[b]"]
    assert manifest["special_ids"] == {"source_pad": 4, "target_pad": 0, "start": 1, "end": 2}
    entries = [manifest["weights"], *manifest["programs"].values()]
    files = {entry["file"]: entry["sha256"] for entry in entries}
    hashes = {name: hashlib.sha256((exported / name).read_bytes()).hexdigest() for name in files}
    assert files == hashes
    assert {path.name for path in exported.iterdir()} == {*files, folder.MANIFEST, "run.py"}


def test_every_damaged_file_is_refused(exported, tmp_path):
    shutil.copytree(exported, tmp_path / "copy")
    for path in (*exported.glob("*.stablehlo"), exported / folder.WEIGHTS):
        content = bytearray(path.read_bytes())
        content[-9] ^= 1
        (tmp_path / "copy" / path.name).write_bytes(content)
        with pytest.raises(SystemExit, match=f"{re.escape(path.name)}: is damaged"):
            Model(tmp_path / "copy")
        (tmp_path / "copy" / path.name).write_bytes(path.read_bytes())


SETTINGS = GenerationConfig(
    **dict(num_beams=3, length_penalty=4.0, beam_scorer=BeamScorer.AVERAGE, max_new_tokens=7),
    **dict(early_stopping=EarlyStopping.FULL, constraints=Constraints(suppress_tokens=(8,))),
    **dict(forced_bos_token_id=5, decoder_start_token_id=6, eos_token_id=7),
)


def test_programs_have_the_settings_of_the_folder(tmp_path):
    """In bfloat16, of sources as long as the model reads."""
    config = helpers.tiny("lesson10_repaired", num_layers=1, max_length=9, **SPECIAL)
    models, out, written = [], tmp_path / "out", folder.Settings.of(config, SETTINGS)
    for seed in (4, 5):
        leaves = transformer.flatten(speakers.loud(config, seed))
        leaves = {name: jnp.asarray(array, jnp.bfloat16) for name, array in leaves.items()}
        models.append(prepare.split(transformer.unflatten(config, leaves)))
    source = helpers.ragged(config.source_vocab_size, PAD, 16, config.longest)
    with runs.as_a_user(), helpers.unchecked():
        arrays = {name: np.asarray(array) for name, array in leaves.items()}
        sha256 = folder.write(out, config, arrays, written)
        assert sha256 == hashlib.sha256((out / folder.MANIFEST).read_bytes()).hexdigest()
        loaded = Model(out)
        assert {str(array.dtype) for array in loaded.weights.values()} == {"bfloat16"}
        folder.check(out, models[1], written)
        with pytest.raises(DifferentError, match="gives other tokens"):
            folder.check(out, models[0], written)
        tokens, scores = jt.generate.generate(models[1], source, SETTINGS)
        theirs = loaded.beam(source)
    ids = {"source_pad": PAD, "target_pad": 0, "start": 6, "end": 7}
    assert loaded.manifest["special_ids"] == ids
    numbers = ("max_source_length", "max_new_tokens", "num_beams", "length_penalty")
    assert [loaded.manifest[name] for name in numbers] == [9, 7, 3, 4.0]
    assert (np.asarray(theirs[0]) == tokens[:, 0]).all() and len(np.unique(tokens[:, 0])) > 3
    np.testing.assert_allclose(theirs[1], scores[:, 0], rtol=1e-2)


def test_no_program_calls_what_only_one_platform_has(exported):
    for path in exported.glob("*.stablehlo"):
        program = jax.export.deserialize(bytearray(path.read_bytes()))
        assert program.platforms == ("cpu", "cuda", "tpu")
        calls = re.findall(r"custom_call @(\w+)", str(program.mlir_module()))
        assert set(calls) == {"shape_assertion"}, path.name


def test_what_has_no_program_is_refused(model, tmp_path):
    with pytest.raises(ConfigError, match="residual 'memory'"):
        folder.Settings.of(helpers.tiny("blog2023"), GenerationConfig())
    with pytest.raises(ConfigError, match="do_sample"):
        folder.Settings.of(model.config, GenerationConfig(do_sample=True))
    arrays = helpers.random_arrays(model.config)
    settings = folder.Settings.of(model.config, GenerationConfig())
    with pytest.raises(ConfigError, match="float64: give --dtype float32"):
        folder.write(tmp_path / "out", model.config, arrays, settings)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("preset", "asked", "expected"), [("t5", None, 512), ("t5", 600, 600), ("bart", None, 1024)]
)
def test_the_programs_make_the_longest_target_unless_the_folder_says_less(preset, asked, expected):
    for beams, searched in ((1, 4), (2, 2)):
        generation = GenerationConfig(max_new_tokens=asked, num_beams=beams)
        settings = folder.Settings.of(jt.preset(preset), generation)
        assert (settings.max_new_tokens, settings.num_beams) == (expected, searched)


@pytest.mark.slow
@pytest.mark.parametrize("preset", [name for name in preset_names.TEXT if name != "blog2023"])
def test_every_preset_is_exported_and_runs(preset, tmp_path):
    model = helpers.random_model(helpers.tiny(preset, num_layers=1), dtype="float32")
    arrays = {name: np.asarray(leaf) for name, leaf in transformer.flatten(model).items()}
    settings = folder.Settings.of(model.config, GenerationConfig(max_new_tokens=6))
    with runs.as_a_user(), helpers.unchecked():
        folder.write(tmp_path / "out", model.config, arrays, settings)
        folder.check(tmp_path / "out", prepare.split(model), settings)
