"""Numbers by chapter: captions below computed figures, and equations.

A figure that a cell computes carries a text alternative. Here it becomes the figure's caption,
with a number, and the drawing is named by that number alone, so that nothing is read twice.
Equations that the paper numbers keep the paper's number; ours are numbered by chapter.
"""

import html
import json
import re

from bodies import rewrite_bodies
from docutils import nodes
from inline_svg import widen
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

# The labels of the three equations that the paper numbers.
PAPER = {"equation-eq-attention": 1, "equation-eq-ffn": 2, "equation-eq-rate": 3}
NAMED = re.compile(r'\A<svg role="img" aria-label="(?P<text>[^"]*)"')
LIVE = re.compile(
    r'\A<div class="live-figure">.*?<svg role="img" aria-label="(?P<text>[^"]*)"', re.S
)
COMPUTED = re.compile(
    r'<figure class="[^"]*\bcomputed\b[^"]*" id="(?P<id>[^"]+)">(?P<inner>.*?)</figure>', re.DOTALL
)
NUMBER = re.compile(r'<span class="caption-number">(?P<number>[^<]*)</span>')
CAPTION = re.compile(r'<span class="caption-text">(?P<text>.*?)</span>', re.DOTALL)
DRAWING = re.compile(r'<svg role="img"[^>]*?style="max-width:100%;height:auto".*?</svg>', re.DOTALL)


def alternative(bundle: nodes.container) -> str:
    """Return what a computed figure says that it shows; nothing where there is no figure."""
    for raw in bundle.findall(nodes.raw):
        text = raw.astext()
        if match := NAMED.match(text) or LIVE.match(text):
            return html.unescape(match["text"])
    return ""


def add_captions(app: Sphinx, doctree: nodes.document) -> None:
    """Put each computed figure of a chapter into a figure with a caption."""
    count = 0
    for bundle in list(doctree.findall(nodes.container)):
        if bundle.get("nb_element") != "mime_bundle" or not (text := alternative(bundle)):
            continue
        count += 1
        figure = nodes.figure("", ids=[f"computed-figure-{count}"], classes=["computed"])
        bundle.replace_self(figure)
        figure += [bundle, nodes.caption("", text)]


def number_equations(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Give the paper's equations their numbers, and count ours in each chapter without them."""
    for kinds in env.toc_fignumbers.values():
        equations = kinds.get("displaymath", {})
        count = 0
        for name, number in equations.items():
            if name in PAPER:
                equations[name] = (PAPER[name],)
            else:
                count += 1
                equations[name] = (*number[:-1], count)
    return []


def keep_legible(figure: str) -> str:
    """Give the drawings of a figure a least width; on a phone the wide ones scroll in their box."""
    figure = DRAWING.sub(lambda drawing: widen(drawing[0]), figure)
    if least := re.search(r"min-width:\d+px", figure):  # what moves is as wide as what stands
        moving = '<div class="moving"'
        figure = figure.replace(moving, f'{moving} style="{least[0]}"')
    return figure


def name_drawings(body: str) -> str:
    """Name each computed drawing by its number; its caption says the rest."""

    def rename(match: re.Match[str]) -> str:
        name, inner = match["id"], match["inner"]
        number, caption = NUMBER.search(inner), CAPTION.search(inner)
        if number is None or caption is None:
            return match[0]
        short = number["number"].strip()
        inner = re.sub(r'(<svg role="img" )aria-label="[^"]*"', rf'\1aria-label="{short}"', inner)
        if '<div class="live-figure">' in inner:  # Vega names its drawing by the description
            text = re.escape(json.dumps(html.unescape(caption["text"])).replace("</", r"<\/"))
            inner = re.sub(rf'("description": ){text}', rf'\1"{short}"', inner)
        inner = keep_legible(inner)
        return f'<figure class="computed align-default" id="{name}">{inner}</figure>'

    return COMPUTED.sub(rename, body)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("doctree-read", add_captions, priority=400)  # before numbers are collected
    app.connect("env-get-updated", number_equations, priority=900)  # after they were given
    rewrite_bodies(app, name_drawings)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
