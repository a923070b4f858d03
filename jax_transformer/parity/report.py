"""The report of a comparison, module by module in the order in which the model computes."""

import json
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jax_transformer import webpage
from jax_transformer.errors import DifferentError
from jax_transformer.parity.coverage import Coverage
from jax_transformer.parity.difference import IN_FLOAT32, Entry, Measurement, differs


@dataclass(frozen=True)
class Report:
    """A comparison of two models.

    As text: :meth:`lines`; as JSON: :meth:`to_json`; as a page: :meth:`to_page`.
    """

    entries: tuple[Entry, ...]
    """Calls of paired modules in the order in which they ended, inner modules before outer ones."""
    results: Mapping[str, Measurement]
    """By PyTorch's names of the arrays that both models return; a lone one's is ""."""
    dtype: str
    """The dtype of the narrow measurements."""
    about: dict[str, Any]
    """Versions, shapes and seeds."""
    notes: tuple[str, ...] = ()
    own_result: tuple[Measurement, str] | None = None
    """``own`` and ``own_place`` of the code that is in no paired module."""
    coverage: Coverage | None = None
    outside_in_16_bits: str = ""
    """The words for code outside of the paired modules that only one model computes in 16 bits."""

    @property
    def result(self) -> Measurement:
        """The first result that differs; the first one of all if none does."""
        every = [*self.results.values()]
        return next(filter(differs, every), every[0])

    @property
    def first_fault(self) -> Entry | None:
        """The first module, the innermost, whose inputs agree and whose output does not; the first
        of ``faults`` if only that tells. None if no paired module is the first. Differences as
        small as float32's rounding, of a constant with few digits, come after all others.
        """
        faulty = (entry for entry in self.entries if entry.faulty)
        first = next((entry for entry in faulty if not self._begun_before(entry)), None)
        own = [entry for entry in self.entries if differs(entry.own) or entry.lower]
        large = [e for e in own if e.lower or (e.own and e.own.times > IN_FLOAT32)]
        if not own or self._outside or first in (large or own):
            return first
        return (large or own)[0]

    @property
    def _outside(self) -> bool:
        """True if code that is in no paired module differs by itself."""
        return self.own_result is not None and differs(self.own_result[0])

    @property
    def faults(self) -> list[Entry]:
        """The modules that differ by themselves, on the other model's inputs, the largest
        difference first; of several calls of a module the worst. Empty if nothing differs.
        """
        worst = sorted(
            (entry for entry in self.entries if differs(entry.own) or entry.lower),
            key=lambda entry: entry.own.times if entry.own else 0.0,
        )
        return list({entry.ours: entry for entry in worst}.values())[::-1]

    def _begun_before(self, entry: Entry) -> bool:
        """Return True if the difference may have reached the module by a way that is not its input.

        That is so if the input of a module around it differs because of an earlier module. If
        nothing earlier differs, the outer module takes another input by nature, as an encoder that
        adds positions itself. If a module's inputs cannot be compared, earlier modules decide.
        """
        around = [e for e in self.entries if entry.is_inside(e) and differs(e.input)]
        around += [entry] if entry.input is None else []
        return any(map(self._differs_before, around))

    def _differs_before(self, outer: Entry) -> bool:
        """Return True if the output differs of a call that ended before this one began."""
        for entry in self.entries:
            if entry is outer or entry.is_inside(outer):
                return False
            if differs(entry.output):
                return True
        return False

    @property
    def first_gradient_fault(self) -> Entry | None:
        """The first module in backward order whose gradients go wrong, if all outputs agree."""
        if not self.same_outputs:
            return None
        return next((entry for entry in reversed(self.entries) if entry.faulty_backward), None)

    @property
    def same_outputs(self) -> bool:
        """True if the results, and the outputs of all paired modules, agree."""
        outputs = (each for entry in self.entries for each in (entry.output, entry.own))
        lower = self.outside_in_16_bits or any(entry.lower for entry in self.entries)
        return not (self._outside or lower or any(map(differs, (self.result, *outputs))))

    @property
    def agrees(self) -> bool:
        """True if the results, the outputs of all paired modules, and all gradients agree: a wrong
        weight can leave the results of this batch unchanged.
        """
        return self.same_outputs and not any(
            differs(gradient)
            for e in self.entries
            for gradient in (e.input_gradient, e.output_gradient, *e.parameters.values())
        )

    def check(self) -> None:
        """Raise DifferentError, in one line, unless the models agree."""
        if not self.agrees:
            raise DifferentError(self.summary())

    def summary(self) -> str:
        """Return the verdict in one line, with the notes if the models differ, and with what was
        compared if they agree.
        """
        if self.agrees:
            compared = f"; {self.coverage}" if self.coverage else ""
            worst = max(self.results.values(), key=lambda each: each.times)
            return (
                f"the models agree: largest difference {worst.wide.max_abs:.2g} in"
                f" {worst.wide.dtype}, {multiple(worst.times)} rounding{compared}"
            )
        summary = self._gradient_summary() if self.same_outputs else self._output_summary()
        return "; ".join((summary, *self.notes))

    def _output_summary(self) -> str:
        fault = self.first_fault
        others = self._others(fault)
        if fault is not None and fault.output is not None:
            agree = self.result.agrees and not fault.lower
            results = "; the results agree on this batch" if agree else ""
            if fault.lower or not fault.faulty:
                return f"{fault.title}: {self.own_difference(fault)}{others}{results}"
            begin = f"{fault.ids}, and" if fault.ids else "its input agrees and"
            return (
                f"{fault.title}: {begin} its output differs,"
                f" {in_words(fault.output)}{f'; {fault.mask}' if fault.mask else ''}"
                f"{self._inside(fault)}{others}{results}"
            )
        if self.outside_in_16_bits:
            return f"{self.outside_in_16_bits}{others}"
        if self.result.agrees:
            verdict = "the results agree and outputs of modules differ"
        else:
            name = next(name for name, each in self.results.items() if each is self.result)
            verb = f"result {name} differs" if len(self.results) > 1 else "results differ"
            verdict = f"the {verb}, {in_words(self.result)}"
        if not self.entries:
            return f"{verdict}, and no module of one is paired with any of the other"
        # If no input differs, the first output that does is the first fault's
        begin = _begin(self.entries) or "all paired modules agree"
        return f"{verdict}, and {begin}: pair more modules to narrow it down{others}"

    def _gradient_summary(self) -> str:
        fault = self.first_gradient_fault
        if fault is None:
            first = "no paired module is the first to differ: pair more of them"
            return f"outputs agree and gradients differ, but {first}"
        gradients = {"input": fault.input_gradient, **fault.parameters}
        name, worst = next((name, each) for name, each in gradients.items() if differs(each))
        assert worst is not None
        return (
            f"{fault.title}: outputs agree, and so does the gradient of its output; the gradient"
            f" of its {name} differs, {in_words(worst)}"
        )

    def own_difference(self, entry: Entry) -> str:
        """Return the words for one of ``faults``."""
        if entry.lower and entry.output is not None:
            return (
                f"computes in {entry.narrow} in the {entry.lower} model only, and its output"
                f" differs by {entry.output.narrow.max_abs:.3g} in float32"
            )
        assert entry.own is not None
        return _own(entry.own, entry.own_place)

    def _others(self, first: Entry | None) -> str:
        """Return the number of modules that differ by themselves besides the first one."""
        others = [entry for entry in self.faults if first is None or entry.ours != first.ours]
        verb = "module differs by itself" if len(others) == 1 else "modules differ by themselves"
        text = f"; {len(others)} {'other ' if first else ''}{verb}" if others else ""
        return text + ("; so does code outside of them" if first and self._outside else "")

    def _inside(self, fault: Entry) -> str:
        """Return the two parts of a faulty module between which the difference begins."""
        inner = [entry for entry in self.entries if entry.is_inside(fault)]
        begin = _begin(inner, f"{fault.ours}.")
        if begin is None:
            return "; all its paired parts agree" if inner else ""
        return f"; in it, {begin}"

    def lines(self) -> Iterator[str]:
        """Return a table of at most 100 columns, then the verdict."""
        yield f"{'':<64}{self.result.wide.dtype:>9}{self.dtype:>10}"
        yield (
            f"{'module':<40}{'input':>8}{'output':>8}{'grads':>8}{'× floor':>9}"
            f"{'max abs':>10}{'× floor':>8}{'ulps':>7}"
        )
        faults = self.first_fault, self.first_gradient_fault
        for entry in self.entries:
            yield from _rows(entry, "<" if any(entry is fault for fault in faults) else " ")
        for name, each in self.results.items():
            title = f"result {name}" if len(self.results) > 1 else "result"
            yield f"{title:<48}{_verdict(each):>8}{'':>8}{_figures(each)}"
        yield from self._below_the_table()
        if self.agrees:
            yield from self.notes
        yield self.summary()

    def _below_the_table(self) -> Iterator[str]:
        about = [(f"{e.narrow} inside", e.ours) for e in self.entries if e.narrow]
        about += [(f"outputs {e.layout}", e.ours) for e in self.entries if e.layout]
        for words in dict.fromkeys(words for words, _ in about):
            names = dict.fromkeys(name for each, name in about if each == words)
            yield from wrapped(f"{words}: {', '.join(names)}")
        if self.coverage is not None:
            counts = [] if self.agrees else [str(self.coverage)]
            yield from wrapped("; ".join((*counts, *self.coverage.names())))
        own = [f"  {entry.title}: {self.own_difference(entry)}" for entry in self.faults]
        if self.own_result is not None and self._outside:
            own.append(f"  outside of paired modules: {_own(*self.own_result)}")
        if len(own) > 1:
            yield f"{len(own)} parts differ by themselves:"
            for text in own:
                yield from wrapped(text)

    def to_json(self) -> str:
        """Return the whole report; NaN and infinities become text."""
        return json.dumps(self.to_data(), indent=1)

    def to_page(self, title: str) -> str:
        """Return one self-contained HTML page: a map of modules, coloured by their difference."""
        template = resources.files(__name__.rpartition(".")[0]).joinpath("page.html")
        text = template.read_text(encoding="utf-8")
        return webpage.render(text, self.to_data() | {"title": title})

    def to_data(self) -> dict[str, Any]:
        """Return the whole report for JSON."""
        fault = self.first_fault or self.first_gradient_fault
        return {
            "agrees": self.agrees,
            "summary": self.summary(),
            "first_fault": fault.title if fault else None,
            "dtype": self.dtype,
            "about": self.about,
            "coverage": self.coverage.to_data() if self.coverage else None,
            "notes": list(self.notes),
            "faults": [entry.title for entry in self.faults],
            "result": self.result.to_data(),
            "results": {name: each.to_data() for name, each in self.results.items()},
            "own_result": _own_data(*self.own_result) if self.own_result else None,
            "modules": [_entry_data(entry, first=entry is fault) for entry in self.entries],
        }


