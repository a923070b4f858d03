"""Freed memory is used again without the system clearing it, unless the environment chooses."""

import ctypes
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"),
    reason="the settings are those of glibc",
)
SIZE = 128 << 20
# In a thread, as XLA runs a program: a thread has an arena of its own by default
CHILD = f"""
import resource, threading
from jax_transformer import allocator

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray({SIZE})
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def measure():
    faults()
    print(allocated, faults())

allocated = allocator.keep_freed_memory()
thread = threading.Thread(target=measure)
thread.start()
thread.join()
"""


def child(**variables: str) -> tuple[str, int]:
    """The result of keep_freed_memory, and the page faults of 128 MiB after 128 MiB were freed."""
    names = [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]
    environment = {k: v for k, v in os.environ.items() if k not in names} | variables
    done = subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, check=True
    )
    result, faults = done.stdout.split()
    return result, int(faults)


def test_freed_memory_is_used_again_without_page_faults():
    result, faults = child()
    assert (result, faults < 100) == ("True", True), faults


def test_settings_of_the_environment_win():
    result, faults = child(MALLOC_TRIM_THRESHOLD_="131072")
    assert (result, faults > 1000) == ("False", True), faults
