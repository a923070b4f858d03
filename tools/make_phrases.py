"""Make the built-in task: English phrases and their German, French and Spanish forms, from Unicode
CLDR through Babel.

Run ``python -m tools.make_phrases [--output FILE]``. The same Babel gives the same
text: every draw comes from one seeded generator, and nothing depends on the clock or on hash order.
Needs Babel; nothing else in the package imports this module.

A template draws its values (a date, an amount, a few names) and returns how to write them in a
locale. Written in English they are the source, written in the target locale the target, so the two
sides agree by construction.
"""

import argparse
import datetime
import lzma
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from random import Random

import babel
from babel import Locale, dates, lists, numbers
from babel.core import get_cldr_version

SEED = 20240305
TARGETS = ("de", "fr", "es")
VALID_PAIRS = TEST_PAIRS = 1_000
COMMON = 5  # the fewest pairs of a language that a word of its valid and test pairs occurs in
DESTINATION = Path(__file__).parents[1] / "jax_transformer/data/phrases.tsv.xz"

Write = Callable[[Locale], str]
Template = Callable[
    ..., Write
]  # called with the generator, then with its row's arguments in TEMPLATES

# Few names, so that each is seen many times: a name met only in the test would measure memory, not
# translation.
TERRITORIES = """
    DE AT CH FR ES IT PT BE NL DK SE NO FI PL GR IE TR JP CN IN BR MX CA AU EG MA CL PE CU KE HU UA
    IS VN AR CO
""".split()
LANGUAGES = "de fr es it en pt nl da sv no fi pl el tr ja zh ar ru cs hu ro uk ko hi".split()
CURRENCIES = "USD EUR GBP JPY CHF CAD AUD SEK PLN INR MXN BRL".split()
DURATIONS = """
    duration-second duration-minute duration-hour duration-day duration-week duration-month
    duration-year
""".split()
MEASURES = """
    length-kilometer length-meter length-centimeter length-millimeter length-mile length-foot
    mass-kilogram mass-gram mass-pound temperature-celsius temperature-fahrenheit volume-liter
    volume-milliliter speed-kilometer-per-hour speed-meter-per-second speed-mile-per-hour
    area-square-meter area-square-kilometer area-hectare digital-megabyte digital-gigabyte
    power-watt power-kilowatt energy-kilowatt-hour
""".split()

FIRST_DAY, LAST_DAY = datetime.date(1990, 1, 1), datetime.date(2039, 12, 31)

# "May" is its own abbreviation, so "May 5, 2024" is long and medium at once: it stays with the long
# form, and medium dates leave it out.
YEAR = range(1, 13)
WITHOUT_MAY = [month for month in YEAR if month != 5]

# CLDR's minimumGroupingDigits, which Babel does not read: Spanish writes 1234 but 12.345.
GROUPED_FROM = {"es": 10_000}


def draw_date(rng: Random, months: Sequence[int] = YEAR) -> datetime.date:
    while True:
        day = FIRST_DAY + datetime.timedelta(days=rng.randrange((LAST_DAY - FIRST_DAY).days + 1))
        if day.month in months:
            return day


def draw_time(rng: Random, *, seconds: bool = False) -> datetime.time:
    return datetime.time(rng.randrange(24), rng.randrange(60), rng.randrange(60) if seconds else 0)


def draw_integer(rng: Random, digits: int) -> Decimal:
    """1 every tenth time, so that singulars are seen; else of 1 to ``digits`` digits, each count as
    likely as the next.
    """
    if rng.random() < 0.1:
        return Decimal(1)
    count = rng.randrange(1, digits + 1)
    return Decimal(rng.randrange(10 ** (count - 1), 10**count))


def draw_fraction(rng: Random, digits: int, decimals: int) -> Decimal:
    """``draw_integer`` or 0, with 1 to ``decimals`` decimal places, of which the last is not 0: no
    locale would write it.
    """
    integer = Decimal(0) if rng.random() < 0.1 else draw_integer(rng, digits)
    scale = rng.randrange(1, decimals + 1)
    tail = rng.randrange(10 ** (scale - 1)) * 10 + rng.randrange(1, 10)
    return integer + Decimal(tail).scaleb(-scale)


