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


def pytest_collection_modifyitems(items):
    """What a test proves, and of what, goes into its report: README's table of families is made of that (benchmarks/families_table.py)."""
    for item in items:
        mark = item.get_closest_marker("proves")
        if mark is not None:
            values = item.callspec.params.values() if hasattr(item, "callspec") else ()
            item.user_properties.append(("proves", mark.args[0]))
            item.user_properties.extend(("of", value) for value in [*mark.args[1:], *values] if isinstance(value, str))
