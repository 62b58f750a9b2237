"""CTranslate2 runs what we export, and gives what we give."""

import copy
from pathlib import Path
from typing import Any

import ctranslate2
import pytest
import sacrebleu
import torch
from tokenizers import Tokenizer

from annotated_transformer.fast.search import greedy_search
from annotated_transformer.interop.ctranslate2 import Precision, export_ctranslate2
from annotated_transformer.interop.folders import token_strings
from annotated_transformer.model.transformer import count_parameters
from tests.interop import small as ours

ctranslate2.set_log_level(50)  # it warns where a processor has no bfloat16


def translate(folder: Path, lines: list[str], most: int = 250) -> list[list[int]]:
    """Translate greedily by CTranslate2 alone; return tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    translator = ctranslate2.Translator(str(folder), intra_threads=1)
    found = translator.translate_batch(
        [one.tokens for one in tokenizer.encode_batch(lines)], beam_size=1, max_batch_size=64,
        max_decoding_length=most, min_decoding_length=0,
    )  # fmt: skip
    return [[int(tokenizer.token_to_id(t) or 0) for t in one.hypotheses[0]] for one in found]


def bleu(found: list[list[int]]) -> float:
    """Return BLEU against the grammar's own translations."""
    tokenizer = ours.embedded().tokenizers[1]
    lines = [tokenizer.decode(one) for one in found]
    return float(sacrebleu.corpus_bleu(lines, [list(ours.sentences().target)]).score)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_500_sentences_are_translated_as_by_us(
    precision: Precision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = ours.embedded()
    before = {name: tensor.clone() for name, tensor in system.model.state_dict().items()}
    export_ctranslate2(system, tmp_path / "out", precision=precision)
    # It quantizes arrays where they are: ours must be others.
    assert all(torch.equal(before[name], now) for name, now in system.model.state_dict().items())
    found = translate(tmp_path / "out", list(ours.sentences().source))
    if precision == "float32":
        assert found == ours.translations()
    assert abs(bleu(found) - bleu(ours.translations())) < 0.5
    line = ours.printed_by_card(tmp_path / "out", ours.sentences().source[0], monkeypatch)
    assert line == ours.embedded().tokenizers[1].decode(found[0])
    size = (tmp_path / "out" / "model.bin").stat().st_size
    bytes_of = {"float32": 4, "bfloat16": 2, "int8": 1}[precision]
    # The shared matrix is stored once; positions, 256 of them for each side, are no parameters.
    most = (count_parameters(system.model) + 2 * 256 * 128) * bytes_of
    assert size < 1.1 * most + (100_000 if precision == "int8" else 0)


@pytest.mark.parametrize(
    "sizes",
    [
        {"norm": "post", "tie": "target"},
        {"norm": "pre"},
        {"norm": "pre", "positions": "learned", "tie": "none"},
    ],
    ids=["post", "pre", "learned"],
)
def test_random_models_give_our_log_probabilities(sizes: dict[str, Any], tmp_path: Path) -> None:
    system = ours.small(**sizes)
    export_ctranslate2(system, tmp_path / "out")
    lines, source, target = ours.small_texts(system)
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    translator = ctranslate2.Translator(str(tmp_path / "out"), intra_threads=1)
    words = [[tokenizer.id_to_token(n) for n in ids] for ids in target]
    scored = translator.score_batch([one.tokens for one in tokenizer.encode_batch(lines)], words)
    wanted = ours.logits_of(system, source, target).log_softmax(-1)
    for row, ids, one in zip(wanted, target, scored, strict=True):
        known = row[torch.arange(len(ids) + 1), torch.tensor([*ids, 2])]
        assert (known - torch.tensor(one.log_probs)).abs().max() < ours.TOLERANCE
    found = translate(tmp_path / "out", lines, ours.MOST)
    assert found == greedy_search(system.model, source, ours.MOST)


def test_words_are_tokens_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = ours.worded()
    export_ctranslate2(system, tmp_path / "out")
    _, source, target = ours.small_texts(system)
    one, other = (token_strings(tokenizer) for tokenizer in system.tokenizers)
    translator = ctranslate2.Translator(str(tmp_path / "out"), intra_threads=1)
    words = [[one[n] for n in ids] for ids in source]
    scored = translator.score_batch(words, [[other[n] for n in ids] for ids in target])
    wanted = ours.logits_of(system, source, target).log_softmax(-1)
    for row, ids, score in zip(wanted, target, scored, strict=True):
        known = row[torch.arange(len(ids) + 1), torch.tensor([*ids, 2])]
        assert (known - torch.tensor(score.log_probs)).abs().max() < ours.TOLERANCE
    sentence = ours.sentences().source[0]
    line = ours.printed_by_card(tmp_path / "out", sentence, monkeypatch)
    found = greedy_search(system.model, [system.tokenizers[0].encode(sentence)], 64, extra=256)
    assert line == system.tokenizers[1].decode(found[0])


def test_a_wrong_weight_is_seen(tmp_path: Path) -> None:
    system = copy.deepcopy(ours.embedded())
    with torch.no_grad():
        system.model.generator.get_submodule("proj").get_parameter("bias")[5] += 30
    export_ctranslate2(system, tmp_path / "out")
    lines = list(ours.sentences().source[:5])
    assert translate(tmp_path / "out", lines, ours.MOST) != ours.translations()[:5]
