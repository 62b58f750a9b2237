"""Each checker passes what is right, however it is written, and names each known mistake."""

from __future__ import annotations

import collections
import itertools
import math
import tempfile
from bisect import bisect_right
from dataclasses import replace
from functools import cache, partial, reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from annotated_transformer.data.cleaning import CleaningReport, clean_pairs
from annotated_transformer.data.corpora import Preparation, read_parallel
from annotated_transformer.data.files import CorpusError
from annotated_transformer.engine.devices import mfu
from annotated_transformer.exercises import NAMES, find, machinery
from annotated_transformer.exercises.calls import Outcome, call_answer
from annotated_transformer.exercises.declare import Answer, Case, Draw, Exercise
from annotated_transformer.exercises.machinery import run_check
from annotated_transformer.fast.decoding import attend_once
from annotated_transformer.fast.sampling import Sampling
from annotated_transformer.model.attention import attention
from annotated_transformer.model.multi_head import split_heads
from annotated_transformer.model.transformer import ModelConfig, build_model, count_parameters
from annotated_transformer.serving.batching import Batcher, Job
from annotated_transformer.serving.requests import Limits
from annotated_transformer.training.batches import token_batches
from annotated_transformer.training.optimizer import make_adam
from annotated_transformer.translation.evaluation import bleu_counts, bleu_of_counts

MISTAKES = [(name, message) for name in NAMES for message in find(name).mistakes]
WANTED: dict[tuple[Answer, int], Outcome] = {}  # of references, by their seeds


@cache
def with_its_cases(name: str) -> Exercise:
    """Return an exercise that draws the case of each seed once."""
    exercise = find(name)
    return replace(exercise, draw=cache(lambda seed: exercise.draw(Draw(seed))))


