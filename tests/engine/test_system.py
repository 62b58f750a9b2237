"""Sizes follow the options; lines keep their places through a translation."""

from dataclasses import replace
from typing import Any

import pytest

from annotated_transformer.background.convolutional import ConvolutionConfig
from annotated_transformer.background.seq2seq import RecurrentConfig
from annotated_transformer.data.files import CorpusError
from annotated_transformer.engine.config import Options, UsageError
from annotated_transformer.engine.system import System, decode_lines, model_config, translate_lines
from annotated_transformer.model.transformer import PRESETS, ModelConfig
from annotated_transformer.translation.greedy import greedy_search
from tests.engine.opinions import system_of
from tests.engine.small import TEXTS


def test_sizes_follow_the_options() -> None:
    assert model_config(Options(), True) == replace(PRESETS["tiny"], max_len=256, tie="all")
    sizes: dict[str, Any] = {
        **{"layers": 3, "d_model": 96, "d_ff": 50, "heads": 3, "d_k": 7, "d_v": 5},
        **{"dropout": 0.2, "attention_dropout": 0.05, "ff_dropout": 0.15, "max_len": 99},
        **{"norm": "pre", "positions": "learned", "tie": "none"},
    }
    options = Options().replace(preset="base", **sizes)
    names = {"layers": "N", "heads": "h"}
    expected = ModelConfig(**{names.get(name, name): value for name, value in sizes.items()})
    assert model_config(options, True) == model_config(options, False) == expected
    assert model_config(options.replace(tie=None), False) == replace(expected, tie="target")
    with pytest.raises(UsageError, match="--d-model 96 is not a multiple of --heads 5"):
        model_config(options.replace(heads=5, d_k=None), True)


def test_sizes_of_the_other_architectures() -> None:
    recurrent = model_config(Options().replace(architecture="rnn-dot", layers=2, dropout=0.1), True)
    assert recurrent == RecurrentConfig("dot", layers=2, dropout=0.1, max_len=256)
    convolution = model_config(Options().replace(architecture="convolution", max_len=64), True)
    assert convolution == ConvolutionConfig(max_len=64)


def test_lines_keep_their_places(system: System) -> None:
    lines = ["", *TEXTS[1].source[:5], "  \t", TEXTS[1].source[2], ""]
    out = translate_lines(system, lines, max_tokens=30)
    assert len(out) == len(lines)
    assert [i for i, line in enumerate(out) if not line] == [0, 6, 8]
    assert out[7] == out[3]
    for line, translation in zip(lines, out, strict=True):
        if line.strip():
            ids = system.tokenizers[0].encode(line)
            (alone,) = greedy_search(system.model, [ids], 127)
            both = system.tokenizers[1].decode(alone).split()
            if len(alone) < 20:  # else cut off, by the longest sentence of its batch
                assert translation.split() == both
        assert "\n" not in translation


def test_one_string_is_no_list_of_lines(system: System) -> None:
    with pytest.raises(TypeError, match="lines: give a list of strings"):
        translate_lines(system, "Der Hund schläft.")


def test_nothing_to_translate(system: System, capsys: pytest.CaptureFixture[str]) -> None:
    assert translate_lines(system, [], progress=True) == []
    assert "line" in capsys.readouterr().err


def test_a_long_line_is_named(system: System) -> None:
    with pytest.raises(CorpusError, match=r"mine\.txt, line 3: .* more than the 127 .*split"):
        translate_lines(system, ["a", "", "wort " * 400], name="mine.txt")


def test_a_batch_is_no_larger_than_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a sentence the model takes; one sentence always fits."""
    system, most = system_of(3, max_len=60), list[int]()

    def search(sources: list[list[int]], numbers: list[int], limit: int) -> list[int]:
        most.append(len(sources))
        return numbers

    lines = ["a b", "c", "e d a", "a a a"] * 3
    found = decode_lines(system, lines, search, 0, 5, name="input", first=1, progress=False)
    assert found == list(range(1, 13))
    assert max(most) == 2  # of "c" with its end symbol
