"""Parsing: constrained search finds trees alone, and scores do not depend on tags."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from annotated_transformer.data.corpora import ParallelText
from annotated_transformer.data.files import CorpusError
from annotated_transformer.engine.parser import (
    Parse,
    WordConstraint,
    best_symbols,
    constraint_of,
    f1_interval,
    parse_sentences,
    penn_words,
    score_parser,
    score_parses,
)
from annotated_transformer.engine.system import System
from annotated_transformer.engine.treebanks import MARKS, with_words, without_words
from annotated_transformer.fast.decoding import start_steps
from annotated_transformer.notation import BOS, EOS
from annotated_transformer.results.parsing import (
    Unfinished,
    delinearize,
    leaves,
    linearize,
    read_trees,
    score_tree,
    tags,
    well_formed,
)
from annotated_transformer.translation.beam_search import length_penalty
from annotated_transformer.translation.greedy import readable_steps
from annotated_transformer.translation.tokenizers import BPETokenizer
from tests.engine.parsers import small_parser

SENTENCES = [["dogs"], ["a", "dog", "sleeps"], [], ["the", "dog", "sees", "it", "."]]


@pytest.mark.parametrize("beam", [1, 3, 21 - 7])
@pytest.mark.parametrize("seed", range(4))
def test_constrained_search_finds_trees_over_the_words(seed: int, beam: int) -> None:
    system = small_parser(seed)
    found = parse_sentences(system, SENTENCES, beam=beam)
    free = parse_sentences(system, SENTENCES, beam=beam, extra=30, constrained=False)
    assert found[2] is free[2] is None
    for words, parse, other in zip(SENTENCES, found, free, strict=True):
        if words:
            assert parse is not None
            assert other is not None
            assert parse.well_formed
            assert linearize(parse.tree) == parse.symbols
            assert leaves(parse.tree) == leaves(other.tree) == words
            assert other.well_formed == well_formed(other.symbols, words)
    assert any(parse is not None and not parse.well_formed for parse in free)


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("constrained", [True, False])
def test_the_fast_search_is_the_readable_one(beam: int, constrained: bool) -> None:
    for seed in range(4):
        system = small_parser(seed)
        sources = [system.tokenizers[0].encode(" ".join(words)) for words in SENTENCES if words]
        constraint = constraint_of(system) if constrained else None
        fast, readable = (
            best_symbols(system, sources, beam=beam, extra=40, constraint=constraint, start=start)
            for start in (start_steps, readable_steps)
        )
        alone = [
            best_symbols(system, [source], beam=beam, extra=40, constraint=constraint)[0]
            for source in sources
        ]
        assert fast == readable == alone
        assert any(fast)


class Watched(WordConstraint):
    """A constraint that refuses a symbol that was not allowed in its place."""

    seen: dict[tuple[int, ...], int]

    def after(self, tree: Unfinished, symbol: int) -> Unfinished:
        """Return what is known after one more symbol."""
        allowed = super().allowed
        assert any(allowed(tree, words, limit)[symbol] for words, limit in self.seen.items())
        return super().after(tree, symbol)

    def allowed(self, tree: Unfinished, sentence: Sequence[int], limit: int) -> torch.Tensor:
        """Return what may follow."""
        self.seen[tuple(sentence)] = limit
        return super().allowed(tree, sentence, limit)


@pytest.mark.parametrize("beam", [1, 6])
def test_the_constraint_is_asked_about_beginnings_of_trees_alone(beam: int) -> None:
    for seed in range(3):
        system = small_parser(seed)
        tokenizer = system.tokenizers[1]
        watched = Watched(tokenizer.tokens(range(len(tokenizer))), EOS)
        watched.seen = {}
        sources = [system.tokenizers[0].encode(" ".join(words)) for words in SENTENCES if words]
        for start in (start_steps, readable_steps):
            best_symbols(system, sources, beam=beam, extra=9, constraint=watched, start=start)


def test_the_limit_leaves_room_to_close_every_bracket() -> None:
    for seed in range(4):
        system = small_parser(seed)
        words = ["a", "dog", "sleeps"]
        source = system.tokenizers[0].encode(" ".join(words))
        constraint = constraint_of(system)
        for extra in (6, 7, 9, 20):  # 6: three words, three tags, two brackets, and the end
            for beam in (1, 5):
                (found,) = best_symbols(
                    system, [source], beam=beam, extra=extra, constraint=constraint
                )
                symbols = system.tokenizers[1].tokens(found)
                assert well_formed(without_words(symbols), words), (seed, extra)
                assert [s for s in symbols if s[0] not in MARKS] == words
                assert len(found) < len(source) + extra


def test_a_wide_constrained_beam_finds_the_most_probable_tree() -> None:
    """Beside the probability of every tree, and without its being normalized again."""
    kept, words = ("(S", ")S", "NN"), ["a", "b"]
    every = (s for n in range(4, 9) for s in itertools.product(kept, repeat=n))
    trees = [with_words(" ".join(s), "a b") for s in every if well_formed(s, words)]
    assert len(trees) > 5
    found_longer = 0
    for seed in range(8):
        system = small_parser(seed)
        tokenizer = system.tokenizers[1]
        names = enumerate(tokenizer.tokens(range(len(tokenizer))))
        others = [n for n, s in names if s not in ("(S", ")S", "/NN", "a", "b")]
        bias = system.model.get_parameter("generator.proj.bias")
        with torch.no_grad():
            bias[[n for n in others if n != EOS]] -= 90
        source = system.tokenizers[0].encode("a b")
        room = 11 - len(source)  # eight symbols, two words, and the end
        (found,) = best_symbols(
            system,
            [source],
            beam=14,
            alpha=0.0,
            extra=room,
            constraint=constraint_of(system),
        )
        values = [log_probability(system, source, tokenizer.encode(tree)) for tree in trees]
        assert tokenizer.decode(found) == trees[int(np.argmax(values))]
        found_longer += len(found) > 6
    assert 0 < found_longer < 8  # neither the shortest tree always nor never


def log_probability(system: System, source: list[int], tokens: list[int]) -> float:
    """Return the log-probability of an output, its end included, position by position.

    A word counts with the probability that any word comes.
    """
    names = system.tokenizers[1].tokens(range(len(system.tokenizers[1])))
    words = [n for n, name in enumerate(names) if name == "<unk>" or name[0] not in "()/<"]
    words.append(names.index("<_>"))
    src = torch.tensor([[*source, EOS]])
    mask = torch.ones(1, 1, src.size(1), dtype=torch.bool)
    with torch.no_grad():
        steps = readable_steps(system.model, src, mask)
        total = 0.0
        for before, token in zip([BOS, *tokens], [*tokens, EOS], strict=True):
            found = steps(torch.tensor([before])).softmax(-1)[0]
            total += float(found[words].sum().log() if token in words else found[token].log())
    return total / length_penalty(len(tokens) + 1, 0.0)


def test_a_sentence_that_is_too_long_is_named() -> None:
    system = small_parser()
    with pytest.raises(CorpusError, match=r"text, line 2: 201 words, too many .*split the line"):
        parse_sentences(system, [["a"], ["bc"] * 200 + ["d"]], name="text")
    with pytest.raises(CorpusError, match=r"text, line 1: 3 words, .* at most 8 symbols"):
        parse_sentences(system, [["a", "dog", "sleeps"]], extra=5, name="text")
    older = dataclasses.replace(system, tokenizers=(BPETokenizer([]), system.tokenizers[1]))
    with pytest.raises(CorpusError, match="an older parser, without words in its trees"):
        parse_sentences(older, [["a"]])
    with pytest.raises(ValueError, match="beam 0"):
        parse_sentences(system, [["a"]], beam=0)


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        ("The dog barks.", "The dog barks ."),
        ("The dog doesn't bark.", "The dog does n't bark ."),
        ('"No," he said.', "`` No , '' he said ."),
        ('He said "no".', "He said `` no '' ."),
        ("It's Mr. Smith's dog, isn't it?", "It 's Mr. Smith 's dog , is n't it ?"),
        ("It costs $3.50 (or 10%).", "It costs $ 3.50 -LRB- or 10 % -RRB- ."),
        ("Prices rose 1,000 -- or more...", "Prices rose 1,000 -- or more ..."),
        ("They cannot; we'll see: 'yes'", "They can not ; we 'll see : 'yes '"),
        ("the dogs' tails", "the dogs ' tails"),
        ("AT&T and Smith & Co.", "AT&T and Smith & Co ."),
        ("", ""),
    ],
)
def test_plain_text_is_split_as_in_the_treebank(plain: str, words: str) -> None:
    assert penn_words(plain) == words.split()
    assert penn_words(words) == words.split()  # splitting again changes nothing here


def test_brackets_in_words_are_escaped() -> None:
    assert penn_words("the (foo) [ dog", tokenized=True) == ["the", "-LRB-foo-RRB-", "-LSB-", "dog"]


GOLD, TEST = (
    read_trees(text)[0]
    for text in (
        "(S (NP (DT a) (NN dog)) (VP (VBZ sees) (NP (PRP it))) (. .))",
        "(S (NP (DT a)) (VP (NN dog) (VP (VBZ sees) (NP (NN it)) (NN .))))",
    )
)


def test_scores_by_hand() -> None:
    """Gold has S 0-4, NP 0-2, VP 2-4, NP 3-4; of S, NP 0-1, VP 1-4, VP 2-4, NP 3-4 three match."""
    found = score_parses([GOLD, GOLD], [Parse(TEST, [], False), Parse(GOLD, [], True)])
    assert (found["matched"], found["gold"], found["test"]) == ("3 4", "4 4", "5 4")
    assert found["precision"] == pytest.approx(100 * 7 / 9, abs=0.01)
    assert found["recall"] == pytest.approx(100 * 7 / 8, abs=0.01)
    assert found["f1"] == pytest.approx(100 * 14 / 17, abs=0.01)
    assert found["exact"] == found["well_formed"] == 50
    assert found["tags"] == 80  # of the five words of the first, three
    assert found["low"] <= found["f1"] <= found["high"]


def test_tags_are_the_gold_ones_when_brackets_are_scored() -> None:
    """A full stop that the model calls a noun is dropped all the same."""
    given = delinearize([s.replace(".", "NN") for s in linearize(GOLD)], leaves(GOLD))
    assert tags(given)[-1] == "NN"
    assert score_tree(GOLD, given).errors == 1
    found = score_parses([GOLD], [Parse(given, [], True)])
    assert found["f1"] == found["exact"] == 100
    assert found["tags"] == 80


def test_the_interval_of_f1() -> None:
    same = np.array([[3, 4, 5]] * 9)
    assert f1_interval(same) == pytest.approx((6 / 9, 6 / 9))
    mixed = np.array([[4, 4, 4], [0, 4, 4]] * 50)
    low, high = f1_interval(mixed)
    deviation = 0.5 / len(mixed) ** 0.5
    assert low == pytest.approx(0.5 - 1.96 * deviation, abs=0.02)
    assert high == pytest.approx(0.5 + 1.96 * deviation, abs=0.02)
    assert f1_interval(np.zeros((9, 3))) == (0, 0)


def test_a_parser_is_scored_freely_and_by_constraint() -> None:
    system = small_parser(1)
    lines = [" ".join(leaves(GOLD)), "dogs"], [" ".join(linearize(GOLD)), "(S (NP NN )NP )S"]
    source, target = (tuple(side) for side in lines)
    text = ParallelText("x", "test", ("en", "trees"), source, target, "", ())
    scores = score_parser(system, text, beam=2, progress=False)
    for name, found in scores.items():
        parses = parse_sentences(
            system, [line.split() for line in lines[0]], beam=2, constrained=name == "constrained"
        )
        golds = [delinearize(b.split(), a.split()) for a, b in zip(*lines, strict=True)]
        wanted = score_parses(golds, [parse for parse in parses if parse is not None])
        assert {key: found[key] for key in wanted} == wanted
        assert found["beam"] == 2
    assert scores["constrained"]["well_formed"] == 100 > scores["free"]["well_formed"]


def test_words_that_look_like_symbols_are_words() -> None:
    sentence = ["(NP", "/NN", ")S", "/.", "<unk>", "dog"]
    for seed in range(3):
        for beam in (1, 4):
            (found,) = parse_sentences(small_parser(seed), [sentence], beam=beam)
            assert found is not None
            assert found.well_formed
            assert leaves(found.tree) == sentence
