"""The checks of the beam search chapter notice a broken search."""

import pytest

from tests.claims import assert_claim_can_fail


@pytest.mark.parametrize(
    ("claim", "old", "new"),
    [
        # the steps do not hear which hypothesis goes on
        ("6.1d", "        steps.follow(parents)\n", ""),
        # no penalty
        ("6.1d", "return math.pow((5 + length) / 6, alpha)", "return 1.0"),
        # a finished hypothesis gives its place away, and the search goes on
        ("6.1d", "return (bound > self.beaten) & (", "return (bound > -torch.inf) & ("),
        # the limit is that of the longest sentence, and too short
        (
            "6.1d",
            "limits=torch.tensor(limits, device=device)",
            "limits=torch.full((len(limits),), max(limits) - 1, device=device)",
        ),
        # long outputs are cut before the paper's limit
        ("6.1d", "(model, sources, max_len, extra)", "(model, sources, 256, extra)"),
        ("6.3b", "(model, sources, max_len, extra)", "(model, sources, 256, extra)"),
        (
            "6.3b",
            "return math.pow((5 + length) / 6, alpha)",
            "return math.pow((5 + length) / 6, 2 * alpha)",
        ),
        # the worst continuations are taken
        ("6.3b", "best, places = stable_topk(cand", "best, places = stable_topk(-cand"),
        # the scores are not sorted
        ("6.3b", "found.sort(key=lambda hypothesis: -hypothesis.score)", "found"),
    ],
)
def test_broken_search_is_noticed(claim: str, old: str, new: str) -> None:
    assert_claim_can_fail("translation/beam_search", claim, old, new)
