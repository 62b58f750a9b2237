"""Options that cannot work are refused where they are given, below ``make_model`` too."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from annotated_transformer.fast.loss import fast_batch_loss
from annotated_transformer.model.architecture import EncoderLayer, SublayerConnection
from annotated_transformer.model.feed_forward import PositionwiseFeedForward
from annotated_transformer.model.multi_head import MultiHeadedAttention
from annotated_transformer.model.transformer import make_model, tie_weights
from annotated_transformer.training.batches import make_batch
from annotated_transformer.training.loop import batch_loss
from annotated_transformer.training.regularization import LabelSmoothing, smoothed_target

call: Any = partial  # a wrong type is what is tried
MODEL = make_model(9, 9, N=1, d_model=8, d_ff=8, h=2)
BATCH = make_batch([[5, 6]], [[7]])
PARTS = (MultiHeadedAttention(2, 8), PositionwiseFeedForward(8, 8))
NORM = "norm='Pre': choose among post, pre"
VARIANT = "variant='Paper': choose among paper, others, article"
CASES: dict[str, tuple[Callable[..., Any], str]] = {
    "tie": (call(tie_weights, MODEL, True), "tie=True: choose among all, target, none"),
    "tie name": (call(tie_weights, MODEL, "tgt"), "tie='tgt': choose among all, target, none"),
    "norm": (call(SublayerConnection, 8, 0.1, norm="Pre"), NORM),
    "norm of a layer": (call(EncoderLayer, 8, *PARTS, 0.1, norm="Pre"), NORM),
    "variant": (call(LabelSmoothing, 5, 0, 0.1, variant="Paper"), VARIANT),
    "variant of a target": (
        call(smoothed_target, BATCH.tgt_y, 9, 0.1, variant="Paper"),
        VARIANT,
    ),
    "criterion": (call(LabelSmoothing, 5, 0, 7), "smoothing=7: must be from 0 to 1"),
    **{
        f"{loss.__name__} {smoothing}": (
            call(loss, MODEL, BATCH, smoothing),
            f"smoothing={smoothing}: must be from 0 to 1",
        )
        for loss in (batch_loss, fast_batch_loss)
        for smoothing in (7, -1.0, float("nan"))
    },
}


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_option_is_refused(name: str) -> None:
    make, message = CASES[name]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make()
