"""The checks of the chapter on the Transformer fail when the code is broken."""

import pytest

from tests.claims import assert_claim_can_fail

CHAPTER = "model/transformer"
OWN = "self.self_attn(x, x, x, tgt_mask)"
CROSS = "attend(x, memory, memory, src_mask)"
THREE = "clones(SublayerConnection(size, dropout, norm=norm), 3 if src_attn else 2)"
BROKEN = [
    ("3.1a", "N: int = 6  #: Layers", "N: int = 5  #: Layers"),
    ("3.4a", 'source.register_parameter("weight", shared)', "pass"),
    (
        "3.4a",
        'source.register_parameter("weight", shared)',
        'source.get_parameter("weight").data = shared',
    ),
    ("5.4a", "positions(c.d_model, c.dropout, c.max_len)", "positions(c.d_model, 0.0, c.max_len)"),
    ("6.2a", "c.N * (3 * attention", "c.N * (2 * attention"),
    ("6.2a", "vocab * d + vocab + positions", "2 * vocab * d + vocab + positions"),
]
BROKEN_MODULES = [  # what stands in other chapters
    ("3.1a", "architecture", THREE, THREE.replace("3", "2")),
    ("3.1a", "architecture", "self.norm = LayerNorm(size)", "self.norm = LayerNorm(1)"),
    ("3.1b", "architecture", CROSS, CROSS.replace("src_mask", "None")),
    (  # a sub-layer without its residual connection
        "3.1b",
        "architecture",
        "self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))",
        "self.sublayer[0].norm(self.self_attn(x, x, x, mask))",
    ),
    ("3.1b", "attention", "/ math.sqrt(query.size(-1))", "/ query.size(-1)"),
    ("3.1c", "architecture", OWN, OWN.replace("tgt_mask", "None")),
    ("3.1c", "architecture", CROSS, CROSS.replace("src_mask", "None")),
    ("3.1c", "attention", "scores.masked_fill(mask == 0, -math.inf)", "scores - 3 * (mask == 0)"),
    ("3.a", "architecture", OWN, OWN.replace("tgt_mask", "None")),
    ("5.4a", "architecture", THREE, THREE.replace("dropout", "0.0")),
    (  # dropout after the addition
        "5.4a",
        "architecture",
        "y = self.norm(x + self.dropout(sublayer(x)))",
        "y = self.dropout(self.norm(x + sublayer(x)))",
    ),
]


@pytest.mark.parametrize(("claim", "old", "new"), BROKEN)
def test_broken(claim: str, old: str, new: str) -> None:
    assert_claim_can_fail(CHAPTER, claim, old, new)


@pytest.mark.parametrize(("claim", "module", "old", "new"), BROKEN_MODULES)
def test_broken_modules(claim: str, module: str, old: str, new: str) -> None:
    assert_claim_can_fail(CHAPTER, claim, old, new, module=f"model/{module}")
