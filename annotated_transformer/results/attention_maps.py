# Written from book/results/attention_maps.md: edit the chapter instead.
"""Attention weights captured, labelled, drawn and measured (section 4, appendix)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import altair as alt
import seaborn
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from annotated_transformer.data.grammar import NOUNS as GRAMMAR_NOUNS
from annotated_transformer.data.grammar import Pair
from annotated_transformer.data.verbs import verb_of_prefix
from annotated_transformer.figures import SEQUENTIAL, canvas, live_heatmap
from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.model.multi_head import MultiHeadedAttention
from annotated_transformer.notation import BOS, EOS
from annotated_transformer.training.batches import make_batch
from annotated_transformer.translation.tokenizers import Tokenizer, cut, normal_blanks


def attention_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of each attention's latest call, ``(batch, h, n, m)``, by its name.

    Raises:
        ValueError: The model has no ``MultiHeadedAttention``, or was not called yet.
    """
    found = {n: m.attn for n, m in model.named_modules() if isinstance(m, MultiHeadedAttention)}
    kept = {name: weights for name, weights in found.items() if weights is not None}
    if not kept:
        what = "was not called yet" if found else "has no MultiHeadedAttention to look into"
        raise ValueError(f"{type(model).__name__} {what}")
    return kept


Part = Literal["encoder", "decoder", "cross"]
PLACES: Mapping[Part, str] = {
    "encoder": "encoder.layers.{}.self_attn",
    "decoder": "decoder.layers.{}.self_attn",
    "cross": "decoder.layers.{}.src_attn",
}


def stacked(weights: Mapping[str, Tensor], part: Part) -> Tensor:
    """Return the weights of all layers of a part, ``(batch, layers, h, n, m)``.

    Raises:
        KeyError: There are no weights of this part.
    """
    layers: list[Tensor] = []
    while (name := PLACES[part].format(len(layers))) in weights:
        layers.append(weights[name])
    if not layers:
        raise KeyError(f"there are no weights of the {part}: call the whole model first")
    return torch.stack(layers, dim=1)


@dataclass(frozen=True)
class Maps:
    """The attention weights of a sentence pair, with the tokens that they stand for.

    Attributes:
        source: The ``m`` tokens that the encoder reads, the end symbol included.
        target: The ``n`` tokens that the decoder reads, the begin symbol included.
        weights: For each part, shape ``(layers, h, queries, keys)``.
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    weights: Mapping[Part, Tensor]

    def labels(self, part: Part) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the queries and the keys of a part."""
        queries = self.source if part == "encoder" else self.target
        return queries, self.target if part == "decoder" else self.source


@torch.no_grad()
def look(
    model: EncoderDecoder,
    tokenizers: tuple[Tokenizer, Tokenizer],
    pairs: Sequence[tuple[str, str]],
    size: int = 64,
) -> list[Maps]:
    """Let a model read sentence pairs, and return what its heads looked at.

    Tokens are what the tokenizers make of the sentences, words or parts of them.

    Args:
        model: Is read in evaluation mode, and left in the mode that it was in.
        tokenizers: Of source and target.
        pairs: Source and target sentences.
        size: Pairs in a batch.
    """
    training, device = model.training, next(model.parameters()).device
    model.eval()
    maps: list[Maps] = []
    try:
        for start in range(0, len(pairs), size):
            texts = pairs[start : start + size]
            sources, targets = (
                [tokenizer.encode(text[side]) for text in texts]
                for side, tokenizer in enumerate(tokenizers)
            )
            batch = make_batch(sources, targets).to(device)
            model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
            kept = attention_weights(model)
            parts = {part: stacked(kept, part).cpu() for part in PLACES}
            for k, (source, target) in enumerate(zip(sources, targets, strict=True)):
                m, n = len(source) + 1, len(target) + 1  # with end, with begin
                weights: dict[Part, Tensor] = {
                    "encoder": parts["encoder"][k, :, :, :m, :m],
                    "decoder": parts["decoder"][k, :, :, :n, :n],
                    "cross": parts["cross"][k, :, :, :n, :m],
                }
                read = tokenizers[0].tokens([*source, EOS]), tokenizers[1].tokens([BOS, *target])
                maps.append(Maps(tuple(read[0]), tuple(read[1]), weights))
    finally:
        model.train(training)
    return maps


def check_labels(weights: Tensor, queries: Sequence[str], keys: Sequence[str]) -> None:
    """Raise ValueError unless weights are ``(layers, h, len(queries), len(keys))``."""
    if weights.dim() != 4 or weights.shape[2:] != (len(queries), len(keys)):
        raise ValueError(
            f"weights of shape {tuple(weights.shape)}, "
            f"not (layers, heads, {len(queries)} queries, {len(keys)} keys)"
        )