@pytest.fixture
def asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call the reference once with each case, not again for each mistake."""

    def once(answer: Answer, case: Case, exercise: Exercise, *, seed: int) -> Outcome:
        if answer is not exercise.reference:
            return call_answer(answer, case, exercise, seed=seed)
        if (answer, seed) not in WANTED:
            WANTED[answer, seed] = call_answer(answer, case, exercise, seed=seed)
        return WANTED[answer, seed]

    monkeypatch.setattr(machinery, "Draw", int)  # with_its_cases makes a Draw of the seed
    monkeypatch.setattr(machinery, "call_answer", once)


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_passes(name: str) -> None:
    exercise = find(name)
    result, trial = run_check(name, exercise, exercise.reference)
    assert result.passed, result.message
    assert len(exercise.examples) == 3
    assert len(exercise.mistakes) >= 3
    assert all(wanted.error is None for _, wanted, _, _ in trial.tried)


@pytest.mark.usefixtures("asked_once")
@pytest.mark.parametrize(("name", "message"), MISTAKES)
def test_a_mistake_is_named(name: str, message: str) -> None:
    exercise = with_its_cases(name)
    result, _ = run_check(name, exercise, exercise.mistakes[message])
    assert not result.passed
    assert result.mistake == message
    assert f"likely mistake: {message}" in result.message


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def norm_by_library(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def heads_one_by_one(q: Tensor, k: Tensor, v: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor,
                     w_o: Tensor, h: int, mask: Tensor | None) -> Tensor:  # fmt: skip
    parts = (w.chunk(h, dim=1) for w in (w_q, w_k, w_v))
    found = [sdpa(q @ a, k @ b, v @ c, mask) for a, b, c in zip(*parts, strict=True)]
    return torch.cat(found, -1) @ w_o


def waves_by_logarithm(length: int, d_model: int) -> Tensor:
    table = torch.zeros(length, d_model)  # float32, as in The Annotated Transformer
    position = torch.arange(length).unsqueeze(1)
    term = torch.exp(torch.arange(0, d_model, 2) * -(math.log(10000.0) / d_model))
    table[:, 0::2], table[:, 1::2] = torch.sin(position * term), torch.cos(position * term)
    return table


def loss_by_library(parts: list[tuple[Tensor, Tensor]], pad: int) -> Tensor:
    log_probs = torch.cat([p.flatten(0, 1) for p, _ in parts])
    return F.nll_loss(log_probs, torch.cat([t.flatten() for _, t in parts]), ignore_index=pad)


def adam_by_library(w: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, lr: float) -> Any:
    m, v = torch.lerp(g, m, 0.9), 0.98 * v + 0.02 * g * g
    return w - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.98**t)) ** 0.5 + 1e-9), m, v


def smoothing_by_library(gold: Tensor, vocab: int, epsilon: float, pad: int) -> Tensor:
    one = F.one_hot(gold, vocab)
    return (one * (1 - epsilon) + epsilon / vocab) * (gold != pad).unsqueeze(1)  # float32


def merge_by_library(word: str, merges: list[tuple[str, str]]) -> list[str]:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    pieces = dict.fromkeys([*"abclowernst", *("".join(pair) for pair in merges)])
    backend = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    return list(backend.encode(word).tokens)


def bleu_of_package(hypotheses: list[list[str]], references: list[list[str]]) -> float:
    counts = [bleu_counts(h, r) for h, r in zip(hypotheses, references, strict=True)]
    return float(bleu_of_counts(np.array(counts).sum(0)))


def clipped(hypothesis: list[str], reference: list[str], n: int) -> tuple[int, int]:
    h, r = (
        collections.Counter(zip(*(words[i:] for i in range(n)), strict=False))
        for words in (hypothesis, reference)
    )
    return sum((h & r).values()), sum(h.values())


def lstm_by_library(x: Tensor, h: Tensor, c: Tensor, w: Tensor, u: Tensor, b: Tensor) -> Any:
    return torch.lstm_cell(x, (h, c), w.T, u.T, b, torch.zeros_like(b))


def convolution_by_library(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    padded = F.pad(x.mT, (len(weight) - 1, 0))
    return F.conv1d(padded, weight.permute(2, 1, 0), bias).mT


def interval_by_library(ours: Tensor, theirs: Tensor, t: float) -> Tensor:
    d = (theirs.log() - ours.log()) / math.log(2)
    ends = torch.tensor([-1.0, 1.0], dtype=d.dtype)
    return d.mean() + ends * t * (d.var() / len(d)).sqrt()


def narrow_by_library(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, w_o: Tensor, h: int
) -> Tensor:
    q, k, v = ((x @ w).unflatten(-1, (h, -1)).transpose(1, 2) for w in (w_q, w_k, w_v))
    return sdpa(q, k, v).transpose(1, 2).flatten(2) @ w_o


def map_of_package(x: Tensor, w_q: Tensor, w_k: Tensor, h: int, head: int) -> Tensor:
    q, k = (split_heads((x @ w).unsqueeze(0), h)[:, head] for w in (w_q, w_k))
    return attention(q, k, k)[1][0]


def model_by_reduction(
    src: Tensor, tgt: Tensor, pad: int, embed: Any, encoder: Any, decoder: Any, generate: Any
) -> Any:
    seen, known = (x.ne(pad)[:, None] for x in (src, tgt))
    known = known & ~torch.ones(tgt.size(1), tgt.size(1)).triu(1).bool()
    memory = reduce(lambda x, layer: layer(x, seen), encoder, embed(src))
    return generate(reduce(lambda y, layer: layer(y, memory, seen, known), decoder, embed(tgt)))


def picked_by_indices(scores: Tensor, log_probs: Tensor, beam: int) -> list[Tensor]:
    sums = (scores.unsqueeze(1) + log_probs).tolist()
    total = [(value, i, j) for i, row in enumerate(sums) for j, value in enumerate(row)]
    best = sorted(total, reverse=True)[:beam]
    parents, tokens = (torch.tensor([one[i] for one in best]) for i in (1, 2))
    return [scores[parents] + log_probs[parents, tokens], parents, tokens]


def layers_by_graph(network: str, distance: int, k: int) -> int:
    """Multiply boolean matrices until the last position has seen the first."""
    n = distance + 1
    seen, layers = torch.eye(n)[-1] > 0, 0
    while not seen[0]:
        gap = {"chain": 1, "windows": 1, "tree": k**layers, "clique": 1}[network]
        width = {"chain": 2, "windows": k, "tree": k, "clique": n}[network]
        back = torch.arange(n).unsqueeze(1) - torch.arange(n)  # from a query to a key
        reads = (back >= 0) & (back % gap == 0) & (back // gap < width)
        seen, layers = (seen.float() @ reads.float()) > 0, layers + 1
    return layers


def row_by_building(N: int, d_model: int, d_ff: int, h: int, d_k: int, d_v: int, vocab: int) -> int:
    config = ModelConfig(N=N, d_model=d_model, d_ff=d_ff, h=h, d_k=d_k, d_v=d_v)
    with torch.device("meta"):
        return count_parameters(build_model(vocab, vocab, config))


def query_by_library(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return sdpa(query[None, None], keys[None], values[None])[0, 0]


def average_by_adding(states: list[dict[str, Tensor]], k: int) -> dict[str, Tensor]:
    chosen = states[max(0, len(states) - k) :]
    return {name: sum(s[name] for s in chosen) / len(chosen) for name in chosen[0]}  # type: ignore[misc]


def cached_one_by_one(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Any:
    out, scale = [], q.size(-1) ** -0.5
    for one, key, value in zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True):
        keys, values = torch.cat([keys, key[:, None]], 1), torch.cat([values, value[:, None]], 1)
        out.append(attend_once(scale * one[:, None], keys, values, None))
    return torch.cat(out, 1), keys, values


def seconds_by_intensity(products: Any, size: int, peak: float, bandwidth: float) -> float:
    work = torch.tensor([2.0 * m * k * n for m, k, n in products]).double()
    moved = torch.tensor([size * (m * k + k * n + m * n) for m, k, n in products])
    return float((work / (work / moved * bandwidth).clamp(max=peak)).sum())


def bfloat16_by_spacing(x: float) -> float:
    if math.isinf(x):
        return x
    spacing = 2.0 ** (math.frexp(x)[1] - 8)
    near = round(x / spacing) * spacing  # Python rounds to even
    return near if abs(near) < 2.0**128 else math.copysign(math.inf, x)


def mfu_of_package(parameters: int, lengths: list[int], seconds: float, teraflops: float | None,
                   devices: int) -> float | None:  # fmt: skip
    peak = teraflops and devices * teraflops * 1e12
    return mfu(6 * parameters * sum(lengths), seconds, peak)


def hours_by_elimination(small: Any, large: Any, tokens: int, updates: int, devices: int) -> float:
    (n, first), (m, second) = small, large
    weights = (first * m - second * n) / (m - n)
    step = (second - weights) / m * tokens / devices + (weights if weights > 0 else 0)
    return float(updates * step / 3600)


def lines_of_package(source: str, target: str) -> list[tuple[int, str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder, "a.de"), Path(folder, "a.en")
        for path, text in zip(paths, (source, target), strict=True):
            path.write_bytes(text.encode())
        try:
            found = read_parallel(*paths)
        except CorpusError:  # no pair is left
            return []
    return list(zip(found.line_numbers(), found.source, found.target, strict=True))


def pairs_of_package(
    pairs: list[tuple[str, str]], most: int, ratio: float
) -> list[tuple[str, str]]:
    source, target = (("text", [pair[n] for pair in pairs]) for n in range(2))
    options = Preparation(max_words=most, max_ratio=ratio)
    return list(clean_pairs(source, target, CleaningReport(), options))


def vocabulary_by_maximum(
    sentences: list[list[str]], specials: list[str], least: int
) -> dict[str, int]:
    found = dict.fromkeys(specials, 0)
    words = sorted(itertools.chain(*sentences))
    while words and words.count(best := max(words, key=words.count)) >= least:
        found.setdefault(best, 0)
        words = [word for word in words if word != best]
    return {word: number for number, word in enumerate(found)}


def point_by_search(batches: list[int], accumulate: int, updates: int) -> tuple[int, int]:
    starts = [0, *itertools.accumulate(math.ceil(n / accumulate) for n in batches)]
    epoch = bisect_right(starts, updates) - 1
    return epoch, (updates - starts[epoch]) * accumulate


def suggestion_by_editing(word: str, known: list[str], limit: int) -> str:
    """Edit the word until it is known."""
    letters, found = {"", *"".join(known)}, {word}
    while limit and not found & {*known}:
        limit -= 1
        cuts = [(each[:i], each[i:]) for each in found for i in range(len(each) + 1)]
        found |= {a + letter + b[k:] for a, b in cuts for letter in letters for k in (0, 1)}
        found |= {a + b[1::-1] + b[2:] for a, b in cuts}
    return next((other for other in known if other in found), "")


def nucleus_of_package(log_probs: Tensor, p: float) -> Tensor:
    probs, tokens = Sampling(top_p=p).probabilities(log_probs)
    return torch.zeros_like(probs).scatter(-1, tokens, probs).log()


def batch_of_server(queue: list[tuple[int, int]], most: int) -> list[list[int]]:
    jobs = [Job([4] * (length - 1), beam) for length, beam in queue]  # and the end symbol
    server: Any = SimpleNamespace(queue=jobs, limits=Limits(tokens=most))
    return [[jobs.index(job) for job in part] for part in Batcher._split(server)]


def rows_by_numpy(weight: Tensor) -> list[Tensor]:
    rows = weight.detach().numpy()
    largest = np.abs(rows).max(1)
    scales = np.where(largest > 0, largest / 127, 1)
    whole = [np.rint(row / scale) for row, scale in zip(rows, scales, strict=True)]
    return [torch.tensor(np.array(whole)).char(), torch.tensor(scales)]


OTHERS: list[tuple[str, Any]] = [
    ("attention", sdpa),
    ("layer_norm", norm_by_library),
    ("layer_norm", nn.LayerNorm),
    ("multi_head_attention", heads_one_by_one),
    ("narrow_heads", narrow_by_library),
    ("head_map", map_of_package),
    ("encoder_decoder", model_by_reduction),
    ("sinusoid", waves_by_logarithm),
    ("scaled_embedding", lambda x, table: F.embedding(x, table * table.size(1) ** 0.5)),
    ("split_heads", lambda x, h: torch.stack(x.chunk(h, -1), 1)),
    ("join_heads", lambda x: torch.cat(list(x.unbind(1)), -1)),
    ("subsequent_mask", lambda n: torch.triu(torch.ones(1, n, n), 1) == 0),
    ("shift_target", lambda tgt: [tgt[:, :-1].clone(), tgt[:, 1:]]),
    ("token_loss", loss_by_library),
    ("adam_step", adam_by_library),
    ("label_smoothing", smoothing_by_library),
    ("dropout", lambda x, keep, p: torch.where(keep, x, 0) / (1 - p)),
    ("bpe_encode", merge_by_library),
    ("ngram_precision", clipped),
    ("bleu", bleu_of_package),
    ("beam_step", picked_by_indices),
    ("lstm_step", lstm_by_library),
    ("causal_convolution", convolution_by_library),
    ("paired_interval", interval_by_library),
    ("layers_to_reach", layers_by_graph),
    ("one_query", query_by_library),
    ("average_last", average_by_adding),
    ("model_parameters", row_by_building),
    ("nucleus", nucleus_of_package),
    ("next_batch", batch_of_server),
    ("quantize_rows", rows_by_numpy),
    ("training_cost", lambda days, gpus, rate: rate * 1e12 * 86_400 * gpus * days),
    ("learning_rate", lambda s, d, w: d**-0.5 * min(1 / s**0.5, s / w**1.5)),
    ("cached_attention", cached_one_by_one),
    ("roofline", seconds_by_intensity),
    ("to_bfloat16", bfloat16_by_spacing),
    ("to_bfloat16", lambda x: torch.tensor(x).bfloat16().item()),
    ("utilization", mfu_of_package),
    ("run_hours", hours_by_elimination),
    ("parallel_lines", lines_of_package),
    ("clean_pairs", pairs_of_package),
    ("vocabulary", vocabulary_by_maximum),
    ("resume_point", point_by_search),
    ("suggestion", suggestion_by_editing),
]


@pytest.mark.parametrize(("name", "yours"), OTHERS)
def test_what_is_right_passes_in_other_words(name: str, yours: Any) -> None:
    result, _ = run_check(name, find(name), yours)
    assert result.passed, result.message


def search_aside(step: Any, start: int, end: int, beam: int, max_len: int, places: str) -> Any:
    """Set finished hypotheses aside, which the exercise forbids, and return the best of all."""
    hypotheses: list[tuple[float, list[int]]] = [(0.0, [start])]
    done: list[tuple[float, list[int]]] = []
    for _ in range(max_len - 1):
        new = [(score + float(p), [*tokens, token]) for score, tokens in hypotheses
               for token, p in enumerate(step(tokens))]  # fmt: skip
        hypotheses = []
        for one in sorted(new, reverse=True):
            if len(hypotheses) + (len(done) if places == "lost" else 0) < beam:
                (done if one[1][-1] == end else hypotheses).append(one)
    return max([*done, *hypotheses])[1]


def from_the_right(word: str, merges: list[tuple[str, str]]) -> list[str]:
    symbols = list(word)
    for pair in merges:
        for i in range(len(symbols) - 2, -1, -1):
            if tuple(symbols[i : i + 2]) == pair:
                symbols[i : i + 2] = ["".join(pair)]
    return symbols


def precision_of_sets(hypothesis: list[str], reference: list[str], n: int) -> tuple[int, int]:
    h, r = (
        collections.Counter(tuple(sorted(words[i : i + n])) for i in range(len(words) - n + 1))
        for words in (hypothesis, reference)
    )
    return sum((h & r).values()), sum(h.values())


def once_each_target(pairs: list[tuple[str, str]], most: int, ratio: float) -> list[Any]:
    kept = find("clean_pairs").reference(pairs, most, ratio)
    return list({target: (source, target) for source, target in reversed(kept)}.values())[::-1]


def fixed(name: str, place: int, value: int) -> tuple[str, Any]:
    """Return an answer that takes a constant for one of its arguments."""
    return name, lambda *case: find(name).reference(*case[:place], value, *case[place + 1 :])


WRONG: list[tuple[str, Any]] = [
    *(("beam_search", partial(search_aside, places=places)) for places in ("kept", "lost")),
    *(fixed(name, *one) for name in ("greedy_decode", "beam_search") for one in ((1, 1), (2, 2))),
    fixed("token_loss", 1, 0),
    fixed("label_smoothing", 3, 0),
    ("bpe_encode", from_the_right),
    ("ngram_precision", precision_of_sets),
    ("clean_pairs", once_each_target),
]


@pytest.mark.parametrize(("name", "yours"), WRONG)
def test_what_is_wrong_in_few_cases_is_refused(name: str, yours: Any) -> None:
    result, _ = run_check(name, find(name), yours)
    assert not result.passed


def test_batches_are_those_of_the_package() -> None:
    lengths = [[n, 1] for n in (1, 2, 2, 3, 4, 4, 4, 7, 9)]
    ours = token_batches(lengths, 12, shuffle=False)
    reference = find("token_batches").reference([n for n, _ in lengths], 12)
    assert [batch.tolist() for batch in ours] == reference


def test_adam_is_that_of_the_package() -> None:
    layer = nn.Linear(3, 1, bias=False).double()
    weight, grad = layer.weight.detach().clone(), torch.tensor([[1.0, -2.0, 3.0]]).double()
    layer.weight.grad = grad
    make_adam(layer, lr=0.01).step()
    zero = torch.zeros_like(grad)
    wanted = find("adam_step").reference(weight, grad, zero, zero, 1, 0.01)[0]
    assert torch.allclose(layer.weight, wanted, rtol=0, atol=1e-12)
