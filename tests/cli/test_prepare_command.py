"""``prepare``, and what is trained from it."""

import io
import json
import os
import tarfile
from pathlib import Path

import pytest

from annotated_transformer.cli import prepare
from annotated_transformer.cli.main import main
from annotated_transformer.data.corpora import ParallelText, load_corpus
from annotated_transformer.data.prepared import Prepared
from tests.cli.command import Capture, fails, write


def test_prepare_a_corpus_from_its_archive(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text = load_corpus("grammar", size=80)
    (tmp_path / "iwslt2014").mkdir()
    with tarfile.open(tmp_path / "iwslt2014/de-en.tgz", "w:gz") as tape:
        for language, side in (("de", text.source), ("en", text.target)):
            train = "".join(f"<title>Talk {n}</title>\n{line}\n" for n, line in enumerate(side))
            members = {f"train.tags.de-en.{language}": train}
            segments = "".join(f'<seg id="{n}"> {line} </seg>\n' for n, line in enumerate(side[:9]))
            for name in ("dev2010", "tst2010", "tst2011", "tst2012"):
                members[f"IWSLT14.TED.{name}.de-en.{language}.xml"] = segments
            for name, content in members.items():
                info = tarfile.TarInfo(f"de-en/{name}")
                info.size = len(content.encode())
                tape.addfile(info, io.BytesIO(content.encode()))
    words = f"prepare {tmp_path / 'p'} --corpus iwslt2014 --mirror {tmp_path} --vocabulary 300"
    assert main([*words.split(), "--workers", "1", "--quiet"]) == 0
    said = capsys.readouterr()
    assert "80 sentence pairs" in said.out + said.err
    assert len((tmp_path / "p/test.de").read_text().splitlines()) == 27


def test_prepare_and_train(texts: list[str], tmp_path: Path, capsys: Capture) -> None:
    out, model = tmp_path / "p", tmp_path / "m"
    words = ["prepare", str(out), *texts, "--vocabulary", "300", "--workers", "1", "--quiet"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "60 of 60 pairs kept" in captured.err
    assert main(words) == 0
    assert "nothing to do" in capsys.readouterr().err
    sizes = "--preset tiny --layers 1 --updates 4 --warmup 2 --average 0 --quiet".split()
    train = ["train", "--prepared", str(out), *sizes, "--out", str(model)]
    assert main(train) == 0
    assert "prepared val" in capsys.readouterr().out
    record = json.loads((model / "record.json").read_text())
    assert record["options"]["vocabulary"] == 300
    assert record["options"]["corpus"] == "prepared"
    assert set(record["corpus"]["checksums"]) == {
        "train-files.de",
        "train-files.en",
        "prepared.json",
    }
    assert "--size" in fails(capsys, *train, "--size", "3")
    assert f"--vocabulary 400: {out} was prepared with 300" in fails(
        capsys, *train, "--vocabulary", "400"
    )
    assert "was prepared with de-en" in fails(capsys, *train, "--pair", "en-de")
    assert "was prepared with bpe" in fails(capsys, *train, "--tokenizer", "bpe-lower")
    assert main([*train, "--vocabulary", "300", "--pair", "de-en"]) == 0
    capsys.readouterr()
    assess = ["evaluate", str(model), "--beam", "1", "--quiet"]
    scores = record["scores"]["val"]
    assert main([*assess, "--prepared", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"prepared val, greedy, {scores['sentences']} sentences" in said
    assert f"BLEU = {scores['bleu']:.2f}" in said
    assert "give --prepared FOLDER" in fails(capsys, *assess)
    both: list[str | Path] = [*assess, "--prepared", out, "--corpus", "grammar"]
    assert "--corpus or --prepared" in fails(capsys, *both)
    found = fails(capsys, *both[:-2], "--test-files", "a", "b")
    assert "--test-files or --prepared" in found
    assert "test.de: no such file" in fails(capsys, *both[:-2], "--split", "test")
    turned = tmp_path / "turned"
    exchanged = [texts[i] for i in (0, 2, 1, 3, 5, 4)]
    assert main(["prepare", str(turned), *exchanged, *words[8:], "--pair", "en-de"]) == 0
    assert "is en-de, but the system is de-en" in fails(capsys, *assess, "--prepared", turned)
    os.truncate(out / "shards" / "train-00000.safetensors", 2000)
    capsys.readouterr()
    assert main(train) == 2
    assert "train-00000.safetensors: damaged" in capsys.readouterr().err.splitlines()[-1]


def test_a_prepared_test_split_is_scored(texts: list[str], tmp_path: Path, capsys: Capture) -> None:
    text = load_corpus("grammar", split="test", size=3)
    test = [write(tmp_path / "t.de", text.source), write(tmp_path / "t.en", text.target)]
    out, model = str(tmp_path / "p"), str(tmp_path / "m")
    words = ["prepare", out, *texts, "--test-files", *test, "--vocabulary", "300", "--quiet"]
    assert main([*words, "--workers", "1"]) == 0
    sizes = "--preset tiny --layers 1 --updates 2 --warmup 2 --average 0 --quiet".split()
    assert main(["train", "--prepared", out, *sizes, "--out", model]) == 0
    record = json.loads((tmp_path / "m" / "record.json").read_text())
    assert {name: s["sentences"] for name, s in record["scores"].items()} == {"test": 3}
    capsys.readouterr()
    assert main(["evaluate", model, "--prepared", out, "--beam", "1", "--quiet"]) == 0
    assert "prepared test, greedy, 3 sentences" in capsys.readouterr().out


def test_prepare_from_an_archive(texts: list[str], tmp_path: Path, capsys: Capture) -> None:
    archive = tmp_path / "corpus.tgz"
    with tarfile.open(archive, "w:gz") as tape:
        for path in (*texts[1:3], *texts[4:6]):
            tape.add(path, f"data/{Path(path).name}")
    inside = [f"{archive}/data/{Path(word).name}" if "/" in word else word for word in texts]
    words = ["prepare", str(tmp_path / "p"), *inside, "--vocabulary", "300", "--quiet"]
    assert main([*words, "--workers", "1"]) == 0
    assert main([*words, "--workers", "1"]) == 0
    assert "nothing to do" in capsys.readouterr().err
    with tarfile.open(archive, "w:gz") as tape:
        tape.add(texts[1], "../data/x")
    words[1] = str(tmp_path / "q")
    assert f"{archive}, member ../data/x: refused" in fails(capsys, *words)


@pytest.mark.parametrize("pair", ["de-en", "en-de"])
def test_prepare_a_known_corpus(
    pair: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    sizes = {"train": 60, "val": 5, "test": 7}

    def small(name: str, pair: str, split: str, **_: object) -> ParallelText:
        return load_corpus(name, pair, split, size=sizes[split])

    monkeypatch.setattr(prepare, "load_corpus", small)
    words = ["prepare", str(tmp_path / "p"), "--corpus", "grammar", "--vocabulary", "300"]
    words += ["--pair", pair, "--quiet", "--workers", "1"]
    assert main(words) == 0
    found = Prepared(tmp_path / "p")
    assert found.languages == tuple(pair.split("-"))
    assert {split: report["kept"] for split, report in found.reports.items()} == sizes
    text = load_corpus("grammar", pair, size=60)
    (first,) = found.tokens("train").pairs([0])
    assert [found.tokenizer.decode(side) for side in first] == [text.source[0], text.target[0]]
    assert main(words) == 0
    assert "nothing to do" in capsys.readouterr().err


def test_prepare_is_interrupted(
    texts: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare, "prepare_corpus", interrupted)
    words: list[str | Path] = ["prepare", tmp_path / "p", *texts]
    assert "run the same command to resume" in fails(capsys, *words, status=130)
