"""The page in a real browser; skipped without chromium, chromedriver and selenium."""

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from jax_transformer.extras.serve import app
from jax_transformer.extras.serve.app import Service
from jax_transformer.extras.serve.requests import Limits
from jax_transformer.inference import attention_page
from jax_transformer.inference.translation import Translator
from parity_tests.unit import services

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver"),
    # selenium leaves the sockets of its connections to the garbage collector
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
LINES = ["one two three", "four five"]


@pytest.fixture(scope="module")
def translator() -> Translator:
    return services.translator(num_layers=2, widths=())


@pytest.fixture(scope="module")
def url(translator) -> Iterator[str]:
    service = Service(translator, Limits(batch_rows=2), title="a run")
    bound = app.bind("127.0.0.1", 0)
    process = uvicorn.Server(uvicorn.Config(service.app, log_config=None, lifespan="on"))
    thread = threading.Thread(target=process.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        until(lambda: service.ready)
        yield app.url(bound)
    finally:
        process.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (
        "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage "
        "--disable-background-networking"
    ).split():
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


def until(condition: Any) -> Any:
    end = time.monotonic() + 60
    while True:
        with contextlib.suppress(Exception):
            if result := condition():
                return result
        assert time.monotonic() < end
        time.sleep(0.05)


def all_of(browser: Any, selector: str) -> list[Any]:
    return browser.find_elements("css selector", selector)


def texts(browser: Any, selector: str) -> list[str]:
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector
    )


def keys(browser: Any, *pressed: str) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(browser).send_keys(*pressed).perform()


@pytest.fixture
def page(browser, url) -> Iterator[Any]:
    """The page after two lines were typed and translated, without a message in its console."""
    from selenium.webdriver.common.keys import Keys

    browser.get(url)
    keys(browser, LINES[0], Keys.ENTER, "", Keys.ENTER, LINES[1])  # the text has the focus
    until(lambda: len(texts(browser, "#lines .output")) == 2 and texts(browser, "#map td"))
    yield browser
    assert not browser.get_log("browser")


def test_what_is_typed_is_translated(page, translator):
    expected = translator.hypotheses(LINES, beam=4, n_best=4)
    assert texts(page, "#lines .output") == [several[0].text for several in expected]
    assert texts(page, "#lines label b") == ["1", "3"]
    assert texts(page, "#alternatives .output") == [each.text for each in expected[0]]
    scores = texts(page, "#alternatives b:last-child")
    assert scores == [f"{each.score:.3f}" for each in expected[0]]
    tokenizer = translator.tokenizer
    pieces = attention_page.pieces(tokenizer, [*tokenizer.encode(LINES[0]), tokenizer.eos_id])
    assert texts(page, "#columns button") == [piece.replace(" ", "␣") for piece in pieces]


def test_another_line_and_another_alternative_show_their_attention(page, translator):
    expected = translator.hypotheses(LINES, beam=4, n_best=4)[1]
    all_of(page, "#lines label")[1].click()
    until(lambda: texts(page, "#alternatives .output") == [each.text for each in expected])
    tokenizer = translator.tokenizer
    for index in (0, 2):
        all_of(page, "#alternatives label")[index].click()
        pieces = attention_page.pieces(tokenizer, expected[index].ids.tolist())
        rows = [piece.replace(" ", "␣") for piece in pieces]
        until(lambda rows=rows: len(texts(page, "#rows button")) == len(rows))


def test_choosing_a_line_does_not_stop_the_translation_of_what_was_typed(page):
    page.execute_script(
        "const ask = window.fetch; window.fetch = async (...all) => {"
        "await new Promise(done => setTimeout(done, 500)); return ask(...all); }"
    )
    all_of(page, "#input")[0].send_keys(" six")
    until(lambda: all_of(page, "#status")[0].text.startswith("Translating"))
    all_of(page, "#lines label")[1].click()
    until(lambda: all_of(page, "#status")[0].text.startswith("2 lines"))
    assert texts(page, "#lines .quiet")[1] == LINES[1] + " six"


def test_pointing_at_a_token_highlights_what_it_looks_at(page):
    from selenium.webdriver import ActionChains

    ActionChains(page).move_to_element(all_of(page, "#rows button")[1]).perform()
    until(lambda: all_of(page, "#rows .here"))
    share = "return [...document.querySelectorAll('#columns button')].map(e => "
    share += "parseFloat(e.style.getPropertyValue('--share')))"
    shares = page.execute_script(share)
    row = "return [...document.querySelectorAll('#map tbody tr:nth-child(2) td')].map(e => "
    row += "parseFloat(e.style.getPropertyValue('--share')))"
    assert max(shares) > 0 and shares == page.execute_script(row)
    ActionChains(page).move_to_element(all_of(page, "#map tbody td")[3]).perform()
    until(lambda: len(all_of(page, ".tokens .here")) == 2)
    assert "with weight" in all_of(page, "#readout")[0].text


def test_every_layer_and_head_can_be_chosen_by_the_keyboard(page):
    from selenium.webdriver.common.keys import Keys

    assert len(all_of(page, "#heads canvas")) == 2 * 4  # the mean and three heads
    first = texts(page, "#map table") and all_of(page, "#map table")[0].get_attribute("aria-label")
    page.execute_script("document.querySelector('#heads :checked').focus()")
    labels = {first}
    for _ in range(7):
        keys(page, Keys.ARROW_RIGHT)
        until(lambda: all_of(page, "#map table")[0].get_attribute("aria-label") not in labels)
        labels.add(all_of(page, "#map table")[0].get_attribute("aria-label"))
    assert len(labels) == 8
    for _ in range(40):  # Tab reaches the tokens and the map
        keys(page, Keys.TAB)
        if page.execute_script("return document.activeElement.tagName") == "TABLE":
            break
    keys(page, Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    assert len(all_of(page, "#map th.here")) == 2


def test_errors_are_shown_and_an_empty_text_shows_nothing(page):
    from selenium.webdriver.common.keys import Keys

    box = all_of(page, "#input")[0]
    box.send_keys(Keys.CONTROL + "a", Keys.NULL, "one " * 30)
    until(lambda: "tokens long" in all_of(page, "#status.bad")[0].text)
    assert [entry["level"] for entry in page.get_log("browser")] == ["SEVERE"]  # status 422
    box.send_keys(Keys.CONTROL + "a", Keys.NULL, " ")
    until(lambda: not all_of(page, "#result")[0].is_displayed())


@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_its_width_and_follows_the_scheme(page, width, scheme):
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        assert page.execute_script("return document.documentElement.scrollWidth") <= width
        script = "return getComputedStyle(document.body).backgroundColor"
        brightness = sum(map(int, page.execute_script(script)[4:-1].split(",")))
        assert (brightness > 600) == (scheme == "light")
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_file_of_translate_is_the_same_page(browser, translator, tmp_path):
    path = tmp_path / "out.html"
    hypotheses = translator.hypotheses(LINES, beam=4, n_best=3)
    attention_page.write(path, translator, LINES, hypotheses, title="a run")
    browser.get(path.as_uri())
    until(lambda: texts(browser, "#map td"))
    assert not all_of(browser, "#request")[0].is_displayed()
    assert texts(browser, "#alternatives .output") == [each.text for each in hypotheses[0]]
    all_of(browser, "#lines label")[1].click()
    others = [each.text for each in hypotheses[1]]
    until(lambda: texts(browser, "#alternatives .output") == others and texts(browser, "#map td"))
    assert not browser.get_log("browser")
