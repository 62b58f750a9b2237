# Written from book/results/attention_maps.md: edit the chapter instead.
"""Attention weights captured, labelled, drawn and measured (Section 4, appendix)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import altair as alt
import seaborn
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional as F

from annotated_transformer.figures import SEQUENTIAL, canvas, live_heatmap
from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.model.multi_head import MultiHeadedAttention
from annotated_transformer.notation import BOS, EOS
from annotated_transformer.training.batches import make_batch
from annotated_transformer.training.loop import evaluation_mode
from annotated_transformer.translation.tokenizers import Tokenizer


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


def stack_weights(weights: Mapping[str, Tensor], part: Part) -> Tensor:
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
        target: The ``n`` tokens that the decoder reads, the start symbol included.
        weights: For each part, shape ``(layers, h, queries, keys)``.
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    weights: Mapping[Part, Tensor]

    def labels(self, part: Part) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the queries and the keys of a part."""
        queries = self.source if part == "encoder" else self.target
        return queries, self.target if part == "decoder" else self.source


def capture_attention(
    model: EncoderDecoder,
    tokenizers: tuple[Tokenizer, Tokenizer],
    pairs: Sequence[tuple[str, str]],
    size: int = 64,
) -> list[Maps]:
    """Let a model read sentence pairs, and return which keys its heads attended to.

    Tokens are what the tokenizers make of the sentences, words or parts of them.

    Args:
        model: Is read in evaluation mode; its parts are left in the modes that they were in.
        tokenizers: Tokenizers of source and target.
        pairs: Source and target sentences.
        size: Pairs in a batch.
    """
    parts = [pairs[start : start + size] for start in range(0, len(pairs), size)]
    with evaluation_mode(model):
        return [maps for texts in parts for maps in maps_of_batch(model, tokenizers, texts)]


@torch.no_grad()
def maps_of_batch(
    model: EncoderDecoder, tokenizers: tuple[Tokenizer, Tokenizer], texts: Sequence[tuple[str, str]]
) -> Iterator[Maps]:
    """Yield the maps of each pair of a batch, without padding; see ``capture_attention``."""
    sources, targets = (
        [tokenizer.encode(text[side]) for text in texts]
        for side, tokenizer in enumerate(tokenizers)
    )
    batch = make_batch(sources, targets).to(next(model.parameters()).device)
    model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
    kept = attention_weights(model)
    parts = {part: stack_weights(kept, part).cpu() for part in PLACES}
    for k, (source, target) in enumerate(zip(sources, targets, strict=True)):
        m, n = len(source) + 1, len(target) + 1  # with end, with begin
        weights: dict[Part, Tensor] = {
            "encoder": parts["encoder"][k, :, :, :m, :m],
            "decoder": parts["decoder"][k, :, :, :n, :n],
            "cross": parts["cross"][k, :, :, :n, :m],
        }
        read = tokenizers[0].tokens([*source, EOS]), tokenizers[1].tokens([BOS, *target])
        yield Maps(tuple(read[0]), tuple(read[1]), weights)


def check_labels(weights: Tensor, queries: Sequence[str], keys: Sequence[str]) -> None:
    """Raise ValueError unless weights are ``(layers, h, len(queries), len(keys))``."""
    if weights.dim() != 4 or weights.shape[2:] != (len(queries), len(keys)):
        raise ValueError(
            f"weights of shape {tuple(weights.shape)}, "
            f"not (layers, heads, {len(queries)} queries, {len(keys)} keys)"
        )


