"""What a target cannot express is refused, and folders are whole or not there."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn

from annotated_transformer.background.seq2seq import RecurrentConfig
from annotated_transformer.data.files import FileError
from annotated_transformer.engine.checkpoints import CheckpointError
from annotated_transformer.engine.system import System
from annotated_transformer.interop.ctranslate2 import export_ctranslate2
from annotated_transformer.interop.folders import (
    ExportError,
    check_heads,
    check_out,
    model_card,
    portable_tokenizer,
    token_strings,
    whole_folder,
)
from annotated_transformer.interop.huggingface import export_huggingface
from annotated_transformer.interop.onnx import export_onnx
from annotated_transformer.model.transformer import PRESETS, ModelConfig, build_model
from annotated_transformer.pretrained import load_pretrained
from annotated_transformer.translation.tokenizers import BPETokenizer, WordTokenizer
from tests.interop import small as ours

WORDS = WordTokenizer("de", [("a", False), ("a", True), (".", True)])


def of_size(**sizes: Any) -> Callable[[], System]:
    """Return what makes a small system of other sizes."""
    return lambda: ours.small(**sizes)


def of_words() -> System:
    """Return a small system that splits words."""
    usual = ours.small()
    assert isinstance(usual.config, ModelConfig)
    model = build_model(len(WORDS), len(WORDS), usual.config)
    return dataclasses.replace(usual, model=model, tokenizers=(WORDS, WORDS))


def test_a_model_that_its_configuration_does_not_build_is_refused(tmp_path: Path) -> None:
    """The target would compute another one."""
    for export in (export_ctranslate2, export_huggingface, export_onnx):
        system = ours.small()
        system.model.get_submodule("encoder.layers.0").feed_forward = nn.Identity()
        with pytest.raises(CheckpointError, match=r"encoder.layers.0.feed_forward \(Identity\)"):
            export(system, tmp_path / "out")
        assert not list(tmp_path.iterdir())


def changed(**parts: Any) -> Callable[[], System]:
    """Return what makes a small system with other parts."""
    return lambda: dataclasses.replace(ours.small(), **parts)


@pytest.mark.parametrize(
    ("export", "make", "words"),
    [
        (export_ctranslate2, of_size(d_k=4), "d_k=4"),
        (export_ctranslate2, of_size(d_v=4), "d_v=4"),
        (export_ctranslate2, of_size(h=3, d_k=8, d_v=8), "d_k=8"),
        (export_huggingface, of_size(d_k=4), "d_k=4"),
        (export_huggingface, of_size(d_v=4, norm="pre"), "d_v=4"),
        (export_huggingface, of_size(positions="learned"), "learned positions"),
        (export_huggingface, of_size(norm="pre", tie="target"), "tie=target"),
        (export_huggingface, of_words, "splits words"),
        (export_ctranslate2, changed(config=RecurrentConfig()), "RecurrentConfig"),
        (export_huggingface, changed(config=RecurrentConfig()), "--architecture transformer"),
        (export_onnx, changed(config=RecurrentConfig()), "RecurrentConfig"),
    ],
)
def test_what_a_target_cannot_express_is_refused(
    export: Callable[[System, Path], None], make: Callable[[], System], words: str, tmp_path: Path
) -> None:
    system = make()
    with pytest.raises(ExportError, match=words) as found:
        export(system, tmp_path / "out")
    assert ": " in str(found.value)
    assert not list(tmp_path.iterdir())


def test_rows_b_of_table_3_are_refused_and_no_others() -> None:
    def refused(name: str) -> bool:
        try:
            check_heads(PRESETS[name], "ctranslate2")
        except ExportError:
            return True
        return False

    assert {name for name in PRESETS if refused(name)} == {"table3_B16", "table3_B32"}


# --- tokenizers ------------------------------------------------------------------------------


def test_glued_words_have_strings_of_their_own(tmp_path: Path) -> None:
    assert token_strings(WORDS) == ["<pad>", "<s>", "</s>", "<unk>", "a", "￭a", "￭."]
    with pytest.raises(ExportError, match="'￭a' twice"):
        token_strings(WordTokenizer("de", [("￭a", False), ("a", True)]))
    merges = [("<", "s"), ("<s", ">")]
    with pytest.raises(ExportError, match="'<s>' twice"):
        token_strings(BPETokenizer(merges))


@pytest.mark.parametrize("text", ["", "Der HUND", "ÄÖÜ ẞ", " two  blanks ", "<s> </s>", "🙂"])
@pytest.mark.parametrize("lowercase", [False, True])
def test_sub_words_need_nothing_of_ours(text: str, lowercase: bool) -> None:
    one = BPETokenizer.train(ours.sentences().source, 400, lowercase=lowercase)
    other = portable_tokenizer(one, ends=True)
    ids = one.encode(text)
    assert other.encode(text).ids == [*ids, 2]
    assert other.decode(ids) == one.decode(ids) == (text.lower() if lowercase else text)
    assert len(one) == other.get_vocab_size()


# --- folders ---------------------------------------------------------------------------------


def test_an_empty_folder_is_taken_and_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with whole_folder(tmp_path / "link", to="test") as folder:
        (folder / "a").write_text("1")
        assert not list((tmp_path / "real").iterdir())
    assert {path.name for path in (tmp_path / "real").iterdir()} == {"a", "export.json"}
    assert (tmp_path / "link").is_symlink()
    check_out(tmp_path / "link")  # it is an export now
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(28, "No space left on device"), "out: cannot be written: No space left"),
        (Exception("I/O error: File too large (os error 27)"), "out: cannot be written: I/O error"),
    ],
)
def test_a_full_disk_is_told_whoever_finds_it(error: Exception, told: str, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=told), whole_folder(tmp_path / "out", to="test"):
        raise error
    with pytest.raises(ZeroDivisionError), whole_folder(tmp_path / "out", to="test"):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_an_export_that_cannot_take_its_place_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, rename = tmp_path / "out", Path.rename
    with whole_folder(out, to="test") as folder:
        (folder / "a").write_text("old")

    def fail(self: Path, target: Path) -> Path:
        if self.name.endswith(".part"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(FileError, match="Input/output"), whole_folder(out, to="test") as folder:
        (folder / "a").write_text("new")
    assert (out / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        with (
            pytest.raises(FileError, match="file"),
            whole_folder(tmp_path / place, to="test"),
        ):
            pass
    late = "late: cannot be written: Not a directory"
    with pytest.raises(FileError, match=late), whole_folder(tmp_path / "late", to="test"):
        (tmp_path / "late").write_text("came meanwhile")
    (tmp_path / "late").unlink()  # still the file
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("what", ["link", "empty"])
def test_links_and_empty_folders_are_not_ours(what: str, tmp_path: Path) -> None:
    with whole_folder(tmp_path / "out", to="test") as folder:
        (folder / "model.bin").write_text("1")
    with whole_folder(tmp_path / "out", to="test"):  # an export may be replaced
        pass
    (tmp_path / "data").mkdir()
    strange = tmp_path / "out" / what
    strange.symlink_to(tmp_path / "data") if what == "link" else strange.mkdir()
    with pytest.raises(FileError, match=f"holds {what}, which no export"):
        check_out(tmp_path / "out")


def test_a_card_has_the_scores_of_its_weights() -> None:
    system = load_pretrained().system
    scores = {"test": {"bleu": 1.5}, "test, averaged": {"bleu": 2.5}}
    record = {"options": {}, "updates": 1, "scores": scores}
    for weights, bleu in (("model.safetensors", 1.5), ("averaged.safetensors", 2.5)):
        card = model_card(system, {**record, "weights": weights}, "", "")
        assert f"- Weights: {weights}" in card
        assert re.findall(r"BLEU ([\d.]+)", card) == [str(bleu)]
    assert len(re.findall("BLEU", model_card(system, record, "", ""))) == 2


def test_the_card_says_what_is_lost_and_its_header_holds_strings() -> None:
    system = dataclasses.replace(load_pretrained().system, languages=("en", "no"))
    card = model_card(system, None, "", "")
    header = yaml.safe_load(card.split("---")[1])
    assert header["language"] == ["en", "no"]
    assert ("lower-cased differently" in card) == system.lowercase


def test_the_card_of_the_packages_model_says_that_it_translates_both_ways() -> None:
    system = load_pretrained().system
    title = "# A Transformer from de to en"
    assert f"{title} and back\n" in model_card(system, None, "", "")
    assert f"{title}\n" in model_card(dataclasses.replace(system, training={}), None, "", "")
