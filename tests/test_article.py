"""Code written for the well-known article runs with changed imports; its weights load."""

import math

import pytest
import torch
from torch import nn

from annotated_transformer.model.attention import subsequent_mask
from annotated_transformer.model.transformer import article_state, make_model
from annotated_transformer.training.batches import Batch
from annotated_transformer.training.copy_task import data_gen
from annotated_transformer.training.optimizer import NoamOpt
from annotated_transformer.training.regularization import LabelSmoothing
from annotated_transformer.translation.decoding import greedy_decode


class SimpleLossCompute:
    """As a user of the article has it."""

    def __init__(self, generator, criterion, opt=None):
        self.generator, self.criterion, self.opt = generator, criterion, opt

    def __call__(self, x, y, norm):
        x = self.generator(x)
        loss = self.criterion(x.reshape(-1, x.size(-1)), y.reshape(-1)) / norm
        if self.opt is not None:
            loss.backward()
            self.opt.step()
            self.opt.optimizer.zero_grad()
        return loss.item() * norm


def run_epoch(batches, model, loss_compute):
    total, tokens = 0.0, 0
    for batch in batches:
        out = model.forward(batch.src, batch.tgt, batch.src_mask, batch.tgt_mask)
        total += loss_compute(out, batch.tgt_y, batch.ntokens)
        tokens += batch.ntokens
    return total / tokens


def test_the_copy_task_as_the_article_writes_it():
    torch.manual_seed(0)
    V = 11
    criterion = LabelSmoothing(size=V, padding_idx=0, smoothing=0.0)
    model = make_model(V, V, N=2, d_model=64, d_ff=128, h=4)
    adam = torch.optim.Adam(model.parameters(), lr=0, betas=(0.9, 0.98), eps=1e-9)
    opt = NoamOpt(model.src_embed[0].d_model, 1, 400, adam)
    losses = []
    for _ in range(2):
        model.train()
        train = SimpleLossCompute(model.generator, criterion, opt)
        run_epoch(data_gen(V, 30, 20), model, train)
        model.eval()
        with torch.no_grad():
            check = SimpleLossCompute(model.generator, criterion)
            losses.append(run_epoch(data_gen(V, 30, 5), model, check))
    assert losses[1] < losses[0]
    src = torch.arange(1, 11).unsqueeze(0)
    words = greedy_decode(model, src, torch.ones(1, 1, 10), max_len=10, start_symbol=1)
    assert words.shape[0] == 1
    assert words[0, 0] == 1


def test_batch():
    batch = Batch(torch.tensor([[1, 5, 0]]), torch.tensor([[1, 5, 6, 0]]), 0)
    assert batch.tgt.tolist() == [[1, 5, 6]]
    assert batch.tgt_y.tolist() == [[5, 6, 0]]
    assert batch.src_mask.tolist() == [[[True, True, False]]]
    assert torch.equal(batch.tgt_mask, subsequent_mask(3))
    assert batch.ntokens == 2


class Article(nn.Module):
    """The article's model, evaluated from its weights alone: an oracle in plain products."""

    def __init__(self, N, d, ff, h, vocab):
        super().__init__()
        self.N, self.d, self.h = N, d, h
        shapes = {"src_embed.0.lut.weight": (vocab, d), "tgt_embed.0.lut.weight": (vocab, d)}
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
        self.w = {k: torch.randn(s) * scale[len(s) == 2] for k, s in shapes.items()}
        self.w["src_embed.1.pe"] = torch.zeros(1, 5000, d)

    def norm(self, x, name):
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return self.w[f"{name}.a_2"] * (x - mean) / (std + 1e-6) + self.w[f"{name}.b_2"]

    def linear(self, x, name):
        return x @ self.w[f"{name}.weight"].T + self.w[f"{name}.bias"]

    def attend(self, q, m, mask, name):
        def heads(x, j):
            x = self.linear(x, f"{name}.linears.{j}")
            return x.view(*x.shape[:2], self.h, -1).transpose(1, 2)

        q, k, v = heads(q, 0), heads(m, 1), heads(m, 2)
        scores = q @ k.transpose(2, 3) / math.sqrt(self.d // self.h)
        x = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9).softmax(-1) @ v
        return self.linear(x.transpose(1, 2).flatten(2), f"{name}.linears.3")

    def embed(self, tokens, side):
        d, length = self.d, tokens.size(1)
        pe = torch.zeros(length, d)
        for pos in range(length):
            for i in range(0, d, 2):
                angle = pos * math.exp(-math.log(10000.0) * i / d)
                pe[pos, i], pe[pos, i + 1] = math.sin(angle), math.cos(angle)
        return self.w[f"{side}_embed.0.lut.weight"][tokens] * math.sqrt(d) + pe

    def stack(self, x, side, mask, memory=None, memory_mask=None):
        for i in range(self.N):
            stem = f"{side}.layers.{i}"
            y = self.norm(x, f"{stem}.sublayer.0.norm")
            x = x + self.attend(y, y, mask, f"{stem}.self_attn")
            last = 1
            if memory is not None:
                y = self.norm(x, f"{stem}.sublayer.1.norm")
                x = x + self.attend(y, memory, memory_mask, f"{stem}.src_attn")
                last = 2
            y = self.norm(x, f"{stem}.sublayer.{last}.norm")
            y = self.linear(y, f"{stem}.feed_forward.w_1").relu()
            x = x + self.linear(y, f"{stem}.feed_forward.w_2")
        return self.norm(x, f"{side}.norm")

    def forward(self, src, tgt, src_mask, tgt_mask):
        memory = self.stack(self.embed(src, "src"), "encoder", src_mask)
        x = self.stack(self.embed(tgt, "tgt"), "decoder", tgt_mask, memory, src_mask)
        return self.linear(x, "generator.proj").log_softmax(-1)


@pytest.mark.parametrize("broken", [False, True])
def test_weights_of_the_article_load(broken):
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
