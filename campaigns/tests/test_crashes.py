"""Crash campaigns: logs are parsed, the model loses what was not synced, and faults are found."""

import dataclasses
import random
import re
from pathlib import Path

import pytest

from campaigns.crashes import campaign, controls, judges, parser
from campaigns.crashes.judges import ConversionJudge, Promise
from campaigns.crashes.recordings import Recording
from campaigns.crashes.states import ROOT, Disk, Names, Resize, State, Sync, Write
from campaigns.crashes.strace import NotModelled


def escaped(log: str, root: Path) -> str:
    """A log with 'string' and </path> as strace prints them; R is the root."""

    def hexadecimal(match: re.Match) -> str:
        text = match[2].replace("R", str(root), 1) if match[2].startswith("R") else match[2]
        inside = "".join(f"\\x{byte:02x}" for byte in text.encode())
        return f'"{inside}"' if match[1] == "'" else f"<{inside}>"

    return re.sub(r"(['<])((?<=')[^']*|[R/][^>]*)['>]", hexadecimal, log.strip()) + "\n"


LOG = """
7 mkdir('new', 0777) = 0
7 clone3({flags=CLONE_VM|CLONE_FILES|CLONE_THREAD, exit_signal=0}, 88) = 8
8 openat(AT_FDCWD<R>, 'new/a', O_WRONLY|O_CREAT|O_CLOEXEC, 0666) = 3<R/new/a>
7 openat(AT_FDCWD<R>, 'old', O_WRONLY|O_APPEND) = 4<R/old>
7 openat(AT_FDCWD<R>, '/proc/stat', O_RDONLY) = 5</proc/stat>
8 write(3<R/new/a>, 'first', 5 <unfinished ...>
7 write(4<R/old>, ' line', 5) = 5
8 <... write resumed>) = 5
7 write(3<R/new/a>, ' second', 7) = 4
8 pwritev2(3<R/new/a>, [{iov_base='F', iov_len=1}, {iov_base='I', iov_len=1}], 2, 0, 0) = 2
8 fsync(3<R/new/a>) = 0
7 mkdir('other', 0777) = -1 EEXIST (File exists)
7 renameat2(AT_FDCWD<R>, 'R/new/a', AT_FDCWD<R>, 'b', 0) = 0
8 ftruncate(3<R/b>, 8) = 0
7 rmdir('new') = 0
7 unlink('old') = 0
7 write(4<R/old>(deleted), 'gone', 4) = 4
"""


def start(**files: str) -> State:
    state = State()
    for number, (name, content) in enumerate(files.items(), 1):
        state.names[ROOT, name], state.contents[number] = number, content.encode()
    return state


def test_a_log_has_the_operations_of_all_threads_in_order(tmp_path):
    operations = parser.parse(escaped(LOG, tmp_path), tmp_path, start(old="one"))
    assert [type(each) for each in operations] == [
        *(Names, Names, Write, Write, Write, Write, Sync),
        *(Names, Resize, Names, Names, Write),
    ]
    state = start(old="one")
    for operation in operations[:6]:
        state.apply(operation)
    assert state.tree() == {"new": None, "new/a": b"FIrst sec", "old": b"one line"}
    for operation in operations[6:]:
        state.apply(operation)
    assert state.tree() == {"b": b"FIrst se"}


@pytest.mark.parametrize(
    "line, message",
    [
        ("7 sendfile(4<R/old>, 5</etc/hosts>, [0] => [9], 9) = 9", "sendfile in"),
        ("7 symlink('old', 'R/link') = 0", "symlink in"),
        ("7 mmap(NULL, 9, PROT_READ|PROT_WRITE, MAP_SHARED, 4<R/old>, 0) = 0x7f", "mmap in"),
        ("7 rename('/tmp/else', 'R/here') = 0", "rename of /tmp/else and"),
        ("7 write(9<R/old>, 'x', 1) = 1", "a descriptor that the log does not show"),
        ("7 write(4<R/old>, 'x', ", "not a call"),
    ],
)
def test_a_call_that_is_not_modelled_is_refused(tmp_path, line, message):
    with pytest.raises(NotModelled, match=message):
        parser.parse(escaped(line, tmp_path), tmp_path, start(old="one"))


# Files written next to their place, as atomic.file does

REPLACED = (
    Names("open .new", (((ROOT, ".new"), 2),)),
    Write("write", 2, 0, b"new" * 400),
    Sync("fsync .new", 2),
    Names("rename .new out", (((ROOT, ".new"), None), ((ROOT, "out"), 2))),
    Sync("fsync .", ROOT),
)
OLD, NEW = {"out": b"old"}, {"out": b"new" * 400}