def in_groups(value: Decimal, locale: Locale) -> bool:
    return value >= GROUPED_FROM.get(locale.language, 1_000)


def write_counted(patterns: Mapping[str, str], value: Decimal, locale: Locale) -> str:
    """Fill in the pattern of the value's plural form; one that CLDR leaves out is ``other`` (UTS
    35), where Babel writes ``1 horas``.
    """
    pattern = patterns.get(locale.plural_form(value)) or patterns["other"]
    return pattern.format(
        numbers.format_decimal(value, locale=locale, group_separator=in_groups(value, locale))
    )


def write_unit(value: Decimal, unit: str, length: str, locale: Locale) -> str:
    return write_counted(locale._data["unit_patterns"][unit][length], value, locale)


def write_list(items: Sequence[str], style: str, locale: Locale) -> str:
    """``format_list``, with the Spanish change of sound that CLDR leaves to the program: "y" is "e"
    before i, "o" is "u" before o.
    """
    text = lists.format_list(items, style, locale)
    if locale.language == "es":
        text = re.sub(r" y (?=i|hi(?![ae]))", " e ", text, flags=re.IGNORECASE)
        text = re.sub(r" o (?=h?o)", " u ", text, flags=re.IGNORECASE)
    return text


def clock(skeleton: str, locale: Locale) -> str:
    """The skeleton with ``j`` replaced by the locale's hours: 12 in English, 24 in the targets."""
    return skeleton.replace("j", "h" if locale.language == "en" else "H")


def date(rng: Random, style: str, months: Sequence[int] = YEAR) -> Write:
    day = draw_date(rng, months)
    return lambda locale: dates.format_date(day, style, locale)


def date_part(rng: Random, skeleton: str) -> Write:
    moment = datetime.datetime.combine(draw_date(rng), draw_time(rng))
    return lambda locale: dates.format_skeleton(clock(skeleton, locale), moment, locale=locale)


def time(rng: Random, style: str) -> Write:
    moment = draw_time(rng, seconds=style == "medium")
    return lambda locale: dates.format_time(moment, style, locale=locale)


def date_and_time(rng: Random, style: str, months: Sequence[int] = YEAR) -> Write:
    day, moment = draw_date(rng, months), draw_time(rng)

    def write(locale: Locale) -> str:
        joined = dates.get_datetime_format(style, locale=locale)
        return joined.format(
            dates.format_time(moment, "short", locale=locale), dates.format_date(day, style, locale)
        )

    return write


def day_interval(rng: Random, skeleton: str) -> Write:
    """Up to 40 days within one year, so within one month or from one to the next."""
    while True:
        start = draw_date(rng)
        end = start + datetime.timedelta(days=rng.randrange(1, 41))
        if start.year == end.year:
            return lambda locale: dates.format_interval(start, end, skeleton, locale=locale)


def month_interval(rng: Random) -> Write:
    year, month = draw_date(rng).year, rng.randrange(1, 12)
    start, end = datetime.date(year, month, 1), datetime.date(year, rng.randrange(month + 1, 13), 1)
    return lambda locale: dates.format_interval(start, end, "yMMM", locale=locale)


def time_interval(rng: Random) -> Write:
    start, end = sorted((draw_time(rng), draw_time(rng)))
    return lambda locale: dates.format_interval(start, end, clock("jm", locale), locale=locale)


def quantity(rng: Random, units: Sequence[str], length: str) -> Write:
    unit, value = (
        rng.choice(units),
        draw_fraction(rng, 3, 1) if rng.random() < 0.3 else draw_integer(rng, 5),
    )
    return lambda locale: write_unit(value, unit, length, locale)


def two_durations(rng: Random) -> Write:
    """A whole number of one unit and of the next smaller one."""
    larger = rng.randrange(1, len(DURATIONS))
    parts = [
        (draw_integer(rng, 2), DURATIONS[larger]),
        (draw_integer(rng, 2), DURATIONS[larger - 1]),
    ]
    return lambda locale: write_list(
        [write_unit(value, unit, "long", locale) for value, unit in parts], "standard", locale
    )


