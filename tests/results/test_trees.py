"""Trees, their symbols and their scores: back and forth, repaired, constrained, as EVALB counts."""

import functools
import gzip
import os
import re
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from annotated_transformer.data.grammar import grammar_pairs
from annotated_transformer.data.grammar.lexicon import NOUNS, PRONOUNS
from annotated_transformer.notation import EOS, SPECIAL_TOKENS
from annotated_transformer.pretrained import RUNNING
from annotated_transformer.results.parsing import (
    BracketCounts,
    Rules,
    Tree,
    TreeConstraint,
    Unfinished,
    bracket_score,
    clean_tree,
    delinearize,
    leaves,
    linearize,
    read_trees,
    score_tree,
    strip_function_tags,
    tags,
    walk,
    well_formed,
    with_tags,
)

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("ANNOTATED_TRANSFORMER_DATA", ROOT.parent / "shared" / "data"))
LABELS, TAGS = ("S", "NP", "VP"), ("DT", "NN", ",", "-LRB-")
WORDS = st.text("abcxyz.,-", min_size=1, max_size=4)
preterminals = st.builds(lambda tag, word: Tree(tag, (word,)), st.sampled_from(TAGS), WORDS)


def constituents(parts: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
    inside = st.lists(parts, min_size=1, max_size=4).map(tuple)
    return st.builds(Tree, st.sampled_from(LABELS), inside)


trees = constituents(st.recursive(preterminals, constituents, max_leaves=12))
SYMBOLS = (*SPECIAL_TOKENS, *(f"({name}" for name in LABELS), *(f"){name}" for name in LABELS))
ALL = (*SYMBOLS, *TAGS)
outputs = st.lists(st.sampled_from(ALL[4:]), max_size=14)


def read(text: str) -> Tree:
    (tree,) = read_trees(text)
    return tree


def is_tree(symbols: list[str], words: int) -> bool:
    """Whether symbols are one tree over so many words: an oracle that builds nothing."""
    depth: list[str] = []
    before = ""
    for place, symbol in enumerate(symbols):
        if place and not depth:
            return False  # goes on after its end
        if symbol[0] == "(":
            depth.append(symbol[1:])
        elif symbol[0] == ")":
            if not depth or depth.pop() != symbol[1:] or before[:1] == "(":
                return False
        else:
            words -= 1
        before = symbol
    return bool(symbols) and not depth and words == 0


# --- back and forth --------------------------------------------------------------------------


@given(trees)
def test_symbols_and_words_give_the_tree_back(tree: Tree) -> None:
    symbols, words = linearize(tree), leaves(tree)
    assert delinearize(symbols, words) == tree
    assert well_formed(symbols, words)
    assert is_tree(symbols, len(words))
    assert [symbol for symbol in symbols if symbol[0] not in "()"] == tags(tree)


@given(st.lists(trees, max_size=3), st.sampled_from(["\n", " ", "\n\n  "]))
def test_brackets_are_read_as_they_were_written(several: list[Tree], between: str) -> None:
    assert read_trees(between.join(map(str, several))) == several


def test_symbols_of_a_sentence() -> None:
    tree = read("(S (NP (PRP She)) (VP (VBZ reads) (NP (PRP it))) (. .))")
    assert " ".join(linearize(tree)) == "(S (NP PRP )NP (VP VBZ (NP PRP )NP )VP . )S"
    assert leaves(tree) == ["She", "reads", "it", "."]
    assert tags(tree) == ["PRP", "VBZ", "PRP", "."]


def test_depth_has_no_limit() -> None:
    deep = 50_000
    text = "(X " * deep + "(NN word)" + ")" * deep
    tree = read(text)
    symbols = linearize(tree)
    assert len(symbols) == 2 * deep + 1
    assert str(tree) == text == str(delinearize(symbols, ["word"]))
    cleaned = clean_tree(tree)
    assert cleaned is not None
    assert str(cleaned) == text
    assert score_tree(tree, tree).matched == deep


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(S (NP (DT the))\n", "line 1, column 1: the bracket is never closed"),
        ("(S (DT the))\n(NP (DT the)))", r"line 2, column 14: '\)' stands outside"),
        ("word", "line 1, column 1: 'word' stands outside"),
        ("(S\n  (NP))", "line 2, column 3: a bracket around 1 words and 0 brackets"),
        ("(S ())", "line 1, column 4: a bracket around 0 words and 0 brackets"),
        ("(NP the baker)", "line 1, column 1: a bracket around 3 words and 0 brackets"),
        ("(NP the (NN baker))", "line 1, column 1: a bracket around 2 words and 1 brackets"),
    ],
)
def test_bad_brackets_are_named_with_their_place(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read_trees(text)
    assert "\n" not in str(caught.value)
    assert ";" in str(caught.value)


# --- clean -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("( (S (NP-SBJ-1 (PRP It)) (VP (VBZ is))) )", "(S (NP (PRP It)) (VP (VBZ is)))"),
        ("(TOP (NP=2 (NN x)))", "(NP (NN x))"),
        ("(S (NP-SBJ (-NONE- *-1)) (VP (VB go)))", "(S (VP (VB go)))"),
        ("(S (SBAR (-NONE- 0) (S (-NONE- *T*-1))) (NP (NN x)))", "(S (NP (NN x)))"),
        ("(S (PRN (-LRB- -LRB-) (NN x) (-RRB- -RRB-)))",
         "(S (PRN (-LRB- -LRB-) (NN x) (-RRB- -RRB-)))"),
        ("(ROOT (ROOT (S (NN x))))", "(S (NN x))"),
        ("( (S (NN x)) (. .) )", "( (S (NN x)) (. .))"),  # no one tree: the bracket stays
    ],
)  # fmt: skip
def test_traces_function_tags_and_the_outer_bracket_go(text: str, expected: str) -> None:
    assert str(clean_tree(read(text))) == expected


