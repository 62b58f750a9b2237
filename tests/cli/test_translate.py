"""``translate``: files, streams, and what cannot be written."""

import io
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from annotated_transformer.cli import systems, translate
from annotated_transformer.cli.main import main
from annotated_transformer.data.tensors import save_tensors
from annotated_transformer.engine.checkpoints import load_system, load_tensors
from annotated_transformer.engine.system import System, translate_lines
from annotated_transformer.fast import decoding, quantized
from annotated_transformer.fast.quantized import Bfloat16Linear, Int8Linear
from annotated_transformer.fast.screen import multiplies_bytes
from annotated_transformer.pretrained import FOLDER, RUNNING, load_pretrained
from tests.cli.command import Capture, fails, full_device, write


def test_translate_files_and_standard_input(
    trained: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '\nDer Hund schläft.\n\nEr sagt "ja"\tund geht.\r\n'
    (tmp_path / "in.txt").write_bytes(text.encode())
    out = tmp_path / "deep/out.txt"
    assert main(["translate", str(trained), str(tmp_path / "in.txt"), "-o", str(out)]) == 0
    lines = out.read_text(encoding="utf-8").split("\n")
    assert len(lines) == 5
    assert lines[0] == lines[2] == lines[4] == ""
    for content in (text, text.rstrip(), "\ufeff" + text):
        stream = io.TextIOWrapper(io.BytesIO(content.encode()))
        monkeypatch.setattr(sys, "stdin", stream)
        capsys.readouterr()
        assert main(["translate", str(trained)]) == 0
        assert capsys.readouterr().out.split("\n") == lines
    assert [path.name for path in out.parent.iterdir()] == ["out.txt"]


def test_a_precision_reaches_every_product(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the embedded model, whose words are those of float32; each linear layer is of its kind."""
    (tmp_path / "in.txt").write_text(RUNNING.text("de") + "\n", encoding="utf-8")
    made: list[str] = []
    for precision, kind in (("bfloat16", Bfloat16Linear), ("int8", Int8Linear)):

        def count(weight: torch.Tensor, bias: torch.Tensor, kind: Any = kind) -> Any:
            made.append(kind.__name__)
            return kind(weight, bias)

        if precision == "int8" and not multiplies_bytes():
            continue
        monkeypatch.setattr(decoding, "LINEARS", {precision: count})
        words = ["translate", str(tmp_path / "in.txt"), "--precision", precision]
        for beam in ("1", "4"):
            capsys.readouterr()
            assert main([*words, "--beam", beam]) == 0
            assert capsys.readouterr().out == RUNNING.text("en") + "\n"
        layers = load_pretrained().config.N
        assert made.count(kind.__name__) == 2 * (7 * layers + 1)


def test_a_precision_that_cannot_be(
    trained: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "multiplies_bytes", lambda: False)
    words = ["translate", str(trained), "--precision"]
    assert "--precision int8: this processor multiplies no bytes" in fails(capsys, *words, "int8")
    monkeypatch.setattr(systems, "can_accelerate", lambda _: False)
    assert "--precision bfloat16: is for Transformers" in fails(capsys, *words, "bfloat16")


def test_translate_nothing(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "in.txt").write_bytes(b"")
    capsys.readouterr()
    assert main(["translate", str(trained), str(tmp_path / "in.txt")]) == 0
    assert capsys.readouterr().out == ""


def test_bad_standard_input(
    trained: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for data, expected in (
        (b"gut\nf\xfcr\n", "standard input, line 2: byte 2 (0xfc) is not valid UTF-8"),
        (b"\n\n" + b"wort " * 300, "standard input, line 3: "),
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        assert expected in fails(capsys, "translate", trained)


def test_a_terminal_is_told_what_to_do(
    trained: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(b""))
    monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdin", stream)
    assert main(["translate", str(trained)]) == 0
    assert "Ctrl-D" in capsys.readouterr().err


def test_bad_input_writes_no_output(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "in.txt").write_bytes(b"gut\n\xff\n")
    (tmp_path / "out.txt").write_text("old")
    words = ("translate", trained, tmp_path / "in.txt", "-o", tmp_path / "out.txt")
    assert "in.txt, line 2: byte 1" in fails(capsys, *words)
    write(tmp_path / "in.txt", ["gut", "wort " * 300])
    assert "in.txt, line 2: " in fails(capsys, *words)
    assert "no such file" in fails(capsys, "translate", trained, tmp_path / "none", "-o", "x")
    assert (tmp_path / "out.txt").read_text() == "old"
    assert list(tmp_path.rglob("*.part")) == []


def test_a_damaged_system(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    shutil.copytree(trained, tmp_path / "copy")
    path = tmp_path / "copy/model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    assert f"{path}: damaged" in fails(capsys, "translate", tmp_path / "copy", path)
    (tmp_path / "copy/tokenizer.json").write_text("{}")
    assert "tokenizer.json: " in fails(capsys, "translate", tmp_path / "copy", path)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a device that is always full")
def test_output_that_is_full(
    trained: Path, texts: list[str], tmp_path: Path, capsys: Capture
) -> None:
    full = full_device(tmp_path / "full")
    line = fails(capsys, "translate", trained, texts[4], "-o", full, "--quiet")
    assert f"{full}: cannot be written: No space left on device" in line
    assert full.is_char_device()


def test_translate_with_a_beam(trained: Path, texts: list[str], capsys: Capture) -> None:
    found = []
    for words in ([], ["--beam", "4", "--alpha", "0.6"], ["--beam", "1"], ["--beam", "3"]):
        assert main(["translate", str(trained), texts[1], *words]) == 0
        found.append(capsys.readouterr().out)
    lines = Path(texts[1]).read_text(encoding="utf-8").splitlines()
    system = load_system(trained)
    assert found[0] == found[1] == "".join(f"{t}\n" for t in translate_lines(system, lines, beam=4))
    assert found[2] == "".join(f"{t}\n" for t in translate_lines(system, lines))


GERMAN, ENGLISH = RUNNING.text("de"), RUNNING.text("en")


def feed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Put a text on the standard input."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def test_without_a_folder_the_model_of_the_package_translates(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, f"{GERMAN}\n\n{ENGLISH}\n")
    assert main(["translate"]) == 0
    found = capsys.readouterr()
    assert found.out == f"{ENGLISH}\n\n{GERMAN}\n"
    (line,) = found.err.splitlines()
    assert "the small model that comes with the package" in line
    assert "only the words of the book's grammar" in line
    path = write(tmp_path / "in", [GERMAN])
    assert main(["translate", path, "--quiet", "-o", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out").read_text(encoding="utf-8") == f"{ENGLISH}\n"
    assert capsys.readouterr() == ("", "")


def test_words_that_the_model_of_the_package_does_not_know_are_named(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed(monkeypatch, f"{GERMAN}\nDer Computer schläft.\n")
    assert main(["translate"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "standard input, line 2: the model does not know Computer"
    assert len(lines) == 2
    feed(monkeypatch, "Der Computer schläft.\n" * 8)
    assert main(["translate"]) == 0
    *lines, last, _ = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert last == "standard input: 3 more lines have words that the model does not know"


def test_no_output_replaces_a_file_of_the_package(tmp_path: Path, capsys: Capture) -> None:
    path = write(tmp_path / "in", [GERMAN])
    for name in ("model.safetensors", "config.json", "sha256sums.txt"):
        line = fails(capsys, "translate", path, "-o", FOLDER / name)
        assert "is also the input" in line


def mean(folder: Path) -> dict[str, list[float]]:
    """Return the averaged weights of a run."""
    tensors, _ = load_tensors(folder / "averaged.safetensors")
    return {name: tensor.flatten().tolist() for name, tensor in tensors.items()}


def test_average_and_take_the_average(trained: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    whole = mean(folder)
    assert main(["average", str(folder), "--last", "1"]) == 0
    assert "--averaged" in capsys.readouterr().err
    assert mean(folder) != whole
    assert main(["average", str(folder)]) == 0
    assert mean(folder) == whole
    assert "cannot average 3 of 2 snapshots" in fails(capsys, "average", folder, "--last", "3")
    shutil.rmtree(folder / "snapshots")
    assert "has no snapshots to average" in fails(capsys, "average", folder)
    (folder / "model.safetensors").unlink()
    text = write(tmp_path / "in", ["Der Hund schläft ."])
    assert "model.safetensors" in fails(capsys, "translate", folder, text)
    assert main(["translate", str(folder), text, "--averaged"]) == 0
    words = ["evaluate", str(folder), "--averaged", "--corpus", "grammar", "--split", "val"]
    assert main([*words, "--quiet"]) == 0


def test_the_better_weights_are_taken(
    trained: Path,
    texts: list[str],
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    tensors, header = load_tensors(folder / "model.safetensors")
    zeros = {name: tensor * 0 for name, tensor in tensors.items()}
    found: list[bool] = []

    def watched(system: System, lines: list[str], **_: object) -> list[str]:
        found.append(not any(parameter.any() for parameter in system.model.parameters()))
        return lines

    monkeypatch.setattr(translate, "translate_lines", watched)
    for loss in (header["valid_loss"] - 1, header["valid_loss"] + 1):
        save_tensors(folder / "averaged.safetensors", zeros, {**header, "valid_loss": loss})
        for option in ([], ["--averaged"], ["--best"]):
            capsys.readouterr()
            assert main(["translate", str(folder), texts[4], *option]) == 0
            taken = "averaged" if found[-1] else "model"
            said = f"translated 5 lines by {folder / taken}.safetensors\n"
            assert capsys.readouterr().err == said
    assert found == [True, True, False, False, True, False]


def test_a_device_that_is_not_there(trained: Path, texts: list[str], capsys: Capture) -> None:
    for name, there in (
        ("cuda", torch.cuda.is_available()),
        ("mps", torch.backends.mps.is_available()),
    ):
        if not there:
            line = fails(capsys, "translate", trained, texts[4], "--device", name)
            assert f"--device {name}: PyTorch finds no such device here; try --device cpu" in line
    assert main(["translate", str(trained), texts[4], "--device", "cpu", "--quiet"]) == 0


def test_a_dash_is_the_standard_output(
    trained: Path,
    texts: list[str],
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    found = []
    for option in ([], ["-o", "-"]):
        assert main(["translate", str(trained), texts[4], "--beam", "1", *option]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1]
    assert found[0].count("\n") == 5
    assert list(tmp_path.iterdir()) == []
