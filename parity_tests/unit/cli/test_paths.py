"""Every command and function that takes a path takes it in every form."""

import os
from pathlib import Path

import pytest

import jax_transformer as jt
from parity_tests.unit import runs

pytestmark = pytest.mark.usefixtures("as_a_user")

FORMS = {
    "parent": "../here/mine/run",
    "through a link": "link/../mine/run",  # the folder before the link's target, as the system does
    "link": "link",
    "slash": "mine/run/",
    "spaces and accents": "mine/ein Läufer",
    "home": "~/mine/run",
}


@pytest.fixture
def here(run, tmp_path, monkeypatch) -> Path:
    """The current folder, which is the home folder also."""
    here = tmp_path / "here"
    (here / "mine").mkdir(parents=True)
    (here / "mine/run").symlink_to(run)
    (here / "mine/ein Läufer").symlink_to(run)
    (tmp_path / "far/mine").mkdir(parents=True)
    (tmp_path / "far/mine/run").symlink_to(run)
    (tmp_path / "far/there").mkdir()
    (here / "link").symlink_to(run)
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.chdir(here)
    return here


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def path(here, request) -> str:
    if request.param.startswith("link/"):
        (here / "link").unlink()
        (here / "link").symlink_to(here.parent / "far/there")
    return request.param


def test_a_run_is_read_by_any_form_of_its_path(console, run, path, here):
    line = b"the cat sees a dog\n"
    _, expected, _ = console.say("translate", "--run", run, stdin=line)
    assert console.say("translate", "--run", path, stdin=line)[:2] == (0, expected)
    assert console.say("inspect", path)[0] == 0
    name = os.path.expanduser(path)
    assert jt.Translator.load(name)(["the cat sees a dog"]) == [expected.rstrip("\n")]
    assert jt.load(name)[1].vocab_size


def test_conversions_are_written_and_runs_begun_in_any_folder(console, run, here, tmp_path):
    """To a sibling folder, and from a folder in which nothing can be made."""
    for name in ("work", "a b"):
        (here / name).mkdir()
    os.chdir(here / "work")
    for target in ("../m.safetensors", "../a b/é.pt", "~/../here/m.pt"):
        assert console.say("convert", "../mine/run", target)[0] == 0, target
    os.chdir("/proc")
    assert console.say("convert", here / "mine/run", here / "from-proc.safetensors")[0] == 0
    written = [here / "m.safetensors", here / "from-proc.safetensors"]
    assert written[0].read_bytes() == written[1].read_bytes()


def test_a_run_is_trained_continued_and_fine_tuned_by_relative_paths(run, here):
    text = runs.write_text(here)
    few = "--steps 2 --eval-every 2 --data.buckets 1".split()
    (here / "work").mkdir()
    os.chdir(here / "work")
    flags = [flag.replace(str(here), "..") for flag in text]
    assert runs.train("--run", "../new/x", *flags, *runs.OPTIONS, *few).code == 0
    again = runs.train("--run", "../work/../new/x/", *flags, *runs.OPTIONS, *few, "--steps", "4")
    assert again.code == 0, again.err
    tuned = runs.train(
        "--run", "../tuned", "--init", "../mine/run", *flags, *few, "--data.tokens-per-batch", "128"
    )
    assert tuned.code == 0, tuned.err


def test_a_home_folder_in_a_yaml_file_is_found(run, here):
    lines = [flag.replace(str(here), "~") for flag in runs.write_text(here)]
    names = [flag.removeprefix("--data.").replace("-", "_") for flag in lines[::2]]
    pairs = zip(names, lines[1::2], strict=True)
    data = "".join(f"  {name}: {path}\n" for name, path in pairs)
    (here / "c.yaml").write_text(f"run: ~/yaml-run\ndata:\n{data}")
    few = "--steps 2 --eval-every 2 --data.buckets 1".split()
    result = runs.train("--config", "~/c.yaml", *runs.OPTIONS, *few)
    assert result.code == 0, result.err
    assert (here / "yaml-run/checkpoints/2").is_dir()
