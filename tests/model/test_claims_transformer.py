"""The checks of the chapter on the Transformer fail when the code is broken."""

import pytest

from tests.claims import assert_claim_can_fail

OWN = "self.self_attn(x, x, x, tgt_mask, target)"
CROSS = "self.src_attn(x, memory, memory, src_mask, source)"
THREE = "clones(SublayerConnection(size, dropout, norm=norm), 3)"
BROKEN = [
    ("3.1a", "N: int = 6\n    d_model", "N: int = 5\n    d_model"),
    ("3.1a", THREE, THREE.replace("3", "2")),
    ("3.1b", CROSS, CROSS.replace("src_mask", "None")),
    (  # a sub-layer without its residual connection
        "3.1b",
        "self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))",
        "self.sublayer[0].norm(self.self_attn(x, x, x, mask))",
    ),
    ("3.1c", OWN, OWN.replace("tgt_mask", "None")),
    ("3.1c", CROSS, CROSS.replace("src_mask", "None")),
    ("3.1c", "PackedMask(see_past, target", "PackedMask(tgt_keep.unsqueeze(1), target"),
    ("3.1d", "dropout=0.0, norm=norm", 'dropout=0.0, norm="post"'),
    ("3.1d", "model(words, begun,", "model(begun, begun,"),  # the source is not shown
    ("3.4a", "source.lut.weight = target.lut.weight", "pass"),
    ("3.4a", "source.lut.weight = target.lut.weight", "source.lut.weight.data = target.lut.weight"),
    ("5.4a", THREE, THREE.replace("dropout", "0.0")),
    ("5.4a", "position(c.d_model, c.dropout, c.max_len)", "position(c.d_model, 0.0, c.max_len)"),
    ("3.a", OWN, OWN.replace("tgt_mask", "None")),
    (  # dropout after the addition
        "5.4a",
        "x = self.sublayer[1](x, self.feed_forward)\n",
        "x = self.sublayer[1].dropout(self.sublayer[1].norm(x + self.feed_forward(x)))\n",
    ),
    ("6.2a", "c.N * (3 * attention", "c.N * (2 * attention"),
    ("6.2a", "vocab * d + vocab + positions", "2 * vocab * d + vocab + positions"),
    ("3.a", "torch.arange(cache.length, cache.length + tgt.size(1)", "torch.arange(tgt.size(1)"),
]


@pytest.mark.parametrize(("claim", "old", "new"), BROKEN)
def test_broken(claim, old, new):
    assert_claim_can_fail("model/transformer", claim, old, new)
