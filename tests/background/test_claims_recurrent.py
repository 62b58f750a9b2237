"""The checks of the chapter on recurrence notice what would make them untrue."""

import pytest

from tests.claims import assert_claim_can_fail

CHAPTER = "background/recurrent"
LOOK = "return self.to_output(F.scaled_dot_product_attention(q, k, v).squeeze(1))"
ONE_BY_ONE = (
    "return list(itertools.accumulate("
    "range(x.size(1)), lambda y, _: self.to_output(y), initial=x))[-1]"
)
STEPS = "for product, here in reversed(steps) if backward else steps:"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("torch.tanh(product + self.from_state(h)),)", "torch.tanh(product + h),)"),
        ("i, f, g, o = (product + self.from_state(h))", "i, f, g, o = (product)"),
        (
            "gru_step(product, self.from_state(h), h)",
            "gru_step(product, self.from_state(h.detach()), h)",
        ),
        ("state = new\n", "state = new if product is products[0] else state\n"),
        (STEPS, "for product, here in steps[:1]:"),
        (LOOK, ONE_BY_ONE),
        ('"AddmmBackward0", ', ""),
        ('"BmmBackward0", ', ""),
    ],
)
def test_broken_chain_is_noticed(old: str, new: str) -> None:
    assert_claim_can_fail(CHAPTER, "1.a-P", old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (STEPS, "for product, here in steps[:1]:"),  # time does not grow
        (LOOK, ONE_BY_ONE),  # self-attention made sequential
    ],
)
def test_broken_times_are_noticed(old: str, new: str) -> None:
    assert_claim_can_fail(CHAPTER, "1.a-M", old, new)
