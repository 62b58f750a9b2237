"""Code written for The Annotated Transformer runs with changed imports, and learns."""

import ast
import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Variable

import annotated_transformer
from annotated_transformer import article, make_model
from annotated_transformer.article import (
    Batch,
    DummyOptimizer,
    DummyScheduler,
    LabelSmoothing,
    LayerNorm,
    MultiGPULossCompute,
    MultiHeadedAttention,
    NoamOpt,
    SimpleLossCompute,
    TrainState,
    article_state,
    attention,
    average,
    batch_size_fn,
    collate_batch,
    data_gen,
    get_std_opt,
    greedy_decode,
    load_tokenizers,
    rebatch,
    run_epoch,
    subsequent_mask,
    tokenize,
    tokenize_de,
    tokenize_en,
    yield_tokens,
)
from annotated_transformer.data.grammar import grammar_pairs
from annotated_transformer.model.embeddings import Embeddings
from annotated_transformer.model.feed_forward import PositionwiseFeedForward
from tests.parts import part_of

V = 11
PADDED = torch.tensor([[1, 8, 9, 2], [1, 3, 2, 0]])


def noam(model: nn.Module, warmup: int, factor: float = 1.0) -> NoamOpt:
    """As users of 2018 write it."""
    adam = torch.optim.Adam(model.parameters(), lr=0, betas=(0.9, 0.98), eps=1e-9)
    return NoamOpt(part_of(model, "src_embed.0", Embeddings).d_model, factor, warmup, adam)


def copy_task_2018(model: nn.Module, epochs: int) -> float:
    """The copy task as the edition of 2018 runs it; return the last loss per token."""
    criterion = LabelSmoothing(size=V, padding_idx=0, smoothing=0.0)
    opt, last = noam(model, 400), math.inf
    generator = model.get_submodule("generator")
    for _ in range(epochs):
        model.train()
        run_epoch(data_gen(V, 30, 20), model, SimpleLossCompute(generator, criterion, opt))
        model.eval()
        with torch.no_grad():
            check = SimpleLossCompute(generator, criterion, None)
            last = run_epoch(data_gen(V, 30, 5), model, check)
    assert opt._step == 20 * epochs
    assert opt._rate == opt.rate() == opt.optimizer.param_groups[0]["lr"]
    return float(last)


