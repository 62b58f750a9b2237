"""Weights are captured without a trace, labelled rightly, and counted as a slow count would."""

import contextlib
import functools
import html
import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import altair as alt
import numpy as np
import pytest
import torch
import vl_convert
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.collections import QuadMesh
from torch import Tensor, nn

from annotated_transformer.data.grammar import Coreference, Pair, grammar_pairs
from annotated_transformer.data.verbs import SEPARABLE, verb_of_prefix
from annotated_transformer.fast.decoding import keep_decoder_weights, start_steps
from annotated_transformer.model.architecture import EncoderDecoder
from annotated_transformer.model.multi_head import MultiHeadedAttention
from annotated_transformer.model.transformer import make_model
from annotated_transformer.notation import BOS, EOS
from annotated_transformer.results.attention_maps import (
    PLACES,
    Links,
    Maps,
    Part,
    as_table,
    at_distances,
    attention_weights,
    capture_attention,
    chance_rates,
    draw_heads,
    hit_rates,
    live_heads,
    stack_weights,
)
from annotated_transformer.training.batches import Batch, make_batch
from annotated_transformer.translation.tokenizers import BPETokenizer, Tokenizer
from benchmarks import attention
from benchmarks.chapters import definitions
from tests.parts import part_of

PAGE = definitions("results/attention_maps", {"NOUNS", "ARTICLES", "BEHAVIOURS", "GENDER"})
NOUNS, BEHAVIOURS = PAGE["NOUNS"], PAGE["BEHAVIOURS"]
antecedents, pronouns, nearest_nouns, articles, article_nouns, translations, verb_parts, back = map(
    PAGE.__getitem__,
    ("antecedents", "pronouns", "nearest_nouns", "articles", "article_nouns", "translations",
     "verb_parts", "back"),
)  # fmt: skip
agreements, nearest_share, rival = map(
    PAGE.__getitem__, ("agreements", "nearest_share", "rival")
)  # fmt: skip
alignment_error_rate, silenced, redirected, verb_links = map(
    PAGE.__getitem__, ("alignment_error_rate", "silenced", "redirected", "verb_links")
)

SOURCES, TARGETS = [[4, 5, 6, 7], [8, 9]], [[6, 5], [9, 8, 7]]


def a_model(dropout: float = 0.0, seed: int = 0) -> EncoderDecoder:
    torch.manual_seed(seed)
    return make_model(11, 11, N=2, d_model=16, d_ff=32, h=4, dropout=dropout).double()


def run(model: EncoderDecoder, batch: Batch) -> Tensor:
    y: Tensor = model(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
    return y


# Capturing


@pytest.mark.parametrize("seed", range(3))
def test_weights_are_those_of_the_library(seed: int) -> None:
    torch.manual_seed(seed)
    ours = MultiHeadedAttention(3, 12, 0.0).double()
    theirs = torch.nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)
    theirs.in_proj_weight.data = torch.cat(
        [ours.get_parameter(f"linears.{i}.weight") for i in range(3)]
    )
    theirs.in_proj_bias.data = torch.cat(
        [ours.get_parameter(f"linears.{i}.bias") for i in range(3)]
    )
    query, key = torch.randn(2, 4, 12).double(), torch.randn(2, 5, 12).double()
    mask = torch.rand(2, 4, 5) < 0.7
    mask[..., 0] = True
    ours(query, key, key, mask)
    weights = attention_weights(ours)
    hidden = (~mask).repeat_interleave(3, dim=0)
    wanted = theirs(query, key, key, attn_mask=hidden, average_attn_weights=False)[1]
    assert torch.allclose(weights[""], wanted, atol=1e-12)
    assert not weights[""].requires_grad


def test_weights_of_an_earlier_call_stay() -> None:
    model = a_model()
    run(model, make_batch(SOURCES, TARGETS))
    before = attention_weights(model)
    run(model, make_batch(SOURCES[:1], TARGETS[:1]))
    assert stack_weights(before, "cross").size(0) == 2
    assert stack_weights(attention_weights(model), "cross").size(0) == 1


def test_a_part_may_be_read_alone() -> None:
    model, batch = a_model(), make_batch(SOURCES, TARGETS)
    model.encode(batch.src, batch.src_mask)
    assert sorted(attention_weights(model.encoder)) == ["layers.0.self_attn", "layers.1.self_attn"]
    weights = attention_weights(model)
    assert stack_weights(weights, "encoder").shape == (2, 2, 4, 5, 5)
    with pytest.raises(KeyError, match="cross"):
        stack_weights(weights, "cross")


