"""Nothing reaches a position from the future or from padding, in training, evaluation and decoding.

Each test changes what must not be seen and compares outputs bit by bit where the computation is
the same one, and to 1e-12 where its order may change. Gradients say the same from the other side.
"""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from annotated_transformer.model.architecture import EncoderDecoder, Norm
from annotated_transformer.model.multi_head import padding_mask, subsequent_mask
from annotated_transformer.model.transformer import make_model

V = 13
MODES = ["train", "eval", "token by token"]
modes = pytest.mark.parametrize("mode", MODES)
orders = st.sampled_from(["post", "pre"])
seeds = st.integers(0, 2**31)
lengths = st.lists(
    st.tuples(st.integers(1, 6), st.integers(2, 5)), min_size=1, max_size=3
)  # of source and target


def make(norm: Norm, seed: int) -> EncoderDecoder:
    torch.manual_seed(seed)
    return make_model(V, V, N=2, d_model=16, d_ff=24, h=4, dropout=0.3, norm=norm).double()


def keeps(lengths: Sequence[tuple[int, int]]) -> tuple[Tensor, ...]:
    return tuple(
        torch.arange(max(sizes)) < torch.tensor(sizes).unsqueeze(1)
        for sizes in zip(*lengths, strict=True)
    )


def run(
    mode: str, model: EncoderDecoder, src: Tensor, tgt: Tensor, src_keep: Tensor, tgt_keep: Tensor
) -> Tensor:
    """Return the output ``(batch, n, d_model)``, zero at padding; dropout is the same each time."""
    model.train(mode == "train")
    torch.manual_seed(5)
    past = subsequent_mask(tgt.size(1))
    see_source, see_target = src_keep.unsqueeze(1), past & tgt_keep.unsqueeze(1)
    if mode == "token by token":
        memory, sizes = model.encode(src, see_source), range(1, tgt.size(1) + 1)
        y = [model.decode(memory, see_source, tgt[:, :n], subsequent_mask(n))[:, -1] for n in sizes]
        out = torch.stack(y, dim=1)
    else:
        out = model(src, tgt, see_source, see_target)
    return out * tgt_keep.unsqueeze(-1)


@modes
@settings(max_examples=12)
@given(seeds, lengths, orders, st.data())
def test_the_future_is_not_seen(
    mode: str, seed: int, lengths: list[tuple[int, int]], norm: Norm, data: st.DataObject
) -> None:
    model, (src_keep, tgt_keep) = make(norm, seed), keeps(lengths)
    src, tgt = torch.randint(1, V, src_keep.shape), torch.randint(1, V, tgt_keep.shape)
    sentence = data.draw(st.integers(0, len(lengths) - 1), label="sentence")
    place = data.draw(st.integers(1, lengths[sentence][1] - 1), label="place")
    changed = tgt.clone()
    changed[sentence, place] = tgt[sentence, place] % (V - 1) + 1  # another token
    with torch.no_grad():
        before, after = (run(mode, model, src, t, src_keep, tgt_keep) for t in (tgt, changed))
    assert torch.equal(before[sentence, :place], after[sentence, :place])
    others = [i for i in range(len(lengths)) if i != sentence]
    assert torch.equal(before[others], after[others])
    assert (before[sentence, place] - after[sentence, place]).abs().max() > 1e-6


@modes
@settings(max_examples=12)
@given(seeds, lengths, orders)
def test_padding_is_not_seen(
    mode: str, seed: int, lengths: list[tuple[int, int]], norm: Norm
) -> None:
    model, (src_keep, tgt_keep) = make(norm, seed), keeps(lengths)
    src, tgt = torch.randint(1, V, src_keep.shape), torch.randint(1, V, tgt_keep.shape)
    garbage = [
        torch.where(keep, x, x % (V - 1) + 1) for x, keep in ((src, src_keep), (tgt, tgt_keep))
    ]
    with torch.no_grad():
        before = run(mode, model, src, tgt, src_keep, tgt_keep)
        after = run(mode, model, garbage[0], garbage[1], src_keep, tgt_keep)
    torch.testing.assert_close(before, after, rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", MODES[1:])
@settings(max_examples=10)
@given(seeds, lengths, orders, st.integers(1, 3))
def test_more_padding_changes_nothing(
    mode: str, seed: int, lengths: list[tuple[int, int]], norm: Norm, extra: int
) -> None:
    model, (src_keep, tgt_keep) = make(norm, seed), keeps(lengths)
    src, tgt = torch.randint(1, V, src_keep.shape), torch.randint(1, V, tgt_keep.shape)
    batch = (src, tgt, src_keep, tgt_keep)
    wider = [torch.cat([x, x.new_zeros(len(lengths), extra)], dim=1) for x in batch]
    with torch.no_grad():
        before, after = run(mode, model, *batch), run(mode, model, *wider)
    torch.testing.assert_close(before, after[:, : tgt.size(1)], rtol=0, atol=1e-12)


@pytest.mark.parametrize("training", [True, False])
@settings(max_examples=10)
@given(seeds, lengths, orders, st.data())
def test_no_gradient_flows_to_the_future_or_to_padding(
    training: bool, seed: int, lengths: list[tuple[int, int]], norm: Norm, data: st.DataObject
) -> None:
    model, (src_keep, tgt_keep) = make(norm, seed).train(training), keeps(lengths)
    sentence = data.draw(st.integers(0, len(lengths) - 1), label="sentence")
    place = data.draw(st.integers(0, lengths[sentence][1] - 1), label="place")
    x, y = (
        torch.randn(*keep.shape, 16, dtype=torch.float64).requires_grad_()
        for keep in (src_keep, tgt_keep)
    )
    past = subsequent_mask(y.size(1)) & tgt_keep.unsqueeze(1)
    memory = model.encoder(x, src_keep.unsqueeze(1))
    out = model.decoder(y, memory, src_keep.unsqueeze(1), past)
    to_source, to_target = torch.autograd.grad(out[sentence, place].sin().sum(), (x, y))
    seen_source = torch.zeros_like(src_keep)
    seen_source[sentence] = src_keep[sentence]
    seen_target = torch.zeros_like(tgt_keep)
    seen_target[sentence, : place + 1] = True
    assert torch.equal(to_source.abs().sum(-1) > 0, seen_source)
    assert torch.equal(to_target.abs().sum(-1) > 0, seen_target)


def test_these_checks_notice_a_leak() -> None:
    model, (src_keep, tgt_keep) = make("post", 0), keeps([(4, 4), (2, 3)])
    src, tgt = torch.randint(1, V, src_keep.shape), torch.randint(1, V, tgt_keep.shape)
    changed = tgt.clone()
    changed[0, 3] = tgt[0, 3] % (V - 1) + 1
    see_all = torch.ones(2, 4, 4, dtype=torch.bool)
    model.eval()
    before, after = (model(src, t, padding_mask(src, 0), see_all) for t in (tgt, changed))
    assert not torch.allclose(before[0, 0], after[0, 0])
