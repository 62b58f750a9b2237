"""Phrases and clauses, generated in both languages from the same choices.

Each choice gets a number, its *link*, and the words that express it in either language carry that
link. Words with equal links are aligned. English words also carry the brackets of the sentence's
tree: each knows its part of speech, the constituents that it begins, and how many it ends.
"""

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

from annotated_transformer.data.grammar.lexicon import (
    ADJECTIVES,
    ADVERBS,
    AUXILIARIES,
    CASES,
    NOUNS,
    PRONOUNS,
    VERBS,
    Case,
    Noun,
    Verb,
    english_number,
    form,
    german_number,
)


class Word(NamedTuple):
    """A generated word; words of the two languages that share a link are aligned."""

    text: str
    links: frozenset[int] = frozenset()
    antecedent: int | None = None  # the link of the noun that a pronoun refers to
    tag: str = ""  # part of speech, in English, as in the Penn Treebank
    opens: tuple[str, ...] = ()  # labels of the constituents that begin with it, the largest first
    closes: int = 0  # constituents that end with it

    def bracketed(self, opens: tuple[str, ...], closes: int) -> "Word":
        """Return the word with other brackets, in a quarter of the time of ``_replace``."""
        return tuple.__new__(Word, (*self[:4], opens, closes))


Words = tuple[Word, ...]
Both = tuple[Words, Words]  # English, German
Order = Literal["first", "second", "last"]  # position of the finite verb in German
NOTHING: Final[Both] = ((), ())
COMMA: Final = Word(",")
THING: Final = ("standing", "lying")  # the kinds of nouns that are things
DAYS: Final = frozenset("yesterday today tomorrow".split())  # adverbs that are nouns


@functools.lru_cache(10_000)
def link_words(text: str, *links: int, tags: str = "") -> Words:
    """Return the words of a text, all with the same links; an empty text has none.

    Args:
        text: Words with blanks between.
        links: Their links.
        tags: A part of speech for each word, in English.
    """
    words, shared = text.split(), frozenset(links)
    named = [*tags.split(), *[""] * len(words)]
    return tuple([Word(word, shared, None, tag) for word, tag in zip(words, named, strict=False)])


def constituent(label: str, words: Words) -> Words:
    """Put a labelled bracket around words; no words have none."""
    if not words:
        return ()
    *most, last = words
    if not most:
        return (last.bracketed((label, *last.opens), last.closes + 1),)
    most[0] = most[0].bracketed((label, *most[0].opens), most[0].closes)
    return *most, last.bracketed(last.opens, last.closes + 1)


def strip_bracket(words: Words) -> Words:
    """Remove the largest bracket, which is around all of the words."""
    first = words[0].bracketed(words[0].opens[1:], words[0].closes), *words[1:]
    return *first[:-1], first[-1].bracketed(first[-1].opens, first[-1].closes - 1)


def add_inside(words: Words, more: Words, depth: int) -> Words:
    """Add words at the end, inside the ``depth`` largest brackets that end there."""
    last, end = words[-1], more[-1]
    end = end.bracketed(end.opens, end.closes + depth)
    return *words[:-1], last.bracketed(last.opens, last.closes - depth), *more[:-1], end