def overview(weights: Tensor, queries: Sequence[str], keys: Sequence[str]) -> Figure:
    """Draw every head of a part; queries are rows, keys are columns.

    Args:
        weights: Shape ``(layers, h, n, m)``.
        queries: The ``n`` tokens that attend.
        keys: The ``m`` tokens that are attended to.

    Raises:
        ValueError: The weights do not fit the labels.
    """
    check_labels(weights, queries, keys)
    layers, h = weights.shape[:2]
    figure, axes = canvas(layers, h, size=(1.5 * h + 1, 1.5 * layers + 1))
    look: dict[str, Any] = {"cmap": SEQUENTIAL, "vmin": 0, "vmax": 1, "cbar": False}
    look |= {"rasterized": True}  # many cells: smaller as an image
    for (layer, head), ax in [((i, j), axes[i, j]) for i in range(layers) for j in range(h)]:
        rows = list(queries) if head == 0 else False
        columns = list(keys) if layer == layers - 1 else False
        matrix = weights[layer, head].detach().cpu().double().numpy()
        seaborn.heatmap(matrix, ax=ax, yticklabels=rows, xticklabels=columns, **look)
        ax.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=8)
        ax.tick_params(labelsize=7)
        ax.grid(visible=False)
    figure.supylabel("query", fontsize="medium")
    figure.supxlabel("key", fontsize="medium")
    return figure


def live_heads(
    weights: Tensor,
    queries: Sequence[str],
    keys: Sequence[str],
    *,
    title: str = "",
    first: tuple[int, int] = (0, 0),
) -> alt.Chart:
    """Draw one head at a time, of a layer and a head that the reader chooses.

    Args:
        weights: Shape ``(layers, h, n, m)``.
        queries: The ``n`` tokens that attend: rows.
        keys: The ``m`` tokens that are attended to: columns.
        title: Title of the chart.
        first: Layer and head that are shown first, counted from 0.

    Raises:
        ValueError: The weights do not fit the labels.
    """
    check_labels(weights, queries, keys)
    names = {"row_label": "query", "column_label": "key", "value_label": "weight"}
    chart = live_heatmap(weights[first], queries, keys, **names, title=title, hover=True)
    layers, h = weights.shape[:2]
    rounded = (weights.double() * 1e4).round() / 1e4
    chart.data = alt.InlineData(
        values=[
            {"i": i, "j": j, "row": query, "column": key, "of": rounded[:, :, i, j].tolist()}
            for i, query in enumerate(queries)
            for j, key in enumerate(keys)
        ]
    )
    shade = alt.Scale(scheme="viridis", domain=[0, 1])
    chart = chart.encode(color=alt.Color("value:Q", scale=shade, title="weight"))
    choices = [
        alt.param(
            name=name,
            value=chosen + 1,
            bind=alt.binding_select(options=list(range(1, count + 1)), name=f"{name} "),
        )
        for name, chosen, count in (("layer", first[0], layers), ("head", first[1], h))
    ]
    moving = chart.transform_calculate(value="datum.of[layer - 1][head - 1]")
    whole: alt.Chart = moving.add_params(*choices)
    return whole


Links = frozenset[tuple[int, int]]  # (row, column): a query, and a key that it should look at


def as_table(links: Links, n: int, m: int) -> Tensor:
    """Return links as a boolean table ``(n, m)``.

    Raises:
        ValueError: A link lies outside, as when rows and columns were mixed up.
    """
    table = torch.zeros(n, m, dtype=torch.bool)
    for row, column in links:
        if not (0 <= row < n and 0 <= column < m):
            raise ValueError(f"link ({row}, {column}) lies outside a map of {n} rows, {m} columns")
    if links:
        table[tuple(zip(*links, strict=True))] = True
    return table


def hits(maps: Sequence[Tensor], links: Sequence[Links]) -> Tensor:
    """Return how often each head looks where it should.

    Args:
        maps: Weights of each sentence, ``(layers, h, n, m)``.
        links: What is right in each sentence.

    Returns:
        Of the queries with a link, the share whose largest weight is on a linked key,
        ``(layers, h)``.

    Raises:
        ValueError: There are no links, or one lies outside its map.
    """
    right, asked = torch.zeros(maps[0].shape[:2]), 0
    for weights, linked in zip(maps, links, strict=True):
        table = as_table(linked, *weights.shape[2:])
        rows = table.any(dim=1).nonzero()[:, 0]
        top = weights[:, :, rows].argmax(dim=-1)  # (layers, h, rows)
        right += table[rows, top].sum(dim=-1)
        asked += len(rows)
    if not asked:
        raise ValueError("no links: there is nothing to be right or wrong about")
    return right / asked


