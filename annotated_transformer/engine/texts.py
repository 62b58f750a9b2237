"""The training data of a run as token ids, and its order."""

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from torch import Tensor

from annotated_transformer.data.corpora import ParallelText
from annotated_transformer.data.files import CorpusError
from annotated_transformer.data.prepared import Prepared
from annotated_transformer.data.shards import TokenPairs
from annotated_transformer.data.text import MAX_SENTENCE
from annotated_transformer.engine.config import DataOptions, OptimOptions, UsageError
from annotated_transformer.engine.treebanks import (
    is_parser,
    safe_words,
    tree_vocabulary,
    with_phrases,
    with_words,
)
from annotated_transformer.training.batches import token_batches
from annotated_transformer.translation.tokenizers import (
    BPETokenizer,
    Tokenizer,
    TokenizerError,
    WordTokenizer,
)

Texts: TypeAlias = tuple[ParallelText, ParallelText] | Prepared  # of training and validation
Tokenizers: TypeAlias = tuple[Tokenizer, Tokenizer]


def learn_tokenizers(text: ParallelText | Prepared, options: DataOptions) -> Tokenizers:
    """Learn source and target tokenizers from a training text, or return a prepared corpus's.

    A parser has one vocabulary of whole words and symbols.

    Raises:
        UsageError: The vocabulary is too small for the bytes, or larger than the text gives.
        TokenizerError: spaCy has no rules for a language.
    """
    if isinstance(text, Prepared):
        return text.tokenizer, text.tokenizer
    if is_parser(text.languages):
        symbols = tree_vocabulary(text, options.vocabulary)
        return symbols, symbols
    if options.tokenizer == "words":
        first, second = text.languages
        return WordTokenizer.train(text.source, first), WordTokenizer.train(text.target, second)
    try:
        sentences = itertools.chain(text.source, text.target)
        lines = (line for line in sentences if len(line) <= MAX_SENTENCE)
        lowercase = options.tokenizer == "bpe-lower"
        shared = BPETokenizer.train(lines, options.vocabulary, lowercase=lowercase)
    except TokenizerError as error:
        raise UsageError(f"--vocabulary {options.vocabulary}: {error}") from None
    return shared, shared


def encode_pairs(text: ParallelText, tokenizers: Tokenizers, options: DataOptions) -> TokenPairs:
    """Encode sentence pairs as token ids.

    Raises:
        CorpusError: A sentence is longer than ``max_len`` and should not be skipped.
    """
    first, second = text.source, text.target
    if is_parser(text.languages):
        first = tuple(map(safe_words, text.source))
        second = tuple(map(with_words, text.target, text.source))
    source = [tokenizers[0].encode(line) for line in first]
    target = [tokenizers[1].encode(line) for line in second]
    limit = options.max_len - 1  # one is for the end symbol
    keep = []
    for i, pair in enumerate(zip(source, target, strict=True)):
        if max(map(len, pair)) <= limit:
            keep.append(i)
        elif not options.skip_long:
            side = 0 if len(pair[0]) > limit else 1
            raise CorpusError(
                f"{line_location(text, i, side)}: {len(pair[side])} tokens, more than the "
                f"{limit} that fit; raise --max-len, or skip such sentences with --skip-long"
            )
    if not keep:
        raise CorpusError(f"{text.name} {text.split}: all sentences are too long; raise --max-len")
    numbers = text.line_numbers()
    source, target = ([side[i] for i in keep] for side in (source, target))
    return TokenPairs.from_lists(source, target, [numbers[i] for i in keep])


def line_location(text: ParallelText, index: int, side: int) -> str:
    """Return the file and line of a sentence; the first file if there are several."""
    return f"{text.checksums[side][0]}{text.line_note(side)}, line {text.line_numbers()[index]}"


def encode_corpus(
    texts: Texts, tokenizers: Tokenizers, options: DataOptions
) -> tuple[TokenPairs, TokenPairs]:
    """Return training and validation text as token ids.

    Raises:
        CorpusError: A sentence is too long, or a shard is damaged.
    """
    if isinstance(texts, Prepared):
        return texts.tokens("train", verify=True), texts.tokens("val", verify=True)
    train = with_phrases(texts[0]) if options.phrases else texts[0]
    return encode_pairs(train, tokenizers, options), encode_pairs(texts[1], tokenizers, options)


def lines_of(text: TokenPairs, groups: Sequence[Tensor]) -> list[int]:
    """Return the line numbers of the pairs, or their indices from 1 if these are unknown."""
    numbers = (int(i) for group in groups for i in group)
    return sorted(text.lines[i] if text.lines else i + 1 for i in numbers)


def updates_to_come(
    text: TokenPairs, options: OptimOptions, done: int, begun: tuple[int, int] = (0, 0)
) -> Iterator[tuple[int, int, Sequence[Tensor]]]:
    """Yield the updates after ``done``: epoch, updates left in it, and micro-batches.

    Args:
        text: The training data.
        options: Seed, batch size and number of updates.
        done: Number of updates already done.
        begun: An epoch, and the number of updates before it, so that earlier epochs need not
            be shuffled again.

    Yields:
        Each micro-batch is given by the indices of its pairs.
    """
    first, number = begun
    for epoch in itertools.count(first):
        order = token_batches(text.lengths(), options.max_tokens, seed=options.seed, epoch=epoch)
        for start in range(0, len(order), options.accumulate):
            if number >= options.updates:
                return
            number += 1
            if number > done:
                left = (len(order) - 1 - start) // options.accumulate
                yield epoch, left, order[start : start + options.accumulate]
