"""Decoding in 16 and 8 bits: products within their rounding, and translations that stay."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from annotated_transformer.data.grammar import grammar_pairs
from annotated_transformer.fast.decoding import keep_decoder_weights
from annotated_transformer.fast.quantized import (
    LINEARS,
    Bfloat16Linear,
    DecodingPrecision,
    Int8Linear,
    check_precision,
)
from annotated_transformer.fast.screen import multiplies_bytes
from annotated_transformer.fast.search import beam_search, greedy_search
from annotated_transformer.pretrained import load_pretrained
from annotated_transformer.translation.evaluation import all_counts, bleu_of_counts

needs_bytes = pytest.mark.skipif(
    not multiplies_bytes(), reason="oneDNN does not multiply bytes on this processor"
)
sizes = st.tuples(*[st.integers(1, 70)] * 3, st.integers(0, 10**6))


def factors(rows: int, inputs: int, outputs: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Draw rows of very different sizes, a matrix likewise, and a bias."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=rng) * torch.logspace(-2, 2, rows).unsqueeze(1)
    weight = torch.randn(outputs, inputs, generator=rng)
    weight *= torch.logspace(-1, 1, outputs).unsqueeze(1)
    return x, weight, torch.randn(outputs, generator=rng)


@needs_bytes
@settings(max_examples=60)
@given(sizes)
def test_int8_errs_by_half_a_step_for_each_factor(size: tuple[int, int, int, int]) -> None:
    x, weight, bias = factors(*size)
    exact = x.double() @ weight.double().T + bias.double()
    step_x = x.double().abs().amax(1, keepdim=True) / 127
    step_w = weight.double().abs().amax(1) / 127
    most = (
        x.double().abs().sum(1, keepdim=True) * step_w / 2
        + step_x / 2 * weight.double().abs().sum(1)
        + size[1] * step_x * step_w / 4
    )
    rounding = 1e-5 * (exact.abs() + most + 1)
    assert ((Int8Linear(weight, bias)(x) - exact).abs() <= most + rounding).all()


@settings(max_examples=60)
@given(sizes)
def test_bfloat16_errs_by_its_eight_digits(size: tuple[int, int, int, int]) -> None:
    x, weight, bias = factors(*size)
    exact = x.double() @ weight.double().T + bias.double()
    most = x.double().abs() @ weight.double().abs().T + bias.double().abs()  # of all terms
    error = (Bfloat16Linear(weight, bias)(x) - exact).abs()
    assert (error <= 2**-6 * most).all()  # 2**-8 for each factor and for the sum, and some more


@pytest.mark.parametrize("precision", ["bfloat16", pytest.param("int8", marks=needs_bytes)])
def test_relu_and_residual_are_those_of_float32(precision: DecodingPrecision) -> None:
    x, weight, bias = factors(3, 32, 8, 0)
    low, residual = LINEARS[precision](weight, bias), torch.randn(3, 8)
    torch.testing.assert_close(low.relu(x), low(x).clamp(min=0))
    torch.testing.assert_close(low.add(x, residual), low(x) + residual)


@pytest.mark.parametrize("precision", ["bfloat16", pytest.param("int8", marks=needs_bytes)])
def test_translations_stay_within_three_tenths_of_a_bleu(precision: DecodingPrecision) -> None:
    found = load_pretrained()
    pairs = list(grammar_pairs("test", 150))
    source, target = found.tokenizers
    sources = [source.encode(pair.text("de")) for pair in pairs]
    references = [pair.text("en") for pair in pairs]
    plain: DecodingPrecision = "float32"
    scores = []
    for each in (plain, precision):
        with keep_decoder_weights(found.model, each):
            outputs = greedy_search(found.model, sources)
            (best, *_), *_ = beam_search(found.model, sources[:4], beam=4, alpha=0.0)
        counts = all_counts([target.decode(tokens) for tokens in outputs], references)
        scores.append(float(bleu_of_counts(counts.sum(0))))
    assert scores[0] > 50
    assert scores[1] == pytest.approx(scores[0], abs=0.3)
    assert best.tokens == outputs[0]


def test_int8_is_refused_where_bytes_are_not_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="it is for the CPU"):
        check_precision("int8", "cuda")
    monkeypatch.setattr("annotated_transformer.fast.quantized.multiplies_bytes", lambda: False)
    with pytest.raises(ValueError, match="multiplies no bytes; use bfloat16"):
        check_precision("int8", "cpu")
    check_precision("bfloat16", "cuda")
    with pytest.raises(ValueError, match="precision='float16': choose among float32, bfloat16"):
        check_precision("float16", "cpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="precision int8"):
        keep_decoder_weights(load_pretrained().model, "int8").__enter__()