def test_a_model_without_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no MultiHeadedAttention"):
        attention_weights(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="EncoderDecoder was not called yet"):
        attention_weights(a_model())


# Reading sentences


class Letters:
    """A tokenizer: a letter is a token."""

    def encode(self, text: str) -> list[int]:
        return [4 + ord(letter) - ord("a") for letter in text]

    def tokens(self, ids: Sequence[int]) -> list[str]:
        return [{BOS: "<s>", EOS: "</s>"}.get(i) or chr(i - 4 + ord("a")) for i in ids]


LETTERS = cast("tuple[Tokenizer, Tokenizer]", (Letters(), Letters()))  # with all that is asked
TEXTS = [("abc", "da"), ("b", "gfed"), ("cd", "a")]


def test_look_labels_and_crops() -> None:
    model = a_model().train()
    model.encoder.eval()  # frozen, say
    seen = capture_attention(model, LETTERS, TEXTS, size=2)
    assert (model.training, model.encoder.training, model.decoder.training) == (True, False, True)
    assert len(seen) == 3
    assert seen[1].source == ("b", "</s>")
    assert seen[1].target == ("<s>", "g", "f", "e", "d")
    assert seen[1].labels("encoder") == (seen[1].source, seen[1].source)
    assert seen[1].labels("decoder") == (seen[1].target, seen[1].target)
    assert seen[1].labels("cross") == (seen[1].target, seen[1].source)
    for maps in seen:
        for part, weights in maps.weights.items():
            queries, keys = maps.labels(part)
            assert weights.shape == (2, 4, len(queries), len(keys))
            assert torch.allclose(weights.sum(-1), torch.ones(2, 4, len(queries)).double())


def test_look_takes_sub_words() -> None:
    lines = ["the dog sees the dogs", "der Hund sieht die Hunde"] * 3
    shared = BPETokenizer.train(lines, 280)
    model = make_model(280, 280, N=1, d_model=8, d_ff=8, h=2)
    (maps,) = capture_attention(model, (shared, shared), [(lines[0], lines[1])])
    assert "".join(maps.source).replace("▁", " ").strip() == lines[0] + "</s>"
    assert "".join(maps.target).replace("▁", " ") == "<s> " + lines[1]
    assert len(maps.source) > 6
    draw_heads(maps.weights["cross"], *maps.labels("cross"))


def test_neighbours_in_the_batch_do_not_matter() -> None:
    model = a_model().eval()
    together = capture_attention(model, LETTERS, TEXTS)
    for text, maps in zip(TEXTS, together, strict=True):
        (alone,) = capture_attention(model, LETTERS, [text])
        for part, weights in alone.weights.items():
            assert torch.allclose(weights, maps.weights[part], atol=1e-12)


def test_mode_is_kept_when_reading_fails() -> None:
    model = a_model().train()
    with pytest.raises(IndexError):
        capture_attention(model, LETTERS, [("z", "z")])  # no such embedding
    assert model.training


# Drawing: labels and numbers read back

QUERIES, KEYS = ["<s>", "der", "Hund"], ["the", "dog", ".", "</s>"]
HAND = torch.arange(2 * 2 * 3 * 4).view(2, 2, 3, 4) / 48


def test_overview_shows_every_head_at_its_place() -> None:
    figure = draw_heads(HAND, QUERIES, KEYS)
    *heads, scale = figure.axes
    assert (scale.get_ylabel(), scale.get_ylim()) == ("weight", (0, 1))
    axes = np.array(heads).reshape(2, 2)
    for layer in range(2):
        for head in range(2):
            ax = axes[layer, head]
            assert ax.get_title() == f"layer {layer + 1}, head {head + 1}"
            (mesh,) = (c for c in ax.collections if isinstance(c, QuadMesh))
            shown = np.asarray(mesh.get_array()).reshape(3, 4)
            assert np.allclose(shown, HAND[layer, head])
            assert (mesh.norm.vmin, mesh.norm.vmax) == (0, 1)
            assert ax.yaxis_inverted()
            rows = [t.get_text() for t in ax.get_yticklabels()]
            columns = [t.get_text() for t in ax.get_xticklabels()]
            assert rows == (QUERIES if head == 0 else [])
            assert columns == (KEYS if layer == 1 else [])
    assert (figure.get_supylabel(), figure.get_supxlabel()) == ("query", "key")


