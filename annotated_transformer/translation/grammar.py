# Written from book/translation/grammar.md: edit the chapter instead.
"""A grammar that writes German and English sentences side by side, with their alignment."""

import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal


def _rows(table: str) -> list[list[str]]:
    return [line.split() for line in table.strip().splitlines()]


NUMBER_WORDS = {  # units, teens, tens
    "de": (
        "- ein zwei drei vier fünf sechs sieben acht neun",
        "zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn",
        "- - zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig",
    ),
    "en": (
        "- one two three four five six seven eight nine",
        "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen",
        "- - twenty thirty forty fifty sixty seventy eighty ninety",
    ),
}


def _number_parts(language: str, number: int) -> tuple[str, str, str]:
    """Return a word of its own for a number below twenty, or its tens and its unit."""
    if not 2 <= number <= 99:  # ein and eine would need a gender
        raise ValueError(f"number words exist here for 2 to 99, not for {number}")
    units, teens, tens = (words.split() for words in NUMBER_WORDS[language])
    ten, unit = divmod(number, 10)
    if ten < 2:
        return (teens if ten else units)[unit], "", ""
    return "", tens[ten], units[unit] if unit else ""


def german_number(number: int) -> str:
    """Return the German word for a number from 2 to 99: the unit is said first."""
    word, tens, unit = _number_parts("de", number)
    if word:
        return word
    return f"{unit}und{tens}" if unit else tens


def english_number(number: int) -> str:
    """Return the English word for a number from 2 to 99: the tens are said first."""
    word, tens, unit = _number_parts("en", number)
    return word or (f"{tens}-{unit}" if unit else tens)


Case = Literal["nominative", "accusative", "dative", "genitive"]
CASES: tuple[Case, ...] = ("nominative", "accusative", "dative", "genitive")
# One row a case, one column a gender: masculine, feminine, neuter, plural.
DEFINITE = {
    "nominative": "der die das die",
    "accusative": "den die das die",
    "dative": "dem der dem den",
    "genitive": "des der des der",
}
# Endings of ein, kein, mein, unser; "-" stands for no ending.
INDEFINITE = {
    "nominative": "- e - e",
    "accusative": "en e - e",
    "dative": "em er em en",
    "genitive": "es er es er",
}


def form(table: Mapping[str, str], case: Case, gender: str) -> str:
    """Look up an ending or a word; ``gender`` is ``m``, ``f``, ``n`` or ``p``."""
    return table[case].split()["mfnp".index(gender)].replace("-", "")


@dataclass(frozen=True)
class Noun:
    """A noun with its German gender and its forms; ``-`` where there is none."""

    kind: str
    gender: str
    singular: str
    plural: str
    genitive: str
    english: str
    english_plural: str

    def german(self, case: Case, number: str) -> str:
        """Return the form for a case; ``number`` is ``singular`` or ``plural``."""
        if number == "plural":
            add_n = case == "dative" and self.plural[-1] not in "ns"
            return self.plural + ("n" if add_n else "")
        return self.genitive if case == "genitive" and self.gender != "f" else self.singular


NOUNS = """
person m Mann Männer Mannes man men
person f Frau Frauen - woman women
person n Kind Kinder Kindes child children
person m Bruder Brüder Bruders brother brothers
person f Schwester Schwestern - sister sisters
person m Vater Väter Vaters father fathers
person f Mutter Mütter - mother mothers
person m Onkel Onkel Onkels uncle uncles
person f Tante Tanten - aunt aunts
person m König Könige Königs king kings
person f Königin Königinnen - queen queens
person m Lehrer Lehrer Lehrers teacher teachers
person f Ärztin Ärztinnen - doctor doctors
person m Bäcker Bäcker Bäckers baker bakers
person f Malerin Malerinnen - painter painters
person m Gärtner Gärtner Gärtners gardener gardeners
person f Sängerin Sängerinnen - singer singers
animal m Hund Hunde Hundes dog dogs
animal m Vogel Vögel Vogels bird birds
animal f Katze Katzen - cat cats
animal f Kuh Kühe - cow cows
animal n Pferd Pferde Pferdes horse horses
animal n Schwein Schweine Schweines pig pigs
standing m Tisch Tische Tisches table tables
standing m Koffer Koffer Koffers suitcase suitcases
standing f Lampe Lampen - lamp lamps
standing f Flasche Flaschen - bottle bottles
standing f Tasse Tassen - cup cups
standing f Kiste Kisten - box boxes
standing n Fahrrad Fahrräder Fahrrads bicycle bicycles
standing n Glas Gläser Glases glass glasses
standing n Bett Betten Bettes bed beds
lying m Schlüssel Schlüssel Schlüssels key keys
lying m Ball Bälle Balles ball balls
lying m Hut Hüte Hutes hat hats
lying m Brief Briefe Briefes letter letters
lying m Löffel Löffel Löffels spoon spoons
lying f Zeitung Zeitungen - newspaper newspapers
lying f Gabel Gabeln - fork forks
lying f Jacke Jacken - jacket jackets
lying f Decke Decken - blanket blankets
lying n Buch Bücher Buches book books
lying n Messer Messer Messers knife knives
lying n Bild Bilder Bildes picture pictures
lying n Hemd Hemden Hemdes shirt shirts
place m Garten Gärten Gartens garden gardens
place m Park Parks Parks park parks
place m Keller Keller Kellers cellar cellars
place m Wald Wälder Waldes forest forests
place f Küche Küchen - kitchen kitchens
place f Schule Schulen - school schools
place f Kirche Kirchen - church churches
place n Haus Häuser Hauses house houses
place n Zimmer Zimmer Zimmers room rooms
place n Hotel Hotels Hotels hotel hotels
drink m Kaffee - - coffee -
drink m Tee - - tea -
drink f Milch - - milk -
drink n Wasser - - water -
food f Suppe - - soup -
food n Brot - - bread -
food m Käse - - cheese -
"""
LEXICON = tuple(Noun(*row) for row in _rows(NOUNS))

