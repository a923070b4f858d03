"""The campaign ``damages``: damages to files of a run, which its readers must notice.

The readers are what ``train`` does before it loads the state, what ``translate`` does before it
loads the weights, and ``inspect``. Each that uses the damaged file must refuse it by name, or pass
over the checkpoint; a file that none of them reads must be in :data:`.damages_copy.HARMLESS`.
"""

import dataclasses
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from campaigns.case import Campaign, Case
from campaigns.damages import runs_copy
from campaigns.damages.damage import Damage
from campaigns.interruptions import tiny_run
from jax_transformer.errors import Refusal
from jax_transformer.storage import checkpoint, run_files, run_folder

OPTIONS = (
    "--model.d-model 16 --model.num-heads 2 --model.d-ff 32 --model.encoder-layers 1 "
    "--model.decoder-layers 1 --model.max-length 40 --data.tokens-per-batch 128 --steps 4 "
    "--eval-every 2 --eval-pairs 2 --log-every 1 --average 2 --keep 2 --optimizer.warmup-steps 1"
)
RUNS = {
    "two": f"{OPTIONS} --data.vocab-size 300 --data.vocabularies separate --model.tying output",
    "bart": f"{OPTIONS} --data.vocab-size 300 --model.preset bart",
}
EACH = 20
"""Damages of a numbered case."""
CHANGED = ("flip", "truncate", "append", "zero", "delete", "replace", "swap", "edit", "folder")


def prepare(shared: Path) -> None:
    """Make pairs of runs: of two vocabularies, of a Hugging Face preset, tuned, and converted."""
    from jax_transformer import cli

    def command(*arguments: Any) -> None:
        if code := cli.main([str(argument) for argument in arguments]):
            raise SystemExit(f"{arguments} ends with exit code {code}")

    text = tiny_run.write_text(shared)
    for seed in ("1", "2"):
        for name, options in RUNS.items():
            run = shared / f"{name}-{seed}"
            command("train", "--run", run, *text, *options.split(), "--seed", seed)
        folder = shared / f"folder-{seed}"
        command("convert", shared / f"bart-{seed}", folder, "--to", "hf")
        command("convert", folder, shared / f"converted-{seed}")
        tuned = [option for option in OPTIONS.split("--") if not option.startswith("model.")]
        more = "--".join(tuned).split()
        init = ["--init", folder, "--seed", seed]
        command("train", "--run", shared / f"tuned-{seed}", *text, *more, *init)


# The readers


def train(run: Path, options: Any) -> list[str]:
    """The messages of what ``train`` does with a run folder before it loads the state."""
    from jax_transformer.training import resume

    with resume.open_run(options):
        _, damaged = run_folder.newest_intact(run / "checkpoints")
    return [str(error) for error in damaged]


def translate(run: Path, weights: str) -> list[str]:
    """The messages of what ``translate`` does before it loads the weights."""
    from jax_transformer.formats import registry

    registry.open(run, weights)
    return []


def inspect(run: Path) -> list[str]:
    """The messages of ``inspect``."""
    from jax_transformer.formats import registry

    registry.inspect(run)
    return []


def messages(reader: Callable[..., list[str]], *arguments: Any) -> list[str]:
    """The messages of a reader, or of its refusal."""
    try:
        return reader(*arguments)
    except Refusal as error:
        return [str(error)]


# The damages


def cases(shared: Path, scratch: Path, seed: int, number: int) -> Iterator[Case]:
    """The outcomes of some damages, counted, and each that is not as promised."""
    copy = runs_copy.open_copy(shared, scratch.parent / f"damaged-{os.getpid()}")
    counts: Counter[tuple[str, str]] = Counter()
    for index in range(EACH):
        kind, outcome, what, wrong = _damaged(
            copy, scratch, random.Random(f"{seed} {number} {index}")
        )
        if wrong:
            yield Case(kind, outcome, what, wrong)
        else:
            counts[kind, outcome] += 1
    for (kind, outcome), count in counts.items():
        yield Case(kind, outcome, count=count)


def _damaged(
    copy: runs_copy.Copy, scratch: Path, source: random.Random
) -> tuple[str, str, str, tuple[str, ...]]:
    """Damage a file and mend it: its kind, the outcome, what was done, and broken promises."""
    run = copy.folder / source.choice(sorted(copy.runs))
    by_kind = copy.by_kind(run)
    path = source.choice(by_kind[source.choice(sorted(by_kind))])
    damage = Damage(source)
    if source.random() < 0.1:
        touched = [_new(source, run, path.parent)]
        way, what = "add", damage.add(touched[0])
    else:
        touched = [path]
        way, what = _change(damage, copy, run, touched)
    kinds = {str(each.relative_to(run)): _kind(copy, run, each) for each in touched}
    copy.forget(touched)
    try:
        wrong = tuple(_wrong(copy, run, kinds, source))
        if wrong:
            shutil.copytree(run, scratch / run.name, dirs_exist_ok=True)
    finally:
        copy.mend(touched)
    first, *_ = kinds
    outcome = "harmless" if _are_harmless(kinds) else "noticed"
    return kinds[first], outcome, f"{run.name}: {way} {first}: {what}", wrong