def live_values(chart: alt.Chart) -> dict[tuple[int, int], float]:
    """What the still picture of a chart says of its cells, for whoever cannot see it."""
    svg = vl_convert.vegalite_to_svg(chart.to_dict())
    told = re.findall(r'aria-label="query ([^"]+), key ([^"]+), weight ([\d.e-]+)"', svg)
    found = {}
    for number, (query, key, weight) in enumerate(told):  # row by row
        i, j = divmod(number, len(KEYS))
        assert (html.unescape(query), html.unescape(key)) == (QUERIES[i], KEYS[j])
        found[i, j] = float(weight)
    return found


@pytest.mark.parametrize("first", [(0, 0), (1, 0), (0, 1)])
def test_live_heads_show_the_head_that_is_chosen(first: tuple[int, int]) -> None:
    chart = live_heads(HAND, QUERIES, KEYS, first=first)
    spec = chart.to_dict()
    # A click in a menu sets these two; the picture that is drawn for them is read below.
    menus = {p["name"]: p for p in spec["params"] if "bind" in p}
    assert {name: menu["value"] for name, menu in menus.items()} == {
        "layer": first[0] + 1,
        "head": first[1] + 1,
    }
    assert all(menu["bind"]["options"] == [1, 2] for menu in menus.values())
    shown = live_values(chart)
    assert len(shown) == 12
    for (i, j), weight in shown.items():
        assert math.isclose(weight, HAND[first[0], first[1], i, j], rel_tol=5e-3, abs_tol=1e-4)


def test_live_heads_are_labelled() -> None:
    spec = live_heads(HAND, QUERIES, KEYS, title="cross").to_dict()
    names = {
        axis: json.loads(spec["encoding"][axis]["axis"]["labelExpr"].rpartition("[datum")[0])
        for axis in "xy"
    }
    assert names == {"x": KEYS, "y": QUERIES}
    titles = [spec["encoding"][axis]["axis"]["title"] for axis in "xy"]
    assert titles == ["key", "query"]
    (cells,) = spec["datasets"].values()
    for cell in cells:
        assert (cell["row"], cell["column"]) == (QUERIES[cell["i"]], KEYS[cell["j"]])
        assert np.allclose(cell["of"], HAND[:, :, cell["i"], cell["j"]], atol=1e-4)
    assert spec["encoding"]["color"]["scale"]["domain"] == [0, 1]
    (pick,) = (p for p in spec["params"] if "select" in p)
    assert pick["select"]["fields"] == ["i"]
    assert pick["select"]["on"] == "pointerover"


@pytest.mark.parametrize("draw", [draw_heads, live_heads])
@pytest.mark.parametrize("wrong", [HAND.transpose(2, 3), HAND[0], HAND[..., 1:]])
def test_weights_must_fit_their_labels(draw: Callable[..., Any], wrong: Tensor) -> None:
    with pytest.raises(ValueError, match="3 queries, 4 keys"):
        draw(wrong, QUERIES, KEYS)


# Counting, against a slow count


Example = tuple[list[Tensor], list[Links]]


@st.composite
def sentences(draw: st.DrawFn) -> Example:
    seed = draw(st.integers(0, 10_000))
    chance_ = torch.Generator().manual_seed(seed)
    maps, links = [], []
    for _ in range(draw(st.integers(1, 4))):
        n, m = draw(st.integers(2, 6)), draw(st.integers(2, 6))
        maps.append(torch.rand(2, 3, n, m, generator=chance_))
        table = torch.rand(n - 1, m - 1, generator=chance_) < 0.3
        links.append(frozenset((i, j) for i, j in table.nonzero().tolist()))
    links[0] |= {(0, 0)}
    return maps, links


def slow_best(row: Sequence[float]) -> int:
    return max(range(len(row)), key=lambda j: row[j])


@settings(max_examples=40)
@given(sentences())
def test_hits_against_a_slow_count(example: Example) -> None:
    maps, links = example
    found = hit_rates(maps, links)
    for layer in range(2):
        for head in range(3):
            right = asked = 0
            for weights, linked in zip(maps, links, strict=True):
                for i in {i for i, _ in linked}:
                    asked += 1
                    right += (i, slow_best(weights[layer, head, i].tolist())) in linked
            assert math.isclose(found[layer, head], right / asked, abs_tol=1e-6)