def test_nothing_is_left_of_traces() -> None:
    assert clean_tree(read("(S (NP (-NONE- *)))")) is None


# --- repair ----------------------------------------------------------------------------------


@given(outputs, st.lists(WORDS, min_size=1, max_size=5))
def test_repair_gives_a_tree_over_the_words(symbols: list[str], words: list[str]) -> None:
    tree = delinearize(symbols, words)
    assert leaves(tree) == words
    assert is_tree(linearize(tree), len(words))
    assert delinearize(linearize(tree), words) == tree  # nothing is left to repair
    assert well_formed(symbols, words) == (is_tree(symbols, len(words)) and symbols != [])


@pytest.mark.parametrize(
    ("symbols", "words", "expected"),
    [
        ("(S (NP DT NN", "the cat", "(S (NP (DT the) (NN cat)))"),
        ("(S (NP DT NN )S", "the cat", "(S (NP (DT the) (NN cat)))"),
        ("(S DT )NP NN )S", "the cat", "(S (DT the) (NN cat))"),
        ("(S DT NN VB )S", "the cat", "(S (DT the) (NN cat))"),
        ("(S (NP DT )NP )S", "the cat", "(S (NP (DT the)) (XX cat))"),
        ("(S (NP )NP DT NN )S", "the cat", "(S (DT the) (NN cat))"),
        ("(NP DT )NP (VP NN )VP", "the cat", "(TOP (NP (DT the)) (VP (NN cat)))"),
        ("DT NN", "the cat", "(TOP (DT the) (NN cat))"),
        ("NN", "cat", "(NN cat)"),
        ("( DT ) ) NN", "the cat", "(TOP ( (DT the)) (NN cat))"),
        ("", "the cat", "(TOP (XX the) (XX cat))"),
    ],
)
def test_each_rule_of_repair(symbols: str, words: str, expected: str) -> None:
    assert str(delinearize(symbols.split(), words.split())) == expected


def test_a_sentence_without_words_has_no_tree() -> None:
    with pytest.raises(ValueError, match="at least one word"):
        delinearize(["(S", ")S"], [])
    assert not well_formed(["(S", ")S"], [])


# --- the constraint --------------------------------------------------------------------------


def allowed(
    constraint: TreeConstraint, prefix: list[int], words: int, limit: int | None = None
) -> list[int]:
    return constraint.mask(known(constraint, prefix), words, limit).nonzero()[:, 0].tolist()


