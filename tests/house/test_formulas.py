"""Formulas in the chapters: a doubled backslash breaks the line where a command was meant."""

import re

import pytest
from house import ROOT

FORMULA = re.compile(r"\$\$.*?\$\$|```\{math\}.*?```|(?<![\\$])\$[^$\n]+\$", re.DOTALL)
ALIGNED = re.compile(r"\\begin\{(\w+\*?)\}.*?\\end\{\1\}", re.DOTALL)  # lines may break there


def doubled(text: str) -> list[str]:
    """Return the formulas with a doubled backslash outside of an environment."""
    found = (match[0] for match in FORMULA.finditer(text))
    return [formula for formula in found if r"\\" in ALIGNED.sub("", formula)]


def test_no_formula_breaks_a_line_by_accident() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in (ROOT / "book").rglob("*.md")}
    assert sum(len(FORMULA.findall(text)) for text in texts.values()) > 500
    assert {path: found for path, text in texts.items() if (found := doubled(text))} == {}


@pytest.mark.parametrize("text", ["a $\\\\frac{1}{2}$", "$$\nx = \\\\sqrt{d_k}\n$$",
                                  "```{math}\nx \\\\cdot y\n```"])  # fmt: skip
def test_a_doubled_backslash_is_noticed(text: str) -> None:
    assert len(doubled(text)) == 1
    assert doubled(text.replace("\\\\", "\\")) == []
    assert doubled("$$\\begin{aligned} a \\\\ b \\end{aligned}$$") == []
