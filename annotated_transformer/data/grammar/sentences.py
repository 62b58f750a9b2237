"""The kinds of sentences; each function makes its random choices and generates both sides."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from annotated_transformer.data.grammar.clauses import (
    COMMA,
    NOTHING,
    THING,
    Both,
    Clause,
    Order,
    Phrase,
    Words,
    Writer,
    add_inside,
    add_owner,
    add_quality,
    add_relative_clause,
    choose_verb,
    constituent,
    english_order,
    german_order,
    noun_phrase,
    strip_bracket,
    write_clause,
    write_person,
    write_place,
    write_pronoun,
)
from annotated_transformer.data.grammar.lexicon import VERBS, Case

Sentence = tuple[Words, Words, str]  # English, German, final mark
COMMAS: Final[Both] = ((), (COMMA,))  # only German has one before a subordinate clause
Negation = tuple[str, int] | None  # the German word, the link
TENSES: Final = "present present past past future can must want should".split()
SHAPES: Final = "thing thing thing person dative both none motion drink food".split()
QUESTIONS: Final = {"whether": "", "why": "warum", "when": "wann", "who": "wer", "what": "was"}
REASONS: Final = (("because", "weil"), ("although", "obwohl"))
CONDITIONS: Final = (("when", "wenn"), ("if", "falls"))
BY_STEM: Final = {verb.stem: verb for verb in VERBS}


def _negation(writer: Writer, probability: float) -> Negation:
    """Negate a clause with a probability."""
    return ("nicht", next(writer.links)) if writer.bernoulli(probability) else None


def _somebody(writer: Writer, subject: Phrase, negation: Negation) -> Phrase:
    """Return a person as the object, sometimes *me* or *us*."""
    if subject.person == "3" and writer.bernoulli(0.25):
        return write_pronoun(writer, which=writer.rng.choice(["I", "we"]))
    if negation:  # nicht follows a definite phrase
        return noun_phrase(writer, "person", determiners="def mein unser")
    return noun_phrase(writer, "person")


def _direct_object(writer: Writer, negation: Negation, owner: bool) -> Phrase:
    """Return a thing as the object; an indefinite one is negated with *kein*."""
    if negation and negation[0] == "kein":
        return noun_phrase(writer, *THING, determiners="kein", negation=negation[1:])
    if owner and writer.bernoulli(0.15):
        return add_owner(writer, noun_phrase(writer, *THING, determiners="def"))
    determiners = "def mein" if negation else "def def ein ein mein number"
    return noun_phrase(writer, *THING, determiners=determiners)


def action_clause(writer: Writer, subject: Phrase, adverb: bool = True, tense: str = "") -> Clause:
    """Return a clause in which a person does something."""
    tense = tense or writer.rng.choice(TENSES)
    shape = writer.rng.choice(SHAPES)
    negation: Negation = None
    if tense in ("present", "past", "future") and shape not in ("drink", "food"):
        negation = _negation(writer, 0.15)
    objects: list[tuple[Phrase, Case]] = []
    if shape in ("person", "dative", "both"):
        case: Case = "accusative" if shape == "person" else "dative"
        objects.append((_somebody(writer, subject, negation), case))
    if shape in ("thing", "both"):
        if negation and writer.bernoulli(0.6):
            negation = ("kein", negation[1])
        objects.append((_direct_object(writer, negation, owner=shape == "thing"), "accusative"))
    if shape in ("drink", "food"):
        objects.append((noun_phrase(writer, shape), "accusative"))
    place = NOTHING
    if shape == "motion" or (shape == "none" and writer.bernoulli(0.5)):
        place = write_place(writer, motion=shape == "motion")
    options: dict[str, Any] = {"adverb": adverb, "negation": negation, "complement": place}
    verb = choose_verb(writer, shape)
    return write_clause(writer, subject, verb, *objects, tense=tense, **options)


def _stated(clause: Clause) -> Sentence:
    """Write a clause as a statement."""
    return english_order(clause), german_order(clause, "second"), "."


def _joined(first: Clause, commas: Both, link: Both, second: Clause, order: Order) -> Sentence:
    """Join a main clause and another clause with a conjunction.

    A subordinate clause, whose verb is last in German, belongs to the first one's verb phrase.
    """
    english = english_order(first), english_order(second)
    if order == "last":
        inner = constituent("SBAR", link[0] + english[1])
        both = add_inside(english[0], inner, depth=2)  # S and VP
    else:
        both = english[0] + commas[0] + link[0] + english[1]
    german = german_order(first, "second") + commas[1] + link[1] + german_order(second, order)
    return both, german, "."


def statement(writer: Writer) -> Sentence:
    """Say who does what."""
    return _stated(action_clause(writer, write_person(writer)))


def description(writer: Writer) -> Sentence:
    """Say what somebody or something is like, or where it is."""
    extra = writer.rng.random()
    if extra < 0.15:
        subject = add_owner(writer, noun_phrase(writer, "person", "lying", determiners="def"))
    else:
        subject = noun_phrase(writer, "person", "animal", *THING)
    if extra > 0.5:
        subject = add_relative_clause(writer, subject)
    tense = writer.rng.choice(["present", "past"])
    if subject.kind in THING and writer.bernoulli(0.5):
        place = write_place(writer, at_thing=writer.bernoulli(0.6))
        verb = choose_verb(writer, subject.kind)
        return _stated(write_clause(writer, subject, verb, tense=tense, complement=place))
    negation = _negation(writer, 0.2)
    return _stated(add_quality(writer, subject, tense, adverb=extra <= 0.5, negation=negation))


def question(writer: Writer) -> Sentence:
    """Ask whether, why, when, who or what."""
    which = writer.rng.choice(list(QUESTIONS))
    tense = writer.rng.choice(["present", "past", "future", "can", "must"])
    if which == "who":
        subject = write_pronoun(writer, which="who")
        clause = action_clause(writer, subject, adverb=False, tense=tense)
        return *_stated(clause)[:2], "?"
    person = write_person(writer)
    if which == "what":
        clause = write_clause(writer, person, choose_verb(writer, "thing"), tense=tense)
    else:
        clause = action_clause(writer, person, adverb=False, tense=tense)
        if clause.negation and clause.negation[0] == "nicht":
            clause = replace(clause, negation=None)
    label, tag = ("WHNP", "WP") if which == "what" else ("WHADVP", "WRB")
    asked = which if QUESTIONS[which] else ""
    english, german = writer.aligned(asked, QUESTIONS[which], tag, label)
    words = english + english_order(clause, question=True)
    words = constituent("SBARQ", words) if english else words
    return words, german + german_order(clause, "first"), "?"


def report(writer: Writer) -> Sentence:
    """Say what somebody says or asks; *dass* and *ob* send the verb to the end."""
    speaker, tense = write_person(writer), writer.rng.choice(["present", "past"])
    if writer.bernoulli(0.3):
        verb, link = BY_STEM["fragen"], writer.aligned("whether", "ob", "IN")
    else:
        verb, link = choose_verb(writer, "saying"), writer.aligned("that", "dass", "IN")
    main = write_clause(writer, speaker, verb, tense=tense)
    said = action_clause(writer, write_person(writer))
    if said.position == "front":
        said = replace(said, position="late")
    return _joined(main, COMMAS, link, said, "last")


def reason(writer: Writer) -> Sentence:
    """Give a reason; the adjective shows whether the pronoun refers to the person or the thing."""
    person = write_person(writer)
    while person.gender == "n":  # English would have to choose he or she for a child
        person = write_person(writer)
    thing = noun_phrase(writer, *THING, determiners="def ein mein")
    tense = writer.rng.choice(["present", "past"])
    verb = choose_verb(writer, "thing")
    place = write_place(writer) if writer.bernoulli(0.2) else NOTHING
    main = write_clause(writer, person, verb, (thing, "accusative"), tense=tense, complement=place)
    about = person if writer.bernoulli(0.35) else thing
    if writer.bernoulli(0.25):  # an animal, alone in its sentence
        about = noun_phrase(writer, "animal")
        main = write_clause(writer, about, choose_verb(writer, "none"), tense=tense)
    link, negation = writer.aligned(*writer.rng.choice(REASONS), "IN"), _negation(writer, 0.15)
    again = write_pronoun(writer, of=about)
    return _joined(main, COMMAS, link, add_quality(writer, again, tense, negation=negation), "last")


def condition(writer: Writer) -> Sentence:
    """Start with a subordinate clause: the main clause then starts with its verb."""
    subject = noun_phrase(writer, "person")
    thing = noun_phrase(writer, *THING, determiners="def mein ein")
    while subject.gender == "n":
        subject = noun_phrase(writer, "person")
    chosen = writer.rng.choice(CONDITIONS)
    tags = ("WRB", "WHADVP") if chosen[0] == "when" else ("IN",)
    english, german = writer.aligned(*chosen, *tags)
    verb = BY_STEM[writer.rng.choice(["sehen", "finden", "verlieren", "brauchen"])]
    first = write_clause(writer, subject, verb, (thing, "accusative"), tense="present")
    tense = writer.rng.choice(["present", "future", "can", "must"])
    again, it = write_pronoun(writer, of=subject), write_pronoun(writer, of=thing)
    verb = choose_verb(writer, "thing")
    then = write_clause(writer, again, verb, (it, "accusative"), tense=tense)
    if writer.bernoulli(0.4):
        first = write_clause(writer, subject, choose_verb(writer, "none"), tense="present")
        then = action_clause(writer, write_person(writer), adverb=False, tense=tense)
    commas = writer.aligned(",", ",", ",")
    sooner = constituent("SBAR", english + english_order(first)) + commas[0]
    german += german_order(first, "last") + commas[1] + german_order(then, "first")
    return constituent("S", sooner + strip_bracket(english_order(then))), german, "."


def contrast(writer: Writer) -> Sentence:
    """Say two things about one subject, or do two things to one object."""
    if writer.bernoulli(0.5):
        about = noun_phrase(writer, *THING, "animal")
        first = add_quality(writer, about)
        second = add_quality(writer, write_pronoun(writer, of=about))
        commas, link = writer.aligned(",", ",", ","), writer.aligned("but", "aber", "CC")
        return _joined(first, commas, link, second, "second")
    person = write_person(writer)
    thing = noun_phrase(writer, *THING, determiners="def ein mein")
    tense = writer.rng.choice(["present", "past"])
    verbs = choose_verb(writer, "thing"), choose_verb(writer, "thing")
    first = write_clause(writer, person, verbs[0], (thing, "accusative"), tense=tense)
    it = write_pronoun(writer, of=thing)
    silent = replace(person, english=lambda _: (), german=lambda _: ())
    second = write_clause(writer, silent, verbs[1], (it, "accusative"), tense=tense)
    link = writer.aligned("and", "und", "CC")
    _, german, mark = _joined(first, NOTHING, link, second, "second")
    acts = (english_order(replace(clause, subject=silent)) for clause in (first, second))
    one, other = map(strip_bracket, acts)  # verb phrases
    acts_joined = constituent("VP", one + link[0] + other)
    return constituent("S", person.english("nominative") + acts_joined), german, mark


# A kind that is listed twice is chosen twice as often.
KINDS: Final[tuple[Callable[[Writer], Sentence], ...]] = (
    *(statement, statement, description, description, question, report, condition),
    *(reason, reason, contrast),
)


def write_sentence(writer: Writer) -> Sentence:
    """Write a sentence of a kind chosen at random."""
    return writer.rng.choice(KINDS)(writer)
