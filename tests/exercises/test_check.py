"""The machinery of exercises: each way to fail has a message of its own."""

from __future__ import annotations

import math
import random
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from annotated_transformer.exercises import check, find, machinery
from annotated_transformer.exercises.calls import call_answer
from annotated_transformer.exercises.declare import brief_value, case_size
from annotated_transformer.exercises.show import draw_examples
from annotated_transformer.model.architecture import LayerNorm
from annotated_transformer.model.attention import attention
from annotated_transformer.model.multi_head import padding_mask, subsequent_mask


def drop(x: Tensor, keep: Tensor, p: float) -> Tensor:
    return x * keep / (1 - p)


def message(name: str, yours: Any) -> str:
    """Return the line of a check that must not pass."""
    result = check(name, yours)
    assert not result.passed
    return result.message


def test_what_is_right_passes_and_says_what_was_tried(capsys: pytest.CaptureFixture[str]) -> None:
    result = check("dropout", drop)
    assert result.passed
    assert result.tried == 3 + machinery.CASES
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == result.message == repr(result)
    assert (
        last == "dropout: passed: 3 examples and 30 cases with random shapes, values and gradients"
    )


def test_examples_are_printed_wanted_beside_yours(capsys: pytest.CaptureFixture[str]) -> None:
    check("length_penalty", lambda length, alpha: 1.0)
    out = capsys.readouterr().out.splitlines()
    assert out[3:6] == ["example 2: 7, 0.6", "    expected  1.516", "    yours     1"]
    assert len(out) == 10


def test_a_starter_cell_is_not_written_yet(capsys: pytest.CaptureFixture[str]) -> None:
    def stub(x: Tensor, keep: Tensor, p: float) -> Tensor:
        raise NotImplementedError

    result = check("dropout", stub)
    assert not result.passed
    assert capsys.readouterr().out == "dropout: not written yet\n"


def test_a_class_that_is_a_stub_is_not_written_yet() -> None:
    class Stub(nn.Module):
        def __init__(self, features: int) -> None:
            raise NotImplementedError

    assert "not written yet" in message("layer_norm", Stub)


def test_what_pytorch_has_not_implemented_is_an_exception() -> None:
    def mask(n: int, r: int) -> Tensor:
        return torch.ones(1, n, n).tril() & torch.ones(1, n, n).triu(1 - r)  # no booleans

    told = message("window_mask", mask)
    assert "not implemented for 'Float'" in told
    assert "not written yet" not in told


def test_an_exception_is_told_with_the_readers_line_and_the_case() -> None:
    def broken(x: Tensor, keep: Tensor, p: float) -> Tensor:
        return x @ x.new_zeros(99, 1)

    text = message("dropout", broken)
    assert "RuntimeError: mat1 and mat2 shapes" in text
    assert "return x @ x.new_zeros(99, 1)" in text
    assert "; in (" in text