def _are_harmless(kinds: Mapping[str, str]) -> bool:
    return set(kinds.values()) <= runs_copy.HARMLESS.keys()


def _kind(copy: runs_copy.Copy, run: Path, path: Path) -> str:
    name = str(path.relative_to(run))
    if name == run_files.METRICS and path.exists() and path in copy.files:
        covered = copy.files[path]
        if path.read_bytes()[: len(covered)] == covered:
            return f"{name}, lengthened"
    return runs_copy.kind_of(name)


def _new(source: random.Random, run: Path, folder: Path) -> Path:
    """A file that the run does not have, with a name that commands read or with another one."""
    is_trained = (run / run_files.DATA).exists()
    names = [
        name
        for name in run_files.LISTED
        if not (run / name).exists()
        and (run / name).parent.is_dir()
        and (is_trained or name not in run_files.TRAINING)
    ]
    return run / source.choice(names) if source.random() < 0.5 else folder / "more"


def _change(
    damage: Damage, copy: runs_copy.Copy, run: Path, touched: list[Path]
) -> tuple[str, str]:
    """Change an existing file, and perhaps a second one, which is added to ``touched``."""
    (path,) = touched
    content, is_json = copy.files[path], path.suffix in (".json", ".jsonl")
    inside = path.relative_to(run).parts
    is_saved = inside[0] in run_files.CHECKPOINTS
    ways = [way for way in CHANGED if content or way in ("append", "delete")]
    ways = [way for way in ways if {"edit": is_json, "folder": is_saved}.get(way, True)]
    way = damage.random.choice(ways)
    if way == "folder":
        return way, _replace_folder(damage.random, copy, run.joinpath(*inside[:2]), touched)
    if way not in ("replace", "swap"):
        return way, getattr(damage, way)(path)
    same_name = [other for other in copy.files if other.name == path.name]
    others = same_name if way == "replace" else copy.runs[run.name]
    others = [other for other in others if copy.files[other] != content]
    if not others:
        return "flip", damage.flip(path)
    other = damage.random.choice(others)
    if way == "replace":
        return way, damage.replace(path, other)
    touched.append(other)
    return way, damage.swap(path, other)


def _replace_folder(
    source: random.Random, copy: runs_copy.Copy, folder: Path, touched: list[Path]
) -> str:
    """Put another checkpoint in the place of one: of another step, or of another run.

    Converted runs have no data.json to be known by, so none gets that of another.
    """
    manifests = [path for path in copy.files if path.name == checkpoint.MANIFEST]
    if not (folder.parent.parent / run_files.DATA).exists():
        manifests = [path for path in manifests if (path.parents[2] / run_files.DATA).exists()]
    others = [path.parent for path in manifests if path.parent != folder]
    other = source.choice([each for each in others if each.parent.name == folder.parent.name])
    before = [path for path in copy.files if path.is_relative_to(folder)]
    moved = {
        folder / path.relative_to(other): path for path in copy.files if path.is_relative_to(other)
    }
    touched[:] = [folder / checkpoint.MANIFEST, *{*before, *moved} - {folder / checkpoint.MANIFEST}]
    for path in before:
        path.unlink()
    for path, source_path in moved.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(copy.files[source_path])
    return f"replaced by {other}"


def _wrong(
    copy: runs_copy.Copy, run: Path, kinds: Mapping[str, str], source: random.Random
) -> Iterator[str]:
    """The readers that use a damaged file and do not name it, and those that refuse an intact one.

    Every reader uses the files that are listed. ``inspect`` judges each damage, ``train`` and
    ``translate`` every other one.
    """
    names = list(kinds)
    listed = any(name in (*run_files.LISTED, run_files.SHA256SUMS) for name in names)
    steps = {
        tuple(Path(name).parts[:2])
        for name, kind in kinds.items()
        if kind.startswith(run_files.CHECKPOINTS)
    }
    newest = ("checkpoints", str(max(checkpoint.steps(run / "checkpoints"))))
    readers = [("inspect", messages(inspect, run), not _are_harmless(kinds))]
    trains = run.name in copy.options and source.random() < 0.5
    if trains:
        options = dataclasses.replace(copy.options[run.name], run=str(run))
        uses = listed or run_files.METRICS in kinds.values() or newest in steps
        readers.append(("train", messages(train, run, options), uses))
    for folder, step in () if trains else sorted(steps) or [newest]:
        weights = "averaged" if folder == "averaged" else step
        answers = messages(translate, run, weights)
        readers.append((f"translate {weights}", answers, listed or bool(steps)))
    for name, answers, uses in readers:
        if bool(answers) != uses:
            yield f"{name} {'refuses' if answers else 'does not notice'} {names}: {answers[:1]}"
        elif uses and not any(Path(each).name in text for each in names for text in answers):
            yield f"{name} does not name {names}: {answers[:1]}"


DAMAGES = Campaign(
    "damages to each file of a run, which its readers must notice",
    prepare,
    cases,
    small=100,
    nightly=5_000,
)
