"""Trees drawn as text and as SVG."""

from __future__ import annotations

import itertools
import re
from xml.etree import ElementTree

from annotated_transformer.results.parsing import Tree, read_trees
from annotated_transformer.tree_figures import TreePicture, draw_svg, draw_text

SVG = "{http://www.w3.org/2000/svg}"
TEXT = "(S (NP (DT The) (NN cat)) (VP (VBZ eats) (NP (NN fish))) (. <&>))"


def read(text: str) -> Tree:
    (tree,) = read_trees(text)
    return tree


def test_a_tree_as_text() -> None:
    assert draw_text(read(TEXT)).splitlines() == [
        "S",
        "├─ NP",
        "│  ├─ DT  The",
        "│  └─ NN  cat",
        "├─ VP",
        "│  ├─ VBZ  eats",
        "│  └─ NP",
        "│     └─ NN  fish",
        "└─ .  <&>",
    ]
    assert draw_text(read("(NN cat)")) == "NN  cat"
    assert repr(TreePicture(read(TEXT))) == draw_text(read(TEXT))


def test_a_tree_as_svg() -> None:
    svg = draw_svg(read(TEXT))
    assert TreePicture(read(TEXT))._repr_html_() == svg
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img"
    assert root.get("aria-label") == "Tree of the sentence: The cat eats fish <&>"
    assert set(re.findall(r"#[0-9a-f]{3,6}|black|white", svg)) == set()  # the page's colour only
    assert svg.count("currentColor") == 2
    labels = root.findall(f".//{SVG}text")
    names = "S NP DT The NN cat VP VBZ eats NP NN fish . <&>"
    assert [label.text for label in labels] == names.split()
    assert len(root.findall(f".//{SVG}line")) == len(labels) - 1
    words = [label for label in labels if label.get("font-style") == "italic"]
    assert [word.text for word in words] == "The cat eats fish <&>".split()
    assert len({word.get("y") for word in words}) == 1
    heights = [float(label.get("y") or 0) for label in labels if label not in words]
    assert max(heights) < float(words[0].get("y") or 0)
    places = [float(word.get("x") or 0) for word in words]
    width, height = (float(root.get(side) or 0) for side in ("width", "height"))
    assert places[0] > 0
    assert all(b - a > 20 for a, b in itertools.pairwise(places))
    assert places[-1] < width
    assert max(float(label.get("y") or 0) for label in labels) < height
    middle = (places[0] + places[1]) / 2  # a noun phrase is above the middle of its words
    assert abs(float(labels[1].get("x") or 0) - middle) < 0.11


def test_deep_trees_are_drawn() -> None:
    deep = read("(X " * 3000 + "(NN word)" + ")" * 3000)
    assert draw_text(deep).count("\n") == 3000
    assert draw_svg(deep).count("<text") == 3002
