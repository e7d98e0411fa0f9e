"""The page in a real browser: what a user sees and does. Needs Chromium (Debian's package) and playwright."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infer.llm import LLM
from tests.infer.server.harness import Served, on_port, served

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")

TIERS = {"ngram", "draft", "intermediate", "target"}


class Browser:
    """The page, opened at a server over the tiny model, and what it shows."""

    def __init__(self, page: Any, one: Served) -> None:
        self.page, self.one = page, one

    def ask(self, text: str, num_tokens: int = 12) -> None:
        self.page.fill("#most", str(num_tokens))
        self.page.fill("#text", text)
        self.page.press("#text", "Enter")

    def wait_until_done(self) -> None:
        self.page.wait_for_selector("#send:visible")

    def texts(self) -> list[str]:
        return [article.text_content() for article in self.page.query_selector_all("article.assistant")]

    def tiers(self, number: int) -> set[str]:
        article = self.page.query_selector_all("article.assistant")[number]
        return {span.get_attribute("class") for span in article.query_selector_all("span")}

    def overflow(self) -> int:
        """By how many pixels the page is wider than the window."""
        return self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


@pytest.fixture
def browser(llm: LLM, request: pytest.FixtureRequest) -> Iterator[Browser]:
    width, height = getattr(request, "param", (1280, 800))
    with served(llm) as one, on_port(one) as address, sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": width, "height": height})
        page.set_default_timeout(20_000)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(address)
        yield Browser(page, one)
        if shots := os.environ.get("HISPEC_SCREENSHOTS"):  # a folder, to look at them
            page.screenshot(path=str(Path(shots) / f"{request.node.name}.png"))
        chromium.close()
        assert not [error for error in errors if not error.startswith("Failed to load resource")], errors


def answer_of(llm: LLM, *talk: str, num_tokens: int = 12) -> str:
    from infer import SamplingParams

    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(talk)]
    return llm.chat(messages, SamplingParams(temperature=0, max_tokens=num_tokens))[0].outputs[0].text


def test_a_question_streams_its_answer_in_the_colours_of_its_tiers(browser, reference):
    browser.one.slow_down(0.05)
    browser.ask("Hi", 24)
    browser.page.wait_for_selector("#stop:visible")
    browser.page.wait_for_selector("article.assistant span")
    seen = len(browser.texts()[0])
    browser.wait_until_done()
    want = answer_of(reference, "Hi", num_tokens=24)
    assert browser.texts() == [want] and 0 < seen < len(want)
    assert browser.tiers(0) <= TIERS and len(browser.tiers(0)) > 1
    colours = browser.page.evaluate(
        "[...document.querySelectorAll('#legend span')].map((span) => getComputedStyle(span).color)"
    )
    assert len(set(colours)) == 4
    line = browser.page.text_content(".figures")
    assert re.search(r"^24 tokens · [\d.]+ tokens/s · .*accepted by target \d+ %", line), line


def test_a_second_question_goes_with_the_talk_and_a_new_chat_forgets_it(browser, reference):
    browser.ask("Hi", 4)
    browser.wait_until_done()
    browser.ask("So", 4)
    browser.wait_until_done()
    first = answer_of(reference, "Hi", num_tokens=4)
    assert browser.texts() == [first, answer_of(reference, "Hi", first, "So", num_tokens=4)]
    browser.page.click("#clear")
    assert browser.texts() == []
    browser.ask("Hi", 4)
    browser.wait_until_done()
    assert browser.texts() == [first]


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_an_answer_can_be_stopped(browser, reference, how):
    browser.one.slow_down(0.2)
    browser.ask("Hi", 40)
    browser.page.wait_for_selector("article.assistant span")
    if how == "button":
        browser.page.click("#stop")
    else:
        browser.page.keyboard.press("Escape")
    browser.wait_until_done()
    (text,) = browser.texts()
    want = answer_of(reference, "Hi", num_tokens=40)
    assert want.startswith(text) and len(text) < len(want)
    assert browser.page.query_selector("article.error") is None
    assert browser.page.evaluate("document.activeElement.id") == "text"


def test_plain_mode_answers_twice_and_says_how_they_compare(browser, reference):
    browser.page.check("#compare")
    browser.ask("Hi", 24)
    browser.wait_until_done()
    want = answer_of(reference, "Hi", num_tokens=24)
    assert browser.texts() == [want, want]
    assert len(browser.tiers(0)) > 1 and browser.tiers(1) == {"target"}
    assert re.fullmatch(r"speed-up \d+\.\d\d × · same text", browser.page.text_content(".verdict"))
    lines = [line.text_content() for line in browser.page.query_selector_all(".figures")]
    assert "accepted" in lines[0] and "accepted" not in lines[1] and all("tokens/s" in line for line in lines)
    boxes = [box.bounding_box() for box in browser.page.query_selector_all(".pair > div")]
    assert boxes[0]["y"] == boxes[1]["y"] and boxes[0]["x"] < boxes[1]["x"]


def test_both_answers_of_a_sampled_pair_draw_the_same_noise(browser):
    browser.page.check("#compare")
    browser.page.fill("#temperature", "1.5")
    browser.ask("Hi", 24)
    browser.wait_until_done()
    first, second = browser.texts()
    assert first == second and first


def test_stopping_a_pair_stops_both(browser):
    browser.page.check("#compare")
    browser.one.slow_down(0.2)
    browser.ask("Hi", 40)
    browser.page.wait_for_selector("article.assistant span")
    browser.page.click("#stop")
    browser.wait_until_done()
    assert len(browser.texts()) == 1 and browser.page.query_selector(".verdict") is None


@pytest.mark.parametrize("browser", [(375, 667), (320, 568)], indirect=True)
def test_a_phone_needs_no_sideways_scrolling(browser):
    assert browser.overflow() == 0
    browser.page.check("#compare")
    browser.ask("a" * 20, 24)
    browser.wait_until_done()
    assert browser.overflow() == 0
    boxes = [box.bounding_box() for box in browser.page.query_selector_all(".pair > div")]
    assert boxes[0]["x"] == boxes[1]["x"] and boxes[0]["y"] < boxes[1]["y"]
    for name in ("#send", "#clear", "#text"):
        box = browser.page.query_selector(name).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= browser.page.viewport_size["width"]
        assert box["y"] + box["height"] <= browser.page.viewport_size["height"] and box["height"] >= 44


def test_a_refusal_is_shown_and_the_question_leaves_the_talk(browser, reference):
    browser.ask("long " * 100, 4)
    browser.wait_until_done()
    assert "leaves no room for an answer" in browser.page.text_content("article.error")
    browser.ask("Hi", 4)
    browser.wait_until_done()
    assert browser.texts()[-1] == answer_of(reference, "Hi", num_tokens=4)