def known(constraint: TreeConstraint, prefix: list[int]) -> Unfinished:
    """Return what is known of a tree after these symbols."""
    return functools.reduce(lambda tree, s: tree.then(s, constraint), prefix, Unfinished())


def row_of_openings(symbols: list[str]) -> int:
    """Return the longest row of opening brackets."""
    return max(len(run) for run in "".join("(" if s[0] == "(" else " " for s in symbols).split(" "))


@settings(deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 3), st.integers(0, 20))
def test_what_is_allowed_becomes_a_tree(data: st.DataObject, words: int, most: int, n: int) -> None:
    constraint, prefix, limit = TreeConstraint(ALL, EOS, most), list[int](), 2 * words + 2 + n
    while EOS not in prefix:
        prefix.append(data.draw(st.sampled_from(allowed(constraint, prefix, words, limit))))
    symbols = [ALL[number] for number in prefix[:-1]]
    assert is_tree(symbols, words)
    assert row_of_openings(symbols) <= most
    assert len(prefix) <= limit


@given(trees)
def test_every_tree_is_allowed(tree: Tree) -> None:
    symbols, words = linearize(tree), len(leaves(tree))
    constraint = TreeConstraint(ALL, EOS, max(1, row_of_openings(symbols)))
    numbers = [*map(ALL.index, symbols), EOS]
    for place, number in enumerate(numbers):
        for limit in (None, len(numbers)):
            mask = constraint.mask(known(constraint, numbers[:place]), words, limit)
            assert mask.dtype == torch.bool
            assert mask.shape == (len(ALL),)
            assert mask[number]


def test_masks_and_trees_agree_on_every_short_sequence() -> None:
    """All sequences of a small vocabulary: those that the masks allow are the trees."""
    vocabulary = (*SPECIAL_TOKENS, "(S", "(NP", ")S", ")NP", "NN", "(VP")  # VP never closes
    constraint, longest = TreeConstraint(vocabulary, EOS, most=2), 7
    for words in (1, 2):
        found: set[tuple[int, ...]] = set()
        growing: list[list[int]] = [[]]
        while growing:
            prefix = growing.pop()
            for number in allowed(constraint, prefix, words):
                if number == EOS:
                    found.add(tuple(prefix))
                elif len(prefix) < longest:
                    growing.append([*prefix, number])
        every: set[tuple[int, ...]] = set()
        growing = [[]]
        while growing:
            prefix = growing.pop()
            symbols = [vocabulary[number] for number in prefix]
            if is_tree(symbols, words) and row_of_openings(symbols) <= 2:
                every.add(tuple(prefix))
            if len(prefix) < longest:
                growing += [[*prefix, number] for number in range(4, 9)]
        assert found == every
        assert len(found) > 3


def test_symbols_that_make_no_tree_are_refused() -> None:
    for symbols in (SYMBOLS, (*SPECIAL_TOKENS, "NN"), (*SPECIAL_TOKENS, "NN", "(S", ")NP")):
        with pytest.raises(ValueError, match="make no tree"):
            TreeConstraint(symbols, EOS)
    with pytest.raises(ValueError, match="at least one word"):
        TreeConstraint(ALL, EOS).mask(Unfinished(), 0)


# --- scores ----------------------------------------------------------------------------------

GOLD = "(S (NP (DT the) (NN cat)) (VP (VBZ sees) (NP (DT the) (NN dog))) (. .))"


