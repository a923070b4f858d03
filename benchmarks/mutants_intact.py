"""Faults of what notices damage to the files of a run, and of a signal at a bad moment."""

from benchmarks.mutants_fault import Mutant

_RUN_FILES = "jax_transformer/storage/run_files.py"
_INTACT = "jax_transformer/storage/integrity.py"
_CHECKSUMS = "jax_transformer/storage/checksums.py"
_IN_RUN_FILES = "parity_tests/unit/test_run_files.py"
_IN_STOPS = "parity_tests/unit/test_lock_and_stops.py"
_DAMAGE = f"{_IN_RUN_FILES}::test_damage_is_named"

MUTANTS = [
    Mutant(
        "a file that is listed may be missing",
        _CHECKSUMS,
        "        if not path.is_file():\n"
        '            yield f"{path}: missing, and {NAME} lists it"\n'
        "        elif sha256(path)",
        "        if path.is_file() and sha256(path)",
        (_DAMAGE,),
        met="a file that somebody deleted",
    ),
    Mutant(
        "a hash that is listed counts for every file",
        _CHECKSUMS,
        "elif sha256(path) not in listed:",
        "elif sha256(path) not in sum(map(list, sums.values()), []):",
        (f"{_IN_RUN_FILES}::test_two_files_that_were_exchanged_are_named",),
        met="two files exchanged",
    ),
    Mutant(
        "the last line of the sums may be cut off",
        _CHECKSUMS,
        "if not match or number == len(lines) or",
        "if not match or",
        (f"{_IN_RUN_FILES}::test_a_damaged_line_of_the_sums_is_named",),
        met="a file cut at its end",
    ),
    Mutant(
        "the sums may name files outside of the run",
        _CHECKSUMS,
        "number == len(lines) or outside:",
        "number == len(lines):",
        (f"{_IN_RUN_FILES}::test_a_damaged_line_of_the_sums_is_named",),
        met="a path that leaves its folder",
    ),
    Mutant(
        "config.json is not at the end of the sums",
        _RUN_FILES,
        "(*TRAINING, *TOKENIZER, *HUGGINGFACE, CONFIG)",
        "(CONFIG, *TRAINING, *TOKENIZER, *HUGGINGFACE)",
        (f"{_IN_RUN_FILES}::test_sums_that_lost_their_last_lines_are_noticed",),
        met="a list cut after a whole line",
    ),
    Mutant(
        "a later start lists what it finds",
        _RUN_FILES,
        "before.get(name) or [checksums.sha256(run / name)]",
        "[checksums.sha256(run / name)]",
        (f"{_IN_RUN_FILES}::test_recording_again_does_not_accept_damage",),
        met="damage that is signed",
    ),
    Mutant(
        "a file is replaced before its new hash is listed",
        _RUN_FILES,
        "checksums.write(run, sums | {name: [*sums[name], new]})",
        "pass",
        (f"{_IN_RUN_FILES}::test_replacing_a_file_may_be_killed_at_any_moment",),
        met="a kill between two files",
    ),
    Mutant(
        "the hash of a replaced file stays listed",
        _RUN_FILES,
        "checksums.write(run, sums | {name: [new]})",
        "pass",
        (f"{_IN_RUN_FILES}::test_replacing_a_file_may_be_killed_at_any_moment",),
        met="an old file that passes for the new one",
    ),
    Mutant(
        "checkpoints of other runs are accepted",
        _RUN_FILES,
        "    return bool(sums) and (about",
        "    return False and (about",
        (f"{_IN_RUN_FILES}::test_a_checkpoint_of_another_run_is_refused",),
        met="a checkpoint copied from elsewhere",
    ),
    Mutant(
        "an average may stand in the place of a checkpoint",
        _RUN_FILES,
        'about.get("folder", here[1])) != here',
        "here[1]) != here",
        (f"{_IN_RUN_FILES}::test_a_checkpoint_in_the_place_of_an_average_is_refused",),
        met="averaged weights resumed as a state",
    ),
    Mutant(
        "sums that were deleted are not missed",
        _INTACT,
        'elif path.exists() or any("run" in about for about in _manifests(run)):',
        "elif path.exists():",
        (_DAMAGE,),
        met="a list deleted with what it protects",
    ),
    Mutant(
        "files that were added are read",
        _INTACT,
        "if name not in sums and (run / name).exists() and not _may_be_added(name, sums):",
        "if False:",
        (f"{_IN_RUN_FILES}::test_an_added_file_that_would_be_read_is_named",),
        met="a second tokenizer next to the first",
    ),
    Mutant(
        "only the newest record of the metrics is compared",
        _INTACT,
        "    for each in recorded:\n",
        "    for each in recorded[:1]:\n",
        (f"{_IN_RUN_FILES}::test_damaged_metrics_are_named",),
        met="a line edited between two checkpoints",
    ),
    Mutant(
        "metrics are compared without their end",
        _RUN_FILES,
        'covered = {"bytes": len(content),',
        'covered = {"bytes": max(0, len(content) - 9),',
        (f"{_IN_RUN_FILES}::test_damaged_metrics_are_named",),
        met="off-by-one of a length",
    ),
    Mutant(
        "damaged checkpoints do not change the exit code",
        _INTACT,
        "(CheckpointError if damaged else InputError)",
        "InputError",
        (f"{_IN_RUN_FILES}::test_everything_that_is_damaged_is_named_at_once",),
        met="exit code 3 for 5",
    ),
    Mutant(
        "a converted run may get a second configuration",
        _INTACT,
        "and run_files.DATA not in sums",
        "",
        (f"{_IN_RUN_FILES}::test_an_added_file_that_would_be_read_is_named",),
        met="a file added to a run that was trained",
    ),
    Mutant(
        "an error that was a request to stop is raised",
        "jax_transformer/training/run.py",
        "if self.asked and not isinstance(error, Preempted):",
        "if False:",
        (
            f"{_IN_STOPS}::test_a_stop_request_that_jaxlib_turns_into_another_error_still_ends_"
            "the_work",
        ),
        met="a signal during a comparison by jaxlib",
    ),
    Mutant(
        "an error that was Ctrl-C is raised",
        "jax_transformer/cli/__init__.py",
        "isinstance(error, ValueError) and KeyboardInterrupt.__name__ not in str(error)",
        "isinstance(error, ValueError)",
        (f"{_IN_STOPS}::test_a_ctrl_c_that_jaxlib_turns_into_another_error_is_one_line",),
        met="a signal during a comparison by jaxlib",
    ),
]