# Adjective endings after a definite article, after ein-words, and with no article.
WEAK = {
    "nominative": "e e e en",
    "accusative": "en e e en",
    "dative": "en en en en",
    "genitive": "en en en en",
}
MIXED = {
    "nominative": "er e es en",
    "accusative": "en e es en",
    "dative": "en en en en",
    "genitive": "en en en en",
}
STRONG = {
    "nominative": "er e es e",
    "accusative": "en e es e",
    "dative": "em er em en",
    "genitive": "en er en er",
}


@dataclass(frozen=True)
class Adjective:
    """An adjective and the kinds of nouns that it describes."""

    kinds: tuple[str, ...]
    german: str
    english: str

    def inflected(self, table: Mapping[str, str], case: Case, gender: str) -> str:
        """Return the German form with the ending that the table asks for."""
        stem = {"teuer": "teur", "dunkel": "dunkl", "müde": "müd"}.get(self.german, self.german)
        return stem + form(table, case, gender)


ADJECTIVES = """
person,animal jung young
person,animal müde tired
person,animal hungrig hungry
person,animal krank sick
person,animal klug clever
person,animal stark strong
person,animal faul lazy
person,animal wütend angry
person traurig sad
person glücklich happy
person mutig brave
person höflich polite
person reich rich
person freundlich friendly
person berühmt famous
person geduldig patient
thing,place neu new
thing,place alt old
thing,place groß big
thing,place klein small
thing,place schön beautiful
thing,place sauber clean
thing,place schmutzig dirty
thing,place dunkel dark
thing teuer expensive
thing billig cheap
thing schwer heavy
thing leicht light
thing rot red
thing blau blue
thing grün green
thing gelb yellow
thing schwarz black
thing weiß white
thing kaputt broken
thing nass wet
thing seltsam strange
mass kalt cold
mass warm warm
mass heiß hot
mass frisch fresh
mass gut good
"""
QUALITIES = tuple(Adjective(tuple(row[0].split(",")), *row[1:]) for row in _rows(ADJECTIVES))


@dataclass(frozen=True)
class Verb:
    """A verb in both languages; ``prefix`` is the part that a separable verb sheds."""

    kind: str
    prefix: str
    stem: str
    third: str
    participle: str
    auxiliary: str
    english: str
    english_third: str
    english_past: str

    @classmethod
    def parse(cls, row: str) -> "Verb":
        """Read a row of the table."""
        kind, infinitive, third, participle, _, *english = row.split()
        prefix, _, stem = infinitive.rpartition("-")
        auxiliary, _, participle = participle.rpartition("+")
        return cls(kind, prefix, stem, third, participle, auxiliary or "hat", *english)

    @property
    def infinitive(self) -> str:
        """Return the form that stands in a dictionary, such as *anrufen*."""
        return self.prefix + self.stem

    def finite(self, person: str) -> str:
        """Return the present, prefix apart; ``person`` is ``ich``, ``3`` or ``p``."""
        return {"ich": self.stem[:-1], "3": self.third, "p": self.stem}[person]


VERBS = """
thing kaufen kauft gekauft | buy buys bought
thing verkaufen verkauft verkauft | sell sells sold
thing finden findet gefunden | find finds found
thing nehmen nimmt genommen | take takes took
thing tragen trägt getragen | carry carries carried
need brauchen braucht gebraucht | need needs needed
thing reparieren repariert repariert | repair repairs repaired
thing malen malt gemalt | paint paints painted
thing waschen wäscht gewaschen | wash washes washed
thing verlieren verliert verloren | lose loses lost
thing vergessen vergisst vergessen | forget forgets forgot
thing zählen zählt gezählt | count counts counted
thing verstecken versteckt versteckt | hide hides hid
thing mit-bringen bringt mitgebracht | bring brings brought
thing ein-packen packt eingepackt | pack packs packed
thing aus-leihen leiht ausgeliehen | borrow borrows borrowed
thing weg-werfen wirft weggeworfen | throw_away throws_away threw_away
thing auf-heben hebt aufgehoben | pick_up picks_up picked_up
person sehen sieht gesehen | see sees saw
person besuchen besucht besucht | visit visits visited
person fragen fragt gefragt | ask asks asked
person lieben liebt geliebt | love loves loved
person hören hört gehört | hear hears heard
person an-rufen ruft angerufen | call calls called
person ein-laden lädt eingeladen | invite invites invited
dative helfen hilft geholfen | help helps helped
dative danken dankt gedankt | thank thanks thanked
dative antworten antwortet geantwortet | answer answers answered
dative folgen folgt ist+gefolgt | follow follows followed
both geben gibt gegeben | give gives gave
both zeigen zeigt gezeigt | show shows showed
both schicken schickt geschickt | send sends sent
none schlafen schläft geschlafen | sleep sleeps slept
none arbeiten arbeitet gearbeitet | work works worked
none lachen lacht gelacht | laugh laughs laughed
none singen singt gesungen | sing sings sang
none tanzen tanzt getanzt | dance dances danced
none warten wartet gewartet | wait waits waited
none weinen weint geweint | cry cries cried
none schwimmen schwimmt ist+geschwommen | swim swims swam
none an-kommen kommt ist+angekommen | arrive arrives arrived
none auf-stehen steht ist+aufgestanden | get_up gets_up got_up
none auf-wachen wacht ist+aufgewacht | wake_up wakes_up woke_up
motion gehen geht ist+gegangen | go goes went
motion laufen läuft ist+gelaufen | run runs ran
standing stehen steht gestanden | stand stands stood
lying liegen liegt gelegen | lie lies lay
drink trinken trinkt getrunken | drink drinks drank
food essen isst gegessen | eat eats ate
saying sagen sagt gesagt | say says said
saying glauben glaubt geglaubt | believe believes believed
saying hoffen hofft gehofft | hope hopes hoped
"""
ACTIONS = tuple(Verb.parse(line) for line in VERBS.strip().splitlines())