@settings(max_examples=40)
@given(sentences())
def test_alignment_error_against_a_slow_count(example: Example) -> None:
    maps, links = example
    found = alignment_error_rate(maps, links)
    for layer in range(2):
        for head in range(3):
            given_, common, sure = 0, 0, 0
            for weights, linked in zip(maps, links, strict=True):
                words = weights[layer, head, :-1, :-1].tolist()
                answer = {(i, slow_best(row)) for i, row in enumerate(words)}
                given_, sure = given_ + len(answer), sure + len(linked)
                common += len(answer & linked)
            assert math.isclose(found[layer, head], 1 - 2 * common / (given_ + sure), abs_tol=1e-6)


@settings(max_examples=20)
@given(sentences(), st.sampled_from(["encoder", "decoder"]))
def test_chance_is_the_mean_of_blind_heads(example: Example, part: Part) -> None:
    maps, links = example
    if part == "decoder":  # a link to the future could not be hit
        links = [frozenset((max(i, j), min(i, j)) for i, j in linked) for linked in links]
        maps = [torch.zeros(1, 1, 7, 7) for _ in maps]
    total, asked = 0.0, 0
    for weights, linked in zip(maps, links, strict=True):
        for row in {i for i, _ in linked}:
            keys = range(row + 1 if part == "decoder" else weights.size(3))
            total += sum((row, key) in linked for key in keys) / len(keys)
            asked += 1
    assert math.isclose(chance_rates(maps, links, part), total / asked, abs_tol=1e-9)


def test_distances_are_kept_inside() -> None:
    maps = at_distances(3, 4, [-1, 0, 2])
    assert maps.shape == (1, 3, 3, 4)
    assert maps.argmax(-1)[0].tolist() == [[1, 2, 3], [0, 1, 2], [0, 0, 0]]
    assert (maps.sum(-1) == 1).all()


def test_links_must_lie_inside() -> None:
    with pytest.raises(ValueError, match=r"link \(1, 4\) lies outside a map of 5 rows, 3 columns"):
        as_table(frozenset({(1, 4)}), 5, 3)
    with pytest.raises(ValueError, match="outside"):
        as_table(frozenset({(-1, 0)}), 5, 3)
    with pytest.raises(ValueError, match="no links"):
        hit_rates([HAND], [frozenset()])
    with pytest.raises(ValueError, match="no links"):
        hit_rates([], [])
    with pytest.raises(ValueError, match="argument 2"):
        hit_rates([HAND, HAND], [frozenset({(0, 0)})])


# What is right, in a pair written by hand

PAIR = Pair(
    english=("The", "aunt", "bought", "a", "red", "table", "because", "it", "was", "old", "."),
    german=(
        *("Die", "Tante", "hat", "einen", "roten", "Tisch", "gekauft", ","),
        *("weil", "er", "alt", "war", "."),
    ),
    alignment=frozenset(
        {(0, 0), (1, 1), (2, 2), (2, 6), (3, 3), (4, 4), (5, 5), (6, 8), (7, 9), (8, 11), (9, 10)}
        | {(10, 12)}
    ),
    coreferences=(Coreference(english=(7, 5), german=(9, 5)),),
)


@functools.cache
def sample() -> list[Pair]:
    """Pairs of the grammar, written once."""
    return grammar_pairs("val", 200)


def words(pair: Pair, part: Part, links: Links) -> set[tuple[str, str, str]]:
    """Say links in words: what the row reads, what it chooses, what it should look at."""
    reads = {"encoder": [*pair.english, "</s>"], "decoder": ["<s>", *pair.german]}
    reads["cross"] = reads["decoder"]
    keys = {"encoder": reads["encoder"], "decoder": reads["decoder"], "cross": reads["encoder"]}
    chosen = {"encoder": reads["encoder"]}.get(part, [*pair.german, "</s>"])
    return {(reads[part][i], chosen[i], keys[part][j]) for i, j in links}


