"""The checks of the complexity chapter notice layers, counters and stacks that are broken."""

import pytest

from tests.claims import assert_claim_can_fail

CHAPTER = "model/complexity"
RATES = "(base**i for i in range(layers))"
SHORT, LONG = "reach, n, b = r // 2,", "reach, n, b = r // 2 + 1,"
BASE = "k if causal else k // 2 + 1"


@pytest.mark.parametrize(
    ("claim", "old", "new"),
    [
        # ConvS2S with a wider kernel, ByteNet without dilation, a Transformer that sees neighbours
        ("2.a", "kernel_size=3, padding=1", "kernel_size=5, padding=2"),
        ("2.a", "most: int = 2**30", "most: int = 1"),
        (
            "2.a",
            "self.layer(x, None)",
            "self.layer(x, torch.ones(1, x.size(1), x.size(1)).triu(-1))",
        ),
        # the counter forgets the recurrence, written without a product of matrices
        ("4.a-P", "self.U(h))", "(self.U.weight * h.unsqueeze(1)).sum(-1))"),
        ("4.a-P", '"bmm": "pairs"', '"bmm": "projections"'),
        ("4.a-P", SHORT, LONG),
        ("4.f", "nn.Conv1d(d, d, k, dilation=dilation)", "nn.Conv1d(d, d, reach + 1)"),
        ("4.a-P", "RestrictedSelfAttention(d, r, block=1)", "RestrictedSelfAttention(d, r)"),
        ("4.a-P", "RestrictedSelfAttention(d, r, block=1)", "SelfAttention(d)"),
        # a recurrence that hands nothing on, and products that are overlooked
        ("4.b", "self.U(h))", "self.U(h.detach()))"),
        ("4.b", '"Bmm": 1, ', ""),
        ("4.c", RATES, "(1 for i in range(layers))"),
        ("4.c", "before[:, -1].detach()", "before[:, -1]"),
        ("4.c", SHORT, LONG),
        ("4.d-P", "self.W(x).unbind", "x.unbind"),
        ("4.d-P", '"GRU": nn.GRUCell', '"GRU": nn.RNNCell'),
        ("4.d-M", "return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)", "return q"),
        # windows that look one too far, past the end, or at everything
        ("4.e", "abs() <= reach) &", "abs() <= reach + 1) &"),
        ("4.e", " & (place < n)", ""),
        # padding that is forgotten, or marked one place too early
        ("4.e", "seen = seen & F.pad", "_ = seen & F.pad"),
        ("4.e", "ends = (reach, reach + lacking)", "ends = (reach + 1, reach + lacking)"),
        ("4.e", SHORT, LONG),
        ("4.e", "RestrictedSelfAttention, r=r, block", "RestrictedSelfAttention, r=r + 2, block"),
        ("4.f", RATES, "(1 for i in range(layers))"),
        ("4.f", BASE, "k"),  # gaps at the edges
        ("4.f", "(reach, 0) if causal", "(reach // 2, reach - reach // 2) if causal"),
        ("4.i", "self.conv = nn.Conv1d(d, d, k,", "self.conv = nn.Conv1d(d, d, k, groups=d,"),
        ("4.i", '"GRU": nn.GRUCell', '"GRU": nn.RNNCell'),
        ("4.g", ", padding=k // 2, groups=d)", ", padding=k // 2)"),
        ("4.g", "self.across = nn.Linear(d, d)", "self.across = nn.Identity()"),
        ("4.g", "PositionwiseFeedForward(d, 4 * d, 0.0)", "PositionwiseFeedForward(d, 64, 0.0)"),
        # products that are left out of a whole model's count
        ("6.1a", "sum(targets) * d * vocab) * 2 * 3", "sum(targets) * d * vocab) * 2 * 2"),
        ("6.1a", " + pairs * heads)", ")"),
        ("6.1a", "2 * d * heads + d * heads +", "2 * d * heads +"),
        ("6.1a", "(sum(sources) + sum(targets)) * token", "2 * sum(targets) * token"),
    ],
)
def test_broken_layers_are_noticed(claim: str, old: str, new: str) -> None:
    assert_claim_can_fail(CHAPTER, claim, old, new)