@dataclass(frozen=True)
class Word:
    """A word being written: words of both languages that share a link are aligned."""

    text: str
    links: frozenset[int] = frozenset()
    antecedent: int | None = None  # the link of the noun that a pronoun stands for


Words = tuple[Word, ...]


class Writer:
    """What a sentence is written with: random choices, and numbers that link words."""

    def __init__(self, rng: random.Random) -> None:
        """Start with no word written."""
        self.rng = rng
        self.links = itertools.count()

    def chance(self, probability: float) -> bool:
        """Return True with a probability."""
        return self.rng.random() < probability


@dataclass(frozen=True)
class Phrase:
    """A noun phrase in every case it may take."""

    english: Mapping[Case, Words]
    german: Mapping[Case, Words]
    person: str  # "ich", "3" or "p": chooses the verb's form
    gender: str  # "m", "f", "n" or "p"
    kind: str
    head: int
    pronoun: bool = False


def _english_phrase(
    noun: Noun,
    determiner: str,
    number: int,
    quality: Adjective | None,
    plural: bool,
    links: Sequence[int],
) -> Words:
    """Write the English side of a noun phrase; its form is the same in every case."""
    words = [(quality.english, links[1])] if quality else []
    words.append((noun.english_plural if plural else noun.english, links[2]))
    article = "an" if words[0][0][0] in "aeiou" else "a"
    if plural and determiner in ("ein", "kein"):
        article = ""
    first = {
        "def": "the",
        "mein": "my",
        "unser": "our",
        "number": english_number(number) if number else "",
        "none": "",
    }.get(determiner, article)
    if first:
        words.insert(0, (first, links[0]))
    return tuple(Word(text, frozenset({link})) for text, link in words)


def _german_phrase(
    noun: Noun,
    determiner: str,
    number: int,
    quality: Adjective | None,
    inflection: tuple[Case, str],
    links: Sequence[int | None],
) -> Words:
    """Write the German side: all words agree in case, gender and number."""
    case, gender = inflection
    known = [frozenset({link} if link is not None else ()) for link in links]
    words: list[Word] = []
    table = STRONG
    if determiner == "def":
        words.append(Word(form(DEFINITE, case, gender), known[0]))
        table = WEAK
    elif determiner == "number":
        words.append(Word(german_number(number), known[0]))
    elif determiner != "none" and not (determiner == "ein" and gender == "p"):
        ending = form(INDEFINITE, case, gender)
        words.append(Word(determiner + ending, known[0] | known[3]))
        table = MIXED
    if quality:
        words.append(Word(quality.inflected(table, case, gender), known[1]))
    noun_form = noun.german(case, "plural" if gender == "p" else "singular")
    return (*words, Word(noun_form, known[2]))


GENERAL_KIND = {"standing": "thing", "lying": "thing", "drink": "mass", "food": "mass"}


def choose_noun(writer: Writer, *kinds: str) -> Noun:
    """Choose a noun of one of the kinds."""
    return writer.rng.choice([noun for noun in LEXICON if noun.kind in kinds])


def choose_verb(writer: Writer, *kinds: str) -> Verb:
    """Choose a verb of one of the kinds."""
    return writer.rng.choice([verb for verb in ACTIONS if verb.kind in kinds])


def choose_quality(writer: Writer, noun_kind: str) -> Adjective:
    """Choose an adjective that fits a kind of noun."""
    kind = GENERAL_KIND.get(noun_kind, noun_kind)
    return writer.rng.choice([quality for quality in QUALITIES if kind in quality.kinds])


def noun_phrase(
    writer: Writer,
    *kinds: str,
    determiners: str = "def def ein mein unser",
    plain: bool = False,
    without: int | None = None,
) -> Phrase:
    """Write a noun phrase.

    Args:
        writer: What chooses, and numbers the words.
        kinds: The kinds of nouns to choose from.
        determiners: What may come first: ``def``, ``ein``, ``kein``, ``mein``,
            ``unser``, ``number``; a plural after ``ein`` has no article.
        plain: Leave out adjectives and the plural.
        without: The link of the negation that *kein* stands for.
    """
    noun = choose_noun(writer, *kinds)
    determiner = writer.rng.choice(determiners.split())
    plural = determiner == "number" or (not plain and writer.chance(0.3))
    quality = None if plain or writer.chance(0.5) else choose_quality(writer, noun.kind)
    if noun.kind in ("drink", "food"):
        plural, determiner = False, writer.rng.choice(["def", "none", "none"])
    links = [next(writer.links) for _ in range(3)]
    number = writer.rng.randint(2, 99) if determiner == "number" else 0
    gender = "p" if plural else noun.gender
    english = _english_phrase(noun, determiner, number, quality, plural, links)
    german = {
        case: _german_phrase(noun, determiner, number, quality, (case, gender), [*links, without])
        for case in CASES
    }
    person = "p" if plural else "3"
    return Phrase(dict.fromkeys(CASES, english), german, person, gender, noun.kind, links[2])


PRONOUNS = {  # masculine, feminine, neuter, plural, ich, wir
    "nominative": "er sie es sie ich wir",
    "accusative": "ihn sie es sie mich uns",
    "dative": "ihm ihr ihm ihnen mir uns",
}


