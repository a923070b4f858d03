"""``jax-transformer evaluate`` against transformers: loss and hypotheses of the same lines."""

import json

import pytest
import torch

from parity_tests import huggingface_folders as folders
from parity_tests.unit import runs

pytestmark = pytest.mark.usefixtures("as_a_user")


@pytest.mark.parametrize(
    "name", ["marian", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mbart50", "t5"))]
)
def test_evaluate_gives_the_scores_of_transformers(name, tmp_path, capsys):
    folder, lines = tmp_path / "model", tmp_path / "valid"
    module = folders.save_model(name, folder)
    words = folders.tokenizer(name, folder)
    # these ids are no text
    silent = [words.unk_token_id, *range(len(words), module.config.vocab_size)]
    module.generation_config.update(
        num_beams=3, max_length=14, min_length=5, suppress_tokens=silent
    )
    with torch.no_grad():  # with small new weights all lines would get the same translation
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter) * parameter.requires_grad
    module.save_pretrained(folder)
    runs.write_text(tmp_path)
    files = [
        "--source",
        f"{lines}.source",
        "--target",
        f"{lines}.target",
        "--hypotheses",
        tmp_path / "hypotheses",
    ]
    languages = dict(
        zip(("--source-lang", "--target-lang"), folders.FOLDERS[name].languages or (), strict=False)
    )
    flags = [word for pair in languages.items() for word in pair]
    assert runs.main("evaluate", "--run", folder, *files, *flags, "--bootstrap", "0", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["pairs"] == 8
    assert report["left_out_of_loss"] == 0
    assert report["step"] == 0
    assert report["weights"] == "model.safetensors"
    assert report["loss"] == pytest.approx(folders.mean_loss(name, folder, lines), rel=1e-5)
    forced = folders.language_id(name, words)
    expected = folders.generated(
        name,
        folder,
        folders.read(lines, "source"),
        **({} if forced is None else {"forced_bos_token_id": forced}),
    )
    assert (tmp_path / "hypotheses").read_text(encoding="utf-8").splitlines() == expected
    assert len(set(expected)) > 1
