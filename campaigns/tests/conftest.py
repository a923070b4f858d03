"""The tests of campaigns run with the settings of the other tests, also by themselves."""

from parity_tests.conftest import (  # noqa: F401 (pytest finds them here)
    _programs_of_a_few_files,
    pytest_collection_finish,
)
