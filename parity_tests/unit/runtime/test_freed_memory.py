"""Freed memory is used again, or given back, as the command needs."""

import ctypes
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"),
    reason="the settings are those of glibc",
)
# In a thread, as XLA runs a program: a thread has an arena of its own by default
CHILD = """
import os, resource, sys, threading
from jax_transformer.runtime import process

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(int(sys.argv[2]) << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def measure():
    faults(), faults()
    print(allocated, faults(), os.environ.get("TOKENIZERS_PARALLELISM"))

allocated = process.keep_freed_memory(sys.argv[1] == "keep") if sys.argv[1] else None
thread = threading.Thread(target=measure)
thread.start()
thread.join()
"""


def child(change: str = "keep", mebibytes: int = 128, **variables: str) -> tuple[str, int]:
    """The result of the change, and the page faults of a block after two others were freed.

    Tokenizers have one thread where all threads have one heap.
    """
    names = [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_", "TOKENIZERS_"))]
    environment = {k: v for k, v in os.environ.items() if k not in names} | variables
    command = [sys.executable, "-c", CHILD, change, str(mebibytes)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    result, faults, parallelism = done.stdout.split()
    usual = variables.get("TOKENIZERS_PARALLELISM")
    assert parallelism == (usual or ("false" if result == "True" else "None"))
    return result, int(faults)


@pytest.mark.parametrize("mebibytes", [128, pytest.param(2100, marks=pytest.mark.slow)])
def test_freed_memory_is_used_again_without_page_faults(mebibytes):
    result, faults = child(mebibytes=mebibytes)
    assert (result, faults < 100) == ("True", True), faults


def test_the_threads_of_tokenizers_can_be_chosen():
    assert child(TOKENIZERS_PARALLELISM="true")[0] == "True"


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_settings_of_the_environment_win(name):
    result, faults = child(**{name: "131072" if "MALLOC" in name else "glibc.malloc.check=0"})
    assert (result, faults > 1000) == ("False", True), faults


@pytest.mark.parametrize(("mebibytes", "stays"), [(8, True), (48, False)])
def test_large_freed_arrays_of_a_conversion_are_given_back(mebibytes, stays):
    result, faults = child("give back", mebibytes)
    assert (result, faults < 1000) == ("True", stays), faults
