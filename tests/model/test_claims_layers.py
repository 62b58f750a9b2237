"""The checks of the layers chapter notice broken parts, and its examples are right."""

import pytest
import torch
from torch import nn

from annotated_transformer.model.layers import SublayerConnection
from tests.claims import assert_claim_can_fail, run_claim

CHAPTER = "model/layers"


@pytest.mark.parametrize(
    ("claim", "old", "new"),
    [
        ("3.3a", "F.relu_(self.w_1(x))", "self.w_1(x)"),
        ("3.3a", "F.relu_(self.w_1(x))", "F.gelu(self.w_1(x))"),
        ("3.3a", "F.relu_(self.w_1(x))", "F.relu_(self.w_1(x).cumsum(-2))"),
        ("3.3a", "copy.deepcopy(module) for", "module for"),
        ("3.3b", "second(first(x.mT).relu()).mT", "second(first(x.mT)).mT"),
        ("3.3b", "F.relu_(self.w_1(x))", "F.relu_(self.w_1(x.roll(1, -2)))"),
        ("3.3b", "F.relu_(self.w_1(x))", "F.relu_(self.w_1(x).detach() * 2 - self.w_1(x))"),
        (
            "3.1b",
            "self.norm(x + self.dropout(sublayer(x)))",
            "self.norm(self.dropout(sublayer(x)))",
        ),
        ("3.1b", "self.norm(x + self.dropout(sublayer(x)))", "x + self.norm(sublayer(x))"),
        ("3.1b", "self.norm(x + self.dropout(sublayer(x)))", "self.norm(x.detach() + sublayer(x))"),
        ("3.1b", 'norm: Norm = "post"', 'norm: Norm = "pre"'),
        ("3.1b", "self.norm = nn.LayerNorm(size)", "self.norm = nn.LayerNorm(size, eps=1e-2)"),
        (
            "5.4a",
            "self.norm(x + self.dropout(sublayer(x)))",
            "self.norm(self.dropout(x + sublayer(x)))",
        ),
        (
            "5.4a",
            "self.norm(x + self.dropout(sublayer(x)))",
            "self.dropout(self.norm(x + sublayer(x)))",
        ),
        (
            "5.4a",
            "x + self.dropout(sublayer(self.norm(x)))",
            "x + sublayer(self.dropout(self.norm(x)))",
        ),
        ("5.4a", "bits >= round(p * LEVELS)", "bits >= round(2 * p * LEVELS)"),
        ("5.4a", "if not self.training or self.p == 0", "if self.p == 0"),
        ("5.4a", ".mul_(1 / kept)", ".mul_(1.0)"),
    ],
)
def test_broken_layers_are_noticed(claim, old, new):
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