def write_pronoun(writer: Writer, of: Phrase | None = None, which: str = "") -> Phrase:
    """Write a personal pronoun: for an antecedent, or as ``which`` says."""
    link = next(writer.links)
    if of is not None:
        which = _english_pronoun(of)
    column, person, gender, objective = {
        "he": (0, "3", "m", "him"),
        "she": (1, "3", "f", "her"),
        "it": ("mfn".find(of.gender) if of else 2, "3", "n", "it"),
        "they": (3, "p", "p", "them"),
        "I": (4, "ich", "m", "me"),
        "we": (5, "p", "p", "us"),
    }[which]
    antecedent = of.head if of else None
    links = frozenset({link})
    german: dict[Case, Words] = {}
    english: dict[Case, Words] = {}
    for case in CASES[:3]:
        german[case] = (Word(PRONOUNS[case].split()[column], links, antecedent),)
        shown = which if case == "nominative" else objective
        english[case] = (Word(shown, links, antecedent),)
    return Phrase(english, german, person, gender, of.kind if of else "person", link, True)


def _english_pronoun(phrase: Phrase) -> str:
    if phrase.gender == "p":
        return "they"
    if phrase.kind != "person":
        return "it"
    return "he" if phrase.gender == "m" else "she"


def write_person(writer: Writer) -> Phrase:
    """Write a subject: a person, or a pronoun that needs no antecedent."""
    if writer.chance(0.35):
        return write_pronoun(writer, which=writer.rng.choice(["I", "we", "he", "she", "they"]))
    return noun_phrase(writer, "person")


def write_thing(writer: Writer, **options: Any) -> Phrase:
    """Write a noun phrase for a thing."""
    return noun_phrase(writer, "standing", "lying", **options)


@dataclass(frozen=True)
class Adverb:
    """An adverb; ``early`` ones stand before the English verb: *often*."""

    english: str
    german: str
    tenses: str
    early: bool = False


ADVERBS = (
    Adverb("today", "heute", "present"),
    Adverb("now", "jetzt", "present"),
    Adverb("yesterday", "gestern", "past"),
    Adverb("tomorrow", "morgen", "future"),
    Adverb("soon", "bald", "future"),
    Adverb("often", "oft", "present past", early=True),
    Adverb("always", "immer", "present", early=True),
    Adverb("rarely", "selten", "present past", early=True),
)
MODALS = {  # English words; German forms for ich, er, wir
    "can": ("can can can", "kann kann können"),
    "must": ("must must must", "muss muss müssen"),
    "want": ("want_to wants_to want_to", "will will wollen"),
    "should": ("should should should", "soll soll sollen"),
    "future": ("will will will", "werde wird werden"),
}
AUXILIARIES = {  # ich, er, wir
    "hat": "habe hat haben",
    "ist": "bin ist sind",
    "war": "war war waren",
    "am": "am is are",
    "was": "was was were",
    "do": "do does do",
}


def by_person(forms: str, person: str) -> str:
    """Choose among three forms: ``ich``, ``3`` (he, she, it), ``p`` (we, they)."""
    return forms.split()[("ich", "3", "p").index(person)]


@dataclass(frozen=True)
class Clause:
    """What a clause says, before either language has put it in order."""

    subject: Phrase
    verb: Verb | None  # None: the copula, with an adjective
    tense: str  # "present", "past", "future" or a modal verb
    links: tuple[int, int, int, int]  # verb, auxiliary, adverb, negation
    objects: tuple[tuple[Phrase, Case], ...] = ()
    adverb: Adverb | None = None
    fronted: bool = False
    negated: str = ""  # how German negates: "nicht", or "kein" in an object
    quality: tuple[Adjective, int] | None = None
    place: tuple[Words, Words] | None = None  # English, German


def german_verb(clause: Clause) -> tuple[Word, Words]:
    """Return the finite verb and the words that wait at the end of the clause."""
    verb, person = clause.verb, clause.subject.person
    link, auxiliary = frozenset({clause.links[0]}), frozenset({clause.links[1]})
    if clause.tense in MODALS:
        infinitive = verb.infinitive if verb else "sein"
        finite = by_person(MODALS[clause.tense][1], person)
        return Word(finite, auxiliary), (Word(infinitive, link),)
    if verb is None:
        forms = AUXILIARIES["war" if clause.tense == "past" else "ist"]
        return Word(by_person(forms, person), link), ()
    if clause.tense == "past":  # spoken German: hat gekauft
        finite = by_person(AUXILIARIES[verb.auxiliary], person)
        return Word(finite, link), (Word(verb.participle, link),)
    prefix = (Word(verb.prefix, link),) if verb.prefix else ()
    return Word(verb.finite(person), link), prefix


def german_order(clause: Clause, order: Literal["first", "second", "last"]) -> Words:
    """Write a German clause with its finite verb first, second or last."""
    finite, end = german_verb(clause)
    subject = clause.subject.german["nominative"]
    adverb = (Word(clause.adverb.german, frozenset({clause.links[2]})),) if clause.adverb else ()
    middle: Words = ()
    for phrase, case in clause.objects:
        if phrase.pronoun:  # short objects come before the adverb
            middle += phrase.german[case]
    middle += () if clause.fronted else adverb
    for phrase, case in clause.objects:
        if not phrase.pronoun:
            middle += phrase.german[case]
    if clause.negated == "nicht":
        middle += (Word("nicht", frozenset({clause.links[3]})),)
    middle += clause.place[1] if clause.place else ()
    if clause.quality:
        middle += (Word(clause.quality[0].german, frozenset({clause.quality[1]})),)
    if order == "last":
        if clause.tense == "present" and end:  # the prefix is joined again: anruft
            end = (Word(end[0].text + finite.text, finite.links),)
        else:
            end += (finite,)
        return subject + middle + end
    if order == "first":
        return (finite, *subject, *middle, *end)
    if clause.fronted:
        return (*adverb, finite, *subject, *middle, *end)
    return (*subject, finite, *middle, *end)


