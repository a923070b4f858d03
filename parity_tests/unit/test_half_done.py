"""The next process undoes or completes the partial work of a killed one: run folder, metrics and
checkpoints.
"""

import json
import shutil

import numpy as np
import pytest

from jax_transformer.errors import InputError
from jax_transformer.storage import atomic, checkpoint, saving
from jax_transformer.storage.run_folder import RunFolder

LOSS = {"step": 4, "loss": 1.0}
EARLIER, VALIDATED, AVERAGED, LATER = ({"step": step, "valid_loss": 1.0} for step in (2, 4, 4, 6))
AVERAGED = {**AVERAGED, "weights": "averaged"}


@pytest.mark.parametrize(
    "validated, averaged, stay",
    [
        (True, True, [EARLIER, LOSS, VALIDATED, AVERAGED]),
        (True, False, [EARLIER, LOSS, VALIDATED]),
        (False, False, [EARLIER, LOSS]),
    ],
)
def test_a_validation_logged_before_an_unsaved_step_is_not_logged_twice(
    tmp_path, validated, averaged, stay
):
    folder = RunFolder(tmp_path)
    for entry in (EARLIER, LOSS, VALIDATED, AVERAGED, LATER):
        folder.add_metrics(entry)
    with open(folder.metrics, "a") as file:
        file.write(json.dumps(LATER)[:9])
    folder.keep_metrics(4, validated=validated, averaged=averaged)
    assert folder.entries() == stay
    assert all("weights" not in entry for entry in folder.validations().values())


def test_a_full_disk_is_reported_with_the_name_of_metrics_jsonl(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as error:
        folder.add_metrics(EARLIER)
    assert error.value.filename == str(folder.metrics)


def test_a_line_without_its_end_is_not_read(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics.write_text(f"{json.dumps(EARLIER)}\n{json.dumps(LATER)}")
    assert folder.entries() == [EARLIER]


@pytest.mark.parametrize("lost", ["\0" * 30, "\0" * 9 + '"valid_loss": 1.0}', "\ufffd"])
def test_lines_that_a_loss_of_power_left_after_the_checkpoint_are_dropped(tmp_path, lost):
    folder = RunFolder(tmp_path)
    for entry in (EARLIER, LOSS, VALIDATED):
        folder.add_metrics(entry)
    saving.save(folder.checkpoints, 4, {"a": np.arange(3)}, about={"figures": VALIDATED})
    with open(folder.metrics, "a") as file:
        file.write(f"{lost}\n{json.dumps(LATER)}\n")
    assert folder.validations() == {2: EARLIER, 4: VALIDATED}
    folder.keep_metrics(4, validated=True, averaged=False)
    assert folder.entries() == [EARLIER, LOSS, VALIDATED]


@pytest.mark.parametrize("damaged", [1, 2, 3])
def test_a_damaged_line_that_was_there_when_the_checkpoint_was_saved_is_refused(tmp_path, damaged):
    folder = RunFolder(tmp_path)
    saving.save(folder.checkpoints, 4, {"a": np.arange(3)}, about={"figures": VALIDATED})
    lines = [json.dumps(entry) for entry in (EARLIER, LOSS, VALIDATED, LATER)]
    lines[damaged - 1] = "\0" * 30
    folder.metrics.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(InputError, match=f"line {damaged} is not an object with a step"):
        folder.entries()


def test_only_partial_files_are_removed(tmp_path):
    stay = {".lock", ".holder.json", "metrics.jsonl", "checkpoints"}
    for name in (*stay, ".metrics.jsonl.1234", ".tokenizer.json.5"):
        (tmp_path / name).touch()
    atomic.remove_unfinished(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == stay


@pytest.mark.parametrize("killed_at", range(3))
def test_a_checkpoint_is_removed_completely_or_not_at_all(tmp_path, monkeypatch, killed_at):
    for step in (1, 2, 3):
        saving.save(tmp_path, step, {"a": np.arange(3.0)}, about={})
    monkeypatch.setattr(shutil, "rmtree", dying(shutil.rmtree, killed_at))
    with pytest.raises(KeyboardInterrupt):
        saving.prune(tmp_path, [3])
        shutil.rmtree(tmp_path / "none")  # both were removed before
    monkeypatch.undo()
    for step in checkpoint.steps(tmp_path):
        checkpoint.open(tmp_path, step)
    saving.remove_unfinished(tmp_path)
    saving.prune(tmp_path, [3])
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


def dying(rmtree, when):
    """Fail in the given folder, after removing a part of it."""
    left = when

    def remove(path, **options):
        nonlocal left
        if left == 0:
            next(path.rglob("*.json"), path / "none").unlink(missing_ok=True)
            raise KeyboardInterrupt
        left -= 1
        rmtree(path, **options)

    return remove