@pytest.mark.parametrize(
    ("test", "counts"),
    [
        (GOLD, (4, 4, 4, 0)),
        ("(TOP (S-X (NP-SBJ (DT the) (NN cat)) (VP (VBZ sees) (NP (DT the) (NN dog)) (. .))))",
         (4, 4, 4, 0)),  # function tags, TOP and punctuation do not count
        ("(S (NP (DT the) (NN cat)) (VP (VBZ sees) (PP (DT the) (NN dog))) (. .))", (3, 4, 4, 0)),
        ("(S (DT the) (NN cat) (VBZ sees) (DT the) (NN dog) (. .))", (1, 4, 1, 0)),
        ("(S (NP (NP (DT the) (NN cat))) (VP (VBZ sees) (NP (DT the) (NN dog))) (. .))",
         (4, 4, 5, 0)),  # a span is found as often as it is there
        ("(S (NP (DT the) (NN cat)) (VP (VBZ sees) (NP (DT the) (NN dog))) (X (. .)))",
         (4, 4, 4, 0)),  # nor does a bracket around nothing else
        ("(S (NP (DT the) (X (NN cat) (VBZ sees))) (NP (DT the) (NN dog)) (. .))", (2, 4, 4, 2)),
    ],
)  # fmt: skip
def test_brackets_counted_by_hand(test: str, counts: tuple[int, ...]) -> None:
    found = score_tree(read(GOLD), read(test))
    assert (found.matched, found.gold, found.test, found.crossing) == counts
    assert found.exact == (counts[0] == counts[1] == counts[2])
    assert (found.sentences, found.errors, found.skipped, found.words) == (1, 0, 0, 5)
    assert found.recall == counts[0] / counts[1]
    assert found.precision == counts[0] / counts[2]
    both = found.precision * found.recall
    assert found.f1 == pytest.approx(2 * both / (found.precision + found.recall))


def test_what_cannot_be_compared_is_left_out() -> None:
    gold = read(GOLD)
    fewer = read("(S (NP (DT the) (NN cat)) (. .))")
    mistaken = read(GOLD.replace("(. .)", "(NN .)"))  # a mark that is not tagged as one
    errors = [score_tree(gold, tree) for tree in (fewer, mistaken)]
    assert errors == [BracketCounts(sentences=1, errors=1)] * 2
    assert score_tree(gold, None) == BracketCounts(sentences=1, skipped=1)
    assert score_tree(gold, with_tags(mistaken, tags(gold))).exact == 1
    assert score_tree(gold, read("(S (. .))")) == BracketCounts(sentences=1, skipped=1)
    both = bracket_score([gold, gold, gold], [gold, fewer, None])
    assert both == BracketCounts(4, 4, 4, 0, 5, 5, 1, 3, 1, 1)
    assert BracketCounts().f1 == BracketCounts().recall == BracketCounts().precision == 0
    with pytest.raises(ValueError, match="1 trees of the treebank, 0 of the parser"):
        bracket_score([gold], [])


def test_particles_count_as_adverbs() -> None:
    one, other = read("(VP (VB go) (PRT (RP up)))"), read("(VP (VB go) (ADVP (RB up)))")
    assert score_tree(one, other).exact == 1
    assert score_tree(one, other).tags == 1  # of two


def test_other_tags_need_as_many_words() -> None:
    with pytest.raises(ValueError, match="2 words, 1 tags"):
        with_tags(read("(S (DT the) (NN cat))"), ["DT"])


@given(trees, trees)
def test_scores_are_symmetric_and_bounded(one: Tree, other: Tree) -> None:
    assume({*tags(one)} != {","} != {*tags(other)})  # otherwise there is nothing to score
    there, back = score_tree(one, other), score_tree(other, one)
    assert (there.matched, there.gold, there.test) == (back.matched, back.test, back.gold)
    assert there.matched <= min(there.gold, there.test)
    assert score_tree(one, one).exact == 1


# --- the grammar's trees ---------------------------------------------------------------------


def test_the_grammars_trees_are_over_its_words() -> None:
    for pair in grammar_pairs("train", 2000):
        tree = read(pair.tree)
        assert leaves(tree) == list(pair.english)
        assert str(tree) == pair.tree
        assert clean_tree(tree) == tree
        assert tree.label in ("S", "SQ", "SBARQ")
        assert tags(tree)[-1] == "."


def spans_of(tree: Tree, *labels: str) -> list[tuple[int, int]]:
    """Return where constituents of some labels begin and end, in words."""
    starts, found, words = list[int](), list[tuple[int, int]](), 0
    for node, opens in walk(tree):
        if opens:
            starts.append(words)
        elif node.word is not None:
            words += 1
        start = 0 if opens else starts.pop()
        if not opens and node.label in labels:
            found.append((start, words))
    return found