def english_verb(clause: Clause, question: bool) -> tuple[Words, Words]:
    """Return auxiliary words and main verb; *do* is added where it must be."""
    verb, person = clause.verb, clause.subject.person
    link, auxiliary = frozenset({clause.links[0]}), frozenset({clause.links[1]})
    negation = (Word("not", frozenset({clause.links[3]})),) if clause.negated else ()
    if clause.tense in MODALS:
        modal = by_person(MODALS[clause.tense][0], person).split("_")
        base = verb.english if verb else "be"
        helpers = tuple(Word(part, auxiliary) for part in modal)
        return helpers + negation, _split(base, link)
    past = clause.tense == "past"
    if verb is None:
        form_of_be = Word(by_person(AUXILIARIES["was" if past else "am"], person), link)
        return ((form_of_be, *negation), ()) if question or negation else ((), (form_of_be,))
    if question or negation:
        helper = "did" if past else by_person(AUXILIARIES["do"], person)
        return (Word(helper, link), *negation), _split(verb.english, link)
    if past:
        return (), _split(verb.english_past, link)
    return (), _split(verb.english_third if person == "3" else verb.english, link)


def _split(words: str, links: frozenset[int]) -> Words:
    return tuple(Word(word, links) for word in words.split("_"))


def english_order(clause: Clause, question: bool = False) -> Words:
    """Write an English clause as a statement or as a yes-no question."""
    helpers, main = english_verb(clause, question)
    adverb: Words = ()
    if clause.adverb:
        adverb = (Word(clause.adverb.english, frozenset({clause.links[2]})),)
    early = clause.adverb is not None and clause.adverb.early
    subject = clause.subject.english["nominative"]
    start = (*helpers[:1], *subject, *helpers[1:]) if question else (*subject, *helpers)
    if clause.fronted:
        start = adverb + start
    copula = clause.verb is None and not helpers
    if early and not copula:
        start += adverb
    rest = (*main[:1], *adverb) if early and copula else main[:1]
    particle = main[1:]  # throws the lamp away, but: throws away the lamp
    for phrase, case in clause.objects:
        words = phrase.english[case]
        rest += words + particle if phrase.pronoun else particle + words
        particle = ()
    rest += particle
    if clause.quality:
        rest += (Word(clause.quality[0].english, frozenset({clause.quality[1]})),)
    rest += clause.place[0] if clause.place else ()
    late = clause.adverb is not None and not early and not clause.fronted
    return start + rest + (adverb if late else ())


TENSES = (
    "present",
    "present",
    "past",
    "past",
    "future",
    "can",
    "must",
    "want",
    "should",
)


def write_clause(
    writer: Writer,
    subject: Phrase,
    verb: Verb | None,
    *objects: tuple[Phrase, Case],
    tense: str = "",
    adverb: bool = False,
    negated: str = "",
    negation: int | None = None,
    **options: Any,
) -> Clause:
    """Put a clause together, with a tense and perhaps an adverb chosen at random."""
    tense = tense or writer.rng.choice(TENSES)
    chosen = None
    fitting = [item for item in ADVERBS if tense in item.tenses.split()]
    if adverb and fitting and not negated and writer.chance(0.4):
        chosen = writer.rng.choice(fitting)
    fronted = chosen is not None and not chosen.early and writer.chance(0.5)
    numbers = (
        next(writer.links),
        next(writer.links),
        next(writer.links),
        next(writer.links),
    )
    links = (*numbers[:3], numbers[3] if negation is None else negation)
    return Clause(subject, verb, tense, links, objects, chosen, fronted, negated, **options)


def described(writer: Writer, subject: Phrase, tense: str = "present", **options: Any) -> Clause:
    """Say that the subject has a quality: *is old*."""
    quality = (choose_quality(writer, subject.kind), next(writer.links))
    return write_clause(writer, subject, None, tense=tense, quality=quality, **options)


CONTRACTIONS = {("in", "dem"): "im", ("in", "das"): "ins"}
PLACES_AT_THINGS = (
    ("on", "auf"),
    ("under", "unter"),
    ("beside", "neben"),
    ("behind", "hinter"),
)


def write_place(writer: Writer, motion: bool = False, on: bool = False) -> tuple[Words, Words]:
    """Write a place; after *in* the case tells where something is from where it goes."""
    links = [next(writer.links)]
    if on:
        english, german = writer.rng.choice(PLACES_AT_THINGS)
        phrase = noun_phrase(writer, "standing", determiners="def def ein mein", plain=True)
    else:
        english, german = ("into", "in") if motion else ("in", "in")
        phrase = noun_phrase(writer, "place", determiners="def def ein unser")
    case: Case = "accusative" if motion else "dative"
    words = phrase.german[case]
    first = Word(german, frozenset(links))
    if joined := CONTRACTIONS.get((german, words[0].text)):
        first = Word(joined, first.links | words[0].links)
        words = words[1:]
    return (Word(english, frozenset(links)), *phrase.english[case]), (first, *words)


Sentence = tuple[Words, Words, str]  # English, German, final mark


def comma(*links: int) -> Word:
    """Return a comma."""
    return Word(",", frozenset(links))


def conjunction(writer: Writer, english: str, german: str) -> tuple[Word, Word]:
    """Return an aligned pair of words."""
    links = frozenset({next(writer.links)})
    return Word(english, links), Word(german, links)


def with_suffix(phrase: Phrase, english: Words, german: Words) -> Phrase:
    """Return the phrase with words after its noun, the same in every case."""
    return replace(
        phrase,
        english={case: words + english for case, words in phrase.english.items()},
        german={case: words + german for case, words in phrase.german.items()},
    )


