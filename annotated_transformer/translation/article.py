# Written from book/translation/article.md: edit the chapter instead.
"""The pipeline of the well-known article, with torchtext 0.6, to compare ours with."""

from collections.abc import Callable, Iterator
from typing import Any

from torchtext.data import Dataset, Example, Field
from torchtext.data import Iterator as TorchtextIterator
from torchtext.data import batch as cut_batches

from annotated_transformer.data.corpora import ParallelText
from annotated_transformer.training.batches import Batch
from annotated_transformer.translation.tokenizers import cut

BOS_WORD, EOS_WORD, BLANK_WORD = "<s>", "</s>", "<blank>"


def make_fields(source: str, target: str) -> tuple[Field, Field]:
    """Return the fields of source and target, as the article sets them up.

    Args:
        source: Code of the source language, as ``de``.
        target: Code of the target language.
    """

    def words(language: str) -> Callable[[str], list[str]]:
        return lambda text: [word for word, _ in cut(text, language)]

    return (
        Field(tokenize=words(source), pad_token=BLANK_WORD),
        Field(
            tokenize=words(target),
            init_token=BOS_WORD,
            eos_token=EOS_WORD,
            pad_token=BLANK_WORD,
        ),
    )


MAX_LEN = 100
MIN_FREQ = 2


def make_dataset(text: ParallelText, fields: tuple[Field, Field]) -> Dataset:
    """Cut every sentence of a text into words, and leave out pairs with more than ``MAX_LEN``.

    Args:
        text: The sentences.
        fields: Of source and target, from ``make_fields``.
    """
    named = [("src", fields[0]), ("trg", fields[1])]
    examples = [Example.fromlist(pair, named) for pair in text]
    return Dataset(examples, named, filter_pred=lambda x: max(len(x.src), len(x.trg)) <= MAX_LEN)


class BatchSize:
    """The article's ``batch_size_fn``: tokens of a batch, padding included.

    Called with the newest example, the number of examples, and the size so far; returns the
    size with the newest example.
    """

    def __init__(self) -> None:
        self.max_src = self.max_tgt = 0

    def __call__(self, new: Any, count: int, sofar: int) -> int:
        """Return the larger of both sides; the target has two symbols more than words."""
        if count == 1:
            self.max_src = self.max_tgt = 0
        self.max_src = max(self.max_src, len(new.src))
        self.max_tgt = max(self.max_tgt, len(new.trg) + 2)
        return count * max(self.max_src, self.max_tgt)


class MyIterator(TorchtextIterator):  # type: ignore[misc]
    """Batches of sentences of similar length, as the article makes them.

    Args:
        dataset: What to go through.
        batch_size: Most tokens of a batch on either side, padding included.
        pool: Sentences that are sorted together, for each token of a batch.
        options: Of ``torchtext.data.Iterator``: ``train``, ``device`` ...
    """

    def __init__(
        self, dataset: Dataset, batch_size: int, *, pool: float = 100, **options: Any
    ) -> None:
        self.batches: Any = []
        self.pool = max(1, round(batch_size * pool))
        usual = {
            "batch_size_fn": BatchSize(),
            "repeat": False,
            "sort_key": lambda x: (len(x.src), len(x.trg)),
        }
        super().__init__(dataset, batch_size, **{**usual, **options})

    def create_batches(self) -> None:
        """Cut one epoch."""
        if self.train:
            self.batches = self._pooled()
        else:
            cuts = cut_batches(self.data(), self.batch_size, self.batch_size_fn)
            self.batches = [sorted(batch, key=self.sort_key) for batch in cuts]

    def _pooled(self) -> Iterator[list[Any]]:
        for pool in cut_batches(self.data(), self.pool):
            in_order = sorted(pool, key=self.sort_key)
            batches = list(cut_batches(in_order, self.batch_size, self.batch_size_fn))
            yield from self.random_shuffler(batches)


def rebatch(pad_idx: int, batch: Any) -> Batch:
    """Make our batch of torchtext's.

    Args:
        pad_idx: Number of the padding symbol, the same in both vocabularies.
        batch: With ``src`` and ``trg`` of shape ``(length, sentences)``.
    """
    return Batch(batch.src.transpose(0, 1), batch.trg.transpose(0, 1), pad_idx)
