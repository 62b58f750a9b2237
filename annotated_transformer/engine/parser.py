"""Parsing with a trained system: sentences to trees by beam search, free or constrained (§6.3)."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from annotated_transformer.data.corpora import ParallelText
from annotated_transformer.data.files import CorpusError
from annotated_transformer.engine.system import System, decode_lines
from annotated_transformer.engine.treebanks import MARKS, safe_words, without_words
from annotated_transformer.fast.decoding import start_steps
from annotated_transformer.fast.search import best_continuations
from annotated_transformer.notation import EOS, UNK
from annotated_transformer.results import parsing
from annotated_transformer.results.parsing import Tree, Unfinished, delinearize, well_formed
from annotated_transformer.translation import greedy
from annotated_transformer.translation.beam_search import beam_search, check_search, stable_topk
from annotated_transformer.translation.greedy import StartSteps, Steps

DUE = -1  # the value of ``row`` while the newest word has no tag yet
BEAM, ALPHA, EXTRA = 21, 0.3, 300  # the paper's search


@dataclass(frozen=True)
class Parse:
    """What a parser makes of a sentence."""

    tree: Tree  #: A tree over exactly the sentence's words.
    symbols: list[str]  #: What the model generated, without the words.
    well_formed: bool  #: Whether that was a tree over as many words before any repair.


class WordConstraint(parsing.TreeConstraint):
    """Which symbols make a tree in which each word of a given sentence stands before its tag."""

    def __init__(self, symbols: Sequence[str], eos: int, most: int = 8) -> None:
        super().__init__(symbols, eos, most)
        self.words = [UNK, *(n for n in self.tags if symbols[n][0] not in MARKS)]
        self.tags = [n for n in self.tags if symbols[n][0] == "/"]

    def after(self, tree: Unfinished, symbol: int) -> Unfinished:
        """Return what is known of a tree after one more symbol, allowed where it stands."""
        if tree.row == DUE:
            return replace(tree, row=0, symbols=tree.symbols + 1)
        later = tree.then(symbol, self)
        return replace(later, row=DUE) if later.words > tree.words else later

    def allowed(self, tree: Unfinished, sentence: Sequence[int], limit: int) -> Tensor:
        """Return which symbols may follow in a tree over a sentence: boolean, shape ``(V,)``."""
        left = len(sentence) - tree.words
        allowed = self.mask(tree, len(sentence), limit - left)
        if tree.row == DUE:
            allowed.zero_()[self.tags] = True
        elif allowed[self.tags[0]]:  # where a tag may follow, the next word does
            allowed[self.tags] = False
            allowed[sentence[tree.words]] = True
        return allowed


class ConstrainedSteps(Steps):
    """Steps whose impossible continuations have no probability, whatever the model thinks.

    The others are not made to sum to 1 again, because then a hypothesis whose likely continuations
    are all impossible would be rewarded. So search with ``continue_as_given``.

    Args:
        steps: Those of the model.
        constraint: Says which symbols may follow.
        sources: The tokens of each sentence.
        limits: Maximum symbols of each sentence's tree, the end symbol included.
        beam: Hypotheses of each sentence.
    """

    def __init__(
        self,
        steps: Steps,
        constraint: WordConstraint,
        sources: Sequence[Sequence[int]],
        limits: Sequence[int],
        beam: int,
    ) -> None:
        self.steps, self.constraint, self.beam = steps, constraint, beam
        bounds = zip(sources, limits, strict=True)
        self.bounds = [pair for pair in bounds for _ in range(beam)]  # of each row
        self.trees: list[Unfinished | None] = [Unfinished() for _ in self.bounds]  # None: no more
        self.allowed: Tensor | None = None

    def __call__(self, tokens: Tensor) -> Tensor:
        """Take the newest tokens ``(rows,)``; return log-probabilities ``(rows, vocab)``."""
        log_probs, words = self.steps(tokens).log_softmax(-1), self.constraint.words
        # Every word gets the summed probability of all, because it is known which one comes.
        log_probs[:, words] = log_probs[:, words].logsumexp(1, keepdim=True)
        if self.allowed is not None:
            sound = self.allowed.gather(1, tokens.unsqueeze(1).to(self.allowed.device))[:, 0]
            self.trees = [
                self.constraint.after(tree, token) if tree and ok and token != EOS else None
                for tree, token, ok in zip(self.trees, tokens.tolist(), sound.tolist(), strict=True)
            ]
        never = torch.zeros(log_probs.size(-1), dtype=torch.bool)
        found = [
            never if tree is None else self.constraint.allowed(tree, *bound)
            for tree, bound in zip(self.trees, self.bounds, strict=True)
        ]
        self.allowed = torch.stack(found)
        return log_probs.masked_fill(~self.allowed.to(log_probs.device), -torch.inf)

    def _reorder(self, rows: Tensor) -> None:
        numbers = rows.tolist()
        self.trees = [self.trees[row] for row in numbers]
        self.bounds = [self.bounds[row] for row in numbers]
        if self.allowed is not None:
            self.allowed = self.allowed[rows.to(self.allowed.device)]

    def select(self, sentences: Tensor) -> None:
        """Keep the given sentences, in that order."""
        self.steps.select(sentences)
        self._reorder(greedy.rows_of(sentences, self.beam))

    def follow(self, parents: Tensor) -> None:
        """Go on from the hypotheses ``parents (sentences, beam)``."""
        self.steps.follow(parents)
        self._reorder(greedy.rows_of_parents(parents))


def continue_as_given(log_probs: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the best continuations, like ``best_continuations``, without normalizing again."""
    candidates = before.unsqueeze(2) + log_probs  # (sentences, beam, vocab)
    best, places = stable_topk(candidates.flatten(1), log_probs.size(1))
    return best, places // log_probs.size(2), places % log_probs.size(2)