def chance(maps: Sequence[Tensor], links: Sequence[Links], part: Part) -> float:
    """Return the share of hits to be expected from looking at any visible key alike."""
    total, asked = 0.0, 0
    for weights, linked in zip(maps, links, strict=True):
        right = as_table(linked, *weights.shape[2:]).sum(dim=1).tolist()
        for row, count in enumerate(right):
            total += count / (row + 1 if part == "decoder" else weights.size(3))
            asked += count > 0
    return total / max(1, asked)


def at_distances(n: int, m: int, distances: Sequence[int]) -> Tensor:
    """Return maps ``(1, distances, n, m)`` in which query ``i`` looks at key ``i - distance``.

    A key beyond the sentence's ends is replaced by the nearest one inside.
    """
    keys = torch.arange(n) - torch.tensor(distances).unsqueeze(1)  # (distances, n)
    return F.one_hot(keys.clamp(0, m - 1), m).float().unsqueeze(0)


def alignment_error_rate(maps: Sequence[Tensor], links: Sequence[Links]) -> Tensor:
    """Return the error rate of the word alignment that each head of the cross-attention gives.

    Args:
        maps: Weights of each sentence, ``(layers, h, words + 1, words + 1)``: the last query
            chooses the end symbol, and the last key is one; both are no words.
        links: (target word, source word) of each sentence, all of them sure.

    Returns:
        Between 0, all right, and 1; shape ``(layers, h)``.

    Raises:
        ValueError: A link lies outside its map.
    """
    common, size = torch.zeros(maps[0].shape[:2]), 0
    for weights, sure in zip(maps, links, strict=True):
        n, m = weights.size(2) - 1, weights.size(3) - 1
        table = as_table(sure, n, m)
        top = weights[:, :, :n, :m].argmax(dim=-1)  # (layers, h, n)
        common += table[torch.arange(n), top].sum(dim=-1)
        size += n + len(sure)
    return 1 - 2 * common / size


def translations(pair: Pair) -> Links:
    """Cross-attention: the row that chooses a German word, and the English words it renders."""
    return frozenset((j, i) for i, j in pair.alignment)


NOUNS = frozenset(form for noun in GRAMMAR_NOUNS for form in (noun.english, noun.english_plural))


def antecedents(pair: Pair) -> Links:
    """Encoder: from *it* to its noun."""
    found = [reference.english for reference in pair.coreferences]
    return frozenset(link for link in found if pair.english[link[0]] == "it")


def pronouns(pair: Pair) -> Links:
    """Cross-attention: the row that chooses *er*, *sie* or *es* for *it*, and the English noun."""
    return frozenset(
        (reference.german[0], reference.english[1])
        for reference in pair.coreferences
        if pair.english[reference.english[0]] == "it"
    )


def nearest_nouns(pair: Pair) -> Links:
    """As ``pronouns``, with the nearest noun before *it*, whether it is meant or not."""
    return frozenset(
        (reference.german[0], max(i for i in range(place) if pair.english[i] in NOUNS))
        for reference in pair.coreferences
        if pair.english[place := reference.english[0]] == "it"
    )


@contextmanager
def silenced(attention: MultiHeadedAttention, head: int) -> Iterator[None]:
    """Take a head, counted from 0, out of the sum of heads while the block lasts.

    Raises:
        IndexError: There is no such head.
    """
    if not 0 <= head < attention.h:
        raise IndexError(f"head {head} of {attention.h}")
    mixing = attention.linears[-1].get_parameter("weight").detach()  # (d_model, h * d_v)
    part = mixing[:, head * attention.d_v : (head + 1) * attention.d_v]
    kept = part.clone()
    try:
        part.zero_()
        yield
    finally:
        part.copy_(kept)


def brackets(pair: Pair, least: int = 4, most: int = 99) -> Links:
    """Decoder: the row that chooses the last part of a German verb, and its first part.

    Args:
        pair: A sentence pair.
        least: Fewest words from the first part to the last.
        most: Most words.
    """
    found = set()
    for english in {i for i, _ in pair.alignment}:
        parts = [j for i, j in pair.alignment if i == english]
        if least <= max(parts) - min(parts) <= most:
            found.add((max(parts), min(parts) + 1))  # the key stands one after the begin symbol
    return frozenset(found)


def verb_links(text: str, tokenizer: Tokenizer, language: str = "de") -> Links:
    """Decoder: the row that chooses a separated prefix, and the pieces of its verb.

    Args:
        text: A sentence.
        tokenizer: Of which ``decode`` gives back what was encoded.
        language: For spaCy's rules of what a word is.
    """
    text = normal_blanks(text)
    words = [word for word, _ in cut(text, language)]
    found = verb_of_prefix(words)
    if found is None:
        return frozenset()
    starts, place = [], 0
    for word in words:
        place = text.index(word, place)
        starts.append(place)
        place += len(word)
    ids = tokenizer.encode(text)
    ends = [len(tokenizer.decode(ids[: n + 1])) for n in range(len(ids))]

    def pieces(word: int) -> list[int]:
        first, last = starts[word], starts[word] + len(words[word])
        return [n for n, end in enumerate(ends) if first < end <= last]

    prefix, verb = map(pieces, found)
    return frozenset((prefix[0], piece + 1) for piece in verb)  # keys: after the begin symbol