def test_links_by_hand() -> None:
    assert words(PAIR, "encoder", antecedents(PAIR)) == {("it", "it", "table")}
    assert words(PAIR, "cross", pronouns(PAIR)) == {("weil", "er", "table")}
    assert words(PAIR, "encoder", nearest_nouns(PAIR)) == {("it", "it", "table")}
    assert words(PAIR, "encoder", agreements(PAIR)) == {
        ("The", "The", "aunt"),
        ("a", "a", "table"),
    }
    assert words(PAIR, "decoder", verb_parts(PAIR)) == {("Tisch", "gekauft", "hat")}
    assert words(PAIR, "decoder", verb_parts(PAIR, 5)) == set()
    assert words(PAIR, "decoder", verb_parts(PAIR, 1, 3)) == set()
    assert words(PAIR, "cross", articles(PAIR)) == {
        ("<s>", "Die", "The"),
        ("hat", "einen", "a"),
    }
    assert words(PAIR, "cross", article_nouns(PAIR)) == {
        ("<s>", "Die", "aunt"),
        ("hat", "einen", "table"),
    }
    assert ("Tisch", "gekauft", "bought") in words(PAIR, "cross", translations(PAIR))
    previous = words(PAIR, "decoder", back(1, "decoder")(PAIR))
    assert ("Tante", "hat", "Die") in previous
    assert len(previous) == 13
    following = words(PAIR, "encoder", back(-1, "encoder")(PAIR))
    assert ("was", "was", "old") in following
    assert len(following) == 11


NEAR = replace(  # where another noun is nearer
    PAIR,
    english=("We", "find", "the", "box", "in", "a", "room", "because", "it", "is", "old", "."),
    german=(
        *("Wir", "finden", "die", "Kiste", "in", "einem", "Zimmer", ","),
        *("weil", "sie", "alt", "ist", "."),
    ),
    alignment=frozenset({(2, 2), (3, 3), (5, 5), (6, 6), (8, 9)}),
    coreferences=(Coreference(english=(8, 3), german=(9, 3)),),
)


def test_the_nearest_noun_may_be_the_wrong_one() -> None:
    assert words(NEAR, "encoder", nearest_nouns(NEAR)) == {("it", "it", "room")}
    assert words(NEAR, "encoder", antecedents(NEAR)) == {("it", "it", "box")}
    assert nearest_share([PAIR, NEAR, NEAR, PAIR, PAIR]) == 3 / 5
    assert rival(NEAR) == 6
    assert rival(replace(NEAR, english=("We", "find", "the", "boxes", *NEAR.english[4:]))) is None
    pairs = [pair for pair in sample() if antecedents(pair)]
    blind = plant(pairs, "encoder", nearest_nouns)
    found = hit_rates(blind, [antecedents(pair) for pair in pairs])[1, 2]
    assert math.isclose(found, nearest_share(pairs), abs_tol=1e-6)
    assert found < 1


def test_links_of_the_grammar() -> None:
    pairs = sample()
    assert sum(len(pronouns(pair)) for pair in pairs) > 20
    for pair in pairs:
        for _, chosen, noun in words(pair, "cross", pronouns(pair)):
            assert chosen.lower() in {"er", "sie", "es", "ihn", "ihm", "ihr"}
            assert noun in NOUNS
        for read, _, noun in words(pair, "encoder", antecedents(pair)):
            assert read == "it"
            assert noun in NOUNS
        for _, chosen, _ in words(pair, "cross", article_nouns(pair)):
            assert re.fullmatch("d(ie|e[rsmn]|as)|ein(e[rsmn]?)?|im|ins|kein.*", chosen.lower())
        for (part, _), links in BEHAVIOURS.items():
            n = len(pair.english if part == "encoder" else pair.german) + 1
            m = len(pair.german if part == "decoder" else pair.english) + 1
            table = as_table(links(pair), n, m)
            if part == "decoder":
                assert not table.triu(1).any()  # no link to the future


# Heads that were planted are found, and mistakes make them disappear


def plant(
    pairs: Sequence[Pair], part: Part, links: Callable[[Pair], Links], seed: int = 0
) -> list[Tensor]:
    """Maps of random weights in which head (1, 2) looks where it should."""
    chance_ = torch.Generator().manual_seed(seed)
    maps = []
    for pair in pairs:
        n = len(pair.english if part == "encoder" else pair.german) + 1
        m = len(pair.german if part == "decoder" else pair.english) + 1
        weights = torch.rand(2, 4, n, m, generator=chance_)
        for row, column in links(pair):
            weights[1, 2, row, column] += 2
        maps.append(weights.softmax(-1))
    return maps