def test_the_grammars_constituents_are_what_it_aligned() -> None:
    """A phrase or clause with a subject is one stretch in German, too: only verbs are split."""
    phrases = 0
    for pair in grammar_pairs("train", 2000):
        tree = read(pair.tree)
        for start, end in spans_of(tree, "NP", "PP", "SBAR", "ADJP", "ADVP"):
            inside = {j for i, j in pair.alignment if start <= i < end}
            between = set(range(min(inside), max(inside) + 1)) - inside
            foreign = between & {j for _, j in pair.alignment}
            assert not foreign, (pair.tree, pair.german, start, end)
            phrases += 1
    assert phrases > 5000


def test_the_grammars_pronouns_and_antecedents_are_noun_phrases() -> None:
    found = 0
    for pair in grammar_pairs("train", 2000):
        tree = read(pair.tree)
        noun_phrases = spans_of(tree, "NP")
        for coreference in pair.coreferences:
            pronoun, noun = coreference.english
            assert (pronoun, pronoun + 1) in noun_phrases
            assert any(end == noun + 1 for _, end in noun_phrases)
            assert tags(tree)[pronoun] == "PRP"
            assert tags(tree)[noun].startswith("NN")
            found += 1
    assert found > 300


def test_the_grammars_tags_are_those_of_its_lexicon() -> None:
    known = {noun.english: "NN" for noun in NOUNS}
    known |= {noun.english_plural: "NNS" for noun in NOUNS if noun.english_plural != noun.english}
    known |= {"the": "DT", "a": "DT", "an": "DT", "my": "PRP$", "of": "IN", "not": "RB"}
    known |= {row["object"]: "PRP" for row in PRONOUNS.values() if row["english"] != "who"}
    for pair in grammar_pairs("train", 2000):
        for place, (word, tag) in enumerate(zip(pair.english, tags(read(pair.tree)), strict=True)):
            assert tag, (word, pair.tree)
            lower = word.lower() if place == 0 and word != "I" else word
            assert known.get(lower, tag) == tag, (word, tag)


PARTS = {  # of each constituent of the grammar, as a linguist would list them
    "S": r"(SBAR , |NP |ADVP )?NP (ADVP )?VP( \.)?|VP|S , CC S \.",
    "SBAR": r"(IN|WHNP|WHADVP) S",
    "SBARQ": r"(WHNP|WHADVP) SQ \.",
    "SQ": r"(MD|VB[ZPD]) NP (RB )?VP( \.)?|VP",
    "NP": r"PRP|(DT |PRP\$ |CD )?(JJ )?NNS?|NP (SBAR|PP)",
    "VP": r"MD (RB )?VP|VB[ZPD] RB VP|TO VP|VB[ZP] S|VP CC VP"
    r"|VB[ZPD]?( RB| ADVP)?( PRT)?( NP| ADJP){0,3}( PRT)?( PP)?( NP| ADVP)?( SBAR)?",
    "PP": r"IN NP", "ADJP": r"JJ", "ADVP": r"RB", "PRT": r"RP", "WHNP": r"WP|WDT", "WHADVP": r"WRB",
}  # fmt: skip


def test_the_grammars_constituents_have_the_parts_of_a_grammar_of_english() -> None:
    for pair in grammar_pairs("train", 2000):
        for node, opens in walk(read(pair.tree)):
            if opens and node.word is None:
                parts = " ".join(c.label for c in node.children if isinstance(c, Tree))
                assert re.fullmatch(PARTS[node.label], parts), (node.label, parts, pair.tree)


def test_the_running_sentence_has_the_tree_that_we_drew_by_hand() -> None:
    assert RUNNING.tree == (
        "(S (NP (DT The) (NN baker)) (VP (VBZ throws) (PRT (RP away)) "
        "(NP (PRP$ my) (JJ new) (NN newspaper)) "
        "(SBAR (IN because) (S (NP (PRP it)) (VP (VBZ is) (ADJP (JJ wet)))))) (. .))"
    )


# --- where the licensed material is at hand --------------------------------------------------

