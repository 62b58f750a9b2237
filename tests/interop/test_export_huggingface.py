"""Hugging Face's models compute what ours do."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from annotated_transformer.fast.search import greedy_search
from annotated_transformer.interop.huggingface import export_huggingface
from annotated_transformer.interop.marian import load_marian
from annotated_transformer.training.batches import make_batch
from tests.interop import small as ours

transformers.logging.disable_progress_bar()


def loaded(folder: Path) -> tuple[Any, Any]:
    """Return model and tokenizer as a user of the library loads them."""
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


def generate(model: Any, batch: Any, most: int) -> list[list[int]]:
    """Return what the library generates greedily, without special tokens; most + 1 ends always."""
    pad, _, eos = model.config.pad_token_id, None, model.config.eos_token_id
    found = model.generate(**batch, max_new_tokens=most + 1)
    return [[n for n in row[1:] if n not in (pad, eos)] for row in found.tolist()]


def check_tied(folder: Path, model: Any) -> None:
    """All three matrices are one, in the file and in memory."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    matrices = {"lm_head.weight", "model.shared.weight"}
    matrices |= {f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder")}
    assert len(names & matrices) == 1
    places = {model.get_parameter(name).data_ptr() for name in matrices}
    assert len(places) == 1


def test_500_sentences_are_translated_as_by_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_huggingface(ours.embedded(), tmp_path / "out")
    model, tokenizer = loaded(tmp_path / "out")
    assert type(model) is transformers.MarianMTModel
    check_tied(tmp_path / "out", model)
    batch = tokenizer(list(ours.sentences().source), return_tensors="pt", padding=True)
    assert [[n for n in row if n] for row in batch.input_ids.tolist()] == [
        [*source, 2] for source in ours.sources()
    ]
    assert generate(model, batch, 100) == ours.translations()
    text = tokenizer.batch_decode([[1, *ids, 2] for ids in ours.translations()], True)
    one = ours.embedded().tokenizers[1]
    assert text == [one.decode(ids) for ids in ours.translations()]
    line = ours.printed_by_card(tmp_path / "out", ours.sentences().source[0], monkeypatch)
    assert line == str(text[:1])
    back, special = load_marian(tmp_path / "out")
    assert special == (0, 1, 2)
    own = dict(ours.embedded().model.named_parameters())
    assert {name: True for name in own} == {
        name: torch.equal(own[name], parameter) for name, parameter in back.named_parameters()
    }


@pytest.mark.parametrize("text", ["", " ", "  a  b ", "</s> <pad>", "Straße\n№ 5 🙂"])
def test_any_text_is_split_as_by_us(text: str, tmp_path: Path) -> None:
    export_huggingface(ours.embedded(), tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = ours.embedded().tokenizers[0].encode(text)
    assert tokenizer(text).input_ids == [*ids, 2]
    assert tokenizer.decode(ids) == text


# By name: the library loads a class with all it needs, which takes seconds.
SMALL: dict[str, tuple[dict[str, Any], str]] = {
    "post": ({"norm": "post"}, "MarianMTModel"),
    "post, target tied": ({"norm": "post", "tie": "target"}, "MarianMTModel"),
    "post, odd": ({"norm": "post", "d_model": 15, "h": 3, "tie": "none"}, "MarianMTModel"),
    "pre": ({"norm": "pre"}, "PegasusForConditionalGeneration"),
    "learned": ({"norm": "pre", "positions": "learned"}, "PegasusForConditionalGeneration"),
}


@pytest.mark.parametrize(("sizes", "kind"), SMALL.values(), ids=SMALL)
def test_random_models_give_our_logits(sizes: dict[str, Any], kind: str, tmp_path: Path) -> None:
    system = ours.small(**sizes)
    export_huggingface(system, tmp_path / "out")
    model, tokenizer = loaded(tmp_path / "out")
    assert type(model) is getattr(transformers, kind)
    if system.config.tie == "all":  # type: ignore[union-attr]
        check_tied(tmp_path / "out", model)
    lines, source, target = ours.small_texts(system)
    batch = tokenizer(lines, return_tensors="pt", padding=True)
    with torch.no_grad():
        found = model(**batch, decoder_input_ids=make_batch(source, target).tgt).logits
    assert ours.distance(found, system, source, target) < ours.TOLERANCE
    assert generate(model, batch, ours.MOST) == greedy_search(system.model, source, ours.MOST)
