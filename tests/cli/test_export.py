"""The command ``export``: from a run to what another program reads."""

import json
import shutil
from pathlib import Path
from typing import Any

import ctranslate2
import pytest
from tokenizers import Tokenizer

from annotated_transformer.cli.main import main
from annotated_transformer.interop import folders
from tests.cli.command import Capture, fails, write


def files(folder: Path) -> dict[str, bytes]:
    """Return what is in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_run_is_exported_and_translates_as_here(
    trained: Path, tmp_path: Path, capsys: Capture
) -> None:
    run, out = tmp_path / "run", tmp_path / "exports" / "out"
    shutil.copytree(trained, run)
    scores = {"bleu": 12.34, "bleu_signature": "nrefs:1", "sentences": 9}
    record = {"scores": {"test": scores}, "updates": 6, "options": {"corpus": "files"}}
    (run / "record.json").write_text(json.dumps(record))
    assert main(["export", str(run), "--to", "ctranslate2", str(out)]) == 0
    assert str(out) in capsys.readouterr().err
    lines = ["Der Hund schläft.", "Sie haben selten Milch getrunken."]
    text = write(tmp_path / "text", lines)
    assert main(["translate", str(run), text, "--beam", "1", "--quiet"]) == 0
    wanted = capsys.readouterr().out.splitlines()
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    tokens = [one.tokens for one in tokenizer.encode_batch(lines)]
    found = []
    for each in tokens:  # our limit depends on the length of the source
        (one,) = ctranslate2.Translator(str(out)).translate_batch(
            [each], beam_size=1, min_decoding_length=0, max_decoding_length=len(each) + 50
        )
        ids = [int(tokenizer.token_to_id(token) or 0) for token in one.hypotheses[0]]
        found.append(" ".join(tokenizer.decode(ids).split()))
    assert found == wanted
    card = (out / "README.md").read_text()
    assert "BLEU 12.34" in card
    assert "12.34" not in card.replace("BLEU 12.34", "")
    line = fails(capsys, "export", run, "--to", "ctranslate2")
    assert f"{run}: is a run; name a new folder after it" in line


def test_an_export_is_replaced_and_nothing_else(tmp_path: Path, capsys: Capture) -> None:
    words = ["export", str(tmp_path / "out"), "--to", "ctranslate2"]
    assert main(words) == 0
    before = files(tmp_path / "out")
    assert main([*words, "--precision", "int8"]) == 0
    after = files(tmp_path / "out")
    assert before.keys() == after.keys()
    assert len(after["model.bin"]) < 0.4 * len(before["model.bin"])
    (tmp_path / "out" / "mine.txt").write_text("mine")
    assert "mine.txt" in fails(capsys, *words)
    assert files(tmp_path / "out") == after | {"mine.txt": b"mine"}
    (tmp_path / "out" / "mine.txt").unlink()
    (tmp_path / "out" / folders.MARK).write_text("{}")
    assert "choose a new folder" in fails(capsys, *words)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_record_that_is_damaged_is_named(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "record.json").write_text("[1]")
    line = fails(capsys, "export", tmp_path / "run", tmp_path / "out", "--to", "ctranslate2")
    assert "record.json: damaged" in line
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_fails_leaves_no_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left")

    (tmp_path / "own").mkdir()
    monkeypatch.setattr("annotated_transformer.interop.folders.save_tokenizers", fail)
    out = tmp_path / "own" / "new" / "newer" / "out"
    assert "No space left" in fails(capsys, "export", out, "--to", "ctranslate2")
    assert list(tmp_path.rglob("*")) == [tmp_path / "own"]


@pytest.mark.parametrize("error", [OSError(28, "No space left"), KeyboardInterrupt(2)])
@pytest.mark.parametrize("before", [False, True])
def test_what_fails_leaves_what_was_there(
    error: BaseException,
    before: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    words = ["export", str(tmp_path / "out"), "--to", "ctranslate2"]
    if before:
        assert main(words) == 0
    kept = {path.name: files(path) for path in tmp_path.iterdir()}

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("annotated_transformer.interop.folders.save_tokenizers", fail)
    assert main(words) == (2 if isinstance(error, OSError) else 130)
    assert {path.name: files(path) for path in tmp_path.iterdir()} == kept
