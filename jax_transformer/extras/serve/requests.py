"""Limits of the service, and a translation request: JSON, checked by them and the known options."""

import enum
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, cast

from jax_transformer.errors import ConfigError, check_numbers, nearest
from jax_transformer.generate.generation_config import ALIASES, Constraints, GenerationConfig
from jax_transformer.storage.untrusted import shown

OPTIONS = frozenset(
    """num_beams num_return_sequences max_new_tokens length_penalty beam_scorer early_stopping
    no_repeat_ngram_size encoder_no_repeat_ngram_size repetition_penalty min_new_tokens
    do_sample temperature top_k top_p seed""".split()
)
"""The decoding options of a request, which the command ``translate`` has as well."""
NAMES = OPTIONS | {name for name, field in ALIASES.items() if field in OPTIONS}
"""Every name of an option, the flags of ``translate`` included."""
ATTENTION_HYPOTHESES = 64
"""Hypotheses whose attention a request may ask for, at most: each is a forward pass of its own."""
_FIELDS = ("text", "attention", "timeout")
_HINTS = {**typing.get_type_hints(GenerationConfig), **typing.get_type_hints(Constraints)}
_LARGEST = 2**31 - 1
_KINDS: dict[type, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    float: (int | float, "a number"),
    int: (int, "an integer"),
}


class RequestError(Exception):
    """A request that is not answered with a translation; the message goes to the client."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.headers = status, message, dict(headers or {})


@dataclass(frozen=True)
class Limits:
    """Bounds on what one request, and all requests together, can ask for."""

    queue_size: int = cast(int, None)
    """Lines that wait for a batch, at most; requests beyond are answered 429 (default: 1024, or
    --max-lines if that is more)."""
    timeout: float = 30.0
    """Seconds until a request is answered 504; a request can ask for less."""
    max_lines: int = cast(int, None)
    """Lines of a request, at most (default: 256, or --queue-size if that is less)."""
    max_characters: int = 100_000
    """Characters of a request's lines together, at most."""
    max_body_bytes: int = 1_000_000
    """Bytes of a request's body, at most."""
    max_beam: int = 16
    """Beam size that a request may ask for, at most."""
    max_configs: int = 16
    """Sets of decoding options to compile programs for, besides those compiled at the start."""
    batch_rows: int = 64
    """Lines of a batch, at most."""
    batch_wait: float = 0.005
    """Seconds that a line waits for others to share its batch while the device is free."""

    def __post_init__(self) -> None:
        lines, queue = self.max_lines, self.queue_size
        if queue is None:
            object.__setattr__(self, "queue_size", max(1024, lines or 0))
        if lines is None:
            object.__setattr__(self, "max_lines", min(256, self.queue_size))
        check = partial(check_numbers, self, "")
        counts = "queue_size max_lines max_characters max_body_bytes max_beam batch_rows"
        check(counts, "be at least 1 and finite", lambda x: 1 <= x < math.inf)
        check("timeout", "be above 0 and finite", lambda x: 0 < x < math.inf)
        check("max_configs batch_wait", "be at least 0 and finite", lambda x: 0 <= x < math.inf)
        if self.max_lines > self.queue_size:
            raise ConfigError(
                f"max_lines={self.max_lines} is over queue_size={self.queue_size}: such a request "
                "would never fit the queue; lower --max-lines or raise --queue-size"
            )


@dataclass(frozen=True)
class TranslationRequest:
    """A request that is well-formed and within the limits."""

    lines: tuple[str, ...]
    config: GenerationConfig
    attention: bool
    """Return the attention weights of each hypothesis."""
    timeout: float
    """Seconds until the request is answered 504."""