def constraint_of(system: System) -> WordConstraint:
    """Return the constraint of a parser's symbols."""
    tokenizer = system.tokenizers[1]
    return WordConstraint(tokenizer.tokens(range(len(tokenizer))), EOS)


def best_symbols(
    system: System, sources: list[list[int]], *, beam: int = BEAM, alpha: float = ALPHA,
    extra: int = EXTRA, constraint: WordConstraint | None = None, start: StartSteps = start_steps,
) -> list[list[int]]:  # fmt: skip
    """Return the best output for each source, without special symbols.

    Args:
        system: A parser.
        sources: The words of each sentence, as tokens.
        beam: Beam size; 1 is greedy decoding.
        alpha: Strength of the length penalty.
        extra: How many symbols a tree, with its words, may exceed its sentence by.
        constraint: Only trees over exactly these words; without it, anything.
        start: Encodes the sentences, and returns the steps: fast ones by default.
    """
    model, limit = system.model, system.config.max_len
    begin: StartSteps = start
    if constraint is not None:
        limits = greedy.output_limits(model, sources, limit, extra)

        def begin(model: Any, src: Tensor, mask: Tensor, beam: int) -> Steps:
            steps = start(model, src, mask, beam)
            return ConstrainedSteps(steps, constraint, sources, limits, beam)

    if beam == 1:
        return greedy.greedy_search(model, sources, limit, extra=extra, start=begin)
    options: dict[str, Any] = {"beam": beam, "alpha": alpha, "max_len": limit, "extra": extra}
    options["continuations"] = best_continuations if constraint is None else continue_as_given
    found = beam_search(model, sources, start=begin, **options)
    return [hypotheses[0].tokens for hypotheses in found]


def parse_sentences(
    system: System, sentences: Sequence[Sequence[str]], *, beam: int = BEAM, alpha: float = ALPHA,
    extra: int = EXTRA, constrained: bool = True, max_tokens: int = 16384, name: str = "input",
    progress: bool = False,
) -> list[Parse | None]:  # fmt: skip
    """Parse sentences, each on its own; a sentence without words has no tree.

    Args:
        system: A trained parser.
        sentences: The words of each.
        beam: Beam size; 1 is greedy decoding.
        alpha: Strength of the length penalty in beam search.
        extra: How many symbols a tree, with its words, may exceed its sentence by (§6.3).
        constrained: Generate only trees over the words; otherwise repair what is generated.
        max_tokens: Source tokens of a batch, over all hypotheses; at least one sentence fits.
        name: Name of the input in errors.
        progress: Show a progress bar.

    Raises:
        CorpusError: A sentence is longer than the model's limit.
        ValueError: The beam or alpha is out of range.
    """
    check_search(beam, alpha)
    check_lengths(system, sentences, name, extra)
    constraint = constraint_of(system) if constrained else None

    def search(sources: list[list[int]], numbers: list[int], _: int) -> list[Parse | None]:
        found = best_symbols(
            system, sources, beam=beam, alpha=alpha, extra=extra, constraint=constraint
        )
        pairs = [
            (without_words(system.tokenizers[1].tokens(tokens)), list(sentences[number - 1]))
            for tokens, number in zip(found, numbers, strict=True)
        ]
        return [Parse(delinearize(*pair), pair[0], well_formed(*pair)) for pair in pairs]

    lines, room = [safe_words(" ".join(words)) for words in sentences], max_tokens // beam
    return decode_lines(system, lines, search, None, room, name=name, first=1, progress=progress)


def check_lengths(
    system: System, sentences: Sequence[Sequence[str]], name: str, extra: int
) -> None:
    """Raise CorpusError for an older parser, or a sentence so long that no tree over it fits."""
    if not system.shared:
        raise CorpusError("an older parser, without words in its trees; train it again")
    most = system.config.max_len - 1
    for number, words in enumerate(sentences, 1):
        limit = min(most, len(words) + extra)
        if 2 * len(words) + 3 > limit:  # words, tags, a bracket around them, and the end
            remedy = "train with a larger --max-len" if limit == most else "raise --extra"
            raise CorpusError(
                f"{name}, line {number}: {len(words)} words, too many for trees of at most "
                f"{limit} symbols; split the line into sentences, or {remedy}"
            )