def draw_heads(weights: Tensor, queries: Sequence[str], keys: Sequence[str]) -> Figure:
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
    wide, tall = max(1.5, 0.12 * len(keys)), max(1.5, 0.12 * len(queries))  # room for labels
    figure, axes = canvas(layers, h, size=(wide * h + 1, tall * layers + 1))
    style: dict[str, Any] = {"cmap": SEQUENTIAL, "vmin": 0, "vmax": 1, "cbar": False}
    style |= {"rasterized": True}  # many cells: smaller as an image
    for (layer, head), ax in [((i, j), axes[i, j]) for i in range(layers) for j in range(h)]:
        rows = list(queries) if head == 0 else False
        columns = list(keys) if layer == layers - 1 else False
        matrix = weights[layer, head].detach().cpu().double().numpy()
        seaborn.heatmap(matrix, ax=ax, yticklabels=rows, xticklabels=columns, **style)
        ax.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=8)
        ax.tick_params(labelsize=8)
        ax.grid(visible=False)
    figure.colorbar(axes[0, 0].collections[0], ax=axes.ravel().tolist(), label="weight")
    figure.supylabel("query", fontsize="medium")
    figure.supxlabel("key", fontsize="medium")
    return figure


def menu(name: str, chosen: int, count: int) -> alt.Parameter:
    """Return a menu of an Altair chart, with the numbers from 1 to ``count``."""
    menu = alt.binding_select(options=list(range(1, count + 1)), name=f"{name} ")
    return alt.param(name=name, value=chosen, bind=menu)


def live_heads(
    weights: Tensor, queries: Sequence[str], keys: Sequence[str], *,
    title: str = "", first: tuple[int, int] = (0, 0),
) -> alt.Chart:  # fmt: skip
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
    rounded = (weights.double() * 1e4).round() / 1e4
    places = ((i, j) for i in range(len(queries)) for j in range(len(keys)))
    chart.data = alt.InlineData([
        {"i": i, "j": j, "row": queries[i], "column": keys[j], "of": rounded[:, :, i, j].tolist()}
        for i, j in places
    ])  # fmt: skip
    colour = alt.Color("value:Q", scale={"scheme": "viridis", "domain": [0, 1]}, title="weight")
    chart = chart.transform_calculate(value="datum.of[layer - 1][head - 1]").encode(color=colour)
    counts = zip(("layer", "head"), first, weights.shape[:2], strict=True)
    whole: alt.Chart = chart.add_params(*(menu(name, i + 1, count) for name, i, count in counts))
    return whole


Links = frozenset[tuple[int, int]]  # (row, column): a query, and a key that it should look at


def as_table(links: Links, n: int, m: int) -> Tensor:
    """Return links as a boolean table ``(n, m)``.

    Raises:
        ValueError: A link lies outside the table; rows and columns may be swapped.
    """
    table = torch.zeros(n, m, dtype=torch.bool)
    for row, column in links:
        if not (0 <= row < n and 0 <= column < m):
            raise ValueError(f"link ({row}, {column}) lies outside a map of {n} rows, {m} columns")
    if links:
        table[tuple(zip(*links, strict=True))] = True
    return table


def hit_rates(maps: Sequence[Tensor], links: Sequence[Links]) -> Tensor:
    """Return how often each head looks where it should.

    Args:
        maps: Weights of each sentence, ``(layers, h, n, m)``.
        links: The right (query, key) pairs of each sentence.

    Returns:
        Share of the queries with a link whose largest weight is on a linked key, ``(layers, h)``.

    Raises:
        ValueError: There are no links, or one lies outside its map.
    """
    if not any(links):
        raise ValueError("no links: there is nothing to be right or wrong about")
    right, asked = torch.zeros(maps[0].shape[:2]), 0
    for weights, linked in zip(maps, links, strict=True):
        table = as_table(linked, *weights.shape[2:])
        rows = table.any(dim=1).nonzero()[:, 0]
        top = weights[:, :, rows].argmax(dim=-1)  # (layers, h, rows)
        right += table[rows, top].sum(dim=-1)
        asked += len(rows)
    return right / asked


def chance_rates(maps: Sequence[Tensor], links: Sequence[Links], part: Part) -> float:
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


def best_head(
    maps: Mapping[str, Sequence[Tensor]], links: Mapping[str, Sequence[Links]]
) -> tuple[tuple[int, int], dict[str, float]]:
    """Return the head with most hits in ``val``, and its share of hits in every split."""
    shares = {split: hit_rates(maps[split], links[split]) for split in links}
    head = divmod(int(shares["val"].argmax()), shares["val"].size(1))
    return head, {split: found[head].item() for split, found in shares.items()}
