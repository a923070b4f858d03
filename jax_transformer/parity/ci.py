"""Reports for continuous integration: JUnit XML, and annotations of GitHub Actions."""

import re
from collections.abc import Iterator, Sequence
from xml.etree import ElementTree

from jax_transformer.parity.report import Report


def junit(reports: Sequence[tuple[str, Report]]) -> str:
    """Return titled reports as JUnit XML: a suite for each, a case for each module, which fails if
    it differs first or by itself, and for the result.
    """
    suites = ElementTree.Element("testsuites")
    for title, report in reports:
        failures = dict(_failures(report))
        names = [*dict.fromkeys(entry.title for entry in report.entries), "result"]
        counts = {"tests": str(len(names)), "failures": str(len(failures))}
        suite = ElementTree.SubElement(suites, "testsuite", {"name": _printable(title), **counts})
        if report.coverage is not None:
            coverage = {"name": "coverage", "value": str(report.coverage)}
            properties = ElementTree.SubElement(suite, "properties")
            ElementTree.SubElement(properties, "property", coverage)
        for name in names:
            labels = {"classname": "parity", "name": _printable(name)}
            case = ElementTree.SubElement(suite, "testcase", labels)
            if name in failures:
                message = _printable(failures[name])
                ElementTree.SubElement(case, "failure", message=message).text = message
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, "unicode") + "\n"


def _failures(report: Report) -> Iterator[tuple[str, str]]:
    """Return the names of the cases that fail, with a message for each."""
    if report.agrees:
        return
    first = report.first_fault or report.first_gradient_fault
    yield "result", report.summary()
    if first is not None:
        yield first.title, report.summary()
    for entry in report.faults:
        if first is None or entry.ours != first.ours:
            yield entry.title, report.own_difference(entry)


def annotation(title: str, message: str) -> str:
    """Return the line that makes GitHub Actions show an error in a pull request."""
    title = _escaped(title).replace(":", "%3A").replace(",", "%2C")
    return f"::error title={title}::{_escaped(message)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _printable(text: str) -> str:
    """Return the text without the characters that XML cannot hold."""
    return re.sub("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "�", text)
