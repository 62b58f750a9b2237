"""The checks of the decoding chapter notice broken decoding."""

import pytest

from tests.claims import assert_claim_can_fail


@pytest.mark.parametrize(
    ("claim", "old", "new"),
    [
        # tokens of the future come first
        ("3.1c", "tokens[:, i : i + 1], None", "tokens[:, tokens.size(1) - 1 - i :][:, :1], None"),
        # the input stands still
        ("3.a", "most_probable_next(steps, token)", "most_probable_next(steps, ys[:, 0])"),
        # nothing is remembered
        (
            "3.a",
            "most_probable_next(steps, token)",
            "most_probable_next(start_steps(model, src, src_mask, 1), token)",
        ),
    ],
)
def test_broken_decoding_is_noticed(claim, old, new):
    assert_claim_can_fail("translation/decoding", claim, old, new)