def _entry_data(entry: Entry, *, first: bool) -> dict[str, Any]:
    names = "ours theirs call faulty faulty_backward note narrow mask ids layout".split()
    data = {name: getattr(entry, name) for name in names} | {"first": first}
    if entry.own is not None:
        data["own"] = _own_data(entry.own, entry.own_place)
    for name in ("input", "output", "input_gradient", "output_gradient"):
        if (measurement := getattr(entry, name)) is not None:
            data[name] = measurement.to_data()
    parameters = {name: value.to_data() for name, value in entry.parameters.items()}
    return data | {"parameters": parameters}


def _own_data(measurement: Measurement, place: str) -> dict[str, Any]:
    return measurement.to_data() | {"place": place}


def _verdict(measurement: Measurement | None) -> str:
    if measurement is None:
        return "-"
    return "agrees" if measurement.agrees else "DIFFERS"


def multiple(value: float) -> str:
    """Return a multiple of rounding as text."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else "inf"
    return f"{value:.1f}×" if value < 1000 else f"{value:.0e}×"


def in_words(measurement: Measurement) -> str:
    """Return the words for a difference, with its largest element."""
    wide = measurement.wide
    at = f", at ({', '.join(map(str, wide.where))})" if wide.where else ""
    nan = f"; NaN: {wide.nan_ours} here, {wide.nan_theirs} there"
    nan = nan if wide.nan_ours != wide.nan_theirs else ""
    return (
        f"by {wide.max_abs:.3g} in {wide.dtype}, {multiple(measurement.times)} rounding{at}:"
        f" {wide.ours:.6g} here, {wide.theirs:.6g} there{nan}"
    )


def _own(measurement: Measurement, place: str) -> str:
    where = f"the input of {place}" if place else "the output"
    return f"on the other model's arrays {where} differs, {in_words(measurement)}"


def wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, 100, subsequent_indent="    ", break_on_hyphens=False)


def _rows(entry: Entry, mark: str) -> Iterator[str]:
    name = entry.ours + (f" #{entry.call + 1}" if entry.call else "")
    name = name if len(name) < 40 else "…" + name[-38:]
    if entry.note:
        for line in textwrap.wrap(entry.note, 58):
            yield f"{name:<40}  {line}"
            name = ""
        return
    columns = entry.input, entry.output, entry.gradients
    verdicts = "".join(f"{_verdict(measurement):>8}" for measurement in columns)
    yield f"{name:<40}{verdicts}{_figures(entry.output)} {mark}".rstrip()


def _figures(measurement: Measurement | None) -> str:
    if measurement is None:
        return ""
    narrow = measurement.narrow
    ulps = f"{narrow.ulps:.0f}" if narrow.ulps < 1e5 else f"{narrow.ulps:.0e}"
    return (
        f"{multiple(measurement.times):>9}{narrow.max_abs:>10.2g}"
        f"{multiple(measurement.narrow_times):>8}{ulps:>7}"
    )


def _begin(entries: Sequence[Entry], prefix: str = "") -> str | None:
    """Return the place where a difference begins, between two modules; None if no input differs."""
    differing = next((entry for entry in entries if differs(entry.input)), None)
    if differing is None:
        return None
    before = [
        entry.ours.removeprefix(prefix)
        for entry in entries[: entries.index(differing)]
        if entry.output is not None and entry.output.agrees
    ]
    after = f" after {before[-1]}" if before else ""
    return f"the input of {differing.ours.removeprefix(prefix)} is the first that differs{after}"
