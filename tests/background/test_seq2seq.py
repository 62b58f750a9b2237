"""Recurrent translators against loops over single cells, against padding, and step by step."""

import ast
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from annotated_transformer.background import seq2seq
from annotated_transformer.background.seq2seq import (
    DECODERS,
    AdditiveDecoder,
    RecurrentConfig,
    RecurrentSteps,
    RecurrentTranslator,
)
from annotated_transformer.data.records import NO_RECORDS
from annotated_transformer.notation import BOS, EOS, PAD
from annotated_transformer.pretrained import RUNNING
from annotated_transformer.translation.greedy import PrefixSteps, Steps, rows_of
from benchmarks.chapters import definitions
from tests.claims import cells
from tests.parts import part_of

SOURCE, TARGET = 11, 9  # sizes of the vocabularies
Form = Literal["none", "additive", "dot"]
FORMS = cast("list[Form]", sorted(DECODERS))
seeds = st.integers(0, 2**31)


def make(
    form: Form = "additive", layers: int = 1, seed: int = 0, hidden: int = 5, width: int = 4
) -> RecurrentTranslator:
    torch.manual_seed(seed)
    config = RecurrentConfig(form, width=width, hidden=hidden, layers=layers, dropout=0.0)
    model = config.build(SOURCE, TARGET).double().eval()
    for parameter in model.parameters():  # large enough to see where things go
        nn.init.uniform_(parameter, -0.8, 0.8)
    return model


def sentences(
    lengths: Sequence[int], generator: torch.Generator, vocab: int = SOURCE
) -> tuple[Tensor, Tensor]:
    """Return random sentences, filled up with padding, and their mask."""
    m = max(lengths)
    tokens = torch.randint(4, vocab, (len(lengths), m), generator=generator)
    keep = torch.arange(m) < torch.tensor(lengths).unsqueeze(1)
    return tokens.masked_fill(~keep, PAD), keep.unsqueeze(1)


# An independent form: one sentence, one word, one cell at a time.


def cell_of(gru: nn.GRU, layer: int, suffix: str = "") -> nn.GRUCell:
    """Return a cell with a layer's weights."""
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    parts = {name: getattr(gru, f"{name}_l{layer}{suffix}").detach() for name in names}
    cell = nn.GRUCell(parts["weight_ih"].size(1), gru.hidden_size).double()
    cell.load_state_dict(parts)
    return cell


def walk(cell: nn.GRUCell, inputs: Iterable[Tensor], state: Tensor | None = None) -> list[Tensor]:
    states = []
    for x in inputs:
        state = cell(x, state)
        states.append(state)
    return states