EVALB, PENN = DATA / "evalb", DATA / "ptb" / "wsj_sample.trees.gz"
RULES = {
    "perturbed": Rules(),  # COLLINS.prm
    "sample": Rules(Rules().dropped - {"."}, {"TT": "T"}, {"This": "this"}),  # sample.prm
}


def text_of(name: str) -> str:
    path = EVALB / name
    return path.read_text() if path.exists() else gzip.open(f"{path}.gz", "rt").read()


def tree_of(line: str) -> Tree | None:
    found = read_trees(line)
    return Tree("", tuple(found)) if len(found) > 1 else next(iter(found), None)


@pytest.mark.skipif(not EVALB.is_dir(), reason="the standard scorer's sample is not at hand")
@pytest.mark.parametrize("name", ["sample", "perturbed"])
def test_scores_agree_with_every_line_of_the_standard_scorer(name: str) -> None:
    lines = [line.split() for line in text_of(f"{name}.rsl").splitlines()]
    rows = [line for line in lines if len(line) == 12 and line[0].isdigit()]
    golds, tests = (text_of(f"{name}.{end}").split("\n")[: len(rows)] for end in ("gld", "tst"))
    counts = []
    for row, gold, test in zip(rows, map(tree_of, golds), map(tree_of, tests), strict=True):
        assert gold is not None
        found = score_tree(gold, test, RULES[name])
        status = 1 if found.errors else 2 if found.skipped else 0
        length = sum(strip_function_tags(tag) != "-NONE-" for tag in tags(gold))
        ours = [length, status, *(f"{100 * x:.2f}" for x in (found.recall, found.precision))]
        ours += [found.matched, found.gold, found.test, found.crossing]
        if not status:
            ours += [found.words, found.tags, f"{100 * found.tags / found.words:.2f}"]
        assert [str(value) for value in ours] == row[1 : 1 + len(ours)], row
        counts.append(found)
    total = sum(counts, BracketCounts())
    last = next(line for line in lines[2:] if len(line) == 9)
    ours = [total.matched, total.gold, total.test]
    assert [f"{100 * x:.2f}" for x in (total.recall, total.precision)] == last[:2]
    assert list(map(str, ours)) == last[2:5]
    assert total.sentences == len(rows)
    summary = text_of(f"{name}.rsl").partition("-- len<=40 --")[0].splitlines()
    pairs = (line.split("=") for line in summary if "  = " in line)
    said = {key.strip(): float(value) for key, value in pairs}
    valid = total.sentences - total.errors - total.skipped
    assert (total.errors, total.skipped) == (
        said["Number of Error sentence"], said["Number of Skip  sentence"]
    )  # fmt: skip
    assert round(100 * total.exact / valid, 2) == said["Complete match"]
    if "Bracketing FMeasure" in said:
        assert round(100 * total.f1, 2) == said["Bracketing FMeasure"]


@pytest.mark.skipif(not PENN.exists(), reason="the treebank sample is not at hand")
def test_all_trees_of_the_sample_back_and_forth() -> None:
    with gzip.open(PENN, "rt", encoding="utf-8") as file:
        raw = read_trees(file.read())
    assert len(raw) == 3914
    assert sum(len(leaves(tree)) for tree in raw) == 100_676
    cleaned = [tree for tree in map(clean_tree, raw) if tree is not None]
    assert len(cleaned) == len(raw)
    assert sum(len(leaves(tree)) for tree in cleaned) == 100_676 - 6592
    vocabulary = (
        *SPECIAL_TOKENS,
        *sorted({symbol for tree in cleaned for symbol in linearize(tree)}),
    )
    constraint = TreeConstraint(vocabulary, EOS)
    for number, tree in enumerate(cleaned):
        symbols, words = linearize(tree), leaves(tree)
        assert delinearize(symbols, words) == tree
        assert well_formed(symbols, words)
        assert read_trees(str(tree)) == [tree]
        assert is_tree(symbols, len(words))
        assert row_of_openings(symbols) <= constraint.most
        if number % 40 == 0:
            numbers = [*map(vocabulary.index, symbols), EOS]
            for place in range(len(numbers)):
                so_far = known(constraint, numbers[:place])
                assert constraint.mask(so_far, len(words))[numbers[place]]
