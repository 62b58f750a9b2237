"""The checks of the chapter on the feed-forward network notice broken parts."""

import pytest

from tests.claims import assert_claim_can_fail

CHAPTER = "model/feed_forward"
HIDDEN = "self.w_1(x).relu()"


@pytest.mark.parametrize(
    ("claim", "old", "new"),
    [
        ("3.3a", HIDDEN, "self.w_1(x)"),
        ("3.3a", HIDDEN, "nn.functional.gelu(self.w_1(x))"),
        ("3.3a", HIDDEN, "self.w_1(x).cumsum(-2).relu()"),
        ("3.3b", "second(first(x.mT).relu()).mT", "second(first(x.mT)).mT"),
        ("3.3b", HIDDEN, "self.w_1(x.roll(1, -2)).relu()"),
        ("3.3b", HIDDEN, "(self.w_1(x).detach() * 2 - self.w_1(x)).relu()"),
    ],
)
def test_a_broken_network_is_noticed(claim: str, old: str, new: str) -> None:
    assert_claim_can_fail(CHAPTER, claim, old, new)


def test_layers_that_share_their_weights_are_noticed() -> None:
    old, new = "copy.deepcopy(module) for", "module for"
    assert_claim_can_fail(CHAPTER, "3.3a", old, new, module="model/architecture")
