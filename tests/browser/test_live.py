"""The model in the page computes what Python computes, and can be used by everyone."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Browser, Page, Route

from annotated_transformer.data.grammar import grammar_pairs
from annotated_transformer.notation import BOS, EOS
from annotated_transformer.pretrained import RUNNING, Pretrained, load_pretrained
from annotated_transformer.translation.beam_search import beam_search
from annotated_transformer.translation.greedy import greedy_search
from tests.test_page_extensions import extension

live = extension("live")
STATIC = Path(__file__).parents[2] / "book" / "_static"
SOURCE = (STATIC / "live" / "model.js").read_text(encoding="utf-8")
AXE = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
GERMAN, ENGLISH = RUNNING.text("de"), RUNNING.text("en")
CLOSE = 1e-3  # of probabilities and weights
FALLBACK = "What stands here without scripts."
PAGE = f"""<!doctype html><html lang="en" data-theme="{{theme}}"><meta charset="utf-8">
<title>t</title><meta name="viewport" content="width=device-width">
<link rel="stylesheet" href="custom.css"><link rel="stylesheet" href="live/widget.css">
<script src="live/widget.js"></script>
<style>html[data-theme=dark] {{{{ background: #14181e; --pst-color-background: #14181e;
  --pst-color-text-base: #ced6dd; --pst-color-text-muted: #9ca4af }}}}</style>
<main><h1>t</h1><div class="translator" data-sentence="{GERMAN}">
<div class="translator-fallback"><p>{FALLBACK}</p></div></div></main></html>
"""
TRANSLATE = """([texts, beam, weights, muted]) => texts.map((text) => {
  const { Translator, fromBase64 } = annotatedTransformer();
  window.translator ??= new Translator(
    annotatedTransformerVocabulary, fromBase64(annotatedTransformerWeights));
  const [first, ...steps] = window.translator.translate(text, { beam, muted });
  const plain = (heads) => heads.map((head) => head.map((row) => Array.from(row)));
  return {
    ids: first.ids,
    labels: first.source,
    tokens: steps.map(({ token }) => token),
    probabilities: steps.map(({ probability }) => probability),
    text: steps[steps.length - 1].text,
    encoder: weights && first.attention.map(plain),
    self: weights && steps.map(({ attention }) => plain(attention.self)),
    cross: weights && steps.map(({ attention }) => plain(attention.cross)),
  };
})"""


@pytest.fixture(scope="session")
def pretrained() -> Pretrained:
    return load_pretrained()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what the build writes, and a page for each theme."""
    folder = tmp_path_factory.mktemp("live")
    (folder / "live").mkdir()
    for path in (STATIC / "live" / "model.js", *(live.SERVING / name for name in live.SHARED)):
        (folder / "live" / path.name).write_bytes(path.read_bytes())
    for name, text in live.scripts().items():
        (folder / "live" / name).write_text(text, encoding="utf-8")
    (folder / "custom.css").write_bytes((STATIC / "custom.css").read_bytes())
    for theme in ("light", "dark"):
        (folder / f"{theme}.html").write_text(PAGE.format(theme=theme), encoding="utf-8")
    return folder


# --- numbers ---------------------------------------------------------------------------------


@contextmanager
def loaded(browser: Browser, source: str = SOURCE) -> Iterator[Page]:
    """Open an empty page that has the model's scripts."""
    page = browser.new_page()
    for text in (source, *live.scripts().values()):
        page.add_script_tag(content=text)
    yield page
    page.close()


@torch.no_grad()
def probabilities(pretrained: Pretrained, source: str, tokens: list[int]) -> list[float]:
    """Return the probability of each token of an output and of its end."""
    batch = pretrained.batch(source, pretrained.tokenizer.decode(tokens))
    assert batch.tgt_y is not None
    assert batch.tgt_y.tolist() == [[*tokens, EOS]]
    model = pretrained.model
    logs = model.generator(model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask))
    found: list[float] = logs.exp().gather(2, batch.tgt_y.unsqueeze(2)).flatten().tolist()
    return found


def faults(page: Page, pretrained: Pretrained, texts: list[str]) -> list[str]:
    """Return the sentences that the page encodes or translates otherwise than Python does."""
    sources = [pretrained.tokenizer.encode(text) for text in texts]
    wanted = greedy_search(pretrained.model, sources)
    found = page.evaluate(TRANSLATE, [texts, 1, False])
    wrong = []
    for text, source, tokens, yours in zip(texts, sources, wanted, found, strict=True):
        same = yours["ids"] == [*source, EOS] and yours["tokens"] == [*tokens, EOS]
        same = same and yours["text"] == pretrained.tokenizer.decode(tokens)
        same = same and yours["labels"] == pretrained.labels(text)
        if not same or yours["probabilities"] != pytest.approx(
            probabilities(pretrained, text, tokens), abs=CLOSE
        ):
            wrong.append(text)
    return wrong


def sentences(count: int) -> list[str]:
    """Return test sentences, as many of each language."""
    pairs = grammar_pairs("test", count, seed=20)
    return [pair.text(language) for language in ("de", "en") for pair in pairs]


def test_tokens_and_probabilities_are_those_of_python(
    browser: Browser, pretrained: Pretrained
) -> None:
    texts = sentences(100)
    assert len(set(texts)) >= 195
    with loaded(browser) as page:
        assert faults(page, pretrained, texts) == []


BROKEN = {
    "scores are not scaled": ("/ Math.sqrt(d_k)", "/ 1"),
    "rows share a scale": ("scale.data[Math.floor(i / columns)]", "scale.data[0]"),
    "embeddings are not scaled": ("* Math.sqrt(d_model)", "* 1"),
    "positions begin with 1": ("this.embed(token, pos)", "this.embed(token, pos + 1)"),
    "norm comes first": (
        "this.norm.forward(add(x, sublayer(x)))",
        "add(x, sublayer(this.norm.forward(x)))",
    ),
    "no bias": ("dot(row, x) + this.bias[i]", "dot(row, x)"),
    "values are keys": ("cache.values.push(this.linears[2]", "cache.values.push(this.linears[1]"),
    "no ReLU": ("Math.max(0, value)", "value"),
    "no blank in front": ("` ${text}`", "`${text}`"),
    "merges in any order": ("?? Infinity", "=== undefined ? Infinity : 0"),
    "the end is not read": ("return [...ids, EOS]", "return ids"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_is_noticed(browser: Browser, pretrained: Pretrained, name: str) -> None:
    old, new = BROKEN[name]
    assert SOURCE.count(old) == 1
    with loaded(browser, SOURCE.replace(old, new)) as page:
        assert faults(page, pretrained, sentences(3))


@pytest.mark.parametrize("text", ["Tür 12½ – “Käse”!", "it's  a  test", "ﬀ 🙂 e\u0301", "x"])
def test_any_text_is_encoded_as_in_python(
    browser: Browser, pretrained: Pretrained, text: str
) -> None:
    with loaded(browser) as page:
        ids, back = page.evaluate(
            """(text) => {
              const { BPETokenizer } = annotatedTransformer();
              const { merges } = annotatedTransformerVocabulary.tokenizer;
              const tokenizer = new BPETokenizer(merges), ids = tokenizer.encode(text);
              return [ids, tokenizer.decode(ids)];
            }""",
            text,
        )
    assert ids == pretrained.tokenizer.encode(text)
    assert back == text


def test_beam_search_finds_what_python_finds(browser: Browser, pretrained: Pretrained) -> None:
    texts = sentences(20)
    sources = [pretrained.tokenizer.encode(text) for text in texts]
    wanted = [found[0].tokens for found in beam_search(pretrained.model, sources)]
    with loaded(browser) as page:
        found = page.evaluate(TRANSLATE, [texts, 4, False])
    assert [yours["tokens"] for yours in found] == [[*tokens, EOS] for tokens in wanted]


@pytest.mark.parametrize("pair", [(GERMAN, ENGLISH), (ENGLISH, GERMAN)])
def test_attention_is_that_of_python(
    browser: Browser, pretrained: Pretrained, pair: tuple[str, str]
) -> None:
    source, target = pair
    with loaded(browser) as page:
        (found,) = page.evaluate(TRANSLATE, [[source], 1, True])
    assert found["text"] == target
    trace, sizes = pretrained.trace(source, target), pretrained.config
    for layer, head in itertools.product(range(sizes.N), range(sizes.h)):
        encoder = torch.tensor(found["encoder"][layer][head], dtype=torch.float32)
        name = f"layers.{layer}.self_attn.attn"
        torch.testing.assert_close(encoder, trace[f"encoder.{name}"][0, head], atol=CLOSE, rtol=0.0)
        torch.testing.assert_close(encoder.sum(1), torch.ones(len(encoder)))
        for kind, part in (("self", "self_attn"), ("cross", "src_attn")):
            wanted = trace[f"decoder.layers.{layer}.{part}.attn"][0, head]
            assert len(found[kind]) == len(wanted)
            for step, (yours, row) in enumerate(zip(found[kind], wanted, strict=True)):
                mine = torch.tensor(yours[layer][head], dtype=torch.float32)
                assert mine.sum().item() == pytest.approx(1, abs=1e-5)
                assert len(mine) == (step + 1 if kind == "self" else len(encoder))
                torch.testing.assert_close(mine, row[: len(mine)], atol=CLOSE, rtol=0.0)


ATTENTIONS = {"encoder": "encoder.layers.{}.self_attn", "self": "decoder.layers.{}.self_attn",
              "cross": "decoder.layers.{}.src_attn"}  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_a_muted_head_has_no_share_in_the_output(browser: Browser, seed: int) -> None:
    """In Python its rows of W^O are 0, as in the chapter on heads."""
    system, rng = load_pretrained(), random.Random(seed)
    sizes = system.config
    width = sizes.d_model // sizes.h
    every = list(itertools.product(ATTENTIONS, range(sizes.N), range(sizes.h)))
    muted = rng.sample(every, 4)
    for kind, layer, head in muted:
        w_o = system.model.get_parameter(f"{ATTENTIONS[kind].format(layer)}.linears.3.weight")
        w_o.data[:, head * width : (head + 1) * width] = 0
    texts = sentences(10)
    sources = [system.tokenizer.encode(text) for text in texts]
    wanted = greedy_search(system.model, sources)
    with loaded(browser) as page:
        found = page.evaluate(TRANSLATE, [texts, 1, False, muted])
        again = page.evaluate(TRANSLATE, [[GERMAN], 1, False, []])
    assert [yours["tokens"] for yours in found] == [[*tokens, EOS] for tokens in wanted]
    assert again[0]["text"] == ENGLISH  # no head stays muted


def test_every_vector_is_that_of_python(browser: Browser, pretrained: Pretrained) -> None:
    wanted = pretrained.trace(GERMAN, ENGLISH)
    ids = [BOS, *pretrained.tokenizer.encode(ENGLISH)]
    with loaded(browser) as page:
        page.evaluate(TRANSLATE, [[GERMAN], 1, False, []])
        found = page.evaluate(
            """([text, ids]) => {
              const { translator } = window;
              const found = translator.model.trace(translator.encode(text), ids);
              return Object.fromEntries(Object.entries(found).map(([name, rows]) =>
                [name, rows.map((row) => Array.from(row))]));
            }""",
            [GERMAN, ids],
        )
    assert len(found) == 2 + 10 * 2 + 16 * 2 + 1  # of encoder and decoder, two layers each
    for name, rows in found.items():
        torch.testing.assert_close(torch.tensor(rows), wanted[name][0], atol=CLOSE, rtol=CLOSE)


# --- the widget ------------------------------------------------------------------------------


@contextmanager
def opened(
    browser: Browser,
    folder: Path,
    theme: str = "light",
    *,
    width: int = 1280,
    script: str = "",
    **options: Any,
) -> Iterator[tuple[Page, list[str], list[str]]]:
    """Open the page from its file, without a network; list what it asked for and what went wrong.

    Args:
        script: Runs before those of the page.
        options: Of the browser's context.
    """
    options = {"reduced_motion": "reduce", **options}
    context = browser.new_context(viewport={"width": width, "height": 900}, **options)
    asked: list[str] = []
    wrong: list[str] = []

    def route(request: Route) -> None:
        url = request.request.url
        asked.append(url.rsplit("/", 1)[-1])
        if url.startswith(("file:", "blob:", "data:")):
            request.continue_()
        else:
            wrong.append(url)
            request.abort()

    context.route("**/*", route)
    if script:
        context.add_init_script(script)
    page = context.new_page()
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(f"{folder.as_uri()}/{theme}.html")
    page.wait_for_selector(".translator[data-ready=yes]")
    yield page, asked, wrong
    context.close()


def translate(page: Page, text: str) -> str:
    """Type a sentence, press Enter, and return the translation."""
    page.get_by_label("A sentence").fill(text)
    page.keyboard.press("Enter")
    page.wait_for_selector(".translator:not([aria-busy])")
    return page.locator(".translator-output strong").inner_text()


def chosen(page: Page) -> str:
    return page.locator("[role=option][aria-selected=true]").inner_text()


def reading(page: Page) -> str:
    return page.locator(".translator-reading").inner_text()


def test_it_works_from_a_file_and_loads_the_weights_when_used(
    browser: Browser, folder: Path
) -> None:
    with opened(browser, folder) as (page, asked, wrong):
        assert page.get_by_text(FALLBACK).is_visible()
        assert not {"weights.js", "model.js", "vocabulary.js"} & set(asked)
        assert translate(page, GERMAN) == ENGLISH
        assert not page.get_by_text(FALLBACK).is_visible()
        assert {"weights.js", "model.js", "vocabulary.js"} <= set(asked)
        assert asked.count("weights.js") == 1
        assert len(page.workers) == 1
        assert translate(page, ENGLISH) == GERMAN
        assert page.locator(".translator-output").inner_text().startswith("English to German")
        assert wrong == []


def test_it_may_replace_what_follows(browser: Browser, folder: Path) -> None:
    script = """addEventListener("DOMContentLoaded", () => {
      const box = document.querySelector(".translator");
      box.dataset.replaces = "next";
      box.after(Object.assign(document.createElement("figure"), { textContent: "Next." }));
    })"""
    with opened(browser, folder, script=script) as (page, _, wrong):
        assert page.get_by_text("Next.").is_visible()
        assert translate(page, GERMAN) == ENGLISH
        assert not page.get_by_text("Next.").is_visible()
        assert wrong == []


MIXER = """addEventListener("DOMContentLoaded", () => {
  document.querySelector(".translator").dataset.mixer = "";
})"""
TRACE = MIXER.replace("mixer", "trace")


def test_heads_can_be_muted(browser: Browser, folder: Path) -> None:
    with opened(browser, folder) as (page, _, _):
        translate(page, GERMAN)
        assert not page.get_by_role("group", name="Heads to mute").is_visible()
    with opened(browser, folder, script=MIXER) as (page, _, wrong):
        assert translate(page, GERMAN) == ENGLISH
        heads = page.get_by_role("group", name="Heads to mute").get_by_role("button")
        assert heads.count() == 25
        message = page.get_by_role("alert")
        first = page.get_by_role("button", name="head 1 of encoder, layer 2")
        changed = f"Without this head the translation changes. With all heads it is: {ENGLISH}"
        for pressed, says in (("true", changed), ("false", "")):
            first.focus()
            page.keyboard.press("Space")
            page.wait_for_selector(".translator:not([aria-busy])")
            assert first.get_attribute("aria-pressed") == pressed
            assert message.inner_text() == says
        assert page.locator(".translator-output strong").inner_text() == ENGLISH
        page.get_by_role("button", name="head 2 of decoder, layer 1").click()
        page.wait_for_selector(".translator:not([aria-busy])")
        assert message.inner_text() == "Without this head the translation is the same."
        first.click()
        page.wait_for_selector(".translator:not([aria-busy])")
        page.get_by_role("button", name="all heads").click()
        page.wait_for_selector(".translator:not([aria-busy])")
        assert page.locator("[aria-pressed=true]").count() == 0
        assert page.locator(".translator-output strong").inner_text() == ENGLISH
        assert wrong == []


def test_any_number_can_be_looked_up(
    browser: Browser, folder: Path, pretrained: Pretrained
) -> None:
    trace = pretrained.trace(GERMAN, ENGLISH)
    with opened(browser, folder, script=TRACE) as (page, _, wrong):
        translate(page, GERMAN)
        part = page.get_by_label("What this part returned")
        token = page.get_by_label("for this token")
        page.wait_for_selector(".translator-numbers .cell")
        for name, label, place in (
            ("encoder.layers.0.self_attn", "sie", 9),
            ("decoder.layers.1.src_attn.linears.1", "Zeitung", 5),
            ("decoder.layers.0.feed_forward.w_1", "because", 8),
            ("generator.proj", "<s>", 0),
        ):
            part.select_option(name)
            token.select_option(label=label)
            wanted = trace[name][0, place]
            shown = page.locator(".translator-numbers .cell").all_inner_texts()
            numbers = [float(text.replace("\u2212", "-")) for text in shown]
            assert numbers == pytest.approx(wanted.tolist(), abs=0.0051)
            norm = page.locator(".translator-norm").inner_text().rpartition(" ")[2]
            assert float(norm.rstrip(".")) == pytest.approx(wanted.norm().item(), abs=0.02)
        assert wrong == []


def test_without_workers_the_page_itself_translates(browser: Browser, folder: Path) -> None:
    refused = "window.Worker = class { constructor() { throw new Error('refused'); } };"
    with opened(browser, folder, script=refused) as (page, _, wrong):
        assert translate(page, GERMAN) == ENGLISH
        assert page.workers == []
        translate(page, "Der Bäcker sieht einen Drachen.")
        assert "“Drachen”" in page.get_by_role("alert").inner_text()
        assert wrong == []


@pytest.mark.parametrize(
    ("text", "hinted"),
    [("Die Katze schläft.", False), ("Schläft die Katze?", False),
     ("die Katze schläft.", True), ("Die Katze schläft", True)],
)  # fmt: skip
def test_a_hint_where_a_sentence_is_not_written_as_in_training(
    browser: Browser, folder: Path, text: str, hinted: bool
) -> None:
    with opened(browser, folder) as (page, _, wrong):
        translate(page, text)
        alert = page.get_by_role("alert")
        page.wait_for_timeout(300)
        assert ("full stop" in alert.inner_text()) == hinted
        assert page.get_by_label("A sentence").get_attribute("aria-invalid") is None
        assert wrong == []


def test_without_scripts_the_page_shows_what_it_has(browser: Browser, folder: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{folder.as_uri()}/light.html")
    assert page.get_by_text(FALLBACK).is_visible()
    assert page.locator(".translator input").count() == 0
    context.close()


def test_without_scripts_there_is_no_frame_around_nothing(browser: Browser, site: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{site}/book/model/multi_head.html")
    box = page.locator(".translator").bounding_box()
    assert box is not None
    assert box["height"] == 0
    context.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Der Zauberer wirft meinen Drachen weg.", "these words: “Zauberer”, “Drachen”"),
        ("der bäcker schläft.", "this word: “bäcker” (perhaps “Bäcker”?)"),
        ("Der dog schläft.", "“dog” is English, but the sentence is German."),
        ("The dog sleeps, Hund.", "“Hund” is German, but the sentence is English."),
        ("   ", "Please type a sentence."),
        ("...", "Please type a sentence."),
        ("Die Katze schläft. " * 12, "at most 32"),
    ],
)
def test_what_it_cannot_translate_it_names(
    browser: Browser, folder: Path, text: str, message: str
) -> None:
    with opened(browser, folder) as (page, _, wrong):
        translate(page, GERMAN)
        page.get_by_label("A sentence").fill(text)
        page.keyboard.press("Enter")
        alert = page.get_by_role("alert")
        alert.get_by_text(message).wait_for()
        assert page.get_by_label("A sentence").get_attribute("aria-invalid") == "true"
        assert not page.locator(".translator-output").is_visible()  # it is of another sentence
        assert translate(page, "Die Katze schläft.") == "The cat sleeps."
        assert alert.inner_text() == ""
        assert wrong == []


def test_letters_may_be_composed_in_two_ways(browser: Browser, folder: Path) -> None:
    with opened(browser, folder) as (page, _, wrong):
        assert translate(page, GERMAN.replace("ä", "a\u0308")) == ENGLISH
        assert wrong == []


def test_the_keyboard_reaches_everything(browser: Browser, folder: Path) -> None:
    with opened(browser, folder) as (page, _, wrong):
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.wait_for_selector(".translator-view:visible")
        page.wait_for_selector(".translator:not([aria-busy])")
        stops = []
        for _ in range(7):
            page.keyboard.press("Tab")
            stops.append(
                page.evaluate(
                    """() => {
                      const e = document.activeElement, style = getComputedStyle(e);
                      const name = e.labels?.[0]?.firstChild.textContent ?? e.textContent;
                      return [name, style.outlineStyle !== "none"
                        && parseFloat(style.outlineWidth) >= 2];
                    }"""
                )
            )
        names = ["Examples", "Search", "Translate", "Weights", "Layer", "Head", "The"]
        assert stops == [[name, True] for name in names]
        before = reading(page)
        for key, token in (("ArrowDown", "baker"), ("End", "</s>"), ("Home", "The")):
            page.keyboard.press(key)
            assert chosen(page) == token
            assert page.evaluate("document.activeElement.textContent") == token
            assert f"“{token}” was chosen with probability" in reading(page)
        assert reading(page) == before
        assert wrong == []


def test_the_line_and_the_pictures_follow_the_choice(
    browser: Browser, folder: Path, pretrained: Pretrained
) -> None:
    with opened(browser, folder) as (page, _, wrong):
        translate(page, GERMAN)
        page.locator("[role=option]", has_text="wet").hover()
        page.mouse.move(0, 0)  # else it would pass over others when the page scrolls
        assert chosen(page) == "wet"
        trace = pretrained.trace(GERMAN, ENGLISH)
        labels = pretrained.labels(ENGLISH)
        row = labels.index("▁wet")
        for layer, head in ((1, None), (0, 2)):
            page.get_by_role("combobox", name="Layer").select_option(index=layer)
            page.get_by_role("combobox", name="Head").select_option(
                index=0 if head is None else head + 1
            )
            heads = trace[f"decoder.layers.{layer}.src_attn.attn"][0]
            weights = (heads.mean(0) if head is None else heads[head])[row]
            most = pretrained.labels(GERMAN)[int(weights.argmax())].removeprefix("▁")
            found = re.search(r"attends to “(.+?)” ([\d.]+) %", reading(page))
            assert found is not None
            assert found[1] == most
            assert float(found[2]) == pytest.approx(100 * weights.max().item(), abs=0.6)
            cells = page.locator(".translator-heat .cell.selected").evaluate_all(
                "all => all.map((e) => Number(e.style.getPropertyValue('--weight')))"
            )
            assert cells == pytest.approx(weights.tolist(), abs=CLOSE)
            ribbons = page.locator(".translator-ribbons path.selected").count()
            assert ribbons == sum(weight >= 0.02 for weight in weights.tolist())
        page.get_by_role("combobox", name="Weights").select_option(value="encoder")
        assert page.locator("[role=option]").all_inner_texts()[0] == "Der"
        assert "encoder self-attention" in reading(page)
        page.get_by_role("combobox", name="Weights").select_option(value="self")
        masked = page.locator(".translator-heat .cell.masked").count()
        assert masked == len(labels) * (len(labels) - 1) // 2
        assert wrong == []


def test_tokens_come_one_after_the_other(browser: Browser, folder: Path) -> None:
    script = """addEventListener("DOMContentLoaded", () => {
      window.seen = [];
      new MutationObserver(() => {
        const text = document.querySelector(".translator-output strong")?.textContent;
        if (text && text !== window.seen[window.seen.length - 1]) window.seen.push(text);
      }).observe(document.querySelector(".translator"), { subtree: true, childList: true });
    })"""
    options: dict[str, Any] = {"reduced_motion": "no-preference"}
    with opened(browser, folder, script=script, **options) as (page, _, wrong):
        translate(page, GERMAN)
        seen = page.evaluate("window.seen")
        assert seen[:3] == ["The", "The baker", "The baker throws"]
        assert seen[-1] == ENGLISH
        assert wrong == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_it_fits_any_screen_and_everyone(
    browser: Browser, folder: Path, theme: str, width: int
) -> None:
    longest = max(sentences(100), key=len)
    with opened(browser, folder, theme, width=width, script=f"{MIXER};{TRACE}") as (page, _, wrong):
        for text in (GERMAN, longest):
            translate(page, text)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            outside = page.evaluate(
                """() => [...document.querySelectorAll(".translator *")].filter((e) =>
                  e.getBoundingClientRect().right
                    > document.querySelector(".translator").getBoundingClientRect().right + 1)
                  .map((e) => e.outerHTML.slice(0, 80))"""
            )
            assert outside == []
        page.evaluate(AXE)
        barriers = page.evaluate(
            """async () => (await axe.run(document, {
              runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"], resultTypes: ["violations"],
              preload: false,
            })).violations.flatMap(({ id, nodes }) => nodes.map(({ html }) => `${id}: ${html}`))"""
        )
        assert barriers == []
        assert wrong == []
