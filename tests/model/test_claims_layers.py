"""The checks of the layers chapter notice broken parts."""

import pytest

from tests.claims import assert_claim_can_fail

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