def test_one_of_two_slips_is_named() -> None:
    """A mask of -inf gives NaN where a query may attend to nothing, whatever else is wrong."""

    def slipping(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = q @ k.transpose(-2, -1)
        scores = scores if mask is None else scores.masked_fill(~mask, -math.inf)
        return scores.softmax(-1) @ v

    assert "likely mistake: scale missing" in message("attention", slipping)
    nothing = message("attention", lambda q, k, v, mask=None: (q.sum() + 0 * v.sum()) * q)
    assert "likely mistake" not in nothing


def test_a_long_list_of_mistakes_is_left_through_the_first_other_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So the name of the last one is found within the time for it."""
    exercise = find("adam_step")
    known, wrong = list(exercise.mistakes.items())[-1]
    calls = 0

    def counted(*given: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return call_answer(*given, **options)

    monkeypatch.setattr(machinery, "call_answer", counted)
    result, trial = machinery.run_check("adam_step", exercise, wrong)
    assert result.mistake == known
    assert calls < 3 * len(trial.tried) + 4 * len(exercise.mistakes)


def test_a_root_in_float32_is_no_mistake() -> None:
    def rooted(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return attention(q * q.size(-1) ** 0.5 / torch.tensor(q.size(-1)).sqrt(), k, v, mask)[0]

    assert check("attention", rooted).passed
    embedded = check(
        "scaled_embedding", lambda x, table: table[x] * torch.tensor(table.size(1)).sqrt()
    )
    assert embedded.passed

    def one_query(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        scores = keys @ query / torch.tensor(len(query)).sqrt()
        return scores.softmax(0) @ values

    assert check("one_query", one_query).passed


def test_what_needs_no_gradient_may_have_none() -> None:
    def mean(states: Any) -> dict[str, Tensor]:
        return {name: sum(state[name] for state in states) / len(states) for name in states[0]}

    assert check("average_checkpoints", mean).passed
    assert check("average_checkpoints", torch.no_grad()(mean)).passed


def test_a_precision_of_zero_is_tried() -> None:
    def logarithms(hypotheses: Any, references: Any) -> float:
        found = find("bleu").reference(hypotheses, references)
        return float(found) if found else math.log(0)

    assert "math domain error" in message("bleu", logarithms)


def test_masks_of_every_query_are_tried() -> None:
    def flat(*values: Any) -> Tensor:
        *others, mask = values
        mask = None if mask is None else mask.view(len(mask), 1, -1)
        y: Tensor = find("multi_head_attention").reference(*others, mask)
        return y

    assert not check("multi_head_attention", flat).passed


@pytest.mark.parametrize(
    ("yours", "wanted"),
    [
        (lambda x, keep, p: None, "the result is None: is a return missing?"),
        (lambda x, keep, p: drop(x, keep, p)[:, :1], "the shape is"),
        (lambda x, keep, p: drop(x, keep, p).float(), "dtype is float32, but should be float64"),
        (lambda x, keep, p: x * keep / 0 * 0, "NaN"),
        (lambda x, keep, p: drop(x.detach(), keep, p), "no gradient reaches the inputs"),
        (lambda x, keep, p: drop(x, keep, p) + x - x.detach(), "a gradient is not"),
        (lambda x, keep, p: drop(x, keep, p) + 1e-4, "values are wrong; at (0, 0)"),
        (lambda x, keep, p: x.mul_(keep).div_(1 - p), "changes its inputs in place"),
        (lambda x, keep, p: drop(x, keep, p).tolist(), "of type list, but should be a tensor"),
        (3.0, "Give the function itself"),
        (lambda x: x, "TypeError"),
    ],
)
def test_each_kind_of_failure_has_its_message(yours: Any, wanted: str) -> None:
    assert wanted in message("dropout", yours)


def test_lists_changed_in_place_are_noticed() -> None:
    def merge(symbols: list[str], pair: tuple[str, str]) -> list[str]:
        found = find("bpe_merge").reference(symbols, pair)
        symbols.clear()
        return list(found)

    assert "in place" in message("bpe_merge", merge)


def test_masks_must_be_boolean() -> None:
    text = message("subsequent_mask", lambda n: subsequent_mask(n).long())
    assert "the dtype is int64, but should be bool" in text


def test_the_smallest_failing_case_is_reported_and_fails() -> None:
    def wrong(x: Tensor, keep: Tensor, p: float) -> Tensor:
        return drop(x, keep, p) if x.size(1) < 3 else x

    result = check("dropout", wrong)
    assert result.case is not None
    exercise = find("dropout")
    assert not torch.equal(wrong(*result.case), drop(*result.case))
    assert case_size(result.case) <= min(
        case_size(case) for case in exercise.examples if case[0].size(1) > 2
    )


def test_a_failure_is_the_same_again_in_any_order() -> None:
    def wrong(x: Tensor, keep: Tensor, p: float) -> Tensor:
        return x * (torch.rand_like(x) < random.random())

    torch.manual_seed(1)
    first = message("dropout", wrong)
    check("attention", attention)
    torch.manual_seed(2)
    random.seed(5)
    state, python = torch.get_rng_state(), random.getstate()
    assert message("dropout", wrong) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python


def test_a_loop_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_: Any) -> None:
        while True:
            try:
                sum(range(10_000))  # sleep takes no processor time, which is what is limited
            except Exception:  # the reader's own net must not catch the end
                continue

    monkeypatch.setattr(machinery, "LIMIT", 0.3)
    assert "is there an infinite loop?" in message("dropout", endless)


def test_a_slow_answer_is_tried_on_the_examples_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machinery, "SECONDS", -1.0)  # over before it begins
    result = check("dropout", drop)
    assert result.passed
    assert result.tried == 3


def test_several_parts_are_checked_under_one_name() -> None:
    assert check("masks", subsequent_mask, padding_mask).passed
    result = check("masks", subsequent_mask, lambda x, pad: x == pad)
    assert not result.passed
    assert result.name == "padding_mask"
    with pytest.raises(ValueError, match="masks needs 2: subsequent_mask, padding_mask; 1"):
        check("masks", subsequent_mask)


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="no exercise 'atention'; choose among adam_step"):
        check("atention", attention)


def test_a_layer_may_be_given_as_a_class() -> None:
    class Linear(nn.Module):
        """A feed-forward network with PyTorch's layers."""

        def __init__(self, d_model: int, d_ff: int) -> None:
            super().__init__()
            self.w_1, self.w_2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.w_2(self.w_1(x).relu())
            return y

    assert check("feed_forward", Linear).passed
    assert check("layer_norm", LayerNorm).passed
    assert check("layer_norm", nn.LayerNorm).passed
    assert "has 0 parameters, but should have 2" in message("layer_norm", nn.Identity)


def test_a_notebook_shows_heat_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []

    class Display:
        display = staticmethod(shown.append)

    class IPython:
        version_info = (9, 0)  # which matplotlib asks for
        display = Display

        @staticmethod
        def get_ipython() -> Any:
            return type("Shell", (), {"kernel": 1})

    monkeypatch.setitem(sys.modules, "IPython", IPython)
    check("attention", lambda q, k, v, mask: attention(q, k, v)[0])
    check("subsequent_mask", lambda n: None)
    assert [repr(picture).split(":")[0] for picture in shown] == [
        "Three examples of attention",
        "Three examples of subsequent_mask",
    ]
    assert "no tensor" in shown[1].html
    assert len(shown[0].html) < 60_000


def test_what_is_no_small_tensor_is_not_drawn() -> None:
    _, trial = machinery.run_check("bleu", find("bleu"), find("bleu").reference)
    assert draw_examples("bleu", [one[:3] for one in trial.tried[:3]]) is None


def test_brief_is_short() -> None:
    assert brief_value({"w": torch.zeros(2, 9)}) == "{'w': float32 (2, 9)}"
    assert brief_value(list(range(100)), 20) == "[0, 1, 2, 3, 4, 5, …"
    assert brief_value(drop) == "drop"
