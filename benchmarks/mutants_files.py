"""Faults of casts, sharded exports and exit codes."""

from benchmarks.mutants_fault import Mutant

_LAZY = "jax_transformer/storage/lazy.py"
_HUGGINGFACE = "jax_transformer/storage/huggingface_folder.py"
_ERRORS = "jax_transformer/errors.py"
_IN_CONVERT_BITS = "parity_tests/unit/test_convert_bits.py"
_IN_ERRORS = "parity_tests/unit/test_errors.py"
_IN_HUGGINGFACE_FOLDERS = "parity_tests/unit/test_huggingface_folders.py"

MUTANTS = [
    Mutant(
        "an overflow is not counted",
        _LAZY,
        ("            if infinite:\n                self._overflowed[name] = infinite\n"),
        "",
        (f"{_IN_CONVERT_BITS}::test_a_cast_reports_its_losses",),
        met="float16 beyond 65,504",
    ),
    Mutant(
        "a cast's largest error is that of the last tensor",
        _LAZY,
        "if error > self._largest:",
        "if error >= 0:",
        (f"{_IN_CONVERT_BITS}::test_a_cast_reports_its_losses",),
        met="a maximum that is overwritten",
    ),
    Mutant(
        "integers are cast too",
        _LAZY,
        "if tensors.is_float(tensor.dtype) and tensor.dtype != self.dtype:",
        "if tensor.dtype != self.dtype:",
        (f"{_IN_CONVERT_BITS}::test_integers_are_converted_between_files",),
        met="a dtype for every tensor",
    ),
    Mutant(
        "every tensor counts as cast",
        _LAZY,
        "                self._count += 1\n",
        "            self._count += 1\n",
        (f"{_IN_CONVERT_BITS}::test_a_cast_reports_its_losses",),
        met="a count that nobody checks",
    ),
    Mutant(
        "a cast through float16",
        _LAZY,
        "after = before.astype(self._target)",
        "after = before.astype(np.float16).astype(self._target)",
        (f"{_IN_CONVERT_BITS}::test_a_cast_reports_its_losses",),
        met="double rounding",
    ),
    Mutant(
        "a shard over its size",
        _HUGGINGFACE,
        "if parts[-1] and filled + size > most:",
        "if parts[-1] and filled > most:",
        (
            f"{_IN_HUGGINGFACE_FOLDERS}::test_shards_are_whole_tensors_and_an_index_that_is_read_back",
        ),
        met="the tensor that crosses the line",
    ),
    Mutant(
        "a shard's size is not begun anew",
        _HUGGINGFACE,
        ("            parts.append([])\n            filled = 0\n"),
        "            parts.append([])\n",
        (f"{_IN_HUGGINGFACE_FOLDERS}::test_runs_of_names_fill_the_shards_in_order",),
        met="an accumulator that is not cleared",
    ),
    Mutant(
        "the index's size in elements",
        _HUGGINGFACE,
        '"total_size": sum(tensor.nbytes for tensor in state.values()),',
        '"total_size": sum(tensor.info.size for tensor in state.values()),',
        (
            f"{_IN_HUGGINGFACE_FOLDERS}::test_shards_are_whole_tensors_and_an_index_that_is_read_back",
        ),
        met="bytes or elements",
    ),
    Mutant(
        "shards counted from 0",
        _HUGGINGFACE,
        'return f"model-{number + 1:05d}-of-{count:05d}.safetensors"',
        'return f"model-{number:05d}-of-{count:05d}.safetensors"',
        (
            f"{_IN_HUGGINGFACE_FOLDERS}::test_shards_are_whole_tensors_and_an_index_that_is_read_back",
        ),
        met="transformers counts from 1",
    ),
    Mutant(
        "a megabyte of 1,024 kilobytes",
        _HUGGINGFACE,
        '"MB": 10**6,',
        '"MB": 2**20,',
        (f"{_IN_HUGGINGFACE_FOLDERS}::test_max_shard_size_is_an_integer",),
        met="MB or MiB",
    ),
    Mutant(
        "PyTorch weights before safetensors",
        _HUGGINGFACE,
        "WEIGHTS = (SAFETENSORS, SAFETENSORS + INDEX, PT, PT + INDEX,",
        "WEIGHTS = (PT, PT + INDEX, SAFETENSORS, SAFETENSORS + INDEX,",
        (f"{_IN_HUGGINGFACE_FOLDERS}::test_a_folder_without_weights_names_the_expected_files",),
        met="the order in which transformers looks",
    ),
    Mutant(
        "damage of a checkpoint ends with 3",
        _ERRORS,
        ('(exit code 5)."""\n\n    exit_code = 5'),
        ('(exit code 5)."""\n\n    exit_code = 3'),
        (f"{_IN_ERRORS}::test_a_refusal_ends_the_command_with_its_code_and_one_line",),
        met="exit codes confused",
    ),
    Mutant(
        "an unsafe file ends with 3",
        _ERRORS,
        ('(exit code 4)."""\n\n    exit_code = 4'),
        ('(exit code 4)."""\n\n    exit_code = 3'),
        (f"{_IN_ERRORS}::test_a_refusal_ends_the_command_with_its_code_and_one_line",),
        met="exit codes confused",
    ),
    Mutant(
        "a locked run ends with 2",
        _ERRORS,
        ('(exit code 7)."""\n\n    exit_code = 7'),
        ('(exit code 7)."""\n\n    exit_code = 2'),
        (f"{_IN_ERRORS}::test_a_refusal_ends_the_command_with_its_code_and_one_line",),
        met="exit codes confused",
    ),
    Mutant(
        "a stopped run ends with 0",
        _ERRORS,
        ('(exit code 75)."""\n\n    exit_code = 75'),
        ('(exit code 75)."""\n\n    exit_code = 0'),
        (f"{_IN_ERRORS}::test_a_refusal_ends_the_command_with_its_code_and_one_line",),
        met="a success that is none",
    ),
    Mutant(
        "a loss that is not finite ends with 1",
        _ERRORS,
        ('(exit code 6)."""\n\n    exit_code = 6'),
        ('(exit code 6)."""\n\n    exit_code = 1'),
        (f"{_IN_ERRORS}::test_a_refusal_ends_the_command_with_its_code_and_one_line",),
        met="exit codes confused",
    ),
    Mutant(
        "a difference ends with 0",
        _ERRORS,
        ('(exit code 1)."""\n\n    exit_code = 1'),
        ('(exit code 1)."""\n\n    exit_code = 0'),
        (f"{_IN_ERRORS}::test_a_refusal_ends_the_command_with_its_code_and_one_line",),
        met="a success that is none",
    ),
]
