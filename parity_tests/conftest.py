"""Strict JAX around the model; imports no torch, as the unit tests run without it."""

import atexit
import ctypes
import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from parity_tests.compiling import FLAGS

# Most of the suite's time is compiling, and two thirds of that would be optimising programs that
# run once. `XLA_FLAGS= pytest` tests what users run.
os.environ.setdefault("XLA_FLAGS", FLAGS)
os.environ.pop("GITHUB_ACTIONS", None)  # there `parity` prints annotations too
# Every process of this run shares the compiled programs: xdist's workers and the commands inherit
# the folder. A folder of your own keeps them for the next run.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="compiled-for-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
# Reading the program of a single operation takes as long as compiling it
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
os.environ.setdefault("JAX_INCLUDE_FULL_TRACEBACKS_IN_LOCATIONS", "false")
# In the background of a shell script (`pytest &`) Ctrl-C is ignored, here and in every command that
# the tests start
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jax
import jaxtyping
import pytest
from jax._src.interpreters import mlir

# JAX 0.10 makes a context of MLIR for every program, which takes longer than lowering a small one
_shares_contexts = jax.__version__.startswith("0.10.")
if _shares_contexts:
    mlir.make_ir_context = functools.cache(mlir.make_ir_context)

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_default_matmul_precision", "highest")


# A sync takes longer than most tests here, and no test cuts the power; campaigns/crashes does
os.fsync = os.fstat  # which still refuses a closed descriptor


def _modules_with_shapes() -> list[str]:
    root = Path(__file__).parents[1]
    names = []
    for file in (root / "jax_transformer").rglob("*.py"):
        if "from jaxtyping import" in file.read_text(encoding="utf-8"):
            names.append(".".join(file.relative_to(root).with_suffix("").parts))
    return names


# Every annotated shape is checked on every call. To check the plain types of all other modules,
# too, which mypy does, takes a tenth of the suite's time
jaxtyping.install_import_hook(_modules_with_shapes(), "beartype.beartype")

gc.disable()  # until the tests are collected: their modules and libraries stay

_KEPT = 4000
"""Largest number of compiled programs in memory: with them a process takes about three gigabytes.
Most are single operations that later files use again."""
_compiled = 0


def _count(event: str, _seconds: float, **_: object) -> None:
    global _compiled
    _compiled += event.endswith("/backend_compile_duration")


jax.monitoring.register_event_duration_secs_listener(_count)


@pytest.fixture(scope="module", autouse=True)
def _programs_of_a_few_files():
    """Clear the compiled programs once there are too many: together they would take gigabytes.

    The C library keeps their memory, which is in small pieces, unless it is told to return it. The
    garbage collector leaves aside what a module has left, which are the traced programs.
    """
    global _compiled
    yield
    gc.freeze()
    if _compiled > _KEPT:
        jax.clear_caches()
        if _shares_contexts:
            mlir.make_ir_context.cache_clear()  # with the constants of the programs
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        if sys.platform == "linux":
            getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
        _compiled = 0


def pytest_collection_finish():
    """Collect garbage less often, and never among the modules and tests, which all stay.

    Tracing makes many objects and few cycles: with Python's own settings a twelfth of the suite's
    time is looking for them.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


def pytest_collection_modifyitems(items):
    """Record what a test proves of which family, for benchmarks/families_table.py."""
    for item in items:
        mark = item.get_closest_marker("proves")
        if mark is not None:
            values = item.callspec.params.values() if hasattr(item, "callspec") else ()
            item.user_properties.append(("proves", mark.args[0]))
            item.user_properties.extend(
                ("of", value) for value in [*mark.args[1:], *values] if isinstance(value, str)
            )


# Imported by the fixtures, as jaxtyping instruments the package after this file is read


@pytest.fixture(scope="module")
def as_a_user():
    """Configure JAX as the command line does: for ``pytest.mark.usefixtures``."""
    from parity_tests.unit import runs

    with runs.as_a_user():
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A trained run, to read."""
    from parity_tests.unit import runs

    with runs.as_a_user():
        return runs.trained(tmp_path_factory.getbasetemp()).path


@pytest.fixture(scope="module")
def trained(as_a_user, tmp_path_factory):
    """That run with its arguments and output, with JAX as the command line configures it."""
    from parity_tests.unit import runs

    return runs.trained(tmp_path_factory.getbasetemp())


@pytest.fixture
def console(capsys, monkeypatch):
    from parity_tests.unit import runs

    return runs.Console(capsys, monkeypatch)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A lesson10 of odd sizes to convert: its configuration, weights file and config.json."""
    from parity_tests.unit import conversions

    return conversions.small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def config(small):
    return small[0]


@pytest.fixture(scope="module")
def weights(small):
    return small[1]


@pytest.fixture(scope="module")
def config_file(small):
    return small[2]


@pytest.fixture
def in_float64(monkeypatch):
    """Let transformers compute in float64 what it computes in float32 whatever its dtype."""
    from parity_tests import huggingface

    yield from huggingface.compute_in_float64(monkeypatch)
