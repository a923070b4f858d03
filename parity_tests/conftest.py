"""JAX at its strictest around the model: 64 bits available, no silent promotion of dtypes or ranks. Imports no torch: the unit tests run without."""

import os

# Nearly all of the suite's time is compiling, and a quarter of that is optimising programs that run once. `XLA_FLAGS= pytest` tests what users run.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")

import jax
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_default_matmul_precision", "highest")


@pytest.fixture(scope="module", autouse=True)
def _programs_of_one_file():
    """Compiled programs serve the tests of a file and are let go behind it: of all files together they would take gigabytes."""
    yield
    jax.clear_caches()
