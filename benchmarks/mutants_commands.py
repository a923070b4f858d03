"""Faults of what a user meets: defaults, options, messages, outputs, and the service."""

from benchmarks.mutants_fault import Mutant

_APP = "jax_transformer/extras/serve/app.py"
_ARGUMENTS = "jax_transformer/cli/arguments.py"
_ATOMIC = "jax_transformer/storage/atomic.py"
_COMPARISON = "jax_transformer/parity/comparison.py"
_CONFIG_FILE = "jax_transformer/cli/config_file.py"
_CURVES = "jax_transformer/training/curves.py"
_GENERATION_CONFIG = "jax_transformer/generate/generation_config.py"
_INSPECTION = "jax_transformer/convert/inspection.py"
_MEASURING = "jax_transformer/parity/measuring.py"
_METRICS_LOGGER = "jax_transformer/training/metrics_logger.py"
_OPTIONS = "jax_transformer/training/options.py"
_PAIRS = "jax_transformer/parity/pairs.py"
_PARALLEL_TEXT = "jax_transformer/data/parallel_text.py"
_RECIPE = "jax_transformer/training/recipe.py"
_RUN_FOLDER = "jax_transformer/storage/run_folder.py"
_SERVER = "jax_transformer/extras/serve/server.py"
_TRANSLATION = "jax_transformer/inference/translation.py"
_IN_BOARDS = "parity_tests/unit/test_boards.py"
_IN_CLI = "parity_tests/unit/test_cli.py"
_IN_CLI_TRANSLATE = "parity_tests/unit/test_cli_translate.py"
_IN_CONFIG_FILE = "parity_tests/unit/test_config_file.py"
_IN_CORPUS = "parity_tests/unit/test_corpus.py"
_IN_CURVES = "parity_tests/unit/test_curves.py"
_IN_GENERATION = "parity_tests/test_huggingface_generation.py"
_IN_INIT = "parity_tests/unit/test_init.py"
_IN_INSPECT = "parity_tests/unit/test_inspect.py"
_IN_OUTPUTS = "parity_tests/unit/test_outputs.py"
_IN_PARITY_REPORT = "parity_tests/test_parity_report.py"
_IN_PARITY_OTHERS = "parity_tests/test_parity_others.py"
_IN_SELECTION = "parity_tests/unit/test_selection.py"
_IN_SERVE_PROCESS = "parity_tests/unit/test_serve_process.py"
_IN_TRAINING = "parity_tests/unit/test_training.py"
_IN_TRANSLATION = "parity_tests/unit/test_translation.py"

