"""Tests of packed rows: what is taken out of a batch goes back, and so do gradients."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from annotated_transformer.fast import packing as module
from annotated_transformer.fast.model import embed_rows
from annotated_transformer.fast.packing import PackedMask, Rows
from annotated_transformer.model.transformer import make_model

seeds = st.integers(0, 2**31)
# Lengths of sentences, among them some that attention fills up, whatever the processor is.
batches = st.lists(st.integers(1, 6) | st.integers(9, 17), min_size=1, max_size=4)


@pytest.fixture(autouse=True, scope="module")
def _wide_vectors() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "VECTOR", 16)
        yield


def keep_of(lengths: list[int]) -> torch.Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


@settings(max_examples=30)
@given(batches, seeds)
def test_pack_and_unpack_are_inverse_and_adjoint(lengths: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    keep = keep_of(lengths)
    rows = Rows(keep)
    x = normal(*keep.shape, 3)
    packed = rows.pack(x)
    assert torch.equal(packed, x[keep])
    assert torch.equal(rows.unpack(packed), x * keep.unsqueeze(-1))
    assert rows.positions.tolist() == [i for n in lengths for i in range(n)]
    assert torch.autograd.gradcheck(rows.pack, x)
    assert torch.autograd.gradcheck(rows.unpack, normal(sum(lengths), 3))


@settings(max_examples=30)
@given(batches, seeds, st.integers(1, 3), st.integers(1, 3))
def test_split_takes_each_part_to_its_place_and_join_brings_it_back(
    lengths: list[int], seed: int, parts: int, h: int
) -> None:
    torch.manual_seed(seed)
    keep = keep_of(lengths)
    rows, x = Rows(keep), torch.randn(sum(lengths), parts * h * 2)
    cut = rows.split(x, parts, h)
    assert cut.shape == (parts, len(lengths) * h, rows.width, 2)
    assert rows.width == (16 if 8 < keep.size(1) < 16 else keep.size(1))
    padded = rows.unpack(x.view(-1, parts, h, 2))  # (batch, length, parts, h, 2)
    expected = padded.permute(2, 0, 3, 1, 4).flatten(1, 2)
    real = keep.repeat_interleave(h, dim=0)
    assert torch.equal(cut[:, :, : keep.size(1)][:, real], expected[:, real])
    assert torch.equal(rows.join(cut, h), x)


@settings(max_examples=20)
@given(batches, seeds, st.integers(1, 3), st.booleans())
def test_the_bias_hides_what_the_mask_hides(
    lengths: list[int], seed: int, h: int, wide: bool
) -> None:
    torch.manual_seed(seed)
    rows = Rows(keep_of(lengths))
    n = rows.shape[1]
    mask = torch.rand(len(lengths), n if wide else 1, n) < 0.5
    packed = PackedMask(mask, rows, rows)
    bias = packed.bias(h, torch.float64)
    assert bias.shape == (len(lengths) * h, rows.width, rows.width)
    seen = mask.expand(-1, n, -1).repeat_interleave(h, 0)
    assert torch.equal(bias[:, :n] == 0, F.pad(seen, (0, rows.width - n)))
    assert (bias[bias != 0] < -1e300).all()
    assert (packed.bias(h, torch.float16) - 1000).isfinite().all()  # with any score, still a number
    assert packed.bias(h, torch.float64) is bias  # made once
    assert packed.full == bool(mask.any(-1).all())


@pytest.mark.parametrize("positions", ["sinusoid", "learned"])
def test_embedded_rows_have_the_positions_of_their_sentences(positions: str) -> None:
    torch.manual_seed(0)
    net = make_model(9, 9, N=1, d_model=8, d_ff=8, h=2, dropout=0.0, positions=positions, max_len=6)
    keep = torch.tensor([[True, True, False, True], [False, True, True, True]])  # gaps, too
    tokens = torch.randint(0, 9, keep.shape)
    found = embed_rows(net.src_embed, tokens, Rows(keep))
    assert torch.equal(found, net.src_embed(tokens)[keep])
    long = torch.ones(1, 7, dtype=torch.long)
    with pytest.raises(IndexError, match="7 tokens, and only 6 positions"):
        embed_rows(net.src_embed, long, Rows(long > 0))