def at_places(n: int, m: int, places: int) -> Tensor:
    """Return maps ``(1, places, n, m)`` in which every query looks at one place from the left."""
    keys = torch.arange(places).clamp(max=m - 1)
    return F.one_hot(keys, m).float().unsqueeze(1).expand(-1, n, -1).unsqueeze(0)


def best_head(
    maps: Mapping[str, Sequence[Tensor]], links: Mapping[str, Sequence[Links]]
) -> tuple[tuple[int, int], float]:
    """Return the head with most hits in ``val``, and its share of hits in ``test``."""
    shares = {split: hits(maps[split], links[split]) for split in links}
    head = divmod(int(shares["val"].argmax()), shares["val"].size(1))
    return head, shares["test"][head].item()


def distant_verbs(
    model: EncoderDecoder,
    untrained: EncoderDecoder,
    tokenizers: tuple[Tokenizer, Tokenizer],
    texts: Mapping[Literal["val", "test"], Sequence[tuple[str, str]]],
) -> dict[str, Any]:
    """Measure how well one decoder head finds the verb of a separated prefix.

    Args:
        model: Writes German.
        untrained: The same model before its training, to compare with.
        tokenizers: Of source and target.
        texts: Sentences with their German translations, to choose the head, and to measure it.

    Returns:
        The head, from zero; the number of verbs in each text; and the shares that were found
        in ``test`` by the head, by chance, at the best distance, at the best place from the
        left, and before the training.

    Raises:
        ValueError: A text has no such verb.
    """
    links: dict[str, dict[tuple[str, str], Links]] = {
        split: {pair: found for pair in pairs if (found := verb_links(pair[1], tokenizers[1]))}
        for split, pairs in texts.items()
    }
    wanted = {split: list(found.values()) for split, found in links.items()}
    for split, there in wanted.items():
        if not there:
            raise ValueError(f"{split}: has no German verb in two parts")
    seen, before = (
        {s: [m.weights["decoder"] for m in look(of, tokenizers, list(p))] for s, p in links.items()}
        for of in (model, untrained)
    )
    sizes = {split: [(w.size(2), w.size(3)) for w in maps] for split, maps in seen.items()}
    back = {s: [at_distances(*size, range(1, 25)) for size in of] for s, of in sizes.items()}
    left = {s: [at_places(*size, 24) for size in of] for s, of in sizes.items()}
    head, share = best_head(seen, wanted)
    shares = {"head": share, "chance": chance(seen["test"], wanted["test"], "decoder")}
    others = {"one distance": back, "one place": left, "untrained": before}
    shares |= {name: best_head(maps, wanted)[1] for name, maps in others.items()}
    verbs = {split: len(found) for split, found in wanted.items()}
    return {"head": head, "verbs": verbs, "shares": shares}


ARTICLES = frozenset({"the", "a", "an"})


def articles(pair: Pair) -> Links:
    """Cross-attention: the row that chooses a German article, and the English article."""
    return frozenset((j, i) for i, j in pair.alignment if pair.english[i].lower() in ARTICLES)


def article_nouns(pair: Pair) -> Links:
    """As ``articles``, with the English noun that the article belongs to."""
    places = range(len(pair.english))
    return frozenset(
        (row, next(k for k in places if k > article and pair.english[k] in NOUNS))
        for row, article in articles(pair)
    )


def back(distance: int, part: Part) -> Callable[[Pair], Links]:
    """Self-attention: from every token to the one at a distance before it (after, if negative)."""

    def links(pair: Pair) -> Links:
        n = len(pair.german if part == "decoder" else pair.english) + 1
        return frozenset((i, i - distance) for i in range(n) if 0 <= i - distance < n)

    return links


BEHAVIOURS: Mapping[tuple[Part, str], Callable[[Pair], Links]] = {
    ("encoder", "it → noun"): antecedents,
    ("encoder", "itself"): back(0, "encoder"),
    ("encoder", "previous"): back(1, "encoder"),
    ("encoder", "next"): back(-1, "encoder"),
    ("decoder", "verb → first part"): brackets,
    ("decoder", "just read"): back(0, "decoder"),
    ("decoder", "the one before"): back(1, "decoder"),
    ("cross", "translation"): translations,
    ("cross", "article → article"): articles,
    ("cross", "article → noun"): article_nouns,
    ("cross", "pronoun → noun"): pronouns,
}