class Writer:
    """The source of a sentence's random choices, and of the numbers that link its words."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.links = itertools.count()

    def bernoulli(self, probability: float) -> bool:
        """Return True with the given probability."""
        return self.rng.random() < probability

    def aligned(self, english: str, german: str, tags: str = "", *labels: str) -> Both:
        """Return a text in both languages, with a common link.

        Args:
            english: Words with blanks between.
            german: The same in German.
            tags: Parts of speech of the English words.
            labels: Brackets around the English words, the smallest first.
        """
        link = next(self.links)
        words = link_words(english, link, tags=tags)
        for label in labels:
            words = constituent(label, words)
        return words, link_words(german, link)


@dataclass(frozen=True)
class Phrase:
    """A noun phrase, which is written in the cases in which it is needed."""

    english: Callable[[Case], Words]
    german: Callable[[Case], Words]
    person: str  # "ich", "3" or "p": determines the verb's form
    gender: str  # "m", "f", "n" or "p"
    kind: str
    head: int  # the link of its noun
    pronoun: bool = False

    def followed_by(self, english: Words, german: Words) -> "Phrase":
        """Return the phrase with words after its noun, the same in every case."""
        return replace(
            self,
            english=lambda case: constituent("NP", self.english(case) + english),
            german=lambda case: self.german(case) + german,
        )


@functools.cache
def of_kind(table: str, *kinds: str) -> tuple[Any, ...]:
    """Return the nouns or verbs of some kinds, or the adjectives that fit one of them."""
    if table == "adjectives":
        return tuple(row for row in ADJECTIVES if set(kinds) & set(row["kinds"].split()))
    return tuple(word for word in (NOUNS if table == "nouns" else VERBS) if word.kind in kinds)


def choose_verb(writer: Writer, kind: str) -> Verb:
    """Choose a verb of a kind."""
    verb: Verb = writer.rng.choice(of_kind("verbs", kind))
    return verb


def choose_adjective(writer: Writer, noun_kind: str) -> dict[str, str]:
    """Choose an adjective that fits a kind of noun."""
    general = {"standing": "thing", "lying": "thing", "drink": "mass", "food": "mass"}
    kind = general.get(noun_kind, noun_kind)
    adjective: dict[str, str] = writer.rng.choice(of_kind("adjectives", kind))
    return adjective


def _german_determiner(determiner: str, number: int, case: Case, gender: str) -> tuple[str, str]:
    """Return a German noun phrase's determiner, and the table of its adjective's endings."""
    if determiner == "def":
        return form("definite", case, gender), "weak"
    if determiner == "number":
        return german_number(number), "strong"
    if determiner == "none" or (determiner == "ein" and gender == "p"):
        return "", "strong"
    return determiner + form("ein", case, gender), "mixed"


def noun_phrase(
    writer: Writer,
    *kinds: str,
    determiners: str = "def def ein mein unser",
    plain: bool = False,
    negation: tuple[int, ...] = (),
) -> Phrase:
    """Write a noun phrase.

    Args:
        writer: The source of random choices and links.
        kinds: The kinds of nouns to choose from.
        determiners: The determiners to choose from: ``def``, ``ein``, ``kein``, ``mein``,
            ``unser``, ``number``; a plural after ``ein`` has no article.
        plain: Leave out adjectives and the plural.
        negation: The link of the negation, if *kein* expresses it.
    """
    noun: Noun = writer.rng.choice(of_kind("nouns", *kinds))
    determiner = writer.rng.choice(determiners.split())
    plural = determiner == "number" or (not plain and writer.bernoulli(0.3))
    bare = plain or writer.bernoulli(0.5)
    adjective = None if bare else choose_adjective(writer, noun.kind)
    if noun.kind in ("drink", "food"):
        plural, determiner = False, writer.rng.choice(["def", "none", "none"])
    gender = "p" if plural else noun.gender
    number = writer.rng.randint(2, 99) if determiner == "number" else 0
    first, second, head = (next(writer.links) for _ in range(3))

    def english(_: Case) -> Words:
        quality = adjective["english"] if adjective else ""
        named = noun.english_plural if plural else noun.english
        article = "" if plural else "an" if (quality or named)[0] in "aeiou" else "a"
        fixed = {"def": "the", "mein": "my", "unser": "our", "none": ""}
        determined = english_number(number) if number else fixed.get(determiner, article)
        tag = "CD" if number else {"mein": "PRP$", "unser": "PRP$"}.get(determiner, "DT")
        words = link_words(determined, first, tags=tag) + link_words(quality, second, tags="JJ")
        words += link_words(named, head, tags="NNS" if plural else "NN")
        return constituent("NP", words)

    def german(case: Case) -> Words:
        determined, table = _german_determiner(determiner, number, case, gender)
        quality = adjective["stem"] + form(table, case, gender) if adjective else ""
        words = link_words(determined, first, *negation) + link_words(quality, second)
        return words + link_words(noun.german(case, plural), head)

    return Phrase(english, german, "p" if plural else "3", gender, noun.kind, head)


def write_pronoun(writer: Writer, of: Phrase | None = None, which: str = "") -> Phrase:
    """Return a pronoun for a phrase (a pronoun is repeated), or the one named ``which``.

    English uses *it* for every thing, but German follows the gender of the noun.
    """
    if of is not None and of.pronoun:
        which, of = of.english("nominative")[0].text, None
    if of is not None:
        which = {"m": "he", "f": "she", "n": "it", "p": "they"}[of.gender]
    thing = of is not None and of.kind != "person" and of.gender != "p"
    english, german = PRONOUNS["it" if thing else which], PRONOUNS[which]
    link = next(writer.links)

    def word(text: str, tag: str = "") -> Words:
        return (Word(text, frozenset({link}), of.head if of else None, tag),)

    def in_english(case: Case) -> Words:
        tag, label = ("WP", "WHNP") if which == "who" else ("PRP", "NP")
        return constituent(label, word(english["english" if case == CASES[0] else "object"], tag))

    kind = of.kind if of else "person"
    person, gender = german["person"], german["gender"]
    return Phrase(in_english, lambda case: word(german[case]), person, gender, kind, link, True)


def write_person(writer: Writer) -> Phrase:
    """Return a subject, a person or a pronoun that needs no antecedent."""
    if writer.bernoulli(0.35):
        return write_pronoun(writer, which=writer.rng.choice(["I", "we", "he", "she", "they"]))
    return noun_phrase(writer, "person")


@dataclass(frozen=True)
class Clause:
    """The content of a clause, before the word order of either language."""

    subject: Phrase
    verb: Verb | None  # None: the copula, with an adjective as complement
    tense: str  # "present", "past", "future" or a modal verb
    links: tuple[int, int]  # of the verb, of its auxiliary
    objects: tuple[tuple[Phrase, Case], ...] = ()
    adverb: Both = NOTHING
    position: str = ""  # of the adverb: "front", or in English "early" or "late"
    negation: tuple[str, int] | None = None  # German "nicht", or "kein" in an object; its link
    complement: Both = NOTHING  # a place, or a quality of the subject


def german_verb(clause: Clause) -> tuple[Words, Words]:
    """Return the finite verb, and the words that come at the end of the clause."""
    verb, person, (link, auxiliary) = clause.verb, clause.subject.person, clause.links
    if clause.tense not in ("present", "past"):
        modal = link_words(AUXILIARIES["de", clause.tense][person], auxiliary)
        return modal, link_words(verb.prefix + verb.stem if verb else "sein", link)
    if verb is None:
        return link_words(AUXILIARIES["de", f"be {clause.tense}"][person], link), ()
    if clause.tense == "past":  # spoken German: hat gekauft
        helper = AUXILIARIES["de", verb.auxiliary][person]
        return link_words(helper, link), link_words(verb.participle, link)
    return link_words(verb.finite(person), link), link_words(verb.prefix, link)


def german_order(clause: Clause, order: Order) -> Words:
    """Write a German clause with its finite verb first, second or last."""
    finite, end = german_verb(clause)
    subject, adverb = clause.subject.german("nominative"), clause.adverb[1]
    front = clause.position == "front"
    middle = () if front else adverb
    for phrase, case in clause.objects:  # a pronoun comes before the adverb
        words = phrase.german(case)
        middle = words + middle if phrase.pronoun else middle + words
    if clause.negation and clause.negation[0] == "nicht":
        middle += link_words(*clause.negation)
    middle += clause.complement[1]
    if order == "last":
        if clause.tense == "present" and end:  # the prefix is reattached: anruft
            return subject + middle + link_words(end[0].text + finite[0].text, clause.links[0])
        return subject + middle + end + finite
    if order == "first":
        return finite + subject + middle + end
    return (adverb + finite + subject if front else subject + finite) + middle + end


def english_verb(clause: Clause, question: bool) -> tuple[Words, Words]:
    """Return auxiliaries and main verb; *do* is added where English needs it."""
    verb, person, (link, auxiliary) = clause.verb, clause.subject.person, clause.links
    negation = link_words("not", clause.negation[1], tags="RB") if clause.negation else ()
    finite = "VBD" if clause.tense == "past" else "VBZ" if person == "3" else "VBP"
    if clause.tense not in ("present", "past"):
        tags = f"{finite} TO" if clause.tense == "want" else "MD"
        modal = link_words(AUXILIARIES["en", clause.tense][person], auxiliary, tags=tags)
        return modal + negation, link_words(verb.english if verb else "be", link, tags="VB RP")
    helped = question or clause.negation is not None
    if verb is None:
        copula = link_words(AUXILIARIES["en", f"be {clause.tense}"][person], link, tags=finite)
        return (copula + negation, ()) if helped else ((), copula)
    if helped:
        helper = link_words(AUXILIARIES["en", f"do {clause.tense}"][person], link, tags=finite)
        return helper + negation, link_words(verb.english, link, tags="VB RP")
    present = verb.english_third if person == "3" else verb.english
    text = verb.english_past if clause.tense == "past" else present
    return (), link_words(text, link, tags=f"{finite} RP")


def english_predicate(clause: Clause, question: bool = False) -> tuple[Words, Words]:
    """Return the auxiliaries, and the verb with what belongs to it; neither has its bracket."""
    helpers, main = english_verb(clause, question)
    rest, particle = main[:1], constituent("PRT", main[1:])  # throws the lamp away, but: away it
    if clause.verb is None and not helpers and clause.position == "early":
        rest += clause.adverb[0]  # is often happy, but: often laughs
    for phrase, case in clause.objects:
        words = phrase.english(case)
        rest += words + particle if phrase.pronoun else particle + words
        particle = ()
    late = clause.adverb[0] if clause.position == "late" else ()
    return helpers, rest + particle + clause.complement[0] + late


def verb_phrase(helpers: Words, rest: Words) -> Words:
    """Put brackets around a predicate: each verb governs what follows it."""
    if not helpers:
        return constituent("VP", rest)
    inner = constituent("VP", rest) if rest and rest[0].tag == "VB" else rest
    if helpers[-1].tag == "TO":  # wants to buy
        inner = constituent("S", constituent("VP", helpers[-1:] + inner))
        return constituent("VP", helpers[:-1] + inner)
    return constituent("VP", helpers + inner)


def english_order(clause: Clause, question: bool = False) -> Words:
    """Write an English clause as a statement or as a yes-no question, with its brackets."""
    helpers, rest = english_predicate(clause, question)
    subject = clause.subject.english("nominative")
    front, early = (clause.adverb[0] if clause.position == p else () for p in ("front", "early"))
    if question:
        words = helpers[:1] + subject + helpers[1:] + early + constituent("VP", rest)
        return constituent("SQ", front + words)
    if clause.verb is None and not helpers:
        early = ()  # stands after the verb
    predicate = early + verb_phrase(helpers, rest)
    if subject and subject[0].opens == ("WHNP",):  # who or that: the clause proper follows
        outer, inner = ("SBARQ", "SQ") if clause.subject.pronoun else ("SBAR", "S")
        return constituent(outer, front + subject + constituent(inner, predicate))
    return constituent("S", front + subject + predicate)


def write_clause(
    writer: Writer,
    subject: Phrase,
    verb: Verb | None,
    *objects: tuple[Phrase, Case],
    tense: str,
    adverb: bool = False,
    negation: tuple[str, int] | None = None,
    complement: Both = NOTHING,
) -> Clause:
    """Assemble a clause, perhaps with a random adverb if ``adverb`` is true."""
    position, words = "", NOTHING
    fitting = [row for row in ADVERBS if adverb and tense in row["tenses"].split()]
    if fitting and not negation and writer.bernoulli(0.4):
        chosen = writer.rng.choice(fitting)
        tags = ("NN", "NP") if chosen["english"] in DAYS else ("RB", "ADVP")
        position = chosen["position"]
        words = writer.aligned(chosen["english"], chosen["german"], *tags)
        if position == "late" and writer.bernoulli(0.5):
            position = "front"
    links = next(writer.links), next(writer.links)
    return Clause(subject, verb, tense, links, objects, words, position, negation, complement)


def add_quality(writer: Writer, subject: Phrase, tense: str = "present", **options: Any) -> Clause:
    """Return a clause that gives the subject a quality, such as *is old*."""
    adjective = choose_adjective(writer, subject.kind)
    complement = writer.aligned(adjective["english"], adjective["german"], "JJ", "ADJP")
    return write_clause(writer, subject, None, tense=tense, complement=complement, **options)


def write_place(writer: Writer, motion: bool = False, at_thing: bool = False) -> Both:
    """Return a place; after *in*, the German case distinguishes location from direction."""
    english, german = ("into" if motion else "in"), "in"
    if at_thing:
        places = [("on", "auf"), ("under", "unter"), ("beside", "neben"), ("behind", "hinter")]
        english, german = writer.rng.choice(places)
        phrase = noun_phrase(writer, "standing", determiners="def def ein mein", plain=True)
    else:
        phrase = noun_phrase(writer, "place", determiners="def def ein unser")
    link, words = next(writer.links), phrase.german("accusative" if motion else "dative")
    preposition = link_words(german, link)
    if joined := {("in", "dem"): "im", ("in", "das"): "ins"}.get((german, words[0].text)):
        preposition, words = link_words(joined, link, *words[0].links), words[1:]
    place = constituent("PP", link_words(english, link, tags="IN") + phrase.english("dative"))
    return place, preposition + words


def add_owner(writer: Writer, phrase: Phrase) -> Phrase:
    """Add an owner in the genitive, such as *the house of the king*."""
    owner = noun_phrase(writer, "person", determiners="def mein unser", plain=True)
    words = owner.english("nominative")
    of = constituent("PP", (Word("of", words[0].links, tag="IN"), *words))
    return phrase.followed_by(of, owner.german("genitive"))


def add_relative_clause(writer: Writer, phrase: Phrase) -> Phrase:
    """Add a relative clause, in which German sends the verb to the end."""
    tense = writer.rng.choice(["present", "past"])
    thing, person = phrase.kind in THING, phrase.kind == "person"
    if thing or (person and writer.bernoulli(0.4)):
        word, case, kind = ("that", CASES[1], "thing") if thing else ("whom", CASES[2], "dative")
        tag = "WDT" if thing else "WP"
        pronoun = writer.aligned(word, form("relative", case, phrase.gender), tag, "WHNP")
        clause = write_clause(writer, write_person(writer), choose_verb(writer, kind), tense=tense)
    else:
        pronoun, clause = NOTHING, _with_relative_subject(writer, phrase, tense)
    german = (COMMA, *pronoun[1], *german_order(clause, "last"), COMMA)
    english = english_order(clause)
    if pronoun[0]:  # otherwise it is the clause's subject
        english = constituent("SBAR", pronoun[0] + english)
    return phrase.followed_by(english, german)


def _with_relative_subject(writer: Writer, phrase: Phrase, tense: str) -> Clause:
    """Write a clause whose subject is the relative pronoun of a phrase."""
    word = "who" if phrase.kind == "person" else "that"
    tag = "WP" if word == "who" else "WDT"
    relative = form("relative", "nominative", phrase.gender)
    english, german = writer.aligned(word, relative, tag, "WHNP")
    subject = replace(phrase, english=lambda _: english, german=lambda _: german)
    if phrase.kind == "person" and writer.bernoulli(0.5):
        thing = noun_phrase(writer, *THING, determiners="def ein mein")
        verb = choose_verb(writer, "thing")
        return write_clause(writer, subject, verb, (thing, "accusative"), tense=tense)
    place = write_place(writer) if writer.bernoulli(0.5) else NOTHING
    verb = choose_verb(writer, "none")
    return write_clause(writer, subject, verb, tense=tense, complement=place)