def relative_time(rng: Random) -> Write:
    field, direction, value = (
        rng.choice(DURATIONS).removeprefix("duration-"),
        rng.choice(("future", "past")),
        draw_integer(rng, 3),
    )
    return lambda locale: write_counted(
        locale._data["date_fields"][field][direction], value, locale
    )


def price(rng: Random) -> Write:
    currency, hundredths = (
        rng.choice(CURRENCIES),
        Decimal(rng.randrange(1, 10 ** rng.randrange(3, 7))),
    )
    value = hundredths if currency == "JPY" else hundredths.scaleb(-2)

    def write(locale: Locale) -> str:
        text = numbers.format_currency(
            value, currency, locale=locale, group_separator=in_groups(value, locale)
        )
        return re.sub(
            r"(?<=[A-Z])(?=\d)", " ", text
        )  # CLDR's currencySpacing, which Babel does not read: "CHF 5", yet "A$5"

    return write


def named_price(rng: Random) -> Write:
    currency, value = rng.choice(CURRENCIES), draw_integer(rng, 4)
    name_format = {"format": "#,##0", "currency_digits": False, "format_type": "name"}
    return lambda locale: numbers.format_currency(
        value, currency, locale=locale, group_separator=in_groups(value, locale), **name_format
    )


def decimal(rng: Random) -> Write:
    value = draw_integer(rng, 6) if rng.random() < 0.3 else draw_fraction(rng, 4, 2)
    return lambda locale: numbers.format_decimal(
        value, locale=locale, group_separator=in_groups(value, locale)
    )


def percent(rng: Random) -> Write:
    value = (draw_integer(rng, 3) if rng.random() < 0.3 else draw_fraction(rng, 2, 2)).scaleb(-2)
    return lambda locale: numbers.format_percent(
        value, locale.percent_formats[None].pattern.replace("0", "0.##"), locale=locale
    )


def compact(rng: Random) -> Write:
    tenths = Decimal(rng.randrange(10)).scaleb(-1) if rng.random() < 0.5 else 0
    value = (draw_integer(rng, 3) + tenths).scaleb(rng.choice((3, 6, 9)))
    return lambda locale: numbers.format_compact_decimal(
        value, format_type="long", locale=locale, fraction_digits=1
    )


def names(rng: Random, table: Callable[[Locale], Mapping], keys: Sequence) -> Write:
    """One to four different names, joined by "and" or "or"."""
    count, style = rng.choice((1, 2, 2, 3, 3, 4)), rng.choice(("standard", "or"))
    chosen = list(keys)
    rng.shuffle(chosen)
    return lambda locale: write_list([table(locale)[key] for key in chosen[:count]], style, locale)


def language_of_territory(rng: Random) -> Write:
    language, territory = rng.choice(LANGUAGES), rng.choice(TERRITORIES)
    return lambda locale: (
        f"{locale.languages[language]} ({locale.territories[territory]})"
    )  # CLDR's localePattern in all four