@pytest.mark.parametrize(("part", "name"), list(BEHAVIOURS))
def test_planted_heads_are_found(part: Part, name: str) -> None:
    links = BEHAVIOURS[part, name]
    pairs = [pair for pair in sample() if links(pair)]
    gold = [links(pair) for pair in pairs]
    maps = plant(pairs, part, links)
    found = hit_rates(maps, gold)
    assert found[1, 2] == 1
    found[1, 2] = 0
    assert found.max() < 0.6
    shuffled = [weights[..., torch.randperm(weights.size(3))] for weights in maps]
    late = [weights.roll(1, dims=2) for weights in maps]
    for wrong in (shuffled, late):
        assert hit_rates(wrong, gold)[1, 2] < 0.6
    square = [k for k, weights in enumerate(maps) if weights.size(2) == weights.size(3)]
    if square and name != "itself" and name != "just read":
        wrong = [maps[k].transpose(2, 3) for k in square]
        assert hit_rates(wrong, [gold[k] for k in square])[1, 2] < 0.9


def test_planted_alignment_is_found() -> None:
    pairs = sample()
    gold = [translations(pair) for pair in pairs]
    maps = plant(pairs, "cross", translations)
    rate = alignment_error_rate(maps, gold)
    linked = sum(len({j for j, _ in one}) for one in gold)
    total, sure = sum(len(pair.german) for pair in pairs), sum(map(len, gold))
    assert math.isclose(rate[1, 2], 1 - 2 * linked / (total + sure), abs_tol=1e-2)
    assert rate[1, 2] < 0.15
    assert rate[0, 0] > 0.7
    assert alignment_error_rate([w.roll(1, dims=2) for w in maps], gold)[1, 2] > 0.6


# Taking a head out


def test_silenced_head_adds_nothing() -> None:
    torch.manual_seed(0)
    layer = MultiHeadedAttention(3, 12, 0.0, d_v=5).double()
    x = torch.randn(2, 4, 12).double()
    before = layer(x, x, x)
    heads = [
        linear(x).unflatten(-1, (3, -1)).transpose(1, 2)
        for linear in itertools.islice(layer.linears, 3)
    ]
    last = layer.get_parameter("linears.3.weight")
    weights = (heads[0] @ heads[1].transpose(2, 3) / layer.d_k**0.5).softmax(-1)
    for head in range(3):
        share = (weights @ heads[2])[:, head] @ last[:, 5 * head : 5 * head + 5].T
        with silenced(layer, head):
            assert torch.allclose(layer(x, x, x), before - share, atol=1e-12)
    with silenced(layer, 0), silenced(layer, 1), silenced(layer, 2):
        assert torch.allclose(
            layer(x, x, x), layer.get_parameter("linears.3.bias").expand(2, 4, 12)
        )
    assert torch.equal(layer(x, x, x), before)


def test_silenced_head_comes_back() -> None:
    layer = MultiHeadedAttention(2, 4)
    last = layer.get_parameter("linears.3.weight")
    weight = last.clone()
    with contextlib.suppress(ZeroDivisionError), silenced(layer, 1):
        assert not torch.equal(last, weight)
        raise ZeroDivisionError
    assert torch.equal(last, weight)
    for wrong in (-1, 2):
        with pytest.raises(IndexError, match=f"head {wrong} of 2"), silenced(layer, wrong):
            pass


@pytest.mark.parametrize(("head", "query", "key"), [(0, 1, 4), (2, 0, 0)])
def test_redirected_query_sees_one_key(head: int, query: int, key: int) -> None:
    torch.manual_seed(0)
    layer = MultiHeadedAttention(3, 12, 0.0, d_v=5).double()
    x, y = torch.randn(2, 4, 12).double(), torch.randn(2, 6, 12).double()
    before = layer(x, y, y)
    weights = attention_weights(layer)[""].clone()
    weights[:, head, query] = torch.eye(6, dtype=torch.float64)[key]
    values = layer.linears[2](y).unflatten(-1, (3, -1)).transpose(1, 2)
    wanted = layer.linears[3]((weights @ values).transpose(1, 2).flatten(2))
    with contextlib.suppress(ZeroDivisionError), redirected(layer, head, query, key):
        found = layer(x, y, y)
        raise ZeroDivisionError
    assert torch.allclose(found, wanted, atol=1e-12)
    same = [i for i in range(4) if i != query]
    assert torch.equal(found[:, same], before[:, same])
    assert torch.equal(layer(x, y, y), before)


