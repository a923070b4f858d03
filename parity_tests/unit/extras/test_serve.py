"""The HTTP service: same translations as the translator, and everything bounded."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from starlette import testclient

from jax_transformer.cli import translate
from jax_transformer.errors import ConfigError
from jax_transformer.extras.serve import app, requests
from jax_transformer.extras.serve.app import Service
from jax_transformer.extras.serve.command import ServeOptions
from jax_transformer.extras.serve.engine import EncodedLine, Engine, _fail, _Waiting
from jax_transformer.generate import decoding, prepare
from jax_transformer.generate.generation_config import ALIASES, GenerationConfig
from jax_transformer.inference import attention_page
from jax_transformer.inference.translation import Hypothesis, Translator
from parity_tests.unit import helpers, services


@pytest.fixture(scope="module")
def translator() -> Translator:
    return services.translator()


@pytest.fixture(scope="module")
def served(translator) -> Iterator[tuple[Service, Any]]:
    with services.serving(translator) as both:
        yield both


@pytest.fixture
def client(served) -> Any:
    return served[1]


# Translations


OPTIONS = [{}, {"beam": 4, "n_best": 3}, {"num_beams": 4, "length_penalty": 2.0}]
OPTIONS += [{"sample": True, "temperature": 1.5, "seed": 7}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_translations_are_the_translator_s(client, translator, options):
    answer = client.post("/translate", json={"text": services.LINES, **options})
    assert answer.status_code == 200, answer.text
    translations = answer.json()["translations"]
    expected = translator.hypotheses(services.LINES, **options)
    assert len({each[0].text for each in expected}) > 4
    for translation, several in zip(translations, expected, strict=True):
        assert [each["text"] for each in translation["hypotheses"]] == [h.text for h in several]
        assert translation["text"] == several[0].text
        scores = [each["score"] for each in translation["hypotheses"]]
        if "sample" in options or not options:
            assert scores == [None] * len(several)
        else:
            np.testing.assert_allclose(scores, [h.score for h in several], rtol=1e-6)


def test_one_string_is_one_line_and_one_of_spaces_is_empty(client, translator):
    for text, expected in (("eight nine", translator(["eight nine"])[0]), (" \t", "")):
        (translation,) = client.post("/translate", json={"text": text}).json()["translations"]
        assert translation == {"text": expected, "hypotheses": [{"text": expected, "score": None}]}


def test_the_options_are_those_of_the_command():
    flags = {
        field.name
        for group in (translate.SearchOptions, translate.SamplingOptions)
        for field in dataclasses.fields(group)
    } | {"n_best"}
    assert {ALIASES.get(flag, flag) for flag in flags} == requests.OPTIONS
    assert flags <= requests.NAMES


def test_attention_comes_if_asked_for(client, translator):
    plain, with_maps = (
        client.post("/translate", json={"text": "one two", "beam": 4, "n_best": 2, **more}).json()
        for more in ({}, {"attention": True})
    )
    (before,), (after,) = plain["translations"], with_maps["translations"]
    for without, hypothesis in zip(before["hypotheses"], after["hypotheses"], strict=True):
        maps = hypothesis.pop("attention")
        assert hypothesis == without
        assert maps.keys() == {"cross", "encoder", "decoder"}
        assert maps["cross"]["layers"] == 1 and "".join(maps["cross"]["columns"]).startswith("one")


def test_each_line_of_a_batch_has_the_maps_that_it_asks_for(served):
    engine = served[0].engine
    config = engine.translator.generation_config
    asked = {"one": False, "two": True, "six": False}
    lines = [engine.encode([text], config, wish)[0] for text, wish in asked.items()]
    first, (_, maps), last = engine.translate(lines)
    assert "".join(maps[0]["cross"]["columns"]).startswith("two") and not first.maps + last.maps


def test_attention_compiles_nothing_after_the_start(served, translator):
    before = attention_page._attend._cache_size()
    for line in services.LINES[:2]:
        for length in range(1, 17):
            hypothesis = Hypothesis("", np.arange(length), None)
            attention_page.maps(translator, line, hypothesis)
    assert attention_page._attend._cache_size() == before >= 2


# No mix-up


def test_concurrent_requests_get_their_own_translations(served, translator):
    service, client = served
    lines = [" ".join(words) for words in itertools.permutations(services.WORDS[:5], 3)]
    expected = dict(zip(lines, translator(lines), strict=True))
    expected_beam = dict(zip(lines, translator(lines, beam=4), strict=True))
    assert len(set(expected.values())) > 20 and expected != expected_beam
    before = service.metrics.registry.get_sample_value("jax_transformer_batch_lines_count")

    def ask(number: int) -> int:
        some = [lines[(7 * number + i) % len(lines)] for i in range(1 + number % 3)]
        options = {"beam": 4, "n_best": 1 + number % 4} if number % 2 else {}
        answer = client.post("/translate", json={"text": some, **options})
        if answer.status_code == 429:
            return 0
        texts = [each["text"] for each in answer.json()["translations"]]
        assert texts == [(expected_beam if number % 2 else expected)[line] for line in some]
        return len(some)

    with ThreadPoolExecutor(8) as threads:
        answered = sum(threads.map(ask, range(60)))
    count = service.metrics.registry.get_sample_value("jax_transformer_batch_lines_count") - before
    assert answered > 60 and count < answered / 1.5


def test_requests_of_equal_options_share_batches(served, monkeypatch):
    service, client = served
    with ThreadPoolExecutor(8) as threads, services.device_busy(service, monkeypatch) as batches:
        futures = [threads.submit(client.post, "/translate", json={"text": "seven"})]
        services.until(lambda: batches)
        for body in (
            {"text": "one", "beam": 4},
            {"text": "two"},
            {"text": ["three", "four"], "beam": 4, "n_best": 3},
            {"text": "five", "beam": 4, "length_penalty": 0},
        ):
            count = service.batcher.queued + (2 if isinstance(body["text"], list) else 1)
            futures.append(threads.submit(client.post, "/translate", json=body))
            services.until(lambda count=count: service.batcher.queued == count)
    assert [each.result().status_code for each in futures] == [200] * 5
    assert batches == [["seven"], ["one", "three", "four"], ["two"], ["five"]]


# Refusals


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "not JSON"),
        (b"\xff", 400, "not JSON"),
        (b"[" * 1500, 400, "nested too deeply"),
        (b'{"text": NaN}', 400, "NaN"),
        (b'{"text": "a", "text": "b"}', 400, "twice"),
        (b'["a"]', 400, "JSON object"),
        ({}, 422, "text must be"),
        ({"text": 3}, 422, "text must be"),
        ({"text": ["a", None]}, 422, "text must be"),
        ({"text": []}, 422, "empty list"),
        (b'{"text": "\\ud800"}', 422, "line 1"),
        ({"text": "a", "beams": 4}, 422, "did you mean 'beam'"),
        ({"text": "a", "forced_bos_token_id": 4}, 422, "unknown field"),
        ({"text": "a", "beam": "4"}, 422, "beam must be an integer"),
        ({"text": "a", "beam": 4.5}, 422, "beam must be an integer"),
        ({"text": "a", "beam": True}, 422, "beam must be an integer"),
        ({"text": "a", "beam": 0}, 422, "num_beams=0"),
        ({"text": "a", "beam": 7}, 422, "maximum of 6"),
        ({"text": "a", "beam": 4, "num_beams": 4}, 422, "given twice"),
        ({"text": "a", "beam": 2, "n_best": 3}, 422, "needs num_beams"),
        ({"text": "a", "beam": 2, "sample": True}, 422, "exclude each other"),
        ({"text": "a", "sample": 1}, 422, "sample must be true or false"),
        ({"text": "a", "sample": True, "seed": 2**64}, 422, "seed must be between"),
        ({"text": "a", "sample": True, "seed": 2**31}, 422, "seed must be between"),
        ({"text": "a", "beam": 4, "length_penalty": "x"}, 422, "length_penalty must be a number"),
        ({"text": "a", "penalty": "x"}, 422, "gnmt, average"),
        ({"text": "a", "max_length": 17}, 422, "max_length=17"),
        ({"text": "a", "max_length": 0}, 422, "max_length=0"),
        ({"text": "a", "sample": True, "top_k": 9999}, 422, "top_k=9999"),
        ({"text": "a", "sample": True, "temperature": 0}, 422, "temperature=0"),
        ({"text": "one " * 20}, 422, "tokens long"),
        ({"text": "a", "timeout": 21}, 422, "at most this server's 20.0"),
        ({"text": "a", "timeout": 0}, 422, "timeout=0"),
        ({"text": ["a"] * 12}, 413, "12 lines"),
        ({"text": ["a\n" * 6, "\n\n", "a\nb\r\n", "", ""]}, 413, "12 lines"),
        ({"text": "a" * 201}, 413, "201 characters"),
        ({"text": ["a" * 101, "b" * 100]}, 413, "201 characters"),
        ({"text": " " * 2000}, 413, "2000 bytes"),
        ({"text": ["a"] * 11, "beam": 6, "n_best": 6, "attention": True}, 413, "64"),
    ],
)
def test_a_wrong_request_is_refused_in_one_line(client, body, status, words):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json; charset=utf-8"}
    answer = client.post("/translate", content=content, headers=headers)
    actual, message = services.status_and_message(answer)
    assert actual == status and words in message, message


def accepted(fields: dict[str, Any], limits: requests.Limits) -> requests.TranslationRequest:
    """The request of a body."""
    try:
        return requests.parse(json.dumps(fields).encode(), GenerationConfig(), limits)
    except requests.RequestError as refusal:
        pytest.fail(refusal.message)


def test_the_limits_of_lines_follow_each_other():
    def limits(**values: int) -> tuple[int, int]:
        result = requests.Limits(**values)
        return result.queue_size, result.max_lines

    assert limits() == (1024, 256)
    sizes = [limits(queue_size=size) for size in (64, 256, 257)]
    assert sizes == [(64, 64), (256, 256), (257, 256)]
    assert [limits(max_lines=n) for n in (1024, 1025)] == [(1024, 1024), (1025, 1025)]
    assert limits(queue_size=8, max_lines=8) == (8, 8)
    message = r"max_lines=9 is over queue_size=8.*--max-lines.*--queue-size"
    with pytest.raises(ConfigError, match=message):
        limits(queue_size=8, max_lines=9)
    texts = ["\n" * 11, "a\n" * 4 + "b", "", *["c"] * 5]  # 11 + 5 + 1 + 5 lines
    assert accepted({"text": texts}, requests.Limits(max_lines=22)).lines == tuple(texts)
    body = json.dumps({"text": texts}).encode()
    with pytest.raises(requests.RequestError, match="22 lines"):
        requests.parse(body, GenerationConfig(), requests.Limits(max_lines=21))


def test_no_default_is_over_the_largest_beam(translator):
    def service(beams: int, most: int, vocabulary: int = 300) -> Service:
        config = GenerationConfig(num_beams=beams)
        wide = Translator(translator.model, translator.tokenizer, config, widths=(8,))
        fields = vars(wide.model.config) | {"target_vocab_size": vocabulary}
        small = helpers.stand_in(type(wide.model.config), **fields)
        wide.model = helpers.stand_in(type(wide.model), config=small)
        return Service(wide, dataclasses.replace(services.LIMITS, max_beam=most))

    with pytest.raises(ConfigError, match=r"num_beams=5 .* max_beam=4: .* --beam .* --max-beam"):
        service(5, 4)
    # A search can have as many beams as half of the vocabulary
    expected = {(5, 5): 5, (1, 5): 4, (1, 3): 3, (1, 1): 1, (1, 5, 7): 3, (1, 5, 8): 4}
    assert {case: service(*case).engine.page_config.num_beams for case in expected} == expected


@pytest.mark.parametrize(
    "host", ["a*b", "*b", "a.example:80", "http://a.example", "*.*", "::1", "*."]
)
def test_hosts_that_no_client_can_name_are_refused(host):
    with pytest.raises(ConfigError, match=re.escape(f"--allowed-hosts {host}: must be a name")):
        ServeOptions("run", allowed_hosts=("[::1]", host))
    ServeOptions("run", allowed_hosts=("[::1]", "*", "*.a-b.example", "127.0.0.1", "my_host"))


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "a" * 200},
        {"text": ["a"] * 11, "timeout": 20.0},
        {"text": "a", "timeout": 20, "beam": None, "n_best": None, "sample": None},
        {"text": ["a"] * 8, "beam": 6, "num_return_sequences": 6, "attention": True},
        {"text": ["a"] * 64, "attention": True},
        {"text": ["a"] * 11, "beam": 6, "attention": True},
    ],
)
def test_what_is_at_a_limit_is_accepted(fields):
    limits = dataclasses.replace(services.LIMITS, queue_size=64, max_lines=64)
    parsed = accepted(fields, limits)
    assert len(parsed.lines) == len(fields["text"]) or parsed.lines == (fields["text"],)
    assert parsed.timeout == 20 and parsed.config.num_beams == (fields.get("beam") or 1)


def test_a_body_at_its_limit_is_read(client):
    headers = {"Content-Type": "Application/JSON"}  # whatever its case
    for size, status in ((2000, 200), (2001, 413)):
        content = b'{"text": "one"' + b" " * (size - 15) + b"}"
        assert client.post("/translate", content=content, headers=headers).status_code == status


@pytest.mark.parametrize("beams", [1, 2])
def test_batches_have_the_fewest_rows_and_the_programs_of_the_start(beams, monkeypatch):
    """For every width, number of lines and number of hypotheses; a wide line has fewer rows."""
    programs = []

    def generate(model, source, config, row_ids):
        programs.append((source.shape, dataclasses.replace(config, **prepare._TRACED)))
        shape = len(source), config.num_return_sequences
        return np.full((*shape, 1), 4, np.int32), np.zeros(shape)

    monkeypatch.setattr(decoding, "generate", generate)
    monkeypatch.setattr(attention_page, "compile", lambda *_: None)
    plain, own = services.translator(), GenerationConfig(num_beams=beams)
    sizes = dict(widths=(4, 8, 16), tokens_per_batch=128)
    translator = Translator(plain.model, plain.tokenizer, own, **sizes)
    engine = Engine(translator, dataclasses.replace(services.LIMITS, batch_rows=11))
    for program in engine.programs():
        program()
    started, page = set(programs), {"beam": engine.page_config.num_beams, "n_best": 2}
    wishes = {}, {"n_best": beams, "length_penalty": 3.0} if beams > 1 else {}, page
    texts = {4: "one", 8: "ABCDE", 16: "ABCDEFGHIJ"}
    for (width, text), wish in itertools.product(texts.items(), wishes):
        config = own.overridden(wish)
        (line,) = engine.encode([text], config, attention=False)
        rows, most = engine.rows(line.group), 128 // config.num_beams // width
        cache = 8 * 128 // config.num_beams // min(16, 2 * width)
        assert (line.group.width, rows[-1]) == (width, min(11, most, cache))
        for count in range(1, rows[-1] + 1):
            programs.clear()
            translations = engine.translate([line] * count)
            assert {len(each.hypotheses) for each in translations} == {config.num_return_sequences}
            (program,) = programs
            assert program in started
            assert program[0] == (min(n for n in rows if n >= count), width)


def test_each_line_has_the_smallest_width_that_fits():
    translator = services.translator(widths=(4, 8, 9))
    engine = Engine(translator, services.LIMITS)
    lines = [" ".join(services.WORDS[:n]) for n in range(1, 7)]
    added = translator.tokenizer.eos_id is not None  # the end token
    encoded = engine.encode(lines, GenerationConfig(), attention=False)
    lengths = [len(line.ids) + added for line in encoded]
    expected = [min(w for w in translator.widths if w >= length) for length in lengths]
    assert [line.group.width for line in encoded] == expected and {*expected} == {4, 8}
    assert {4, 5} <= {*lengths}, lengths


def test_other_methods_and_paths_are_refused(client):
    answer = client.get("/translate")
    assert services.status_and_message(answer)[0] == 405 and answer.headers.get("allow") == "POST"
    for path in ("/nothing", "/../../etc/passwd", "/%2e%2e/config.json", "/alignment.js"):
        assert services.status_and_message(client.get(path))[0] == 404
    # No form or script of another site can send this type without asking
    answer = client.post("/translate", content=b"{}", headers={"Content-Type": "text/plain"})
    assert services.status_and_message(answer)[0] == 415


def test_only_known_hosts_are_answered(translator):
    service = Service(translator, services.LIMITS, allowed_hosts=app.hosts("127.0.0.1"))
    client = testclient.TestClient(service.app, base_url="http://evil.example")
    status, message = services.status_and_message(client.get("/health/live"))
    assert status == 400 and "host" in message
    for host in ("localhost:8000", "[::1]:8000"):
        assert client.get("/metrics", headers={"Host": host}).status_code == 200
    own = app.hosts("127.0.0.1")
    assert own == app.hosts("localhost") == app.hosts("::1") and app.hosts("0.0.0.0") == ("*",)
    for address, url in ((("::", 80, 0, 0), "[::]:80"), (("0.0.0.0", 8), "0.0.0.0:8")):
        bound = mock.Mock(spec=socket.socket, **{"getsockname.return_value": address})
        assert app.url(bound) == f"http://{url}/"


def test_options_that_would_compile_without_end_are_refused(translator):
    engine = Engine(translator, services.LIMITS)
    free = {"num_beams": 4, "length_penalty": 0.1}  # a value that compiles nothing
    for changes in (free, *({"max_new_tokens": n} for n in (5, 6, 5))):
        engine.admit(GenerationConfig().overridden(changes))
    with pytest.raises(requests.RequestError, match="max-configs") as refused:
        engine.admit(GenerationConfig(max_new_tokens=7))
    assert refused.value.status == 422
    engine.forget(GenerationConfig(max_new_tokens=6))
    engine = Engine(translator, dataclasses.replace(services.LIMITS, max_configs=9))
    for changes in ({}, {"seed": 3}, {"temperature": 2.0}, {"seed": 4, "temperature": 0.1}):
        engine.admit(GenerationConfig(do_sample=True, **changes))
    assert len(engine._others) == 1
    for top_p in (0.2, 0.9, 1.0):  # below 1 the probabilities are summed
        engine.admit(GenerationConfig(do_sample=True, top_p=top_p))
    assert len(engine._others) == 2


# Queue, deadline, errors


def test_beyond_the_queue_is_429_and_what_was_accepted_is_answered(served, translator, monkeypatch):
    service, client = served
    with ThreadPoolExecutor(8) as threads, services.device_busy(service, monkeypatch) as batches:
        first = threads.submit(client.post, "/translate", json={"text": "one"})
        services.until(lambda: batches)
        second = threads.submit(client.post, "/translate", json={"text": services.WORDS})
        services.until(lambda: service.batcher.queued == 10)
        assert "\njax_transformer_queued_lines 10.0\n" in client.get("/metrics").text
        refused = client.post("/translate", json={"text": services.WORDS[:3]})
        assert services.status_and_message(refused)[0] == 429
        assert int(refused.headers["retry-after"]) >= 1
        with monkeypatch.context() as patch:
            patch.setattr(service.batcher, "_seconds_per_line", 0.45)
            refused = client.post("/translate", json={"text": services.WORDS[:3]})
            assert refused.headers["retry-after"] == "5"  # 10 lines
        third = threads.submit(client.post, "/translate", json={"text": services.WORDS[:2]})
        services.until(lambda: service.batcher.queued == 12)
    for answer, lines in ((first, ["one"]), (second, services.WORDS), (third, services.WORDS[:2])):
        texts = [each["text"] for each in answer.result().json()["translations"]]
        assert texts == translator(lines)


def test_a_request_past_its_timeout_is_504_and_leaves_the_queue(served, monkeypatch):
    service, client = served
    before = service.accepted, service.answered
    with ThreadPoolExecutor(8) as threads, services.device_busy(service, monkeypatch) as batches:
        first = threads.submit(client.post, "/translate", json={"text": "one"})
        services.until(lambda: batches)
        late = client.post("/translate", json={"text": ["two", "three"], "timeout": 0.05})
        assert services.status_and_message(late)[0] == 504
    assert first.result().status_code == 200
    assert batches == [["one"]]
    assert (service.accepted, service.answered) == (before[0] + 2, before[1] + 2)


def test_the_timeout_of_a_request_begins_before_its_body(served, monkeypatch):
    service, client = served
    times, body, before = [], service._body, app._before

    async def noted_body(request):
        times.append(asyncio.get_running_loop().time())
        return await body(request)

    async def noted_deadline(deadline, *rest):
        times.append(deadline)
        return await before(deadline, *rest)

    monkeypatch.setattr(service, "_body", noted_body)
    monkeypatch.setattr(app, "_before", noted_deadline)
    assert client.post("/translate", json={"text": "one", "timeout": 16}).status_code == 200
    arrived, deadline = times
    assert deadline <= arrived + 16


def test_an_error_of_the_server_is_500_and_tells_nothing_of_it():
    answer = asyncio.run(app._internal_error(mock.Mock(), ValueError("secret")))
    assert answer.status_code == 500
    assert json.loads(answer.body) == {"error": "internal error: see the server's log"}


def test_a_batch_that_fails_is_500_and_the_next_is_answered(served, monkeypatch, caplog):
    service, client = served
    with monkeypatch.context() as patch, ThreadPoolExecutor(3) as threads:
        patch.setattr(service.engine, "translate", lambda lines: 1 / 0)
        with services.device_busy(service, monkeypatch) as batches:
            bodies = [{"text": text, "timeout": 5} for text in ("one", "two", "three")]
            answers = [threads.submit(client.post, "/translate", json=bodies[0])]
            services.until(lambda: batches)
            answers += [threads.submit(client.post, "/translate", json=each) for each in bodies[1:]]
            services.until(lambda: service.batcher.queued == 2)
        for answer in answers:
            status, message = services.status_and_message(answer.result())
            assert status == 500 and "division" not in message
        assert len(batches) == 2
    assert "ZeroDivisionError" in caplog.text
    assert client.post("/translate", json={"text": "one"}).status_code == 200


def test_an_error_of_a_batch_reaches_those_that_still_wait():
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        gone, done, waits = futures = [loop.create_future() for _ in range(3)]
        gone.cancel()
        done.set_result("a translation")
        error = requests.RequestError(500, "no")
        _fail([_Waiting(mock.Mock(EncodedLine), each, 0.0) for each in futures], error)
    assert gone.cancelled() and done.result() == "a translation" and waits.exception() is error


def test_options_that_the_model_refuses_are_422_and_forgotten(served, monkeypatch):
    service, client = served

    def refuse(_):
        raise ConfigError("no such option in this model")

    monkeypatch.setattr(service.engine, "translate", refuse)
    for length in range(3, 7):  # more than services.LIMITS.max_configs
        answer = client.post("/translate", json={"text": "one", "max_length": length})
        assert services.status_and_message(answer) == (422, "no such option in this model")


def test_a_line_waits_for_others_and_the_figures_are_theirs(translator):
    with (
        services.serving(translator, batch_wait=0.5) as (service, client),
        ThreadPoolExecutor(2) as threads,
    ):
        value = service.metrics.registry.get_sample_value
        texts = (["one", "", "two"], ["seven"])
        answers = threads.map(lambda t: client.post("/translate", json={"text": t}), texts)
        assert [each.status_code for each in answers] == [200, 200]
        names = "batch_lines_sum batch_lines_count accepted_requests_total request_seconds_count"
        figures = [value(f"jax_transformer_{name}") for name in names.split()]
        assert figures == [3, 1, 2, 2]
        seconds = value("jax_transformer_batch_seconds_sum") / 3
        assert service.batcher._seconds_per_line == pytest.approx(seconds)
        assert value("jax_transformer_request_seconds_sum") >= 0.5
        client.post("/translate", json={"text": "two"})
        average = 0.9 * seconds + 0.1 * (value("jax_transformer_batch_seconds_sum") - 3 * seconds)
        assert service.batcher._seconds_per_line == pytest.approx(average), "of many batches"
        service.failure = ZeroDivisionError()
        assert not client.get("/health").json()["ready"]
        for answer in (client.get("/health"), client.get("/none"), client.get("/")):
            assert answer.headers.get("x-content-type-options") == "nosniff"
            assert answer.headers.get("cache-control") == "no-store"


# Health, metrics and the page


@pytest.fixture
def gated(monkeypatch) -> threading.Semaphore:
    """Each release lets the start of a service compile one program."""
    gate, compile = threading.Semaphore(0), Engine.compile
    monkeypatch.setattr(Engine, "compile", lambda *all: gate.acquire() and compile(*all))
    return gate


def test_requests_are_answered_after_the_first_programs(gated, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr(app, "_PROGRESS", 0)
    translator = services.translator(widths=(4, 8))
    service, counts, beams = Service(translator, services.LIMITS), [], []
    translate = Engine._translate

    def counted(engine: Engine, lines: list[Any], count: int) -> list[Any]:
        counts.append(count)
        beams.append(lines[0].group.config.num_beams)
        return translate(engine, lines, count)

    monkeypatch.setattr(Engine, "_translate", counted)

    def health(status: int) -> tuple[bool, int, int]:
        answer = client.get("/health")
        assert answer.status_code == status and answer.json()["live"]
        return tuple(answer.json()[name] for name in ("ready", "compiled", "programs"))

    def ask(**options: Any) -> list[int]:
        """The rows of the batches of a request, whose translations are right."""
        counts.clear()
        answer = client.post("/translate", json={"text": services.LINES[:2] * 2, **options}).json()
        texts = [each["text"] for each in answer["translations"]]
        assert texts == translator(services.LINES[:2] * 2, **options)
        return counts

    with testclient.TestClient(service.app) as client, contextlib.ExitStack() as at_end:
        at_end.callback(gated.release, 99)
        assert client.get("/health/live").status_code == 200
        for compiled in range(3):  # one for each width
            services.until(lambda compiled=compiled: service.compiled == compiled)
            assert health(503) == (False, compiled, 16)
            early = client.post("/translate", json={"text": "one"})
            assert services.status_and_message(early)[0] == 503 and early.headers["retry-after"]
            gated.release()
        services.until(lambda: service.ready)
        assert health(200) == (True, 3, 16) and beams == [1, 1, 1]
        assert ask() == ask(beam=4) == [1] * 4  # those that are there, or else the smallest
        for compiled, rows in ((10, [1] * 4), (13, [4] * 2)):  # 10: with those of attention
            for _ in range(3):
                gated.release()
            services.until(lambda compiled=compiled: service.compiled == compiled)
            assert ask() == rows and ask(beam=4, length_penalty=0.1) == [1] * 4
        gated.release(3)
        services.until(lambda: service.compiled == 16)
        assert ask(beam=4, length_penalty=0.1) == [4] * 2
    lines = [record.getMessage().rpartition(" after ")[0] for record in caplog.records]
    lines = [line for line in lines if "programs" in line]
    later = [f"compiled {n} of 16 programs" for n in range(4, 17)]
    assert lines[3:] == ["ready: 3 of 16 programs", *later]


@pytest.mark.parametrize("stage", [0, 4])  # a program of decoding, and one of attention
def test_a_program_that_two_threads_need_is_compiled_once(stage):
    compiled, barrier = [], threading.Barrier(2)
    engine = Engine(services.translator(widths=(3,)), services.LIMITS)
    program = list(engine.programs())[stage]

    def listen(name: str, _: float, **more: Any) -> None:
        if "backend_compile" in name:
            compiled.append(more.get("fun_name"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda _: (barrier.wait(60), program()), range(2)))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == ["jit(_attend)" if stage else "jit(_decode)"]


def test_a_failed_start_is_neither_live_nor_ready(translator, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "compile", lambda *_: 1 / 0)
        service, stops = Service(translator, services.LIMITS), []
        service.on_failure = lambda: stops.append(service.failure)
        with testclient.TestClient(service.app) as client:
            services.until(lambda: client.get("/health/live").status_code == 503)
            assert client.get("/health/ready").status_code == 503
    assert isinstance(service.failure, ZeroDivisionError) and stops == [service.failure]


def test_metrics_count_requests_and_batches(served):
    service, client = served
    value = service.metrics.registry.get_sample_value
    names = {"status": "200"}, {"status": "422"}
    before = [value("jax_transformer_requests_total", each) or 0 for each in names]
    client.post("/translate", json={"text": ["one", "two"]})
    client.post("/translate", json={"text": 1})
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    after = [value("jax_transformer_requests_total", each) for each in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1]
    assert f'jax_transformer_requests_total{{status="200"}} {after[0]}' in answer.text
    assert "jax_transformer_queued_lines 0.0" in answer.text
    for bucket in ('request_seconds_bucket{le="0.005"}', 'batch_seconds_bucket{le="0.005"}'):
        assert f"jax_transformer_{bucket}" in answer.text
    assert 'jax_transformer_batch_lines_bucket{le="256.0"}' in answer.text


def test_the_page_loads_nothing_from_elsewhere(client):
    answer = client.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "a <model>" not in answer.text and "a \\u003cmodel\\u003e" in answer.text
    assert re.search(r'"service": ?{"beam": ?4, ?"max_beam": ?6}', answer.text)
    assert not re.findall(r"https?:|url\(|@import|innerHTML|eval\(", answer.text)
