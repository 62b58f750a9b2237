"""TeX to MathML, for pages that are read where MathJax does not run."""

import re

from latex2mathml.converter import convert

ENDS = re.compile(r"\A\s*\\[\[(]|\\[\])]\s*\Z")
# MathML Core has no named widths.
WIDTHS = {"negativethinmathspace": "-0.167em", "thinmathspace": "0.167em",
          "mediummathspace": "0.222em", "thickmathspace": "0.278em"}  # fmt: skip
NAMED = re.compile(rf'width="({"|".join(WIDTHS)})"')


class FormulaError(Exception):
    """A formula cannot be converted; the message says which."""


def mathml(tex: str, *, block: bool) -> str:
    """Return a formula as MathML.

    Raises:
        FormulaError: It is not well formed.
    """
    inner = ENDS.sub("", tex).strip()
    if "{aligned}" in inner:  # the converter knows it under another name
        inner = re.sub(r"\\(begin|end)\{split\}", "", inner).replace("{aligned}", "{split}")
    try:
        found: str = convert(inner, display="block" if block else "inline")
    except Exception as error:  # the converter's errors have no common class
        raise FormulaError(f"cannot convert {inner!r}: {error}") from None
    return NAMED.sub(lambda match: f'width="{WIDTHS[match[1]]}"', found)
