"""Lines and data about conversions and files, and the self-check's random batches and memory."""

import json
from pathlib import Path

import numpy as np
import pytest

from jax_transformer.convert import conversion
from jax_transformer.convert.conversion import Outcome
from jax_transformer.convert.planning import Plan, Prepared
from jax_transformer.formats.base import Checked
from jax_transformer.formats.contents import Contents
from jax_transformer.storage.tensors import CastLoss, Note, TensorInfo
from parity_tests.unit.helpers import stand_in, tiny

HOSTILE = "x\ny\x1b[31m"  # a line of its own, in colour
TIES = (("a", "b", "c"), ("d", HOSTILE))


def test_a_conversion_reports_every_tie_and_note_and_the_largest_difference():
    plan = Plan("from", "to", (), (), (Note(HOSTILE, "unused"),), TIES, {"d_ff": 7}, HOSTILE)
    prepared = stand_in(Prepared, plan=plan, preset_sizes={"num_heads": 8})
    errors = {"first": 3e-15, "largest": 2e-14, "smallest": 1e-16}
    loss = CastLoss("float16", 5, overflowed={"a": 2})
    outcome = Outcome(prepared, "done", loss, Checked("ran", errors), "12ab", ("config.json", "z"))
    lines = [*outcome.lines()]
    expected = ["tied: a = b = c", "with them: config.json, z", "sha256 12ab"]
    expected += ["checked: ran: largest difference 2e-14 over 3 outputs"]
    assert not {"done", *expected} - {*lines} and lines[0] == "done"
    for words in ("unused", "d_ff=7", "num_heads=8", "cast 5 tensors", "2 numbers are too large"):
        assert [line.isprintable() for line in lines if words in line] == [True]
    data = json.loads(json.dumps(outcome.to_data()))
    expected = {"cast": vars(loss), "check": {"how": "ran", "errors": errors}}
    expected |= {"sha256": "12ab", "files": ["config.json", "z"], "kept": {"num_heads": 8}}
    assert data == expected | {"plan": data["plan"]}
    for line in (*plan.lines(), *plan.prefix_lines()):
        assert line.isprintable()
    assert sum("tied a = b = c" in line for line in plan.lines()) == 1


def test_inspect_prints_every_tensor_and_value_on_one_line_in_order():
    tensors = {"b": TensorInfo((2, 3), "float16"), HOSTILE: TensorInfo((), "float64")}
    tensors |= {"a": TensorInfo((5,), "bfloat16")}
    values = {"none": None, "long": "é" * 300, "other": [1], "yes": True, HOSTILE: 1.5}
    contents = Contents("file", "kind", tensors, {"file": "12ab"}, values, TIES)
    lines = [*contents.lines()]
    assert all(line.isprintable() for line in lines) and len(lines) == 1 + 3 + 5 + 2 + 3
    assert [line.split()[:2] for line in lines[1:3]] == [["a", "5"], ["b", "2x3"]]
    assert "scalar" in lines[3] and len(lines[5]) == 200
    assert lines[9] == "tied a = b = c"
    assert lines[-3:] == ["3 arrays, 12 numbers", "30 bytes", "sha256 12ab  file"]
    data = json.loads(json.dumps(contents.to_data()))
    assert data["values"] == values | {"other": "[1]"}
    assert {name: each["bytes"] for name, each in data["tensors"].items()} == {
        name: tensor.nbytes for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("preset", ["lesson10_repaired", "blog2023"])
@pytest.mark.parametrize("last", [False, True])
def test_rows_of_a_random_batch_have_tokens_and_then_padding(preset, last):
    pads = {"source_pad_id": 10, "target_pad_id": 12} if last else {}
    config = tiny(preset, **pads, max_length=6)
    for length in (None, 1, 2, 3, 5, 6, 9):
        batch = conversion.random_batch(config, 0, length)
        for again, ids in zip(conversion.random_batch(config, 0, length), batch, strict=True):
            np.testing.assert_array_equal(again, ids)
        widths = (length, length) if length else (7, 7 if config.equal_lengths else 5)
        assert [ids.shape[1] for ids in batch] == [min(width, config.longest) for width in widths]
        for ids, size, pad in (
            (batch[0], config.source_vocab_size, config.source_pad_id),
            (batch[1], config.target_vocab_size, config.target_pad_id),
        ):
            assert ids.min() >= 0 and ids.max() < size
            is_pad = ids == pad
            assert not is_pad[:, 0].any() and not is_pad[0].any()
            np.testing.assert_array_equal(np.sort(is_pad, axis=1), is_pad)
            assert is_pad.any() or ids.shape[1] == 1


@pytest.mark.parametrize(
    ("available", "limit", "used", "unused", "free"),
    [
        (2, "9000", 100, 50, 2048),
        (90, "9000", 8000, 0, 1000),
        (90, "9000", 8000, 300, 1300),
        (2, "max", 100, 0, 2048),
        (2, None, 0, 0, 2048),
    ],
)
def test_free_memory_is_the_least_of_the_machine_and_the_container(
    available, limit, used, unused, free, tmp_path, monkeypatch
):
    group = tmp_path / "sys/fs/cgroup"
    files = {tmp_path / "proc/meminfo": f"MemFree: 1 kB\nMemAvailable:   {available} kB\n"}
    if limit is not None:
        files |= {group / "memory.max": f"{limit}\n", group / "memory.current": f"{used}\n"}
        files[group / "memory.stat"] = f"anon 7\ninactive_file {unused}\nactive_file 9\n"
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(conversion, "Path", lambda path: tmp_path / Path(path).relative_to("/"))
    assert conversion._available_memory() == free