MUTANTS = [
    Mutant(
        "a trained model is fine-tuned at the rate of random weights",
        _OPTIONS,
        "return ADAPTERS if self.lora.rank else FINE_TUNING",
        "return ADAPTERS if self.lora.rank else FROM_SCRATCH",
        (f"{_IN_INIT}::test_init_has_defaults_for_fine_tuning_and_options_win",),
        met="a default for another task",
    ),
    Mutant(
        "adapters at the rate of all weights",
        _OPTIONS,
        "return ADAPTERS if self.lora.rank else FINE_TUNING",
        "return FINE_TUNING",
        (f"{_IN_INIT}::test_init_has_defaults_for_fine_tuning_and_options_win",),
        met="a default for another task",
    ),
    Mutant(
        "Python's batches of other widths than the command's",
        _TRANSLATION,
        "            widths=opened.widths,\n",
        "            widths=(),\n",
        (f"{_IN_TRANSLATION}::test_python_translates_as_the_command",),
        met="two ways to one result",
    ),
    Mutant(
        "Python without the folder's settings",
        _TRANSLATION,
        "opened.generation_config(tokenizer).overridden(options)",
        "GenerationConfig().overridden(options)",
        (f"{_IN_GENERATION}::test_python_translates_as_the_command_and_as_transformers",),
        met="M2M100 began with another language from Python",
    ),
    Mutant(
        "flags checked without the folder's settings",
        _GENERATION_CONFIG,
        "        base = self\n        if changes",
        "        base = GenerationConfig()\n        if changes",
        (f"{_IN_GENERATION}::test_flags_change_the_settings_of_the_folder[marian]",),
        met="--n-best 2 refused with four beams in the folder",
    ),
    Mutant(
        "inputs of two modules with parts compared as one",
        _MEASURING,
        " and not has_paired_parts:",
        ":",
        (f"{_IN_PARITY_REPORT}::test_families_of_transformers_agree[marian]",),
        met="a note on shapes in the report of models that agree",
    ),
    Mutant(
        "inputs of another kind are differences",
        _MEASURING,
        "if outputs_agree and entry.input is not None and not entry.input.agrees:",
        "if False:",
        (
            f"{_IN_PARITY_REPORT}::test_inputs_of_another_kind_and_calls_in_another_order_are_not_differences",
        ),
        met="DIFFERS above «the models agree»",
    ),
    Mutant(
        "equal scores go to the first step",
        _RUN_FOLDER,
        "(sign * figures[step][criterion], figures[step][LOSS], step)",
        "(sign * figures[step][criterion], step)",
        (f"{_IN_SELECTION}::test_best_steps_come_first_and_ties_go_to_the_lower_loss",),
        met="the worse of two checkpoints with BLEU 0 was exported",
    ),
    Mutant(
        "a line of one tab is translated",
        _TRANSLATION,
        "if not line.source.strip() or (",
        "if not line.source or (",
        (f"{_IN_TRANSLATION}::test_a_blank_line_is_not_translated",),
        met='a tab became "Argentin"',
    ),
    Mutant(
        "gzip on standard input is text",
        _PARALLEL_TEXT,
        "reader: Any = gzip.GzipFile(fileobj=file) if zipped else file",
        "reader: Any = file",
        (f"{_IN_CLI_TRANSLATE}::test_line_endings_do_not_matter",),
        met="compressed bytes refused as text",
    ),
    Mutant(
        "a folder as the output",
        _ATOMIC,
        "if target.is_dir():",
        "if False:",
        (f"{_IN_OUTPUTS}::test_a_folder_is_refused_before_anything_is_read",),
        met="an error after hours of work",
    ),
    Mutant(
        "only the first unknown key is named",
        _CONFIG_FILE,
        'keys.unknown.append(f"{name!r}{hint}")',
        'keys.unknown[:] = keys.unknown or [f"{name!r}{hint}"]',
        (f"{_IN_CONFIG_FILE}::test_invalid_values_are_refused_by_file_and_key",),
        met="one mistake at a time",
    ),
    Mutant(
        "only the last wrong rule of a comparison is named",
        _PAIRS,
        'raise ConfigError("; ".join(problems))',
        "raise ConfigError(problems[-1])",
        (f"{_IN_PARITY_OTHERS}::test_models_that_cannot_be_compared_are_refused",),
        met="one mistake at a time",
    ),
    Mutant(
        "a choice refused without the choices",
        _ARGUMENTS,
        "if issubclass(option.type, enum.Enum):",
        "if False:",
        (f"{_IN_CLI}::test_invalid_options_are_refused",),
        met="Invalid choice invalid choice",
    ),
    Mutant(
        "a vocabulary that is not reached is not named",
        _RECIPE,
        "min(sizes) < options.data.vocab_size:",
        "min(sizes) > options.data.vocab_size:",
        (f"{_IN_CORPUS}::test_a_vocabulary_or_warm_up_that_is_not_reached_is_named",),
        met="100,000 became 281",
    ),
    Mutant(
        "a warm-up as long as the run is not named",
        _RECIPE,
        "if warmup >= options.steps:",
        "if warmup > 10 * options.steps:",
        (f"{_IN_CORPUS}::test_a_vocabulary_or_warm_up_that_is_not_reached_is_named",),
        met="a rate that is never reached",
    ),
    Mutant(
        "a finished run continues",
        _RECIPE,
        "if saved is not None and run.finished(options, folder):",
        "if False:",
        (f"{_IN_TRAINING}::test_a_finished_run_is_not_changed",),
        met="continuing at step 12 of 12",
    ),
    Mutant(
        "a dict is a batch of its names",
        _COMPARISON,
        "if isinstance(batch, Mapping):",
        "if False:",
        (f"{_IN_PARITY_OTHERS}::test_a_batch_may_be_one_array_and_is_not_a_dict",),
        met="a dict as the fixture's batch",
    ),
    Mutant(
        "a forgotten eval() is not named",
        _COMPARISON,
        "if torch_module.training and not report.agrees:",
        "if False:",
        (f"{_IN_PARITY_OTHERS}::test_train_mode_is_named_if_the_models_differ_and_stays",),
        met="a PyTorch module left in train mode",
    ),
    Mutant(
        "inspect believes a PyTorch file's checksums",
        _INSPECTION,
        "{path.name: pt.verify(path)}",
        "{path.name: checksums.sha256(path)}",
        (f"{_IN_INSPECT}::test_a_checksum_that_does_not_hold_is_refused",),
        met="a damaged file inspected with exit code 0",
    ),
    Mutant(
        "time left beyond an hour in minutes",
        _METRICS_LOGGER,
        "left = tqdm.format_interval(per_step * (self.steps - self.step))",
        'left = "{:.0f}:{:02.0f}".format(*divmod(per_step * (self.steps - self.step), 60))',
        (f"{_IN_BOARDS}::test_progress_shows_both_losses_and_hours",),
        met="62:03 for an hour",
    ),
    Mutant(
        "progress shows the smoothed loss only",
        _METRICS_LOGGER,
        'if nll_loss != entry["loss"]:',
        "if False:",
        (f"{_IN_BOARDS}::test_progress_shows_both_losses_and_hours",),
        met="a smoothed loss beside validation's",
    ),
    Mutant(
        "curves compare the smoothed loss with validation's",
        _CURVES,
        '_line(axes, nll_loss or loss, "training", BLUE)',
        '_line(axes, loss, "training", BLUE)',
        (f"{_IN_CURVES}::test_the_training_loss_is_drawn_with_and_without_label_smoothing",),
        met="a smoothed loss beside validation's",
    ),
    Mutant(
        "a body that does not come is the client's going",
        _APP,
        'raise RequestError(408, "the body did not come in time") from None',
        "raise ClientDisconnect from None",
        (f"{_IN_SERVE_PROCESS}::test_a_body_that_does_not_come_in_time_is_408",),
        met="a slow client counted as one that has gone",
    ),
    Mutant(
        "a client that goes is a failure",
        _APP,
        "            status = CLIENT_CLOSED\n",
        "            pass\n",
        (
            f"{_IN_SERVE_PROCESS}::test_a_client_that_goes_while_it_sends_is_499",
            f"{_IN_SERVE_PROCESS}::test_the_lines_of_a_client_that_goes_leave_the_queue",
        ),
        met="clients that go counted as the server's errors",
    ),
    Mutant(
        "a client that waits is not watched",
        _APP,
        "        if gone.done():\n            raise ClientDisconnect\n",
        "",
        (f"{_IN_SERVE_PROCESS}::test_the_lines_of_a_client_that_goes_leave_the_queue",),
        met="clients that go counted as late answers",
    ),
    Mutant(
        "the lines of a client that goes stay",
        _APP,
        "        for future in futures:\n            future.cancel()\n",
        "",
        (f"{_IN_SERVE_PROCESS}::test_the_lines_of_a_client_that_goes_leave_the_queue",),
        met="work for nobody",
    ),
    Mutant(
        "a second Ctrl-C ends the server like the first",
        _SERVER,
        "if uvicorn_server.force_exit:",
        "if False:",
        (f"{_IN_SERVE_PROCESS}::test_a_second_ctrl_c_does_not_wait_for_answers",),
        met="lost requests with exit code 0",
    ),
    Mutant(
        "lost requests are not counted",
        _SERVER,
        'f"{service.abandoned} abandoned by their clients" + (f", {lost} lost" if lost else ""),',
        'f"{service.abandoned} abandoned by their clients",',
        (f"{_IN_SERVE_PROCESS}::test_a_second_ctrl_c_does_not_wait_for_answers",),
        met="lost requests, unsaid",
    ),
    Mutant(
        "the last 16 bits of a port",
        _SERVER,
        "if not 0 <= port < 65536:",
        "if False:",
        (f"{_IN_SERVE_PROCESS}::test_an_address_in_use_is_refused",),
        met="port 80000 is 14464",
    ),
    Mutant(
        "a file is synced as it is read on Windows",
        _ATOMIC,
        "os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)",
        "os.open(path, os.O_RDONLY)",
        (f"{_IN_OUTPUTS}::test_a_folder_is_not_synced_on_windows",),
        met="an error where the system syncs only what is open for writing",
    ),
]
