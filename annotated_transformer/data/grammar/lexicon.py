"""The words of the grammar and their forms, read from the tables next to this module.

A table (``nouns.tsv`` …) has one word per line; its first line names the columns. ``-`` marks a
form that does not exist.
"""

import csv
from importlib.resources import files
from typing import Final, Literal, NamedTuple

Case = Literal["nominative", "accusative", "dative", "genitive"]
CASES: Final[tuple[Case, ...]] = ("nominative", "accusative", "dative", "genitive")


class Noun(NamedTuple):
    """A noun with its German gender: ``m``, ``f`` or ``n``.

    Its kind says what can be done with it: things *stand* or *lie*, food is eaten.
    """

    kind: str
    gender: str
    singular: str
    plural: str
    genitive: str
    english: str
    english_plural: str

    def german(self, case: Case, plural: bool = False) -> str:
        """Return the German form for a case and number."""
        if plural:
            add_n = case == "dative" and not self.plural.endswith(("n", "s"))
            return self.plural + ("n" if add_n else "")
        return (self.genitive if case == "genitive" else "") or self.singular


class Verb(NamedTuple):
    """A verb; its kind says which objects it takes: a thing, a person, both, or none.

    ``prefix`` is the part that splits off a separable verb: *an* of *anrufen*.
    """

    kind: str
    prefix: str
    stem: str
    third: str
    participle: str
    auxiliary: str
    english: str
    english_third: str
    english_past: str

    def finite(self, person: str) -> str:
        """Return the present form without prefix; ``person`` is ``ich``, ``3`` or ``p``."""
        return {"ich": self.stem[:-1], "3": self.third, "p": self.stem}[person]


def read_table(name: str) -> list[dict[str, str]]:
    """Return the rows of a table, as dictionaries by column name."""
    text = (files(__package__) / f"{name}.tsv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
    return [{name: "" if word == "-" else word for name, word in row.items()} for row in rows]


NOUNS: Final = tuple(Noun(**row) for row in read_table("nouns"))
VERBS: Final = tuple(Verb(**row) for row in read_table("verbs"))
ADJECTIVES: Final = read_table("adjectives")  # with the kinds of nouns that each describes
ADVERBS: Final = read_table("adverbs")  # an early one comes before the English verb: *often*
ENDINGS: Final = {(row["table"], row["case"]): row for row in read_table("endings")}
PRONOUNS: Final = {row["english"]: row for row in read_table("pronouns")}
NUMBERS: Final = {int(row["number"]): row for row in read_table("numbers")}
# By person, like finite verbs: ``ich``, ``3`` (he, she, it) or ``p`` (we, they).
AUXILIARIES: Final = {(row["language"], row["name"]): row for row in read_table("auxiliaries")}


def form(table: str, case: Case, gender: str) -> str:
    """Look up an article or an ending; ``gender`` is ``m``, ``f``, ``n`` or ``p`` (plural).

    The tables are the articles ``definite`` and ``relative``, the endings of ``ein`` (also *kein*,
    *mein*, *unser*), and those of adjectives: after *der* ``weak``, after *ein* ``mixed``, and
    without an article ``strong``.
    """
    return ENDINGS[table, case][gender]


def _number(language: str, number: int, pattern: str) -> str:
    """Return a number word; ``pattern`` joins its tens and its unit."""
    if not 2 <= number <= 99:  # ein and eine would need a gender
        raise ValueError(f"number {number}: must be from 2 to 99")
    if number in NUMBERS:
        return NUMBERS[number][language]
    tens, unit = NUMBERS[number - number % 10], NUMBERS[number % 10]
    return pattern.format(tens=tens[language], unit=unit[language])


def german_number(number: int) -> str:
    """Return the German word for a number from 2 to 99: the unit comes first."""
    return _number("de", number, "{unit}und{tens}")


def english_number(number: int) -> str:
    """Return the English word for a number from 2 to 99: the tens come first."""
    return _number("en", number, "{tens}-{unit}")