# name: (pairs over all languages, template, its arguments). The sizes favour short phrases, and
# stay below the number of forms there are.
TEMPLATES: dict[str, tuple] = {
    "full date": (3600, date, "full"),
    "long date": (3600, date, "long"),
    "medium date": (2400, date, "medium", WITHOUT_MAY),
    "short date": (2400, date, "short"),
    "month and day": (540, date_part, "MMMMd"),
    "weekday and day": (1500, date_part, "MMMEd"),
    "month and year": (900, date_part, "yMMMM"),
    "quarter": (300, date_part, "yQQQQ"),
    "short quarter": (300, date_part, "yQQQ"),
    "time": (1500, time, "short"),
    "time with seconds": (1200, time, "medium"),
    "weekday and time": (1500, date_part, "Ejm"),
    "full date and time": (1200, date_and_time, "full"),
    "long date and time": (1800, date_and_time, "long"),
    "medium date and time": (1800, date_and_time, "medium", WITHOUT_MAY),
    "short date and time": (1200, date_and_time, "short"),
    "day interval": (2700, day_interval, "yMMMd"),
    "day interval without year": (1500, day_interval, "MMMd"),
    "month interval": (900, month_interval),
    "time interval": (2400, time_interval),
    "measure": (3300, quantity, MEASURES, "long"),
    "short measure": (3300, quantity, MEASURES, "short"),
    "duration": (1500, quantity, DURATIONS, "long"),
    "short duration": (600, quantity, DURATIONS[:3], "short"),
    "two durations": (1800, two_durations),
    "relative time": (1800, relative_time),
    "price": (3000, price),
    "named price": (2400, named_price),
    "decimal": (1500, decimal),
    "percent": (1500, percent),
    "compact number": (1500, compact),
    "territories": (2100, names, lambda locale: locale.territories, TERRITORIES),
    "languages": (1500, names, lambda locale: locale.languages, LANGUAGES),
    "weekdays": (780, names, lambda locale: locale.days["format"]["wide"], range(7)),
    "months": (780, names, lambda locale: locale.months["format"]["wide"], YEAR),
    "language of a territory": (1500, language_of_territory),
}


def normalise(text: str) -> str:
    """NFC, with CLDR's no-break and thin spaces made ordinary: nobody types them."""
    return unicodedata.normalize("NFC", re.sub("[\u00a0\u2009\u202f]", " ", text))


def draw_pairs(
    rng: Random, targets: dict[str, set[str]], count: int, template: Template, *arguments: object
) -> None:
    """Add to ``targets`` (source to its targets) until ``count`` new sources, a third for each
    language, are there.
    """
    english = Locale("en")
    for language in TARGETS:
        locale, goal = Locale(language), len(targets) + count // len(TARGETS)
        while len(targets) < goal:
            write = template(rng, *arguments)
            targets.setdefault(f"<2{language}> {normalise(write(english))}", set()).add(
                normalise(write(locale))
            )


def words(source: str, target: str) -> set[str]:
    """Each word of both sides with the language, as in ``<2de> March`` and ``<2de> März``; digits
    and signs are no words.
    """
    return {f"{source[:5]} {word}" for word in re.findall(r"[^\W\d_]+", source[5:] + " " + target)}


def split_pairs(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """The split of each pair, in order.

    One with a rare word, such as the only "1 megabyte", is for training: nothing else teaches it.
    """
    counts = Counter(word for pair in pairs for word in words(*pair))
    held_out = iter(["test"] * TEST_PAIRS + ["valid"] * VALID_PAIRS)
    return [
        next(held_out, "train") if all(counts[word] >= COMMON for word in words(*pair)) else "train"
        for pair in pairs
    ]


def make_text() -> str:
    """The data file: the header, then a line ``split<TAB>source<TAB>target`` for each pair."""
    rng = Random(SEED)
    targets: dict[str, set[str]] = {}
    for count, template, *arguments in TEMPLATES.values():
        draw_pairs(rng, targets, count, template, *arguments)
    pairs = [
        (source, forms.pop()) for source, forms in targets.items() if len(forms) == 1
    ]  # a source with two targets teaches nothing
    rng.shuffle(pairs)
    header = (
        "# English phrases in German, French and Spanish. "
        "Made by tools/make_phrases.py; do not edit.\n"
        f"# Data from Unicode CLDR version {get_cldr_version()} "
        f"via Babel version {babel.__version__}.\n"
        "# Licence: Unicode License v3 (SPDX Unicode-3.0), Copyright Unicode, Inc.; "
        "its text is in PHRASES_LICENSE.\n"
    )
    return header + "".join(
        f"{split}\t{source}\t{target}\n"
        for split, (source, target) in zip(split_pairs(pairs), pairs, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.make_phrases", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=DESTINATION,
        help="the .xz file to write (default: %(default)s)",
    )
    output = parser.parse_args().output
    output.write_bytes(
        lzma.compress(
            make_text().encode(),
            format=lzma.FORMAT_XZ,
            check=lzma.CHECK_CRC64,
            preset=9 | lzma.PRESET_EXTREME,
        )
    )


if __name__ == "__main__":
    main()