def owned(writer: Writer, phrase: Phrase) -> Phrase:
    """Add an owner in the genitive: *the house of the king*."""
    owner = noun_phrase(writer, "person", determiners="def mein unser", plain=True)
    words = owner.english["nominative"]
    of = Word("of", words[0].links)
    return with_suffix(phrase, (of, *words), owner.german["genitive"])


RELATIVES = {**DEFINITE, "dative": "dem der dem denen"}


def related(writer: Writer, phrase: Phrase) -> Phrase:
    """Add a relative clause, in which German sends the verb to the end."""
    tense = writer.rng.choice(["present", "past"])
    pronoun = frozenset({next(writer.links)})
    if phrase.kind in ("standing", "lying"):
        case: Case = "accusative"
        clause = write_clause(
            writer, write_person(writer), choose_verb(writer, "thing"), tense=tense
        )
        word = Word("that", pronoun)
    elif phrase.kind == "person" and writer.chance(0.4):
        case = "dative"
        clause = write_clause(
            writer, write_person(writer), choose_verb(writer, "dative"), tense=tense
        )
        word = Word("whom", pronoun)
    else:
        return _related_subject(writer, phrase, tense, pronoun)
    german = (Word(form(RELATIVES, case, phrase.gender), pronoun),)
    return with_suffix(
        phrase,
        (word, *english_order(clause)),
        (comma(), *german, *german_order(clause, "last"), comma()),
    )


def _related_subject(writer: Writer, phrase: Phrase, tense: str, pronoun: frozenset[int]) -> Phrase:
    word = Word("who" if phrase.kind == "person" else "that", pronoun)
    relative = Word(form(RELATIVES, "nominative", phrase.gender), pronoun)
    subject = replace(phrase, english={"nominative": (word,)}, german={"nominative": (relative,)})
    if phrase.kind == "person" and writer.chance(0.5):
        thing: tuple[Phrase, Case] = (
            write_thing(writer, determiners="def ein mein"),
            "accusative",
        )
        clause = write_clause(writer, subject, choose_verb(writer, "thing"), thing, tense=tense)
    else:
        place = write_place(writer) if writer.chance(0.5) else None
        clause = write_clause(
            writer, subject, choose_verb(writer, "none"), tense=tense, place=place
        )
    return with_suffix(
        phrase,
        english_order(clause),
        (comma(), *german_order(clause, "last"), comma()),
    )


SHAPES = (
    "thing",
    "thing",
    "thing",
    "person",
    "dative",
    "both",
    "none",
    "motion",
    "drink",
    "food",
)


def somebody(writer: Writer, subject: Phrase, negated: str) -> Phrase:
    """Write the person that something is done to: sometimes *me* or *us*."""
    if subject.person == "3" and writer.chance(0.25):
        return write_pronoun(writer, which=writer.rng.choice(["I", "we"]))
    if negated:  # nicht follows a definite phrase
        return noun_phrase(writer, "person", determiners="def mein unser")
    return noun_phrase(writer, "person")


def direct_object(writer: Writer, negated: str, negation: int | None, owner: bool) -> Phrase:
    """Write the thing that something is done to; an indefinite one is negated by *kein*."""
    if negated == "kein":
        return write_thing(writer, determiners="kein", without=negation)
    if owner and writer.chance(0.15):
        return owned(writer, write_thing(writer, determiners="def"))
    if negated:
        return write_thing(writer, determiners="def mein")
    return write_thing(writer, determiners="def def ein ein mein number")


def action_clause(writer: Writer, subject: Phrase, adverb: bool = True, tense: str = "") -> Clause:
    """Let a person do something."""
    tense = tense or writer.rng.choice(TENSES)
    shape = writer.rng.choice(SHAPES)
    negation, negated = None, ""
    deniable = tense in ("present", "past", "future") and shape not in ("drink", "food")
    if deniable and writer.chance(0.15):
        negation, negated = next(writer.links), "nicht"
    objects: list[tuple[Phrase, Case]] = []
    if shape in ("person", "dative", "both"):
        case: Case = "accusative" if shape == "person" else "dative"
        objects.append((somebody(writer, subject, negated), case))
    if shape in ("thing", "both"):
        negated = "kein" if negation is not None and writer.chance(0.6) else negated
        thing = direct_object(writer, negated, negation, owner=shape == "thing")
        objects.append((thing, "accusative"))
    if shape in ("drink", "food"):
        objects.append((noun_phrase(writer, shape), "accusative"))
    place = None
    if shape == "motion" or (shape == "none" and writer.chance(0.5)):
        place = write_place(writer, motion=shape == "motion")
    return write_clause(
        writer,
        subject,
        choose_verb(writer, shape),
        *objects,
        tense=tense,
        adverb=adverb,
        negated=negated,
        negation=negation,
        place=place,
    )


def statement(writer: Writer) -> Sentence:
    """Say who does what."""
    clause = action_clause(writer, write_person(writer))
    return english_order(clause), german_order(clause, "second"), "."


def description(writer: Writer) -> Sentence:
    """Say what somebody or something is like, or where it is."""
    extra = writer.rng.random()
    if extra < 0.15:
        subject = owned(writer, noun_phrase(writer, "person", "lying", determiners="def"))
    else:
        subject = noun_phrase(writer, "person", "animal", "standing", "lying")
    if extra > 0.5:
        subject = related(writer, subject)
    tense = writer.rng.choice(["present", "past"])
    if subject.kind in ("standing", "lying") and writer.chance(0.5):
        place = write_place(writer, on=writer.chance(0.6))
        clause = write_clause(
            writer, subject, choose_verb(writer, subject.kind), tense=tense, place=place
        )
    else:
        negated = "nicht" if writer.chance(0.2) else ""
        clause = described(writer, subject, tense, adverb=extra <= 0.5, negated=negated)
    return english_order(clause), german_order(clause, "second"), "."


