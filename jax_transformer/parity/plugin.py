"""The pytest plugin: the fixture ``parity``. Importing it loads neither jax nor torch."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from jax_transformer.parity.report import Report


def pytest_addoption(parser: pytest.Parser) -> None:
    """The plugin's options."""
    group = parser.getgroup("parity", "Flax models beside PyTorch models")
    group.addoption(
        "--parity-pages",
        metavar="FOLDER",
        help="write the report of every comparison that fails there, as an HTML page",
    )
    group.addoption(
        "--parity-make-goldens",
        action="store_true",
        help="record goldens that a test names and that are not there",
    )


class Parity:
    """Called, it asserts that a Flax and a PyTorch model are one; see :meth:`__call__`."""

    def __init__(self, name: str, pages: str | None, make_goldens: bool):
        self._name, self._pages, self._make_goldens = name, pages, make_goldens

    def __call__(
        self,
        flax_model: Any,
        torch_module: Any = None,
        batch: Sequence[Any] | None = None,
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
    ) -> "Report":
        """Fail, with the report as the message, unless the models agree; the report where they do.

        Args:
            flax_model, torch_module, batch, rules: as of :func:`jax_transformer.parity.compare`.
            torch_factory: in the place of ``torch_module``: ``package.module:callable``, which gives the module in another process,
            torch_python: that of this interpreter, where not of another environment's.
            golden: a file of recorded numbers in the place of a PyTorch model. With ``--parity-make-goldens`` it is made of ``torch_factory`` and
                ``batch`` where it is not there.
            dtype, gradients, seed, call_flax, call_torch: as of :func:`jax_transformer.parity.compare`.
        """
        import numpy as np

        from jax_transformer.parity import compare, compare_recorded

        options = {"dtype": dtype, "gradients": gradients, "seed": seed}
        if torch_module is not None:
            if batch is None or torch_factory is not None or golden is not None:
                raise pytest.UsageError(
                    "parity: give torch_module and batch, or torch_factory and batch, or golden"
                )
            report = compare(
                flax_model,
                torch_module,
                batch,
                rules,
                **options,
                call_flax=call_flax,
                call_torch=call_torch,
            )  # type: ignore[arg-type]
        else:
            if call_torch is not None:
                raise pytest.UsageError(
                    "parity: call_torch cannot cross to another process: let the factory give a module that takes the batch"
                )
            arrays = None if batch is None else [np.asarray(array) for array in batch]
            theirs, given = self._recorded(torch_factory, torch_python, arrays, golden, seed)
            report = compare_recorded(flax_model, theirs, given, rules, **options, call=call_flax)  # type: ignore[arg-type]
        if not report.agrees:
            self._write(report)
            pytest.fail("\n".join(report.lines()), pytrace=False)
        return report

    def _recorded(
        self,
        factory: str | None,
        python: str | None,
        batch: Sequence[Any] | None,
        golden: str | Path | None,
        seed: int,
    ) -> tuple[Any, Sequence[Any]]:
        from jax_transformer.parity import golden as goldens
        from jax_transformer.parity.other_process import OtherProcess

        other = None if factory is None else OtherProcess(factory, python)
        if golden is None:
            if other is None or batch is None:
                raise pytest.UsageError(
                    "parity: give torch_module and batch, or torch_factory and batch, or golden"
                )
            return other, batch
        if not Path(golden).exists():
            if not self._make_goldens or other is None or batch is None:
                pytest.fail(
                    f"{golden}: no such golden: give torch_factory and batch, and run pytest --parity-make-goldens",
                    pytrace=False,
                )
            goldens.make(golden, other, batch, source={"factory": factory}, seed=seed)
        found = goldens.load(golden)
        return found, found.batch

    def _write(self, report: "Report") -> None:
        if self._pages is not None:
            from jax_transformer.parity import page

            Path(self._pages).mkdir(parents=True, exist_ok=True)
            name = "".join(
                letter if letter.isalnum() or letter in "-_." else "_" for letter in self._name
            )
            page.write(Path(self._pages) / f"{name}.html", report, title=self._name)


@pytest.fixture
def parity(request: pytest.FixtureRequest) -> Parity:
    """``parity(flax_model, torch_module, batch, rules)`` fails unless the two models agree, with the first module that differs in its message."""
    return Parity(
        request.node.nodeid,
        request.config.getoption("--parity-pages"),
        request.config.getoption("--parity-make-goldens"),
    )
