"""Data of the copy task, and a small model that learns it."""

from __future__ import annotations

import inspect

import pytest
import torch

from annotated_transformer.fast.loss import fast_batch_loss
from annotated_transformer.model.multi_head import subsequent_mask
from annotated_transformer.notation import BOS, EOS, PAD, UNK
from annotated_transformer.training.copy_task import data_gen, train_copy_task
from annotated_transformer.training.loop import LossFunction, batch_loss, evaluate


def test_data_are_copies_between_the_named_tokens() -> None:
    batches = list(data_gen(11, 20, 3))
    assert len(batches) == 3
    for batch in batches:
        assert batch.src.size(0) == 20
        assert torch.equal(batch.src, batch.tgt_y)
        assert (batch.tgt[:, 0] == BOS).all()
        assert ((batch.src == EOS).sum(1) == 1).all()
        symbols = batch.src[(batch.src != EOS) & (batch.src != PAD)]
        assert symbols.min() > UNK
        assert symbols.max() < 11
        assert 1 <= (batch.src != PAD).sum(1).min() - 1 <= (batch.src != PAD).sum(1).max() - 1 <= 10


def test_data_follow_the_generator() -> None:
    one, other = (
        next(data_gen(11, 5, 1, generator=torch.Generator().manual_seed(3))) for _ in range(2)
    )
    assert torch.equal(one.src, other.src)


def test_a_vocabulary_without_symbols_is_refused() -> None:
    with pytest.raises(ValueError, match="only special tokens"):
        next(data_gen(4, 2, 1))


def test_the_article_calls_it_with_three_numbers() -> None:
    assert inspect.signature(data_gen).parameters.keys() >= {"V", "batch", "nbatches"}
    assert [len(batch.src) for batch in data_gen(11, 3, 2)] == [3, 3]


@pytest.mark.parametrize(("seed", "loss"), [(7, batch_loss), (8, batch_loss), (9, fast_batch_loss)])
def test_a_small_model_learns_to_copy(seed: int, loss: LossFunction) -> None:
    state = torch.get_rng_state()
    model, history = train_copy_task(seed, V=7, length=4, updates=250, batch_size=48, loss=loss)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert len(history) == 250
    assert history[0].perplexity > 3

    batch = next(data_gen(7, 100, 1, length=4, generator=torch.Generator().manual_seed(99)))
    assert evaluate(model, [batch]).perplexity <= 1.02
    written = torch.full((100, 1), BOS)
    with torch.no_grad():
        memory = model.encode(batch.src, batch.src_mask)
        for n in range(1, batch.src.size(1) + 1):
            x = model.decode(memory, batch.src_mask, written, subsequent_mask(n))
            written = torch.cat([written, model.generator(x[:, -1]).argmax(1, keepdim=True)], 1)
    real = batch.src != PAD
    assert torch.equal(written[:, 1:][real], batch.src[real])