def survivors(operations) -> list[dict]:
    """The destinations that a loss of power may leave after these operations."""
    disk = Disk(start(out="old"))
    for operation in operations:
        disk.apply(operation)
    draw = random.Random(0)
    trees = [*disk.extremes(), *(disk.drawn(draw) for _ in range(40))]
    return [dict(judges.part(tree, "out")) for tree in trees]


def test_what_was_synced_survives():
    assert all(tree == OLD for tree in survivors(REPLACED[:3]))
    renamed = survivors(REPLACED[:4])
    assert OLD in renamed and NEW in renamed and all(tree in (OLD, NEW) for tree in renamed)
    assert all(tree == NEW for tree in survivors(REPLACED))


def test_what_was_not_synced_is_lost_in_parts():
    without = survivors([REPLACED[0], REPLACED[1], REPLACED[3], REPLACED[4]])
    contents = {tree["out"] for tree in without}
    assert {b"", bytes(1200), b"new" * 400} <= contents
    assert any(0 in content and b"new" in content for content in contents)


def test_names_of_a_folder_survive_one_by_one():
    disk = Disk(State())
    for number, name in enumerate("abc", 1):
        disk.apply(Names(f"open {name}", (((ROOT, name), number),)))
    draw = random.Random(0)
    assert {"".join(sorted(disk.drawn(draw))) for _ in range(100)} >= {"", "b", "ac", "abc"}
    disk.apply(Sync("fsync .", ROOT))
    assert sorted(disk.drawn(draw)) == ["a", "b", "c"]


def test_a_folder_that_replaces_another_by_exchange_is_one_of_them():
    state = State({(ROOT, "x"): 1, (ROOT, ".y"): 2, (1, "f"): 3, (2, "f"): 4}, {3: b"1", 4: b"2"})
    state.folders |= {1, 2}
    disk = Disk(state)
    disk.apply(Names("exchange", (((ROOT, "x"), 2), ((ROOT, ".y"), 1))))
    draw = random.Random(0)
    pairs = {(tree["x/f"], tree[".y/f"]) for tree in (disk.drawn(draw) for _ in range(20))}
    assert pairs == {(b"1", b"2"), (b"2", b"1")}


# Judges


@pytest.fixture
def judged(monkeypatch, tmp_path):
    """A function of operations: the findings of both campaigns."""
    monkeypatch.setattr(ConversionJudge, "end", lambda judge, tree, outcome: [])

    def findings(operations) -> dict[str, list[str]]:
        recording = Recording("r", ("convert", "in", "out"), start(out="old"), REPLACED, {})
        judge = ConversionJudge(recording, tmp_path)
        recording = dataclasses.replace(recording, operations=tuple(operations))
        wrong = {
            crash.__name__: [
                line
                for _, tree, promise in crash(recording, controls.ALL, random.Random(0))
                for line in judge(tree, promise, restart=False)[1]
            ]
            for crash in (campaign.killed, campaign.lost)
        }
        judge.closing.close()
        return wrong

    return findings


def test_an_atomic_write_passes(judged):
    assert judged(REPLACED) == {"killed": [], "lost": []}


@pytest.mark.parametrize(
    "order, campaign",
    [
        ([0, 1, 3, 4], "lost"),  # no fsync of the file
        ([0, 1, 2, 3], "lost"),  # no fsync of the folder
        ([0, 3, 1, 2, 4], "killed"),  # renamed before it is written
    ],
)
def test_a_fault_is_found(judged, order, campaign):
    assert judged([REPLACED[i] for i in order])[campaign]


def test_the_promised_checkpoint_is_the_one_before_the_next_save():
    run, checkpoints = (
        Names("", (((ROOT, "run"), 1),), True),
        Names("", (((1, "checkpoints"), 2),), True),
    )
    operations = [run, checkpoints]
    for number, step in ((3, 8), (4, 16)):
        writing, named = (2, f".writing-{step}"), (2, str(step))
        operations.append(Names("mkdir", ((writing, number),), True))
        operations.append(Names("rename", ((writing, None), (named, number))))
    recording = Recording("r", ("--steps", "16"), State(), tuple(operations), {})
    bounds = [(each.lowest, each.newest) for each in judges.promises(recording)]
    assert bounds == [(0, 0), (0, 0), (0, 0), (0, 0), (0, 8), (8, 8), (16, 16)]
    ended = dataclasses.replace(recording, operations=tuple(operations[:4]))
    assert judges.promises(ended)[-1] == Promise(8, 8)
