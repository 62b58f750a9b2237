"""The server's page, in a browser: the book's widget, fed by the system that is served."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest
from playwright.sync_api import Browser, expect

from annotated_transformer.pretrained import RUNNING, load_pretrained
from tests.serving.servers import running

AXE = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_a_sentence_is_translated_and_its_attention_shown(
    browser: Browser, scheme: str, width: int
) -> None:
    german, english = RUNNING.text("de"), RUNNING.text("en")
    with running() as server:
        here = f"http://127.0.0.1:{server.port}"
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,  # type: ignore[arg-type]
            reduced_motion="reduce",
        )
        page = context.new_page()
        wrong: list[str] = []
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda one: None if one.url.startswith((here, "data:"))
                else wrong.append(one.url))  # fmt: skip
        page.goto(here)
        page.keyboard.press("Tab")  # the field is the first
        assert page.locator("input").input_value() == german
        page.keyboard.press("Enter")
        expect(page.locator(".translator-output strong")).to_have_text(english)
        expect(page.locator(".translator-output")).to_have_text(re.compile("^German to English: "))
        pretrained = load_pretrained()
        columns = len(pretrained.labels(german))
        rows = len(pretrained.tokenizer.encode(english)) + 1  # tokens chosen, the end included
        assert page.locator(".translator-heat .cell").count() == rows * columns
        page.locator(".translator-queries li").first.focus()
        page.keyboard.press("End")
        expect(page.locator(".translator-queries [aria-selected=true]")).to_have_text("</s>")
        page.evaluate(AXE)
        found = page.evaluate("axe.run()")
        assert [one["id"] for one in found["violations"]] == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.locator("input").fill("wort " * 70)
        assert wrong == []  # until here: the browser itself reports what is refused
        page.keyboard.press("Enter")
        expect(page.locator(".translator-message.wrong")).to_have_text(
            re.compile(r"^sentence: has \d+ tokens, more than 64")
        )
        assert [one for one in wrong if "422" not in one] == []
        context.close()


def test_a_recurrent_system_translates_without_pictures(browser: Browser) -> None:
    with running(shown=300) as server:
        page = browser.new_page(reduced_motion="reduce")
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(f"http://127.0.0.1:{server.port}")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.locator(".translator-output strong")).to_have_text(RUNNING.text("en"))
        assert page.locator(".translator-heat").is_visible()
        server.give_recurrent()
        page.get_by_label("Search").select_option("beam of 4")  # translates again
        page.locator(".translator-heat").wait_for(state="hidden")
        asked = {"sentences": [RUNNING.text("de")], "beam": 4}
        (wanted,) = server.ask(data=asked)[1]["translations"]
        expect(page.locator(".translator-output strong")).to_have_text(wanted)
        assert wrong == []
        page.close()
