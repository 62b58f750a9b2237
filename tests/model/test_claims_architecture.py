"""The checks of the chapter on the architecture notice broken parts; its examples are right."""

import pytest
import torch
from torch import nn

from annotated_transformer.model.architecture import SublayerConnection
from tests.claims import assert_claim_can_fail, run_claim

CHAPTER = "model/architecture"
POST = "self.norm(x + self.dropout(sublayer(x)))"
PRE = "x + self.dropout(sublayer(self.norm(x)))"
OWN = "self.self_attn(x, x, x, tgt_mask)"
CROSS = "self.src_attn(x, memory, memory, src_mask)"
EPS = "(variance + self.eps).sqrt()"


@pytest.mark.parametrize(
    ("claim", "old", "new"),
    [
        ("3.1b", POST, "self.norm(self.dropout(sublayer(x)))"),
        ("3.1b", POST, "x + self.norm(sublayer(x))"),
        ("3.1b", POST, "self.norm(x.detach() + sublayer(x))"),
        ("3.1b", PRE, "self.norm(x) + self.dropout(sublayer(self.norm(x)))"),
        ("3.1b", 'dropout: float, *, norm: Norm = "post"', 'dropout: float, *, norm: Norm = "pre"'),
        ("3.1b", EPS, "(variance + 1e-2).sqrt()"),
        ("3.1b", EPS, "(variance.sqrt() + self.eps)"),
        ("3.1b", "centred.pow(2).mean(-1, keepdim=True)", "x.var(-1, keepdim=True)"),
        ("3.1b", "self.weight * centred /", "self.weight.abs() * centred /"),
        ("3.1b", OWN, OWN.replace("tgt_mask", "src_mask[:, :, :5]")),
        ("3.1b", CROSS, CROSS.replace("src_mask", "src_mask | True")),
        ("3.1b", CROSS, CROSS.replace("memory, memory", "memory, memory.detach()")),
        (  # a sub-layer without its residual connection
            "3.1b",
            "self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))",
            "self.sublayer[0].norm(self.self_attn(x, x, x, mask))",
        ),
        ("5.4a", POST, "self.norm(self.dropout(x + sublayer(x)))"),
        ("5.4a", POST, "self.dropout(self.norm(x + sublayer(x)))"),
        ("5.4a", PRE, "x + sublayer(self.dropout(self.norm(x)))"),
        ("5.4a", "self.dropout = nn.Dropout(dropout)", "self.dropout = nn.Dropout(2 * dropout)"),
        ("5.4a", "self.dropout = nn.Dropout(dropout)", "self.dropout = nn.Identity()"),
        ("5.4a", POST, "self.norm(x + F.dropout(sublayer(x), self.dropout.p))"),
        (  # not scaled
            "5.4a",
            "self.dropout = nn.Dropout(dropout)",
            "self.dropout = nn.Sequential(nn.Dropout(dropout), nn.Hardtanh())",
        ),
    ],
)
def test_broken_architecture_is_noticed(claim, old, new):
    assert_claim_can_fail(CHAPTER, claim, old, new)


@pytest.fixture(scope="module")
def norms():
    return run_claim(CHAPTER, "3.1b", whole=True)  # the cells before it, batch normalization too


def test_batch_norm_with_a_mask_is_pytorchs_on_packed_tokens(norms):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 6, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    keep = torch.arange(6) < torch.tensor([[6], [2], [1], [4]])
    layer = nn.BatchNorm1d(3, affine=False).double()
    mine, theirs = norms["batch_norm"](x, keep)[keep], layer(x[keep])
    torch.testing.assert_close(mine, theirs)
    slopes = [torch.autograd.grad(y.sin().sum(), x)[0] for y in (mine, theirs)]
    torch.testing.assert_close(*slopes)
    assert not torch.allclose(norms["batch_norm"](x, torch.ones_like(keep))[keep], theirs)


def test_padding_shifts_words_by_all_tokens_only(norms):
    ways = norms["ways"]
    for extra in (1, 4, 40):
        share, moved = norms["mean_of_real"](ways["BatchNorm"], extra)
        assert share == extra / (10 + extra)
        # by hand: of mean 1 and variance 1, some tokens are set to zero
        expected = share / ((1 - share) + share * (1 - share)) ** 0.5
        torch.testing.assert_close(moved.mean().item(), expected, rtol=0.05, atol=0)
        for name in ("LayerNorm", "BatchNorm, real tokens"):
            _, still = norms["mean_of_real"](ways[name], extra)
            torch.testing.assert_close(still, norms["mean_of_real"](ways[name], 0)[1])


def test_neighbours_move_batch_norm_in_proportion_to_the_root(norms):
    unrest, ways = norms["unrest"], norms["ways"]
    assert unrest(ways["LayerNorm"], 4) < 1e-12
    for name in ("BatchNorm", "BatchNorm, real tokens"):
        small, large = (unrest(ways[name], count) for count in (4, 64))
        assert 2.5 < small / large < 7  # the root of 16 is 4


@pytest.mark.parametrize("seed", range(5))
def test_depth_does_to_gradients_what_the_chapter_says(norms, seed):
    def framed(order):
        def apply(x, sublayer):
            for weight in (weight for weight in sublayer.parameters() if weight.dim() > 1):
                nn.init.xavier_uniform_(weight)
            return SublayerConnection(x.size(-1), 0.0, norm=order)(x, sublayer)

        return apply

    below = norms["gradient_below"]
    assert below(16, lambda x, f: f(x), seed=seed) < 1e-6
    assert 0.5 < below(16, lambda x, f: x + f(x), seed=seed) < 10
    assert 0.3 < below(32, framed("post"), seed=5 + seed) < 2.5  # other starts than the chapter's
    assert below(32, framed("pre"), seed=5 + seed) > 2 * below(1, framed("pre"), seed=5 + seed)