def test_the_copy_task_of_2018_learns(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = article.make_model(V, V, N=2, d_model=128, d_ff=512)
    before = [p.shape for p in model.parameters()]
    assert copy_task_2018(model, 7) < 1.0  # guessing costs 2.3
    src, mask = Variable(torch.arange(1, V).unsqueeze(0)), Variable(torch.ones(1, 1, 10))
    ys = greedy_decode(model, src, mask, max_len=10, start_symbol=1)
    assert int((ys == src).sum()) >= 4
    assert [p.shape for p in model.parameters()] == before
    assert "Epoch Step: 1 Loss:" in capsys.readouterr().out


def test_the_loss_of_several_devices_gives_the_same_weights() -> None:
    def trained(make: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = article.make_model(V, V, 1, 16, 32, 2, dropout=0.0).double()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        criterion = LabelSmoothing(V, 0, 0.1)
        # SGD: Adam would blow up the rounding of a gradient that is zero
        opt = NoamOpt(16, 1, 2, torch.optim.SGD(model.parameters(), lr=0))
        loss = run_epoch(data_gen(V, 6, 3), model, make(model, criterion, opt))
        return [*model.parameters(), torch.tensor(float(loss), dtype=torch.double)]

    one = trained(lambda m, c, o: SimpleLossCompute(m.generator, c, o))
    several = trained(lambda m, c, o: MultiGPULossCompute(m.generator, c, [0, 1, 2], o, 4))
    for mine, yours in zip(one, several, strict=True):
        torch.testing.assert_close(mine, yours, rtol=0, atol=1e-12)


# The article steps its schedule after each batch, also before the first update of several.
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")
def test_the_loop_of_2022() -> None:
    torch.manual_seed(0)
    model = article.make_model(V, V, N=1, d_model=16, d_ff=32, h=2)
    criterion = LabelSmoothing(V, 0, 0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5, betas=(0.9, 0.98), eps=1e-9)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: article.rate(step, 16, factor=1.0, warmup=40)
    )
    compute, losses = SimpleLossCompute(model.generator, criterion), []
    state = TrainState()
    for _ in range(6):
        model.train()
        batches = data_gen(V, 20, 10)
        _, state = run_epoch(
            batches, model, compute, optimizer, schedule, mode="train", accum_iter=2,
            train_state=state,
        )  # fmt: skip
        model.eval()
        loss, _ = run_epoch(
            data_gen(V, 20, 2), model, compute, DummyOptimizer(), DummyScheduler(), mode="eval"
        )
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    assert (state.step, state.accum_step, state.samples) == (60, 30, 1200)
    assert state.tokens == 60 * 20 * 9


def test_the_loop_of_2022_needs_no_scheduler() -> None:
    torch.manual_seed(0)
    model = article.make_model(V, V, N=1, d_model=16, d_ff=32, h=2)
    compute = SimpleLossCompute(model.generator, LabelSmoothing(V, 0, 0.0))
    optimizer = torch.optim.Adam(model.parameters())
    _, state = run_epoch(data_gen(V, 20, 2), model, compute, optimizer, mode="train")
    assert state.step == 2


def test_the_text_of_2022_becomes_batches_that_a_model_learns_from() -> None:
    """Its code for Multi30k, with a list for torchtext's vocabulary."""
    found = grammar_pairs("train", 96)
    pairs = [(" ".join(pair.german), " ".join(pair.english)) for pair in found]
    spacy_de, spacy_en = load_tokenizers()

    def words_de(text: str) -> list[str]:
        return tokenize(text, spacy_de)

    def words_en(text: str) -> list[str]:
        return tokenize(text, spacy_en)

    special = ["<s>", "</s>", "<blank>", "<unk>"]
    de = special + sorted({word for one in yield_tokens(pairs, words_de, 0) for word in one})
    en = special + sorted({word for one in yield_tokens(pairs, words_en, 1) for word in one})

    def collate(batch: list[tuple[str, str]]) -> tuple[Tensor, Tensor]:
        return collate_batch(
            batch, words_de, words_en, lambda words: [*map(de.index, words)],
            lambda words: [*map(en.index, words)], "cpu", max_padding=20, pad_id=2,
        )  # fmt: skip

    batches = [collate(pairs[i : i + 32]) for i in (0, 32, 64)]
    for side, own in enumerate((de, en)):
        rows = torch.cat([batch[side] for batch in batches]).tolist()
        for pair, row in zip(pairs, rows, strict=True):
            words = [own[i] for i in row]
            end = words.index("</s>")
            assert words[0] == "<s>"
            assert "".join(words[1:end]) == pair[side].replace(" ", "")
            assert words[end + 1 :] == ["<blank>"] * (20 - end - 1)
    torch.manual_seed(0)
    model = article.make_model(len(de), len(en), N=1, d_model=32, d_ff=32, h=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    compute = SimpleLossCompute(model.generator, LabelSmoothing(len(en), 2, 0.1))
    losses = []
    for _ in range(25):
        data = (Batch(src, tgt, 2) for src, tgt in batches)
        losses.append(run_epoch(data, model, compute, optimizer, schedule)[0])
    assert losses[-1] < losses[0] / 2


def test_a_long_sentence_is_cut_as_in_2022() -> None:
    known = {"a": 4, "b": 5}

    def look_up(words: list[str]) -> list[int]:
        return [known[word] for word in words]

    src, tgt = collate_batch([("a b a b", "b")], str.split, str.split, look_up, look_up, "cpu", 4)
    assert src.tolist() == [[0, 4, 5, 4]]
    assert tgt.tolist() == [[0, 5, 1, 2]]


def test_attributes_of_both_editions() -> None:
    batch = Batch(torch.tensor([[1, 5, 0]] * 2), trg=PADDED, pad=0)
    assert batch.trg.tolist() == batch.tgt.tolist() == PADDED[:, :-1].tolist()
    assert batch.trg_y.tolist() == batch.tgt_y.tolist() == PADDED[:, 1:].tolist()
    assert torch.equal(batch.trg_mask, batch.tgt_mask)
    assert batch.ntokens == 5
    batch.trg = batch.trg.cpu()  # where 2018 wrote .cuda()
    assert batch.tgt is batch.trg
    assert Batch(torch.tensor([[5, 2, 2]]), tgt=torch.tensor([[1, 4, 2]]), pad=2).ntokens == 1
    with pytest.raises(TypeError, match="no argument 'target'"):
        Batch(PADDED, target=PADDED)
    attn = MultiHeadedAttention(2, 8)
    x = torch.randn(3, 4, 8)
    attn(x, x, x, subsequent_mask(4))
    assert attn.attn is not None
    assert attn.attn.shape == (3, 2, 4, 4)
    assert len(attn.linears) == 4
    criterion = LabelSmoothing(size=5, padding_idx=0, smoothing=0.4)
    criterion(torch.randn(2, 5).log_softmax(-1), torch.tensor([2, 0]))
    assert criterion.confidence == 0.6
    assert criterion.true_dist is not None
    assert criterion.true_dist[0].tolist() == pytest.approx([0, 0.4 / 3, 0.6, 0.4 / 3, 0.4 / 3])
    assert criterion.true_dist[1].tolist() == [0.0] * 5


def test_a_batch_of_ones_own_with_the_names_of_2018() -> None:
    torch.manual_seed(0)
    model = article.make_model(V, V, N=1, d_model=16, d_ff=16, h=2).eval()
    compute = SimpleLossCompute(model.generator, LabelSmoothing(V, 0, 0.1), None)
    names = "src src_mask trg trg_y trg_mask ntokens".split()
    batch = Batch(PADDED, PADDED)
    own = SimpleNamespace(**{name: getattr(batch, name) for name in names})
    assert run_epoch([own], model, compute) == run_epoch([batch], model, compute)


def test_defaults_are_those_of_the_article() -> None:
    model = article.make_model(7, 9, N=1, d_model=8, d_ff=16, h=2, dropout=0.2)
    assert {p.p for p in model.modules() if isinstance(p, nn.Dropout)} == {0.1, 0.2}
    assert part_of(model, "encoder.layers.0.self_attn", MultiHeadedAttention).dropout.p == 0.1
    assert part_of(model, "encoder.layers.0.feed_forward", PositionwiseFeedForward).dropout.p == 0.2
    assert {m.order for m in model.modules() if hasattr(m, "order")} == {"pre"}
    assert model.get_parameter("src_embed.0.lut.weight") is not model.get_parameter(
        "tgt_embed.0.lut.weight"
    )
    assert model.get_parameter("generator.proj.weight") is not model.get_parameter(
        "tgt_embed.0.lut.weight"
    )
    x = torch.randn(4, 8)
    wanted = (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(LayerNorm(8)(x), wanted)
    opt = get_std_opt(model)
    assert (opt.factor, opt.warmup, opt.model_size) == (2, 4000, 8)


def test_a_layer_of_ones_own_goes_into_the_stacks() -> None:
    class Doubling(nn.Module):
        size = 4

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return 2 * x

    x = torch.randn(2, 3, 4)
    torch.testing.assert_close(article.Encoder(Doubling(), 3)(x, None), LayerNorm(4)(8 * x))


def test_pipeline_functions() -> None:
    first = SimpleNamespace(src=["a"] * 3, trg=["b"])
    assert [batch_size_fn(first, 1, 0), batch_size_fn(first, 2, 3)] == [3, 6]
    assert batch_size_fn(SimpleNamespace(src=["a"], trg=["b"] * 7), 3, 6) == 27
    batch = rebatch(0, SimpleNamespace(src=PADDED.T, trg=PADDED.T))
    assert torch.equal(batch.src, PADDED)
    assert tokenize_de("Das Haus, das ich sah.") == ["Das", "Haus", ",", "das", "ich", "sah", "."]
    assert tokenize_en("It's here.") == ["It", "'s", "here", "."]


def test_average() -> None:
    models = [nn.Linear(2, 2) for _ in range(3)]
    average(models[0], models[1:])
    torch.testing.assert_close(models[0].weight, (models[1].weight + models[2].weight) / 2)


def test_attention_of_weights_with_dropout() -> None:
    q = torch.randn(2, 3, 4)
    x, weights = attention(q, q, q, mask=subsequent_mask(3), dropout=nn.Dropout(0.5))
    assert x.shape == (2, 3, 4)
    assert weights.shape == (2, 3, 3)


def test_names_at_the_top_are_those_of_their_modules() -> None:
    assert annotated_transformer.attention is attention
    assert set(annotated_transformer.__all__) <= set(dir(annotated_transformer))
    for name in annotated_transformer.__all__:
        assert getattr(annotated_transformer, name) is not None
    misspelt = "atention"
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        getattr(annotated_transformer, misspelt)


def test_type_checkers_know_the_names_at_the_top() -> None:
    """Without the stub, a misspelt import would be of any type, and pass."""
    stub = Path(annotated_transformer.__file__).with_name("__init__.pyi")
    imports = [
        part
        for part in ast.parse(stub.read_text(encoding="utf-8")).body
        if isinstance(part, ast.ImportFrom)
    ]
    known = {
        alias.asname: f"{part.module}.{alias.name}" for part in imports for alias in part.names
    }
    assert known.keys() == set(annotated_transformer.__all__) - {"__version__"}
    for name, path in known.items():
        module, _, own = path.rpartition(".")
        assert name == own
        assert getattr(import_module(module), name) is getattr(annotated_transformer, name)


# --- weights of the article's model -----------------------------------------------------------


class Article(nn.Module):
    """The article's model, evaluated from its weights alone: an oracle in plain products."""

    def __init__(self, N: int, d: int, ff: int, h: int, vocab: int) -> None:
        super().__init__()
        self.N, self.d, self.h = N, d, h
        shapes: dict[str, tuple[int, ...]] = {
            "src_embed.0.lut.weight": (vocab, d),
            "tgt_embed.0.lut.weight": (vocab, d),
        }
        shapes |= {"generator.proj.weight": (vocab, d), "generator.proj.bias": (vocab,)}
        for side, kinds in (("encoder", ["self_attn"]), ("decoder", ["self_attn", "src_attn"])):
            norms = [f"{side}.norm"]
            for i in range(N):
                stem = f"{side}.layers.{i}"
                for kind in kinds:
                    for j in range(4):
                        shapes[f"{stem}.{kind}.linears.{j}.weight"] = (d, d)
                        shapes[f"{stem}.{kind}.linears.{j}.bias"] = (d,)
                for w, size in (("w_1", (ff, d)), ("w_2", (d, ff))):
                    shapes[f"{stem}.feed_forward.{w}.weight"] = size
                    shapes[f"{stem}.feed_forward.{w}.bias"] = size[:1]
                norms += [f"{stem}.sublayer.{j}.norm" for j in range(len(kinds) + 1)]
            shapes |= {f"{norm}.{key}": (d,) for norm in norms for key in ("a_2", "b_2")}
        scale = {True: d**-0.5, False: 1.0}
        self.w: dict[str, Tensor] = {
            k: torch.randn(s) * scale[len(s) == 2] for k, s in shapes.items()
        }
        self.w["src_embed.1.pe"] = torch.zeros(1, 5000, d)

    def norm(self, x: Tensor, name: str) -> Tensor:
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return self.w[f"{name}.a_2"] * (x - mean) / (std + 1e-6) + self.w[f"{name}.b_2"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w[f"{name}.bias"]

    def attend(self, q: Tensor, m: Tensor, mask: Tensor, name: str) -> Tensor:
        def heads(x: Tensor, j: int) -> Tensor:
            x = self.linear(x, f"{name}.linears.{j}")
            return x.view(*x.shape[:2], self.h, -1).transpose(1, 2)

        q, k, v = heads(q, 0), heads(m, 1), heads(m, 2)
        scores = q @ k.transpose(2, 3) / math.sqrt(self.d // self.h)
        x = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9).softmax(-1) @ v
        return self.linear(x.transpose(1, 2).flatten(2), f"{name}.linears.3")

    def embed(self, tokens: Tensor, side: str) -> Tensor:
        d, length = self.d, tokens.size(1)
        pe = torch.zeros(length, d)
        for pos in range(length):
            for i in range(0, d, 2):
                angle = pos * math.exp(-math.log(10000.0) * i / d)
                pe[pos, i], pe[pos, i + 1] = math.sin(angle), math.cos(angle)
        return self.w[f"{side}_embed.0.lut.weight"][tokens] * math.sqrt(d) + pe

    def stack(
        self,
        x: Tensor,
        side: str,
        mask: Tensor,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        for i in range(self.N):
            stem = f"{side}.layers.{i}"
            y = self.norm(x, f"{stem}.sublayer.0.norm")
            x = x + self.attend(y, y, mask, f"{stem}.self_attn")
            last = 1
            if memory is not None and memory_mask is not None:
                y = self.norm(x, f"{stem}.sublayer.1.norm")
                x = x + self.attend(y, memory, memory_mask, f"{stem}.src_attn")
                last = 2
            y = self.norm(x, f"{stem}.sublayer.{last}.norm")
            y = self.linear(y, f"{stem}.feed_forward.w_1").relu()
            x = x + self.linear(y, f"{stem}.feed_forward.w_2")
        return self.norm(x, f"{side}.norm")

    def forward(self, src: Tensor, tgt: Tensor, src_mask: Tensor, tgt_mask: Tensor) -> Tensor:
        memory = self.stack(self.embed(src, "src"), "encoder", src_mask)
        x = self.stack(self.embed(tgt, "tgt"), "decoder", tgt_mask, memory, src_mask)
        return self.linear(x, "generator.proj").log_softmax(-1)


def test_state_dicts_are_those_of_the_article() -> None:
    theirs = Article(2, 16, 32, 4, 13).w
    theirs["tgt_embed.1.pe"] = theirs["src_embed.1.pe"] = torch.randn(1, 5000, 16)
    model = article.make_model(13, 13, 2, 16, 32, 4)
    model.load_state_dict(theirs)  # no name is missing, none too many
    found = model.state_dict()
    assert found.keys() == theirs.keys()
    assert all(torch.equal(found[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("broken", [False, True])
def test_weights_of_the_article_load(broken: bool) -> None:
    torch.manual_seed(0)
    article = Article(2, 16, 32, 4, 13)
    state = article_state(article.w)
    if broken:  # without the folding of the deviation the outputs differ visibly
        state |= {k.replace("a_2", "weight"): v for k, v in article.w.items() if "a_2" in k}
    model = make_model(13, 13, 2, 16, 32, 4, norm="pre", tie="none").eval()
    model.load_state_dict(state)
    batch = Batch(torch.tensor([[4, 5, 6, 2], [7, 2, 0, 0]]), torch.tensor([[1, 8, 9, 2]] * 2))
    inputs = batch.src, batch.tgt, batch.src_mask, batch.tgt_mask
    ours = model.generator(model(*inputs))
    close = torch.allclose(ours, article(*inputs), rtol=0, atol=1e-4)
    assert close is not broken
