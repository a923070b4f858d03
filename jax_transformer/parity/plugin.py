"""The pytest plugin: the fixture ``parity``. Importing it loads neither jax nor torch."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from jax_transformer.parity.report import Report

_USAGE = "parity: pass torch_module and batch, or torch_factory and batch, or golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the plugin's options."""
    group = parser.getgroup("parity", "Flax models compared with PyTorch models")
    group.addoption(
        "--parity-pages",
        metavar="FOLDER",
        help="write the report of every comparison that fails there, as an HTML page",
    )
    group.addoption(
        "--parity-make-goldens",
        action="store_true",
        help="record goldens that a test names and that do not exist",
    )


@dataclass
class Parity:
    """An assertion that a Flax and a PyTorch model are equal; see :meth:`__call__`."""

    name: str
    pages: str | None
    make_goldens: bool
    properties: list[tuple[str, object]] = field(default_factory=list)

    def __call__(
        self,
        flax_model: Any,
        torch_module: Any = None,
        batch: Any = None,
        rules: Mapping[str, str] | Sequence[tuple[str, str]] | None = None,
        *,
        torch_factory: str | None = None,
        torch_python: str | None = None,
        golden: str | Path | None = None,
        dtype: str | None = None,
        gradients: bool = True,
        seed: int = 0,
        call_flax: Callable[..., Any] | None = None,
        call_torch: Callable[..., Any] | None = None,
        architecture: Any = None,
    ) -> "Report":
        """Return the report if the models agree; otherwise fail the test with it as the message.

        The arguments that are not listed are those of :func:`jax_transformer.parity.compare`.

        Args:
            torch_factory: ``package.module:callable``, which returns the module in another process;
                instead of ``torch_module``.
            torch_python: interpreter of that process; this one if None.
            golden: file of recorded numbers, instead of a PyTorch model. With
                ``--parity-make-goldens`` a missing file is made from ``torch_factory`` and
                ``batch``.
        """
        from jax_transformer.parity import comparison, structures

        options: dict[str, Any] = dict(
            dtype=dtype, gradients=gradients, seed=seed, architecture=architecture
        )
        if torch_module is not None:
            if batch is None or torch_factory is not None or golden is not None:
                raise pytest.UsageError(_USAGE)
            options |= {"call_flax": call_flax, "call_torch": call_torch}
            report = comparison.compare(flax_model, torch_module, batch, rules, **options)
        else:
            if call_torch is not None:
                raise pytest.UsageError(
                    "parity: call_torch cannot cross to another process: let the factory return a"
                    " module that takes the batch"
                )
            arrays = None if batch is None else structures.arrays_of(batch)
            recorder, arrays = self._recorder(torch_factory, torch_python, arrays, golden, seed)
            report = comparison.compare_recorded(
                flax_model, recorder, arrays, rules, **options, call=call_flax
            )
        if not report.agrees:
            self._write(report)
            self.properties.append(("parity", report.summary()))
            pytest.fail("\n".join(report.lines()), pytrace=False)
        return report

    def _recorder(
        self, factory: str | None, python: str | None, batch: Any, golden: Any, seed: int
    ) -> tuple[Any, Any]:
        """Return the recorder of the PyTorch model, and its batch."""
        from jax_transformer.parity import golden as goldens

        process = None if factory is None else goldens.OtherProcess(factory, python)
        if golden is None:
            if process is None or batch is None:
                raise pytest.UsageError(_USAGE)
            return process, batch
        if not Path(golden).exists():
            if not self.make_goldens or process is None or batch is None:
                pytest.fail(
                    f"{golden}: no such golden: pass torch_factory and batch, and run pytest"
                    " --parity-make-goldens",
                    pytrace=False,
                )
            goldens.create(golden, process, batch, source={"factory": factory}, seed=seed)
        loaded = goldens.load(golden)
        return loaded, loaded.batch

    def _write(self, report: "Report") -> None:
        if self.pages is not None:
            from jax_transformer.storage import atomic

            Path(self.pages).mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^\w.-]", "_", self.name)
            atomic.write_text(Path(self.pages) / f"{name}.html", report.to_page(self.name))


@pytest.fixture
def parity(request: pytest.FixtureRequest) -> Parity:
    """Return ``parity(flax_model, torch_module, batch, rules)``, which fails unless the models
    agree and names the first module that differs.
    """
    node, option = request.node, request.config.getoption
    options = option("--parity-pages"), option("--parity-make-goldens")
    return Parity(node.nodeid, *options, node.user_properties)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """In GitHub Actions, annotate the pull request with the comparisons that failed."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return
    from jax_transformer.parity import ci

    for test in terminalreporter.getreports("failed"):
        for name, summary in test.user_properties:
            if name == "parity":
                terminalreporter.write_line(ci.annotation(test.nodeid, str(summary)))