def read(model: RecurrentTranslator, words: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states of both directions at each word, ``(m, 2 * hidden)``."""
    xs, gru = list(model.src_embed.weight[words]), model.encoder.gru
    for layer in range(gru.num_layers):
        ahead = walk(cell_of(gru, layer), xs)
        back = walk(cell_of(gru, layer, "_reverse"), xs[::-1])[::-1]
        xs = [torch.cat(both) for both in zip(ahead, back, strict=True)]
    return torch.stack(xs), torch.cat([ahead[-1], back[0]])


def first_cell(decoder: AdditiveDecoder) -> tuple[nn.GRUCell, Callable[[Tensor], Tensor]]:
    """Return the cell of the additive form's loop, and the map to its query."""
    h = decoder.sizes[1]
    cell = nn.GRUCell(decoder.word.in_features + 2 * h, h).double()
    weight, bias = decoder.state.weight.detach(), decoder.state.bias.detach()
    parts = {
        "weight_ih": torch.cat([decoder.word.weight, decoder.context.weight], 1).detach(),
        "weight_hh": weight[: 3 * h],
        "bias_ih": decoder.word.bias.detach(),
        "bias_hh": bias[: 3 * h],
    }
    cell.load_state_dict(parts)
    return cell, lambda s: weight[3 * h :] @ s + bias[3 * h :]


@torch.no_grad()
def by_cells(model: RecurrentTranslator, source: Tensor, target: Tensor) -> Tensor:
    """Return the logits after each target word, for one sentence without padding."""
    memory, context = read(model, source)
    decoder, form = model.decoder, model.config.attention
    if form == "none":
        memory = context.unsqueeze(0)
    states = list(
        torch.tanh(decoder.first.weight @ memory[0] + decoder.first.bias).chunk(model.config.layers)
    )
    logits = []
    for word in target:
        x = model.tgt_embed.weight[word]
        if form == "additive":
            assert isinstance(decoder, AdditiveDecoder)
            cell, query = first_cell(decoder)
            keys = memory @ decoder.keys.weight.T
            scores = torch.tanh(query(states[0]) + keys) @ decoder.score.weight[0]
            context = scores.softmax(0) @ memory
            states[0] = cell(torch.cat([x, context]), states[0])
            for layer in range(1, len(states)):
                assert decoder.upper is not None
                states[layer] = cell_of(decoder.upper, layer - 1)(states[layer - 1], states[layer])
        else:
            x = torch.cat([x, context]) if form == "none" else x
            for layer in range(len(states)):
                x = states[layer] = cell_of(part_of(decoder, "gru", nn.GRU), layer)(
                    x, states[layer]
                )
            if form == "dot":
                context = (memory @ (decoder.get_parameter("keys.weight").T @ states[-1])).softmax(
                    0
                ) @ memory
        out = torch.tanh(decoder.readout(torch.cat([context, states[-1]])))
        logits.append(model.generator(out))
    return torch.stack(logits)


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_equal_to_a_loop_over_single_cells(form: Form, layers: int) -> None:
    model = make(form, layers, seed=layers)
    generator = torch.Generator().manual_seed(layers)
    src, mask = sentences([4, 1, 6], generator)
    tgt, _ = sentences([5, 5, 5], generator, TARGET)
    logits = model.generator(model(src, tgt, mask, None))
    for i, m in enumerate((4, 1, 6)):
        torch.testing.assert_close(
            logits[i], by_cells(model, src[i, :m], tgt[i]), rtol=0, atol=1e-12
        )


# Padding.


def padding_error(
    model: RecurrentTranslator, lengths: Sequence[int], extra: int, generator: torch.Generator
) -> float:
    """Return how far results with padding are from those of each sentence alone."""
    src, mask = sentences(lengths, generator)
    src = F.pad(src, (0, extra), value=PAD)
    mask = F.pad(mask, (0, extra), value=False)
    src = torch.where(mask.squeeze(1), src, torch.randint(SOURCE, src.shape, generator=generator))
    tgt, _ = sentences([3] * len(lengths), generator, TARGET)
    together = model(src, tgt, mask, None)
    apart = [model(src[i : i + 1, :m], tgt[i : i + 1], None, None) for i, m in enumerate(lengths)]
    return float((together - torch.cat(apart)).detach().abs().max())


lists_of_lengths = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=15)
@given(lengths=lists_of_lengths, extra=st.integers(0, 3), layers=st.integers(1, 2), seed=seeds)
def test_padding_never_changes_a_result(
    form: Form, lengths: list[int], extra: int, layers: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    assert padding_error(make(form, layers, seed), lengths, extra, generator) < 1e-12


@pytest.mark.parametrize("form", ["additive", "dot"])
def test_attention_without_its_mask_is_noticed(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(scores: Tensor, padding: Tensor) -> Tensor:
        return scores.softmax(-1)

    monkeypatch.setattr(seq2seq, "attention_weights", careless)
    generator = torch.Generator().manual_seed(0)
    assert padding_error(make(form), [5, 2], 1, generator) > 1e-3


@pytest.mark.parametrize("form", FORMS)
def test_an_encoder_that_reads_padding_is_noticed(
    form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_of_it(src: Tensor, src_mask: Tensor | None) -> Tensor:
        return torch.full((len(src),), src.size(1))

    monkeypatch.setattr(seq2seq, "source_lengths", all_of_it)
    generator = torch.Generator().manual_seed(0)
    assert padding_error(make(form), [5, 2], 1, generator) > 1e-3


@pytest.mark.parametrize("form", FORMS)
def test_sentences_of_equal_length_are_read_as_if_packed(form: Form) -> None:
    model, results = make(form, layers=2), []
    src, mask = sentences([4, 4], torch.Generator().manual_seed(0))
    tgt = torch.tensor([[BOS, 4, 5], [BOS, 6, EOS]])
    weights = [p for part in (model.encoder, model.decoder) for p in part.parameters()]
    for extra in (0, 1):  # with a place of padding, they are packed
        padded = F.pad(src, (0, extra), value=PAD), F.pad(mask, (0, extra), value=False)
        out = model(padded[0], tgt, padded[1], None)
        results.append([out, *torch.autograd.grad(out.square().sum(), weights)])
    for plain, packed in zip(*results, strict=True):
        torch.testing.assert_close(plain, packed, rtol=0, atol=1e-11)


@pytest.mark.parametrize("form", FORMS)
def test_padding_gets_no_gradient(form: Form) -> None:
    model = make(form)
    src, mask = sentences([4, 2], torch.Generator().manual_seed(0))
    tgt = torch.tensor([[BOS, 4, 5], [BOS, 6, EOS]])
    model(src, tgt, mask, None).square().sum().backward()
    slope = model.src_embed.weight.grad
    assert slope is not None
    assert slope[src[mask.squeeze(1)]].abs().sum(-1).gt(0).all()
    assert (slope[PAD] == 0).all()


@pytest.mark.parametrize("form", FORMS)
def test_no_position_sees_the_future(form: Form) -> None:
    model = make(form, layers=2)
    src, mask = sentences([4], torch.Generator().manual_seed(0))
    tgt = torch.tensor([[BOS, 4, 5, 6]])
    changed = torch.tensor([[BOS, 4, 5, 7]])
    before, after = (model(src, each, mask, None)[0] for each in (tgt, changed))
    assert torch.equal(before[:3], after[:3])
    assert not torch.allclose(before[3], after[3])


@pytest.mark.parametrize("form", FORMS)
def test_a_sentence_without_words_gives_numbers(form: Form) -> None:
    model = make(form)
    src, mask = sentences([3, 0], torch.Generator().manual_seed(0))
    tgt = torch.tensor([[BOS, 4], [BOS, 5]])
    memory = model.encode(src, mask)
    assert (memory[1] == 0).all()
    out = model(src, tgt, mask, None)
    assert out.isfinite().all()
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    if form != "none":
        weights = model.alignment(src, tgt, mask)
        assert (weights[1] == 0).all()
        torch.testing.assert_close(weights[0].sum(-1), torch.ones(2).double())


def test_padding_before_a_word_is_refused() -> None:
    src = torch.tensor([[PAD, 5, 6]])
    with pytest.raises(ValueError, match="before a real token"):
        make().encode(src, (src != PAD).unsqueeze(1))


# Steps.


def search_error(
    model: RecurrentTranslator,
    steps: Steps,
    beam: int,
    lengths: Sequence[int],
    seed: int,
    src: Tensor,
    mask: Tensor,
) -> float:
    """Go through a random search; compare each logit with teacher forcing of the same words."""
    generator = torch.Generator().manual_seed(seed)
    alive = torch.arange(len(lengths))
    written = torch.zeros(len(lengths), beam, 0, dtype=torch.long)
    largest = 0.0
    for step in range(6):
        newest = torch.randint(TARGET, (len(alive), beam, 1), generator=generator)
        written = torch.cat([written, newest], -1)
        logits = steps(newest.flatten())
        rows = alive.repeat_interleave(beam)
        out = model(src[rows], written.flatten(0, 1), mask[rows], None)
        largest = max(largest, (logits - model.generator(out[:, -1])).abs().max().item())
        parents = torch.randint(beam, (len(alive), beam), generator=generator)
        steps.follow(parents)
        written = written.gather(1, parents.unsqueeze(-1).expand(-1, -1, step + 1))
        if len(alive) > 1 and step % 2:
            kept = torch.randperm(len(alive), generator=generator)[: len(alive) - 1]
            steps.select(kept)
            alive, written = alive[kept], written[kept]
    return largest


@torch.no_grad()
def run_search(
    kind: str, form: Form, layers: int, beam: int, lengths: Sequence[int], seed: int
) -> float:
    model = make(form, layers, seed)
    src, mask = sentences(lengths, torch.Generator().manual_seed(seed))
    steps = (
        PrefixSteps(model, model.encode(src, mask), mask, beam)
        if kind == "prefix"
        else model.start_steps(src, mask, beam)
    )
    return search_error(model, steps, beam, lengths, seed + 1, src, mask)


@pytest.mark.parametrize("kind", ["state", "prefix"])
@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=6)
@given(
    layers=st.integers(1, 2),
    beam=st.integers(1, 3),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    seed=seeds,
)
def test_steps_equal_teacher_forcing_through_any_search(
    kind: str, form: Form, layers: int, beam: int, lengths: list[int], seed: int
) -> None:
    assert run_search(kind, form, layers, beam, lengths, seed) < 1e-11


def stay(steps: RecurrentSteps, parents: Tensor) -> None:
    """Go on from the hypotheses in the same places, whatever the parents."""


def first_sentence(steps: RecurrentSteps, parents: Tensor) -> None:
    """Take parents for rows, as if all belonged to the first sentence."""
    steps.state = steps.state[:, parents.flatten()]


def other_source(steps: RecurrentSteps, parents: Tensor) -> None:
    """Follow rightly, but take the context of a wrong row."""
    right_follow(steps, parents)
    steps.source = steps.source.rows(torch.arange(parents.numel()).roll(1))


def source_stays(steps: RecurrentSteps, sentences: Tensor) -> None:
    """Keep the states of the chosen sentences, and the first of the sources."""
    rows = rows_of(sentences, steps.beam)
    steps.state = steps.state[:, rows]
    steps.source = steps.source.rows(torch.arange(len(rows)))


right_follow = RecurrentSteps.follow


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("follow", stay),
        ("follow", first_sentence),
        ("follow", other_source),
        ("select", source_stays),
    ],
)
def test_wrong_rows_are_noticed(
    form: Form,
    name: str,
    wrong: Callable[[RecurrentSteps, Tensor], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RecurrentSteps, name, wrong)
    assert run_search("state", form, 1, 2, [4, 2, 5], seed=3) > 1e-3


# Configurations.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "hard"}, "none, additive or dot"),
        ({"hidden": 0}, "hidden must be positive"),
        ({"layers": 0}, "layers must be positive"),
        ({"max_len": 0}, "max_len must be positive"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_configurations_that_cannot_be_built_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RecurrentConfig(**options)


def test_a_fixed_context_has_no_alignment() -> None:
    tokens = torch.tensor([[4, 5]])
    with pytest.raises(ValueError, match="has no attention weights"):
        make("none").alignment(tokens, tokens)


@pytest.mark.parametrize("form", FORMS)
def test_dropout_works_in_training_alone(form: Form) -> None:
    model = RecurrentConfig(form, width=8, hidden=8, layers=2, dropout=0.5).build(SOURCE, TARGET)
    src, tgt = torch.tensor([[4, 5, 6]]), torch.tensor([[BOS, 4]])
    assert not torch.equal(model(src, tgt, None, None), model(src, tgt, None, None))
    model.eval()
    assert torch.equal(model(src, tgt, None, None), model(src, tgt, None, None))


@pytest.mark.parametrize("form", FORMS)
def test_there_is_dropout_between_the_layers_of_the_decoder(form: Form) -> None:
    torch.manual_seed(0)
    decoder, memory, x = DECODERS[form](8, 8, 2, 0.5), torch.randn(1, 1, 16), torch.randn(1, 3, 8)
    source = decoder.prepare(memory, torch.zeros(1, 1, 1, dtype=torch.bool))
    outputs = [decoder(x, source, decoder.start(memory))[0] for _ in range(2)]
    assert not torch.equal(*outputs)
    decoder.eval()
    outputs = [decoder(x, source, decoder.start(memory))[0] for _ in range(2)]
    assert torch.equal(*outputs)


def test_the_bounds_of_a_model() -> None:
    model = RecurrentConfig(max_len=77).build(SOURCE, TARGET)
    assert model.max_len == 77
    assert part_of(model, "generator.proj", nn.Linear).out_features == TARGET


# What the chapter finds, in small: sentences to be turned around, of few and of many words.


def turned(
    n: int, generator: torch.Generator, size: int = 32, vocab: int = 10
) -> tuple[Tensor, Tensor]:
    """Return ``n`` words a sentence, and the same words from the last to the first."""
    words = torch.randint(4, vocab, (size, n), generator=generator)
    return words, words.flip(1)


def learned(form: Form, seed: int, updates: int = 300, longest: int = 10) -> dict[int, float]:
    """Train on short and long sentences; return the share of right words of each length."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = RecurrentConfig(form, width=16, hidden=24, dropout=0.0).build(10, 10)
    optimizer = torch.optim.Adam(model.parameters(), 2e-2, fused=True)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, updates, pct_start=0.1)

    def forced(n: int, size: int = 32) -> tuple[Tensor, Tensor]:
        src, wanted = turned(n, generator, size)
        tgt = F.pad(wanted[:, :-1], (1, 0), value=BOS)
        return model.generator(model(src, tgt, None, None)), wanted

    for _ in range(updates):
        n = int(torch.randint(2, longest + 1, (), generator=generator))
        logits, wanted = forced(n)
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), wanted.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rate.step()
    with torch.no_grad():
        results = {n: forced(n, size=128) for n in (2, longest)}
    return {n: (y.argmax(-1) == w).double().mean().item() for n, (y, w) in results.items()}


@pytest.mark.parametrize("seed", range(5))
def test_one_vector_holds_short_sentences_and_attention_long_ones(seed: int) -> None:
    fixed, attentive = (learned(form, seed) for form in ("none", "additive"))
    assert attentive[10] > fixed[10] + 0.1
    assert fixed[2] > fixed[10] + 0.15


def test_the_record_of_five_seeds_is_of_the_same_runs() -> None:
    path = Path(__file__).parents[2] / "results" / "lengths.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    lines = [line for cell in cells("background/seq2seq") for line in cell.source.splitlines()]
    (line,) = (line for line in lines if line.startswith("updates = {"))
    updates = ast.literal_eval(line.removeprefix("updates = "))
    assert record["updates"] == {**updates, "dot, longer": 3 * updates["dot"]}
    assert set(record["runs"]) >= set("01234")


def store(folder: Path, name: str, record: dict[str, Any]) -> None:
    """Write a record where a page finds it."""
    (folder / "results").mkdir(exist_ok=True)
    (folder / "results" / name).write_text(json.dumps(record), encoding="utf-8")


def of_the_repository(name: str) -> dict[str, Any]:
    """Read a record."""
    path = Path(__file__).resolve().parents[2] / "results" / name
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def run_cells(marks: tuple[str, ...]) -> dict[str, Any]:
    """Run the cells that hold these words, with what the chapter defines; return all names."""
    names: dict[str, Any] = definitions("background/seq2seq", {"kinds"})
    names |= {"test": range(1, 5), "words_of": {k: 7 * k for k in range(1, 5)}}
    names |= {"show": lambda figure, text: text, "Table": lambda head, rows: (head, rows)}
    found = [c for c in cells("background/seq2seq") if any(mark in c.source for mark in marks)]
    assert len(found) == len(marks)
    for cell in found:
        exec(cell.source, names)
    return names


LENGTHS = ('find_record("lengths.json")', "by_form = [", "by_choice = [")
TRANSLATIONS = ('find_record("recurrent-running.json")', 'if running["runs"]:')


def test_another_seed_in_the_records_breaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, running = (of_the_repository(n) for n in ("lengths.json", "recurrent-running.json"))
    record["runs"]["99"] = run = json.loads(json.dumps(record["runs"]["0"]))
    run["dot"], run["additive"] = run["additive"], run["dot"]
    running["runs"]["99"] = run = json.loads(json.dumps(running["runs"]["0"]))
    run["none"] |= {"exact": 1.0, "translation": ""}
    store(tmp_path, "lengths.json", record)
    store(tmp_path, "recurrent-running.json", running)
    monkeypatch.chdir(tmp_path)
    names = run_cells(LENGTHS)
    assert [row[0] for row in names["by_form"]] == [names["names"][f] for f in record["updates"]]
    assert len(names["of_seeds"]("dot", "exact", "4")) == len(record["runs"])
    assert "0.0%" not in str(names["by_choice"])
    names = run_cells(TRANSLATIONS)
    assert f"mean of {len(running['runs'])} seeds" in names["pictures"]
    _, rows = names["translations"]("none")
    assert [row[0] for row in rows] == list(running["runs"])


def test_the_page_does_without_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_cells(LENGTHS)["picture"] is None
    assert run_cells(TRANSLATIONS)["picture"] is None
    assert capsys.readouterr().out.count(NO_RECORDS) == 2


def test_the_record_of_the_running_sentence_is_of_that_sentence() -> None:
    record = of_the_repository("recurrent-running.json")
    assert record["source"] == list(RUNNING.german)
    assert record["target"] == list(RUNNING.english)
    for run in record["runs"].values():
        weights = torch.tensor(run["additive"]["weights"])
        assert weights.shape == (len(RUNNING.english), len(RUNNING.german))
        assert (weights >= 0).all()
        assert (weights.sum(-1) < 1.001).all()  # the rest is on the end symbol
        assert 0 <= run["none"]["exact"] <= 1