def question(writer: Writer) -> Sentence:
    """Ask whether, why, when, who or what."""
    which = writer.rng.choice(["whether", "why", "when", "who", "what"])
    tense = writer.rng.choice(["present", "past", "future", "can", "must"])
    link = frozenset({next(writer.links)})
    if which == "who":
        unknown = Phrase(
            {"nominative": (Word("who", link),)},
            {"nominative": (Word("wer", link),)}, "3", "m", "person", -1,
        )  # fmt: skip
        clause = action_clause(writer, unknown, adverb=False, tense=tense)
        return english_order(clause), german_order(clause, "second"), "?"
    if which == "what":
        clause = write_clause(
            writer, write_person(writer), choose_verb(writer, "thing"), tense=tense
        )
    else:
        clause = action_clause(writer, write_person(writer), adverb=False, tense=tense)
        clause = replace(clause, negated="") if clause.negated == "nicht" else clause
    english = english_order(clause, question=True)
    german = german_order(clause, "first")
    if which == "whether":
        return english, german, "?"
    word = {"why": "warum", "when": "wann", "what": "was"}[which]
    return (Word(which, link), *english), (Word(word, link), *german), "?"


def report(writer: Writer) -> Sentence:
    """Say what somebody says or asks; *dass* and *ob* send the verb to the end."""
    speaker, tense = write_person(writer), writer.rng.choice(["present", "past"])
    if writer.chance(0.3):
        verb = next(verb for verb in ACTIONS if verb.stem == "fragen")
        english, german = conjunction(writer, "whether", "ob")
    else:
        verb = choose_verb(writer, "saying")
        english, german = conjunction(writer, "that", "dass")
    main = write_clause(writer, speaker, verb, tense=tense)
    said = action_clause(writer, write_person(writer))
    said = replace(said, fronted=False)
    return (
        (*english_order(main), english, *english_order(said)),
        (*german_order(main, "second"), comma(), german, *german_order(said, "last")),
        ".",
    )


def mention_again(writer: Writer, phrase: Phrase) -> Phrase:
    """Mention a phrase again, by its pronoun."""
    if not phrase.pronoun:
        return write_pronoun(writer, of=phrase)
    word = phrase.english["nominative"][0].text
    return write_pronoun(writer, which=word)


REASONS = (("because", "weil"), ("although", "obwohl"))


def reason(writer: Writer) -> Sentence:
    """Give a reason; the adjective tells whether the pronoun means person or thing."""
    person = write_person(writer)
    while person.gender == "n" and not person.pronoun:
        person = write_person(writer)
    thing = write_thing(writer, determiners="def ein mein")
    tense = writer.rng.choice(["present", "past"])
    verb = choose_verb(writer, "thing")
    place = write_place(writer) if writer.chance(0.2) else None
    main = write_clause(writer, person, verb, (thing, "accusative"), tense=tense, place=place)
    about = person if writer.chance(0.35) else thing
    if writer.chance(0.25):  # an animal, alone in its sentence
        about = noun_phrase(writer, "animal")
        main = write_clause(writer, about, choose_verb(writer, "none"), tense=tense)
    english, german = conjunction(writer, *writer.rng.choice(REASONS))
    negated = "nicht" if writer.chance(0.15) else ""
    why = described(writer, mention_again(writer, about), tense, negated=negated)
    return (
        (*english_order(main), english, *english_order(why)),
        (*german_order(main, "second"), comma(), german, *german_order(why, "last")),
        ".",
    )


CONDITIONS = (("when", "wenn"), ("if", "falls"))


def condition(writer: Writer) -> Sentence:
    """Start with a subordinate clause: the main clause then starts with its verb."""
    subject, thing = (
        noun_phrase(writer, "person"),
        write_thing(writer, determiners="def mein ein"),
    )
    while subject.gender == "n":
        subject = noun_phrase(writer, "person")
    english, german = conjunction(writer, *writer.rng.choice(CONDITIONS))
    seen = writer.rng.choice(["sehen", "finden", "verlieren", "brauchen"])
    verb = next(verb for verb in ACTIONS if verb.stem == seen)
    first = write_clause(writer, subject, verb, (thing, "accusative"), tense="present")
    doing: tuple[Phrase, Case] = (write_pronoun(writer, of=thing), "accusative")
    tense = writer.rng.choice(["present", "future", "can", "must"])
    then = write_clause(
        writer,
        write_pronoun(writer, of=subject),
        choose_verb(writer, "thing"),
        doing,
        tense=tense,
    )
    if writer.chance(0.4):
        first = write_clause(writer, subject, choose_verb(writer, "none"), tense="present")
        then = action_clause(writer, write_person(writer), adverb=False, tense=tense)
    pause = comma(next(writer.links))
    return (
        (english, *english_order(first), pause, *english_order(then)),
        (german, *german_order(first, "last"), pause, *german_order(then, "first")),
        ".",
    )


def contrast(writer: Writer) -> Sentence:
    """Say two things about one subject, or do two things to one object."""
    if writer.chance(0.5):
        about = noun_phrase(writer, "standing", "lying", "animal")
        first, second = (
            described(writer, about),
            described(writer, write_pronoun(writer, of=about)),
        )
        pause = comma(next(writer.links))
        english, german = conjunction(writer, "but", "aber")
        return (
            (*english_order(first), pause, english, *english_order(second)),
            (
                *german_order(first, "second"),
                pause,
                german,
                *german_order(second, "second"),
            ),
            ".",
        )
    person, thing = (
        write_person(writer),
        write_thing(writer, determiners="def ein mein"),
    )
    tense = writer.rng.choice(["present", "past"])
    first = write_clause(
        writer, person, choose_verb(writer, "thing"), (thing, "accusative"), tense=tense
    )
    again: tuple[Phrase, Case] = (write_pronoun(writer, of=thing), "accusative")
    silent = replace(person, english={"nominative": ()}, german={"nominative": ()})
    second = write_clause(writer, silent, choose_verb(writer, "thing"), again, tense=tense)
    english, german = conjunction(writer, "and", "und")
    return (
        (*english_order(first), english, *english_order(second)),
        (*german_order(first, "second"), german, *german_order(second, "second")),
        ".",
    )


