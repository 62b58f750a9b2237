"""The baselines of Table 4: trees that go down to the right, and a grammar that counts."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from annotated_transformer.data.corpora import ParallelText
from annotated_transformer.engine.treebanks import LANGUAGES, tree_lines
from annotated_transformer.results.parsing import Tree, leaves, linearize, read_trees, tags
from benchmarks import treebank
from benchmarks.pcfg import INNER, Chart, Grammar, Options, in_place, is_tag
from benchmarks.treebank import baselines, best, right_branching, score

TREES = read_trees(
    """
    (S (NP (DT the) (NN dog)) (VP (VBZ sees) (NP (DT a) (JJ big) (NN cat))) (. .))
    (S (NP (NN dog)) (VP (VBZ sees) (NP (NP (DT the) (NN cat)) (PP (IN in) (NP (NN box))))) (. .))
    (S (VP (VBZ sleeps) (PP (IN in) (NP (DT a) (NN bed)))) (. .))
    (S (NP (DT the) (JJ big) (JJ old) (NN dog)) (VP (VBZ sleeps)) (. .))
    (S (NP (NN dog)) (VP (VBZ sees) (NP (DT the) (NN cat)) (PP (IN in) (NP (NN bed)))) (. .))
    (SINV (VP (VBZ sleeps)) (NP (S (VP (VBZ sees))) (DT the) (NN cat)) (. .))
    """
)
CHOICES = [Options(parents, siblings) for parents in (1, 2) for siblings in (1, 2)]
SENTENCES = ["the dog sleeps .", "the cat in bed sees a dog .", "the mouse sees the big dog ."]


def test_right_branching_by_hand() -> None:
    def drawn(words: str) -> str:
        return " ".join(linearize(right_branching(words.split(), "VP")))

    assert drawn("a b c .") == "(S XX (VP XX XX )VP XX )S"
    assert drawn("a b c d") == "(S XX (VP XX (VP XX XX )VP )VP )S"
    assert drawn("a b . ''") == "(S XX XX XX XX )S"
    assert drawn("a .") == "(S XX XX )S"
    assert drawn("a") == "(S XX )S"
    assert leaves(right_branching("a b c . ''".split(), "NP")) == "a b c . ''".split()


def test_rules_are_binary_and_remember_as_much_as_was_asked() -> None:
    """A hand-written expansion of (NP DT JJ JJ NN), below S."""
    tree = TREES[3].children[0]
    assert isinstance(tree, Tree)
    first = [
        ("NP", "DT", "@NP|DT"), ("@NP|DT", "JJ", "@NP|JJ"), ("@NP|JJ", "JJ", "NN"),
    ]  # fmt: skip
    assert list(Grammar(TREES, Options(1, 1)).rules(tree, "S")) == first
    second = [
        ("NP^S", "DT", "@NP^S|DT"), ("@NP^S|DT", "JJ", "@NP^S|DT|JJ"), ("@NP^S|DT|JJ", "JJ", "NN"),
    ]  # fmt: skip
    assert list(Grammar(TREES, Options(2, 2)).rules(tree, "S")) == second
    for options in CHOICES:
        grammar = Grammar(TREES, options)
        out = np.bincount(grammar.above, np.exp(grammar.worth), len(grammar.labels))
        unary = np.exp(np.where(grammar.next == np.arange(len(out)), grammar.unary, -np.inf))
        total = out + unary.sum(1)
        for number, label in enumerate(grammar.labels):
            if label.partition("^")[0].strip(INNER).partition("|")[0].isupper() and total[number]:
                assert total[number] == pytest.approx(1, abs=1e-5), label
        assert np.exp(grammar.roots).sum() == pytest.approx(1)


def derivations(
    grammar: Grammar, label: int, words: list[str], i: int, j: int, chain: int
) -> Iterator[tuple[float, list[Tree]]]:
    """Yield every derivation of a span from a label, by trying all rules: value and trees."""
    name = grammar.labels[label]
    shown = name.partition("^")[0]

    def finished(value: float, below: list[Tree]) -> tuple[float, list[Tree]]:
        return value, below if name.startswith(INNER) else [Tree(shown, tuple(below))]

    if j == i + 1:
        value = float(grammar.words(words[i], not i)[label])
        if value > -math.inf:
            yield value, [Tree(name, (words[i],))]
    for rule in np.flatnonzero(grammar.above == label):
        for k in range(i + 1, j):
            left = derivations(grammar, int(grammar.left[rule]), words, i, k, 0)
            right = derivations(grammar, int(grammar.right[rule]), words, k, j, 0)
            for (one, trees), (two, others) in itertools.product(list(left), list(right)):
                yield finished(float(grammar.worth[rule]) + one + two, [*trees, *others])
    if chain < 3:
        for below in np.flatnonzero(grammar.next[label] == np.arange(len(grammar.labels))):
            value = float(grammar.unary[label, below])
            for one, trees in derivations(grammar, int(below), words, i, j, chain + 1):
                yield finished(value + one, trees)


@pytest.mark.parametrize("options", CHOICES[::3], ids=str)
@pytest.mark.parametrize(
    "sentence", ["the dog sleeps .", "dog sees the cat in bed .", "mice sleeps ."]
)
def test_the_chart_finds_the_most_probable_tree(sentence: str, options: Options) -> None:
    """Beside all derivations, one after the other."""
    grammar, words = Grammar(TREES, options), sentence.split()
    every = [
        (value + float(grammar.roots[root]), trees[0])
        for root in np.flatnonzero(np.isfinite(grammar.roots))
        for value, trees in derivations(grammar, int(root), words, 0, len(words), 0)
    ]
    assert len(every) > ("in" in words)  # a phrase that may belong to the cat, or not
    chart = Chart(grammar, words)
    top = (chart.full[0, len(words)] + grammar.roots).max()
    assert float(top) == pytest.approx(max(value for value, _ in every), abs=1e-4)
    assert chart.tree() == max(every, key=lambda pair: pair[0])[1]


def test_what_it_has_seen_it_parses_alike() -> None:
    for options in CHOICES:
        grammar = Grammar(TREES, options)
        found = [Chart(grammar, leaves(tree)).tree() for tree in TREES]
        assert sum(one == two for one, two in zip(found, TREES, strict=True)) >= 4
        for sentence in SENTENCES:
            tree = Chart(grammar, sentence.split()).tree()
            assert tree is not None or options != Options()
            if tree is not None:
                assert leaves(tree) == sentence.split()
                assert not any(INNER in symbol or "^" in symbol for symbol in linearize(tree))


def test_unknown_words_are_known_by_their_shape() -> None:
    found = [in_place(word, first=False) for word in ("1,000", "Smith", "barking", "x-ray", "USA")]
    assert len(set(found)) == 5
    assert in_place("17", first=True) == in_place("3.5", first=False)
    assert in_place("walking", first=False) == in_place("talking", first=False)
    assert in_place("Dogs", first=True) != in_place("Dogs", first=False)
    tree = Chart(Grammar(TREES, Options()), "the old mouse sleeps .".split()).tree()
    assert tree is not None
    assert tags(tree) == ["DT", "JJ", "NN", "VBZ", "."]
    assert is_tag(Tree("NN", ("mouse",)))


def test_no_tree_is_told_and_replaced() -> None:
    found = score(lambda _: None, TREES)
    assert found["failed"] == len(TREES)
    assert found["f1"] == score(lambda words: right_branching(words, "VP"), TREES)["f1"]
    whole = iter(TREES)
    assert score(lambda _: next(whole), TREES)["f1"] == 100


def test_the_best_on_validation_is_chosen_and_scored_on_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(name: str, *, split: str, mirror: Path | None) -> ParallelText:
        assert (name, mirror) == ("treebank", tmp_path)
        trees = TREES if split == "train" else TREES[:2] if split == "val" else TREES[2:4]
        source, target = zip(*map(tree_lines, trees), strict=True)
        return ParallelText(name, split, LANGUAGES, source, target, "", ())

    monkeypatch.setattr(treebank, "load_treebank", load)
    path = tmp_path / "record.json"
    words = ["treebank", "--mirror", str(tmp_path), "--record", str(path), "--sizes", "3"]
    monkeypatch.setattr(sys, "argv", words)
    treebank.main()
    record = json.loads(path.read_text())
    rows = record["rows"]
    assert list(rows) == ["right_branching", "pcfg", "pcfg_3"]
    for row in rows.values():
        assert row["valid_f1"][row["chosen"]] == max(row["valid_f1"].values())
        assert row["test"]["sentences"] == 2
        assert "dog" not in json.dumps(row)  # counts alone, no sentence
    assert rows["pcfg"]["test"]["f1"] > rows["right_branching"]["test"]["f1"]
    made = baselines(TREES, [])["right_branching"]()
    assert best(made, TREES[:2])[1] == rows["right_branching"]["valid_f1"]
    path.write_text(json.dumps({**record, "rows": {**rows, "pcfg": {"mark": 1}}}))
    capsys.readouterr()
    treebank.main()  # nothing is left to do
    assert capsys.readouterr().out == ""
    for number, told in (("0", "--sizes 0: must be at least 1"), ("6", "and below 6")):
        monkeypatch.setattr(sys, "argv", [*words[:-1], number])
        with pytest.raises(SystemExit):
            treebank.main()
        assert told in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", words)
    path.write_text("{}")
    with pytest.raises(SystemExit):
        treebank.main()
    assert "has no rows" in capsys.readouterr().err
