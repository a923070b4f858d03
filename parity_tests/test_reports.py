"""Everything that commands print and write about a model of each format, compared as a whole.

``reports.txt`` has the commands of one session, each followed by its output; ``cat`` shows a file.
After a wanted change, copy the file that a failure names over it, and read the difference.
"""

import json
import re
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jax_transformer.config import codec
from jax_transformer.data.options import DataOptions
from jax_transformer.storage import huggingface_folder, run_files, tensors
from jax_transformer.storage.pt import writer
from jax_transformer.training.options import ModelOptions, TrainOptions
from parity_tests import marian_files, t5x_files, test_toolkits
from parity_tests.unit import conversions
from parity_tests.unit.extras import test_marian_files
from parity_tests.unit.formats import test_huggingface

GOLDEN = Path(__file__).with_name("reports.txt")
FAMILIES = "bart blenderbot blenderbot-small fsmt longt5 m2m_100 mbart pegasus plbart t5"
# The files of a checkpoint's arrays, whose names TensorStore draws
_CHUNKS = re.compile(r'sha256 \w+  state/.*d/.*\n|, "state/[^"]*d/[^"]*": "[^"]*"')
_HASH = re.compile(r"\b[0-9a-f]{64}\b")


def lessons() -> None:
    """Bare weights, a training's file with ties and 16 bits, and shards."""
    config = conversions.config_of("lesson10", encoder_layers=1, d_ff=20, max_length=17)
    Path("lesson.json").write_text(config.to_json())
    state = conversions.state_of(config)
    conversions.write(Path("lesson.safetensors"), state)
    wrapped = {f"module.{name}": array for name, array in state.items()}
    halves = {"x": np.ones((2, 3), np.float32), "z": np.zeros(5, ml_dtypes.bfloat16)}
    halves |= {"y": halves["x"], "scalar": np.array(7, np.int64)}
    writer.write(Path("training.pt"), {"model": wrapped, "epoch": 3, "other": {"rate": 0.5}})
    empty = np.zeros((0, 3))
    halves |= {"none": empty, "empty": empty}
    writer.write(Path("ties.pt"), {"model": halves, "step": 7, "name": "a", "none": None})
    state = tensors.in_memory({name: state[name] for name in sorted(state)[:4]})
    huggingface_folder.write(Path("shards"), state, {}, shard_size=700)


def folders() -> None:
    """Models of other programs."""
    files = {"config.json": json.dumps(test_huggingface.T5).encode(), "spiece.model": b"\0\1"}
    files |= {"README.md": test_huggingface.CARD.encode(), "generation_config.json": b"{}"}
    huggingface_folder.write(Path("hf"), tensors.in_memory(test_huggingface.weights()), files)
    chosen = marian_files.options(dec_depth=1, transformer_decoder_dim_ffn=8)
    content = marian_files.model(marian_files.weights(chosen), chosen)
    marian_files.opus(Path("opus"), content, test_marian_files.IDS)
    sizes = t5x_files.Sizes(scalable=True, scan_axis=1)
    t5x_files.write(Path("t5x"), t5x_files.params(sizes, dtype=np.float32))
    Path("t5x/config.gin").write_text(sizes.gin())
    test_toolkits.joey(Path("joey"), test_toolkits.JOEY["pre-norm"])
    test_toolkits.onmt(Path("onmt.pt"), test_toolkits.ONMT["base"])
    test_toolkits.fairseq(Path("fairseq"), test_toolkits.FAIRSEQ["base"])


def trained() -> None:
    """A run that says what it was trained on."""
    conversions.convert("hf", "trained")
    texts = {"train_source": "/home/me/train.en", "train_target": "/home/me/train.de"}
    texts |= {"valid_source": "/home/v", "valid_target": "w"}
    data = DataOptions(**{name: (file,) for name, file in texts.items()})
    options = TrainOptions(init="hf:owner/name", data=data, model=ModelOptions(dropout=0.2))
    Path("trained/train_config.json").write_text(codec.to_json(options))
    Path("trained/data.json").write_text('{"train_pairs": 1200, "valid_pairs": 34, "widths": [16]}')
    figures = {"step": 0, "valid_loss": 1.5, "bleu": 31.234, "chrf": 55.5, "ter": 60.25}
    figures |= {"exact_match": 12.5, "signatures": {"bleu": "nrefs:1|case:mixed"}}
    Path("trained/metrics.jsonl").write_text(f"{json.dumps(figures)}\n")
    shutil.copytree("trained", "cardless")
    Path("cardless/huggingface/README.md").unlink()


def test_reports_and_written_files_are_as_recorded(console, tmp_path, monkeypatch):
    pytest.importorskip("ctranslate2")
    monkeypatch.chdir(tmp_path)
    lessons()
    folders()
    trained()
    for name in FAMILIES.split():
        config = conversions.config_of(name, encoder_layers=1, d_ff=20)
        conversions.write(Path(f"{name}.safetensors"), conversions.state_of(config))
        Path(f"{name}.json").write_text(config.to_json())
    output = console.session(GOLDEN)
    names = {}
    for file in sorted(Path().rglob("*")):
        if file.is_file():
            names.setdefault(run_files.sha256(file), f"<sha256 of {file}>")
    text, others = _CHUNKS.sub("", output.replace(f"{tmp_path}/", "")), {}
    for digest in _HASH.findall(text):
        if digest not in names:
            others.setdefault(digest, f"<hash {len(others)}>")
    text = _HASH.sub(lambda match: (names | others)[match[0]], text)
    (tmp_path / GOLDEN.name).write_text(text, encoding="utf-8")
    assert text.split("\n") == GOLDEN.read_text(encoding="utf-8").split("\n"), tmp_path / GOLDEN