KINDS: tuple[Callable[[Writer], Sentence], ...] = (
    statement,
    statement,
    description,
    description,
    question,
    report,
    condition,
    reason,
    reason,
    contrast,
)


def write_sentence(writer: Writer) -> Sentence:
    """Write a sentence of a kind chosen at random."""
    return writer.rng.choice(KINDS)(writer)


@dataclass(frozen=True)
class Coreference:
    """Where a pronoun and its antecedent stand, in both sentences: (pronoun, noun)."""

    english: tuple[int, int]
    german: tuple[int, int]


MARKS = frozenset(".,?!:;")


def detokenise(words: Iterable[str]) -> str:
    """Join words by blanks; a punctuation mark is set against the word before it."""
    return "".join(word if word in MARKS else f" {word}" for word in words).lstrip(" ")


@dataclass(frozen=True)
class Pair:
    """A sentence in both languages, with what a corpus of real text leaves open.

    Attributes:
        english: The words as they stand in the text, punctuation apart.
        german: Likewise.
        alignment: Pairs (English index, German index) of words that mean the same.
        coreferences: The pronouns with an antecedent in the sentence.
    """

    english: tuple[str, ...]
    german: tuple[str, ...]
    alignment: frozenset[tuple[int, int]]
    coreferences: tuple[Coreference, ...] = ()

    def words(self, language: str) -> tuple[str, ...]:
        """Return the words in ``en`` or ``de``."""
        return {"en": self.english, "de": self.german}[language]

    def text(self, language: str) -> str:
        """Return the sentence in ``en`` or ``de``, as one would write it."""
        return detokenise(self.words(language))

    def spans(self, language: str) -> tuple[tuple[int, int], ...]:
        """Return where each word starts and ends in the text, in characters."""
        spans, end = [], 0
        for word in self.words(language):
            start = end + (0 if end == 0 or word in MARKS else 1)
            end = start + len(word)
            spans.append((start, end))
        return tuple(spans)


def _finish(words: Words, mark: Word) -> Words:
    """Add the final mark, drop commas that meet another mark, start with a capital."""
    kept: list[Word] = []
    for word in (*words, mark):
        if kept and kept[-1].text == "," and word.text in MARKS:
            word = Word(word.text, word.links | kept.pop().links)
        kept.append(word)
    first = kept[0].text
    return (replace(kept[0], text=first[0].upper() + first[1:]), *kept[1:])


def _positions(words: Words) -> dict[int, int]:
    return {link: index for index, word in enumerate(words) for link in word.links}


def make_pair(sentence: Sentence, mark_link: int) -> Pair:
    """Turn linked words into a pair: equal links become the alignment."""
    mark = Word(sentence[2], frozenset({mark_link}))
    english, german = _finish(sentence[0], mark), _finish(sentence[1], mark)
    alignment = frozenset(
        (i, j)
        for i, word in enumerate(english)
        for j, other in enumerate(german)
        if word.links & other.links
    )
    nouns = [_positions(english), _positions(german)]
    coreferences = []
    for i, word in enumerate(english):
        if word.antecedent is not None:
            j = next(j for j, other in enumerate(german) if other.links == word.links)
            antecedents = [found[word.antecedent] for found in nouns]
            coreferences.append(Coreference((i, antecedents[0]), (j, antecedents[1])))
    texts = [tuple(word.text for word in side) for side in (english, german)]
    return Pair(texts[0], texts[1], alignment, tuple(coreferences))


GRAMMAR_SIZES: Mapping[str, int] = {"train": 16_000, "val": 500, "test": 1_000}
SHORTEST = 4  # words and marks of a sentence, on either side
LONGEST = 20


def split_of(pair: Pair) -> str:
    """Return the split that a sentence belongs to, whatever the seed that wrote it."""
    digest = hashlib.sha256(" ".join(pair.english).encode()).digest()
    return "test" if digest[0] < 26 else "val" if digest[0] < 52 else "train"


def is_good(pair: Pair) -> bool:
    """Tell whether a pair has the wanted length, and no adjective twice."""
    known = {quality.english for quality in QUALITIES}
    used = [word for word in pair.english if word in known]
    lengths = len(pair.english), len(pair.german)
    return SHORTEST <= min(lengths) <= max(lengths) <= LONGEST and len(used) == len(set(used))


def grammar_pairs(split: str = "train", size: int | None = None, seed: int = 0) -> list[Pair]:
    """Write sentence pairs of the grammar.

    Args:
        split: ``train``, ``val`` or ``test``. No sentence is in two of them, not even
            for different seeds: a hash of the sentence chooses its split.
        size: How many different pairs; the default is in ``GRAMMAR_SIZES``.
        seed: The same seed writes the same pairs, and a longer list starts with them.

    Raises:
        ValueError: If there is no such split, or the size is negative.
    """
    if split not in GRAMMAR_SIZES:
        raise ValueError(f"grammar: no split {split!r}; choose among {', '.join(GRAMMAR_SIZES)}")
    wanted = GRAMMAR_SIZES[split] if size is None else size
    if wanted < 0:
        raise ValueError(f"grammar: the size must not be negative, it is {wanted}")
    writer = Writer(random.Random(f"{split} {seed}"))
    pairs: dict[tuple[str, ...], Pair] = {}
    while len(pairs) < wanted:
        pair = make_pair(write_sentence(writer), next(writer.links))
        if is_good(pair) and split_of(pair) == split:
            pairs.setdefault(pair.english, pair)
    return list(pairs.values())