def first_logits(model: EncoderDecoder, batch: Batch) -> Tensor:
    return start_steps(model, batch.src, batch.src_mask)(torch.full((len(batch.src),), BOS))


def test_decoding_notices_a_silenced_head() -> None:
    model = a_model().float().eval()
    src = make_batch(SOURCES, TARGETS)
    layer = part_of(model, "decoder.layers.1.src_attn", MultiHeadedAttention)
    with keep_decoder_weights(model), torch.no_grad():
        plain = first_logits(model, src)
        layer.get_parameter("linears.3.weight").mul_(50)  # so that the head matters
        loud = first_logits(model, src)
        with silenced(layer, 0), silenced(layer, 1), silenced(layer, 2), silenced(layer, 3):
            still = first_logits(model, src)
        again = first_logits(model, src)
    assert torch.equal(loud, again)
    assert not torch.equal(loud, still)
    assert plain.shape == loud.shape


def test_behaviours_have_names_and_parts() -> None:
    assert set(PLACES) == {part for part, _ in BEHAVIOURS}


# Verbs in two parts, in real text

PREFIXES = sorted(SEPARABLE)
VERBS = sorted(set().union(*SEPARABLE.values()))
WORDS = st.lists(st.sampled_from(["Sie", "es", "immer", "gern", *VERBS[:9]]), max_size=9)


@given(words=WORDS, prefix=st.sampled_from(PREFIXES), least=st.integers(1, 6))
def test_the_verb_of_a_prefix_is_the_only_one_that_fits(
    words: list[str], prefix: str, least: int
) -> None:
    fitting = [n for n, word in enumerate(words) if word in SEPARABLE[prefix]]
    found = verb_of_prefix([*words, prefix, "."], least)
    if len(fitting) == 1 and len(words) - fitting[0] >= least:
        assert found == (len(words), fitting[0])
    else:
        assert found is None
    assert verb_of_prefix([*words, prefix, "!"], least) is None
    assert verb_of_prefix([*words, "Haus", "."], least) is None


def captions(count: int = 12) -> list[tuple[str, str, str]]:
    objects = ["die alten Bilder", "den großen Hund", "ein Buch über Käse", "das Öl im Glas"]
    verbs = [("schaut", "an"), ("führt", "vor"), ("nimmt", "ein")]
    every = [(f"Sie {v} heute {o} {p}.", v, p) for o in objects for v, p in verbs]
    return every[:count]


@pytest.mark.parametrize("size", [265, 300, 330])
def test_links_of_pieces_spell_the_verb_and_come_before_the_prefix(size: int) -> None:
    tokenizer = BPETokenizer.train([text for text, *_ in captions()], size)
    for text, verb, prefix in captions():
        ids = tokenizer.encode(text)
        links = sorted(verb_links(text, tokenizer))
        assert tokenizer.decode([ids[key - 1] for _, key in links]).strip() == verb
        (row,) = {row for row, _ in links}
        assert tokenizer.decode(ids[row:]).strip() == f"{prefix}."
    assert not verb_links("Sie schaut an.", tokenizer)


def test_a_planted_head_finds_the_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = BPETokenizer.train([text for text, *_ in captions()], 300)
    model, untrained = a_model(), a_model(seed=1)

    def planted(of: nn.Module, tokenizers: Any, pairs: Sequence[tuple[str, str]]) -> list[Maps]:
        maps = []
        for _, text in pairs:
            n = len(tokenizer.encode(text)) + 1
            weights = torch.rand(2, 4, n, n, generator=torch.Generator().manual_seed(n)).tril()
            if of is model:
                for row, key in verb_links(text, tokenizer):
                    weights[1, 2, row, key] += 2
            maps.append(Maps((), (), {"decoder": weights}))
        return maps

    monkeypatch.setattr(attention, "capture_attention", planted)
    pairs = [("", text) for text, *_ in captions()]
    found = attention.distant_verbs(
        model, untrained, (tokenizer, tokenizer), {"val": pairs[:6], "test": pairs[6:]}
    )
    assert found["head"] == (1, 2)
    assert found["verbs"] == {"val": 6, "test": 6}
    assert found["shares"]["head"] == 1
    assert found["shares"]["untrained"] < 1
    assert 0 < found["shares"]["chance"] < 0.5
    with pytest.raises(ValueError, match="test: has no German verb"):
        attention.distant_verbs(
            model, untrained, (tokenizer, tokenizer), {"val": pairs, "test": [("", "Nein.")]}
        )