# --- words of a plain text -------------------------------------------------------------------

BRACKETS = {"(": "-LRB-", ")": "-RRB-", "{": "-LCB-", "}": "-RCB-", "[": "-LSB-", "]": "-RSB-"}
SPLITS = (  # pattern, replacement: as in the Penn Treebank
    (r'(^|[\s(\[{])"', r"\1 `` "),
    (r'"', r" '' "),
    (r"\.\.\.", " ... "),
    (r"--+", " -- "),
    (r"([;@#$%?!\[\](){}]|(?<!\w)&|&(?!\w))", r" \1 "),  # AT&T stays whole
    (r"([,:])(?=\D|$)", r" \1 "),
    (r"([^.\s])(\.)(['\")\]}\s]*)$", r"\1 \2 \3"),
    (r"(?i)(\w)(n't)\b", r"\1 \2"),
    (r"(?i)(\w)('(?:s|m|d|ll|re|ve))\b", r"\1 \2"),
    (r"(\w)'(?=\s|$)", r"\1 '"),
    (r"(?i)\b(can)(not)\b", r"\1 \2"),
)


def penn_words(text: str, *, tokenized: bool = False) -> list[str]:
    """Split a plain sentence into words as the Penn Treebank does, unless it is ``tokenized``.

    Punctuation, ``n't`` and ``'s`` are words of their own, double quotes become two single ones
    that open or close, and brackets become ``-LRB-`` and so on.
    """
    for pattern, replacement in () if tokenized else SPLITS:
        text = re.sub(pattern, replacement, text)
    return ["".join(BRACKETS.get(sign, sign) for sign in word) for word in text.split()]


# --- scores ----------------------------------------------------------------------------------


def score_parser(
    system: System, text: ParallelText, *, beam: int = BEAM, alpha: float = ALPHA, progress: bool
) -> dict[str, dict[str, Any]]:
    """Score a parser on a text, decoding freely and by constraint, see :func:`score_parses`."""
    sentences = [line.split() for line in text.source]
    pairs = zip(text.target, sentences, strict=True)
    golds = [delinearize(line.split(), words) for line, words in pairs]
    search: dict[str, Any] = {"beam": beam, "alpha": alpha}
    label, scores = f"{text.name} {text.split}", {}
    for name, only in (("free", False), ("constrained", True)):
        start = time.perf_counter()
        found = parse_sentences(
            system, sentences, **search, constrained=only, name=label, progress=progress
        )
        seconds = round(time.perf_counter() - start, 3)
        parses = [parse for parse in found if parse is not None]
        scores[name] = {**search, "seconds": seconds, **score_parses(golds, parses)}
    return scores


def score_parses(golds: Sequence[Tree], parses: Sequence[Parse]) -> dict[str, Any]:
    """Score parses against the treebank's trees, by labelled brackets.

    Returns:
        F1 with a 95 % interval (bootstrap over sentences), precision and recall in percent; the
        share of sentences whose brackets are all right, of outputs that were well-formed before
        repair, and of right tags, in percent; and the brackets of every sentence: ``matched``,
        ``gold`` and ``test``, numbers with blanks between.
    """
    rows, right, words = list[parsing.BracketCounts](), 0, 0
    for gold, parse in zip(golds, parses, strict=True):
        wanted = parsing.tags(gold)
        rows.append(parsing.score_tree(gold, parsing.with_tags(parse.tree, wanted)))
        right += sum(map(str.__eq__, wanted, parsing.tags(parse.tree)))
        words += len(wanted)
    whole = sum(rows, parsing.BracketCounts())
    counted = np.array([(counts.matched, counts.gold, counts.test) for counts in rows])
    low, high = f1_interval(counted)
    percent = {
        "f1": whole.f1,
        "low": low,
        "high": high,
        "precision": whole.precision,
        "recall": whole.recall,
        "exact": float((counted == counted[:, :1]).all(1).mean()),
        "well_formed": sum(parse.well_formed for parse in parses) / len(rows),
        "tags": right / words,
    }
    columns = zip(("matched", "gold", "test"), counted.T.tolist(), strict=True)
    return {
        "sentences": len(rows),
        **{name: round(100 * value, 2) for name, value in percent.items()},
        **{name: " ".join(map(str, column)) for name, column in columns},
    }


def f1_interval(counts: np.ndarray, samples: int = 1000) -> tuple[float, float]:
    """Return the 95 % interval of F1 for ``counts (sentences, 3)``, by bootstrap."""
    rng = np.random.default_rng(0)
    drawn = counts[rng.integers(len(counts), size=(samples, len(counts)))].sum(1)  # (samples, 3)
    f1 = 2 * drawn[:, 0] / np.maximum(1, drawn[:, 1] + drawn[:, 2])
    low, high = np.quantile(f1, (0.025, 0.975))
    return float(low), float(high)
