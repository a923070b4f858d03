"""Faults of a resumed run: its checkpoints, which are kept and averaged, and its metrics."""

from benchmarks.mutants_fault import Mutant

_RUN = "jax_transformer/training/run.py"
_RUN_FOLDER = "jax_transformer/storage/run_folder.py"
_CHECKPOINT = "jax_transformer/storage/checkpoint.py"
_IN_CHECKPOINT = "parity_tests/unit/test_checkpoint.py"
_IN_HALF_DONE = "parity_tests/unit/test_half_done.py"
_IN_SELECTION = "parity_tests/unit/test_selection.py"

MUTANTS = [
    Mutant(
        "the first checkpoints are averaged",
        _RUN,
        "else sorted(figures, reverse=True)\n",
        "else sorted(figures)\n",
        (f"{_IN_SELECTION}::test_the_best_checkpoints_are_averaged",),
        met="an order the wrong way round",
    ),
    Mutant(
        "candidates of the average are removed",
        _RUN,
        "return {max(steps), *last, *best, *to_average(options, figures)}",
        "return {max(steps), *last, *best}",
        (f"{_IN_SELECTION}::test_the_best_and_newest_checkpoints_are_kept",),
        met="pruned before they are averaged",
    ),
    Mutant(
        "the first checkpoints are kept",
        _RUN,
        "last = sorted(figures)[-options.keep :]",
        "last = sorted(figures)[: options.keep]",
        (f"{_IN_SELECTION}::test_the_best_and_newest_checkpoints_are_kept",),
        met="an order the wrong way round",
    ),
    Mutant(
        "the newest checkpoint is removed",
        _RUN,
        "return {max(steps), *last,",
        "return {*last,",
        (f"{_IN_SELECTION}::test_the_best_and_newest_checkpoints_are_kept",),
        met="a checkpoint of a signal",
    ),
    Mutant(
        "the worst checkpoint is kept",
        _RUN,
        "best = ranked(figures, options.best_by)[: options.keep_best]",
        "best = ranked(figures, options.best_by)[-options.keep_best :]",
        (f"{_IN_SELECTION}::test_the_best_and_newest_checkpoints_are_kept",),
        met="an order the wrong way round",
    ),
    Mutant(
        "patience counts the best validation",
        _RUN,
        "return sum(step > ranked(figures, by)[0]",
        "return sum(step >= ranked(figures, by)[0]",
        (f"{_IN_SELECTION}::test_patience_counts_validations_since_the_best",),
        met="off-by-one of patience",
    ),
    Mutant(
        "patience ends a validation late",
        _RUN,
        "0 < options.patience <= since_best",
        "0 < options.patience < since_best",
        (f"{_IN_SELECTION}::test_patience_counts_validations_since_the_best",),
        met="off-by-one of patience",
    ),
    Mutant(
        "no patience ends at once",
        _RUN,
        "return 0 < options.patience <=",
        "return options.patience <=",
        (f"{_IN_SELECTION}::test_patience_counts_validations_since_the_best",),
        met="0 that means never",
    ),
    Mutant(
        "checkpoints are averaged newest first",
        _RUN,
        "return sorted(order[: options.average])",
        "return order[: options.average]",
        (f"{_IN_SELECTION}::test_the_best_checkpoints_are_averaged",),
        met="an order the wrong way round",
    ),
    Mutant(
        "a run of another seed is continued",
        _RUN,
        '"steps eval_every eval_pairs keep_best',
        '"seed steps eval_every eval_pairs keep_best',
        (f"{_IN_SELECTION}::test_changes_that_break_a_resumed_run_are_refused",),
        met="an option that is not compared",
    ),
    Mutant(
        "lines of a step that is made again stay",
        _RUN_FOLDER,
        'return entry["step"] < step or (\n',
        'return entry["step"] <= step or (\n',
        (f"{_IN_HALF_DONE}::test_a_validation_logged_before_an_unsaved_step_is_not_logged_twice",),
        met="metrics after a resume",
    ),
    Mutant(
        "validation and average exchanged",
        _RUN_FOLDER,
        "saved = {False: validated, True: averaged}",
        "saved = {False: averaged, True: validated}",
        (f"{_IN_HALF_DONE}::test_a_validation_logged_before_an_unsaved_step_is_not_logged_twice",),
        met="metrics after a resume",
    ),
    Mutant(
        "the training line of a step is lost",
        _RUN_FOLDER,
        '("valid_loss" not in entry or saved["weights" in entry])',
        'saved["weights" in entry]',
        (f"{_IN_HALF_DONE}::test_a_validation_logged_before_an_unsaved_step_is_not_logged_twice",),
        met="metrics after a resume",
    ),
    Mutant(
        "a line that was cut off is read",
        _RUN_FOLDER,
        'self.metrics.read_text(encoding="utf-8", errors="replace").split("\\n")[:-1]',
        'self.metrics.read_text(encoding="utf-8", errors="replace").splitlines()',
        (f"{_IN_HALF_DONE}::test_a_line_without_its_end_is_not_read",),
        met="a crash while a line was written",
    ),
    Mutant(
        "the average counts as a validation",
        _RUN_FOLDER,
        'if "valid_loss" in entry and "weights" not in entry',
        'if "valid_loss" in entry',
        (f"{_IN_HALF_DONE}::test_a_validation_logged_before_an_unsaved_step_is_not_logged_twice",),
        met="two figures of one step",
    ),
    Mutant(
        "the lowest score is best",
        _RUN_FOLDER,
        "sign = 1 if criterion == LOSS else -1",
        "sign = 1",
        (f"{_IN_SELECTION}::test_best_steps_come_first_and_ties_go_to_the_lower_loss",),
        met="an order the wrong way round",
    ),
    Mutant(
        "the highest loss is best",
        _RUN_FOLDER,
        "sign = 1 if criterion == LOSS else -1",
        "sign = -1",
        (f"{_IN_SELECTION}::test_best_steps_come_first_and_ties_go_to_the_lower_loss",),
        met="an order the wrong way round",
    ),
    Mutant(
        "equal scores go to the later",
        _RUN_FOLDER,
        "figures[step][criterion], figures[step][LOSS], step)",
        "figures[step][criterion], -step)",
        (f"{_IN_SELECTION}::test_best_steps_come_first_and_ties_go_to_the_lower_loss",),
        met="a tie",
    ),
    Mutant(
        "weights auto prefers the last to the best",
        _RUN_FOLDER,
        (
            '        yield from (Candidate(folder.checkpoints, step, "best") for step '
            "in best[:most])\n"
        ),
        (
            '        yield from (Candidate(folder.checkpoints, step, "best") for step '
            "in best[1:most])\n"
        ),
        (f"{_IN_SELECTION}::test_weights_name_checkpoints_in_order_of_preference",),
        met="the first of a list",
    ),
    Mutant(
        "best may be any checkpoint",
        _RUN_FOLDER,
        '    most = None if weights == "auto" else 1\n',
        "    most = None\n",
        (f"{_IN_SELECTION}::test_weights_name_checkpoints_in_order_of_preference",),
        met="a fallback that was not asked for",
    ),
    Mutant(
        "the oldest is taken for the last",
        _RUN_FOLDER,
        "rest = [step for step in reversed(steps)",
        "rest = [step for step in (steps)",
        (f"{_IN_SELECTION}::test_weights_name_checkpoints_in_order_of_preference",),
        met="an order the wrong way round",
    ),
    Mutant(
        "the oldest intact checkpoint is resumed",
        _RUN_FOLDER,
        "for step in reversed(checkpoint.steps(folder)):",
        "for step in checkpoint.steps(folder):",
        (
            f"{_IN_CHECKPOINT}::test_the_newest_intact_checkpoint_is_found_and_newer_damage_is_named",
        ),
        met="an order the wrong way round",
    ),
    Mutant(
        "a second quarantine has the name of another step's",
        _RUN_FOLDER,
        'else f"damaged-{step}.{number}")',
        'else f"damaged-{step}{number}")',
        (f"{_IN_CHECKPOINT}::test_a_quarantined_checkpoint_is_skipped_and_not_deleted",),
        met="a name that exists",
    ),
    Mutant(
        "pruning removes what is kept",
        _CHECKPOINT,
        "for step in set(steps(folder)) - set(keep):",
        "for step in set(steps(folder)) & set(keep):",
        (f"{_IN_CHECKPOINT}::test_prune_removes_only_the_other_steps",),
        met="a set the wrong way round",
    ),
    Mutant(
        "an old checkpoint is lost while it is replaced",
        _CHECKPOINT,
        'if stale.suffix == ".replaced" and not (folder / name).exists():',
        "if False:",
        (f"{_IN_CHECKPOINT}::test_an_interrupted_replacement_restores_the_old_checkpoint",),
        met="a crash between two renames",
    ),
]