def parse(body: bytes, defaults: GenerationConfig, limits: Limits) -> TranslationRequest:
    """Return the request in a body, with the server's ``defaults`` for options that it leaves out.

    Raises RequestError: 400 for a body that is not a JSON object, 413 for one over a limit, 422 for
    unknown fields and for values that are wrong.
    """
    fields = _json_object(body)
    known = sorted({*_FIELDS, *NAMES})
    if unknown := [name for name in fields if name not in known]:
        names = ", ".join(f"{shown(name)}{nearest(name[:80], known)}" for name in unknown[:12])
        raise RequestError(422, f"unknown field {names}")
    parsed = TranslationRequest(
        _lines(fields, limits),
        _config({name: fields[name] for name in fields if name in NAMES}, defaults, limits),
        _typed("attention", fields.get("attention", False), bool),
        _typed("timeout", fields.get("timeout", limits.timeout), float),
    )
    if not 0 < (timeout := parsed.timeout) <= limits.timeout:
        must = f"must be above 0 and at most this server's {limits.timeout}"
        raise RequestError(422, f"timeout={timeout} {must}")
    hypotheses = len(parsed.lines) * parsed.config.num_return_sequences
    if parsed.attention and hypotheses > (most := ATTENTION_HYPOTHESES):
        message = f"attention of {hypotheses} hypotheses is over the maximum of {most}"
        raise RequestError(413, message)
    return parsed


def _json_object(body: bytes) -> dict[str, Any]:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) < len(items):
            raise ValueError("a key appears twice")
        return result

    def constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        fields = json.loads(body, object_pairs_hook=pairs, parse_constant=constant)
    except RecursionError:
        raise RequestError(400, "the body is not JSON: nested too deeply") from None
    except ValueError as error:
        raise RequestError(400, f"the body is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise RequestError(400, 'the body is not a JSON object such as {"text": "A line."}')
    return fields


def _lines(fields: Mapping[str, Any], limits: Limits) -> tuple[str, ...]:
    text = fields.get("text")
    lines = [text] if isinstance(text, str) else text
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise RequestError(422, "text must be a string or a list of strings")
    if not lines:
        raise RequestError(422, "text is an empty list")
    count = sum(line.removesuffix("\n").count("\n") + 1 for line in lines)
    if count > limits.max_lines:
        raise RequestError(
            413, f"{count} lines are over this server's maximum of {limits.max_lines}"
        )
    characters = sum(map(len, lines))
    if characters > limits.max_characters:
        most = limits.max_characters
        raise RequestError(413, f"{characters} characters are over this server's maximum of {most}")
    for number, line in enumerate(lines, start=1):
        try:
            line.encode()
        except UnicodeEncodeError:
            raise RequestError(422, f"line {number} has half of a surrogate pair") from None
    return tuple(lines)


def _config(
    options: Mapping[str, Any], defaults: GenerationConfig, limits: Limits
) -> GenerationConfig:
    values = {}
    for name, value in options.items():
        hint = _HINTS[ALIASES.get(name, name)]
        if isinstance(hint, types.UnionType):
            (hint,) = {*typing.get_args(hint)} - {type(None)}
        if value is not None:  # null is the server's default
            values[name] = _typed(name, value, hint)
    try:
        config = defaults.overridden(values)
    except ConfigError as error:
        raise RequestError(422, str(error)) from None
    if config.num_beams > limits.max_beam:
        raise RequestError(
            422, f"num_beams={config.num_beams} is over this server's maximum of {limits.max_beam}"
        )
    return config


def _typed(name: str, value: Any, kind: type[Any]) -> Any:
    if issubclass(kind, enum.Enum):
        choices = [str(member.value) for member in kind]
        if value not in choices:
            raise RequestError(422, f"{name} must be one of {', '.join(choices)}")
        return kind(value)
    accepted, noun = _KINDS[kind]
    if not isinstance(value, accepted) or isinstance(value, bool) != (kind is bool):
        raise RequestError(422, f"{name} must be {noun}")
    if not abs(value) <= _LARGEST:
        raise RequestError(422, f"{name} must be between -{_LARGEST} and {_LARGEST}")
    return kind(value)
