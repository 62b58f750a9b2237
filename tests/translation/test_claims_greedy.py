"""The checks of the chapter on greedy decoding notice broken decoding."""

import pytest

from tests.claims import assert_claim_can_fail


@pytest.mark.parametrize(
    ("claim", "old", "new"),
    [
        # tokens of the future come first
        ("3.1c", "steps(tokens[:, i]) for i", "steps(tokens[:, -1 - i]) for i"),
        # earlier positions of the prefix see later ones
        ("3.1c", "past = subsequent_mask(self.", "past = 0 * subsequent_mask(self."),
        # the input stands still
        (
            "3.a",
            "token = steps.most_probable(token)",
            "token = steps.most_probable(0 * token + BOS)",
        ),
        # nothing is remembered
        ("3.a", "torch.cat([self.prefix, tokens.unsqueeze(1)], 1)", "tokens.unsqueeze(1)"),
        # the plain loop looks at the first position
        (
            "3.a",
            "model.generator(out[:, -1]).argmax(dim=-1, keepdim",
            "model.generator(out[:, 0]).argmax(dim=-1, keepdim",
        ),
        # what follows the end is kept
        ("3.a", "& (token != special.eos)", ""),
    ],
)
def test_broken_decoding_is_noticed(claim: str, old: str, new: str) -> None:
    assert_claim_can_fail("translation/greedy", claim, old, new)
