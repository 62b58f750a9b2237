"""onnxruntime runs both graphs, and gives what we give."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from tokenizers import Tokenizer

from annotated_transformer.fast.search import greedy_search
from annotated_transformer.interop.onnx import (
    OnnxTranslator,
    encoder_graph,
    export_onnx,
    step_graph,
)
from annotated_transformer.training.batches import make_batch
from tests.interop import small as ours


def test_500_sentences_are_translated_as_by_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_onnx(ours.embedded(), tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    ids = [one.ids for one in tokenizer.encode_batch(list(ours.sentences().source))]
    assert ids == [[*source, 2] for source in ours.sources()]
    translator = OnnxTranslator(tmp_path / "out", threads=1)
    assert translator.greedy(ids) == ours.translations()
    assert translator.greedy(ids[:1]) == ours.translations()[:1]
    line = ours.printed_by_card(tmp_path / "out", ours.sentences().source[0], monkeypatch)
    assert line == ours.embedded().tokenizers[1].decode(ours.translations()[0])


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_a_converted_model_is_exported_in_float32(kind: torch.dtype, tmp_path: Path) -> None:
    system = ours.small(max_len=9)
    export_onnx(system, tmp_path / "plain")
    wanted = OnnxTranslator(tmp_path / "plain", threads=1).greedy([[4, 5, 2]])
    system.model.to(kind)
    export_onnx(system, tmp_path / "out")
    assert OnnxTranslator(tmp_path / "out", threads=1).greedy([[4, 5, 2]]) == wanted


@pytest.mark.parametrize("max_len", [9, 300])
def test_an_output_ends_with_the_positions(max_len: int, tmp_path: Path) -> None:
    system = ours.small(max_len=max_len)
    with torch.no_grad():
        system.model.generator.get_parameter("proj.bias")[2] = -99.0  # it never ends by itself
    export_onnx(system, tmp_path / "out")
    sources = [[4, 5, 6], [7] * 7, []]
    wanted = greedy_search(system.model, sources, max_len, extra=400)
    translator = OnnxTranslator(tmp_path / "out", threads=1)
    found = translator.greedy([[*source, 2] for source in sources], extra=400)
    assert [[n for n in ids if n] for ids in found] == wanted  # ours leaves out padding
    assert {len(ids) for ids in found} == {max_len}


def test_the_loop_of_the_card_ends_with_the_positions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = ours.small(max_len=9)
    with torch.no_grad():
        system.model.generator.get_parameter("proj.bias")[2] = -99.0
    export_onnx(system, tmp_path / "out")
    (wanted,) = greedy_search(system.model, [system.tokenizers[0].encode("</s>")], 9)
    line = ours.printed_by_card(tmp_path / "out", "</s>", monkeypatch)  # four tokens, no symbol
    assert line == system.tokenizers[1].decode(wanted)


def test_graphs_are_valid_and_weights_keep_their_names() -> None:
    model = ours.small(N=2, tie="target").model
    stored = set()
    for graph in (encoder_graph(model), step_graph(model)):
        onnx.checker.check_model(graph, full_check=True)
        stored |= {each.name for each in graph.graph.initializer}
    assert {name for name in stored if "constant" not in name} == dict(
        model.named_parameters()
    ).keys()


def forced(translator: OnnxTranslator, source: np.ndarray, tokens: np.ndarray) -> torch.Tensor:
    """Return the logits ``(batch, n, vocabulary)`` of given tokens, by steps."""
    names = [output.name for output in translator.encoder.get_outputs()]
    memory = dict(zip(names, translator.encoder.run(None, {"source": source}), strict=True))
    caches = translator.no_past(len(source))
    found = []
    for token in tokens.T:
        fed = {"source": source, "token": token.copy(), **caches, **memory}
        logits, *present = translator.decoder.run(None, fed)
        caches = dict(zip(caches, present, strict=True))
        found.append(torch.from_numpy(logits))
    return torch.stack(found, 1)


@pytest.mark.parametrize(
    "sizes",
    [
        {"norm": "post", "tie": "none"},
        {"norm": "pre", "positions": "learned", "d_k": 5, "d_v": 3, "tie": "target"},
    ],
    ids=["post", "pre, learned, other heads"],
)
def test_random_models_give_our_logits(
    sizes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, apart = ours.small(N=1, **sizes), sizes["norm"] == "pre"
    if apart:  # as if one file did not hold all weights
        monkeypatch.setattr("annotated_transformer.interop.onnx.MOST_BYTES", 0)
    export_onnx(system, tmp_path / "out")
    assert (tmp_path / "out" / "decoder.onnx.data").exists() == apart
    translator = OnnxTranslator(tmp_path / "out", threads=1)
    _, source, target = ours.small_texts(system)
    batch = make_batch(source, target)
    found = forced(translator, batch.src.numpy(), batch.tgt.numpy())
    assert ours.distance(found, system, source, target) < ours.TOLERANCE
    wanted = greedy_search(system.model, source, ours.MOST)
    assert translator.greedy([[*ids, 2] for ids in source], ours.MOST) == wanted
    # A sentence that is padding alone gives numbers, too, as it does here.
    nothing = np.zeros((1, 3), np.int64)
    assert forced(translator, nothing, np.ones((1, 2), np.int64)).isfinite().all()
    # An untrained model goes on to its last position, and no further.
    ids = source[0]
    assert translator.greedy([[*ids, 2]], 63) == greedy_search(system.model, [ids], 63)
