"""The checks of the chapter on the architecture notice broken parts; its examples are right."""

from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.chapters import definitions
from tests.claims import assert_claim_can_fail, run_claim

CHAPTER = "model/architecture"
POST = "self.norm(x + self.dropout(sublayer(x)))"
PRE = "x + self.dropout(sublayer(self.norm(x)))"
OWN = "self.self_attn(x, x, x, tgt_mask)"
CROSS = "attend(x, memory, memory, src_mask)"
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
def test_broken_architecture_is_noticed(claim: str, old: str, new: str) -> None:
    assert_claim_can_fail(CHAPTER, claim, old, new)


@pytest.fixture(scope="module")
def chapter() -> dict[str, Any]:
    return run_claim(CHAPTER, "3.1b", whole=True)  # the cells before it


def test_batch_norm_with_a_mask_is_pytorchs_on_packed_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 6, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    keep = torch.arange(6) < torch.tensor([[6], [2], [1], [4]])
    layer = nn.BatchNorm1d(3, affine=False).double()
    masked = definitions(CHAPTER)["masked_batch_norm"]  # of an exercise
    mine, theirs = masked(x, keep)[keep], layer(x[keep])
    torch.testing.assert_close(mine, theirs)
    slopes = [torch.autograd.grad(y.sin().sum(), x)[0] for y in (mine, theirs)]
    torch.testing.assert_close(*slopes)
    assert not torch.allclose(masked(x, torch.ones_like(keep))[keep], theirs)


@pytest.mark.parametrize("seed", range(5, 10))  # other starts than the chapter's
@pytest.mark.parametrize("glorot", [True, False])
def test_depth_does_to_gradients_what_the_chapter_says(
    chapter: dict[str, Any], seed: int, glorot: bool
) -> None:
    below = chapter["gradient_below"]
    assert below(16, False, glorot, seed) < 1e-3
    assert 0.5 < below(16, True, glorot, seed) < 20
