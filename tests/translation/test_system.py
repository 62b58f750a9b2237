"""Training goes on where it stopped; translating keeps lines; scoring is sacreBLEU's."""

import contextlib
import copy
import errno
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from annotated_transformer.data.corpora import ParallelText, load_corpus, read_parallel
from annotated_transformer.data.files import CorpusError, FileError
from annotated_transformer.data.prepare import prepare
from annotated_transformer.data.prepared import Preparation, Prepared
from annotated_transformer.data.shards import TokenPairs
from annotated_transformer.engine.journal import read_journal
from annotated_transformer.notation import EOS
from annotated_transformer.training.batches import token_batches
from annotated_transformer.training.loop import evaluate
from annotated_transformer.training.optimizer import make_adam, rate
from annotated_transformer.training.precision import NonFiniteError
from annotated_transformer.translation import system as module
from annotated_transformer.translation.checkpoints import (
    AVERAGED,
    CheckpointError,
    System,
    load_system,
    load_tensors,
    snapshots,
    trainings,
    weights,
)
from annotated_transformer.translation.decoding import greedy_search
from annotated_transformer.translation.system import (
    RECIPES,
    Run,
    Running,
    Training,
    UsageError,
    check_options,
    encode,
    interruption,
    learn_tokenizers,
    make_record,
    model_config,
    processor,
    replay,
    translate_lines,
    updates_to_come,
)

TEXTS = (load_corpus("grammar", size=60), load_corpus("grammar", split="val").head(12))
OPTIONS = Training(
    layers=1, vocabulary=300, updates=8, warmup=4, max_tokens=256, dropout=0.2, max_len=128
)


def weights_of(folder: Path) -> dict[str, bytes]:
    """Return the tensors of the training file, the random state too, as bytes."""
    tensors, _ = load_tensors(trainings(folder)[-1])
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a training that nobody interrupted."""
    run = Run(OPTIONS, tmp_path_factory.mktemp("straight"), TEXTS)
    assert run.go(progress=False)
    return run


@pytest.fixture(scope="module")
def system(straight: Run) -> System:
    """Return what it learned."""
    return load_system(straight.folder)


# --- options -------------------------------------------------------------------


@pytest.mark.parametrize("corpus", RECIPES)
def test_recipes_can_work(corpus: str) -> None:
    check_options(RECIPES[corpus])
    assert RECIPES[corpus].corpus == corpus


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"corpus": "wmt99"}, "--corpus wmt99"),
        ({"updates": 0}, "--updates 0"),
        ({"max_tokens": -3}, "--max-tokens -3"),
        ({"layers": 0}, "--layers 0"),
        ({"size": -1}, "--size -1"),
        ({"average": -1}, "--average -1"),
        ({"average_every": 0}, "--average-every 0"),
        ({"peak": float("nan")}, "--peak nan"),
        ({"peak": float("inf")}, "--peak inf"),
        ({"dropout": 1.0}, "--dropout 1.0"),
        ({"smoothing": -0.1}, "--smoothing -0.1"),
        ({"smoothing": float("nan")}, "--smoothing nan"),
    ],
)
def test_values_that_cannot_work(change: dict[str, Any], flag: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(flag)):
        Run(replace(OPTIONS, **change), tmp_path / "run", TEXTS)
    assert not (tmp_path / "run").exists()


def test_sizes_follow_the_options() -> None:
    assert model_config(Training(), True).N == 4
    config = model_config(Training(preset="base", layers=3, dropout=0.2, max_len=99), False)
    assert (config.N, config.d_model, config.dropout) == (3, 512, 0.2)
    assert (config.max_len, config.tie) == (99, "target")


# --- text ----------------------------------------------------------------------


def files(folder: Path, source: list[str], target: list[str]) -> ParallelText:
    """Write two files and read them."""
    for name, lines in (("a.de", source), ("a.en", target)):
        (folder / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return read_parallel(folder / "a.de", folder / "a.en")


def test_tokenizers() -> None:
    first, second = learn_tokenizers(TEXTS[0], OPTIONS)
    assert first is second
    assert len(first) == 300
    first, second = learn_tokenizers(TEXTS[0], replace(OPTIONS, tokenizer="words"))
    assert first is not second
    first, second = learn_tokenizers(TEXTS[0], replace(OPTIONS, tokenizer="bpe-lower"))
    assert first is second
    assert first.encode("DER Mann") == first.encode("der mann")
    with pytest.raises(UsageError, match="--vocabulary 10: "):
        learn_tokenizers(TEXTS[0], replace(OPTIONS, vocabulary=10))
    with pytest.raises(UsageError, match="--vocabulary 99999: "):
        learn_tokenizers(TEXTS[0], replace(OPTIONS, vocabulary=99999))


@pytest.mark.parametrize("side", [0, 1])
def test_a_long_sentence_is_named_by_file_and_line(side: int, tmp_path: Path) -> None:
    lines = [["kurz", "", "kurz", "kurz", "lang"], ["short", "x", "short", " ", "short"]]
    lines[0][4] = lines[1][4] = "short"
    lines[side][4] = "very long " * 30
    text = files(tmp_path, *lines)
    assert len(text) == 3  # two pairs have a blank side
    tokenizers = learn_tokenizers(TEXTS[0], OPTIONS)
    name = ("a.de", "a.en")[side]
    with pytest.raises(CorpusError, match=f"{name}, line 5: .*--skip-long"):
        encode(text, tokenizers, replace(OPTIONS, max_len=20))
    short = encode(text, tokenizers, replace(OPTIONS, max_len=20, skip_long=True))
    assert len(short) == 2
    with pytest.raises(CorpusError, match="no sentence is left"):
        encode(text, tokenizers, replace(OPTIONS, max_len=1, skip_long=True))


def test_tabs_and_quotes_are_text(tmp_path: Path) -> None:
    lines = ['Er sagt "ja"\tund geht.', '"', "\tein Wort"]
    text = files(tmp_path, lines, lines)
    tokenizers = learn_tokenizers(TEXTS[0], OPTIONS)
    encoded = encode(text, tokenizers, OPTIONS)
    assert [tokenizers[0].decode(source) for source, _ in encoded.pairs(range(3))] == lines


def test_lengths_and_batches() -> None:
    encoded = TokenPairs.from_lists([[4, 5], [6]], [[7], [8, 9, 10]])
    assert encoded.lengths().tolist() == [[3, 2], [2, 4]]
    batch = encoded.batch([1, 0])
    assert batch.src.tolist() == [[6, EOS, 0], [4, 5, EOS]]
    assert batch.ntokens == 6


def numbered_pairs() -> TokenPairs:
    """Return twenty pairs of one to five source tokens."""
    return TokenPairs.from_lists(
        [[4] * (n % 5 + 1) for n in range(20)], [[n + 4] for n in range(20)]
    )


@contextlib.contextmanager
def watched_epochs() -> Iterator[list[int]]:
    """Collect the epochs that are put in order, without those of the validation text."""
    asked: list[int] = []

    def watched(*arguments: Any, **named: Any) -> Any:
        if named.get("shuffle", True):
            asked.append(named["epoch"])
        return token_batches(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "token_batches", watched)
        yield asked


@settings(max_examples=20)
@given(done=st.integers(0, 12), accumulate=st.integers(1, 4), seed=st.integers(0, 3))
def test_updates_to_come_are_those_after_the_ones_done(
    done: int, accumulate: int, seed: int
) -> None:
    encoded = numbered_pairs()
    options = Training(updates=12, max_tokens=12, accumulate=accumulate, seed=seed)
    every = list(updates_to_come(encoded, options, 0))
    rest = list(updates_to_come(encoded, options, done))
    assert len(every) == 12
    assert len(rest) == 12 - done
    for (epoch, left, batches), other in zip(every[done:], rest, strict=True):
        assert (epoch, left) == other[:2]
        assert all(map(torch.equal, batches, other[2]))
    first = [update for update in every if update[0] == 0]
    if every[-1][0] > 0:  # a whole epoch: each sentence once
        assert [left for _, left, _ in first] == list(range(len(first)))[::-1]
        seen = [i for *_, groups in first for numbers in groups for i in numbers.tolist()]
        assert sorted(seen) == list(range(20))


# --- training ------------------------------------------------------------------


@settings(max_examples=20)
@given(done=st.integers(0, 12), accumulate=st.integers(1, 4))
def test_earlier_epochs_need_not_be_put_in_order_again(done: int, accumulate: int) -> None:
    encoded = numbered_pairs()
    options = Training(updates=12, max_tokens=24, accumulate=accumulate)
    every = list(updates_to_come(encoded, options, 0))
    epoch = every[done][0] if done < 12 else every[-1][0]
    before = sum(update[0] < epoch for update in every)
    with watched_epochs() as asked:
        rest = list(updates_to_come(encoded, options, done, (epoch, before)))
    assert len(rest) == 12 - done
    for (number, left, batches), other in zip(every[done:], rest, strict=True):
        assert (number, left) == other[:2]
        assert all(map(torch.equal, batches, other[2]))
    assert min(asked) == epoch


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Return the texts in shards."""
    folder = tmp_path_factory.mktemp("prepared")
    files = {}
    for split, text in zip(("train", "val"), TEXTS, strict=True):
        sides = zip(("de", "en"), (text.source, text.target), strict=True)
        paths = [(folder / f"{split}.{language}", side) for language, side in sides]
        for path, side in paths:
            path.write_text("".join(f"{line}\n" for line in side), encoding="utf-8")
        files[split] = [(paths[0][0], paths[1][0])]
    made = Preparation(vocabulary=OPTIONS.vocabulary, max_len=OPTIONS.max_len)
    return prepare(folder / "out", files, made, workers=1, log=lambda _: None)


SHARDED = replace(OPTIONS, corpus="prepared", updates=14, max_tokens=400)


def test_the_position_in_a_prepared_text_is_saved(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = Run(SHARDED, tmp_path / "a", prepared)
    assert straight.go(progress=False)
    for updates in (2, 6):
        with monkeypatch.context() as patch:
            stop_after(updates, patch, lambda: signal.raise_signal(signal.SIGINT))
            assert not Run(SHARDED, tmp_path / "b", prepared).go(progress=False)
    run = Run(SHARDED, tmp_path / "b", prepared)
    assert run.state["epoch"][0] > 0  # not by going through all that was before
    with watched_epochs() as asked:
        assert run.go(progress=False)
    assert weights_of(tmp_path / "a") == weights_of(tmp_path / "b")
    assert min(asked) > 0


def test_a_prepared_text_trains_as_a_text_does(prepared: Prepared, tmp_path: Path) -> None:
    run = Run(replace(SHARDED, updates=8), tmp_path, prepared)
    start = run.measure().loss
    assert start == pytest.approx(
        Run(replace(OPTIONS, updates=8), tmp_path / "t", TEXTS).measure().loss
    )
    assert run.go(progress=False)
    assert run.measure().loss < start
    assert load_system(tmp_path).fingerprint == run.system.fingerprint


def test_a_prepared_text_must_fit(prepared: Prepared, tmp_path: Path) -> None:
    for name in ("max_tokens", "max_len"):
        with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} 9: a sentence has"):
            Run(replace(SHARDED, **{name: 9}), tmp_path, prepared)
    Run(SHARDED, tmp_path, prepared)
    other = copy.copy(prepared)
    other.checksums = (*prepared.checksums[:-1], ("prepared.json", "0" * 64))
    with pytest.raises(UsageError, match="another text"):
        Run(SHARDED, tmp_path, other)


def test_a_training_leaves_a_system(straight: Run, system: System) -> None:
    curve = straight.state["curve"]
    assert straight.state["updates"] == OPTIONS.updates
    assert curve[-1]["update"] == OPTIONS.updates
    best = min(point["valid_loss"] for point in curve)
    header = load_tensors(straight.folder / "model.safetensors")[1]
    assert header["valid_loss"] == pytest.approx(best, abs=1e-4)
    assert system.training["options"]["vocabulary"] == 300
    assert system.languages == ("de", "en")
    assert list(straight.folder.rglob("*.part")) == []


def stop_after(updates: int, monkeypatch: pytest.MonkeyPatch, how: Any) -> None:
    """Do something instead of the update after so many."""
    real, count = module.update_together, itertools.count()

    def counted(*arguments: Any, **named: Any) -> Any:
        if next(count) == updates:
            how()
        return real(*arguments, **named)

    monkeypatch.setattr(module, "update_together", counted)


@pytest.mark.parametrize("updates", [0, 3, 6])
def test_ctrl_c_finishes_the_update_and_saves(
    updates: int, straight: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(updates, patch, lambda: signal.raise_signal(signal.SIGINT))
        run = Run(OPTIONS, tmp_path, TEXTS)
        assert not run.go(progress=False)
    assert run.state["updates"] == updates + 1
    torch.manual_seed(77)
    again = Run(OPTIONS, tmp_path, TEXTS)
    assert again.state["updates"] == updates + 1
    assert again.go(progress=False)
    assert weights_of(tmp_path) == weights_of(straight.folder)
    for mine, other in zip(again.state["curve"], straight.state["curve"], strict=True):
        assert mine["train_loss"] == other["train_loss"]
        assert mine["valid_loss"] == other["valid_loss"]
    models = [(folder / "model.safetensors") for folder in (tmp_path, straight.folder)]
    assert models[0].read_bytes() == models[1].read_bytes()


def test_a_crash_costs_only_what_was_not_saved(
    straight: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash() -> None:
        raise RuntimeError("power cut")

    for updates in (0, 2, 1):
        with monkeypatch.context() as patch:
            stop_after(updates, patch, crash)
            with pytest.raises(RuntimeError, match="power cut"):
                Run(OPTIONS, tmp_path, TEXTS, running=Running(save_every=0.0)).go(progress=False)
    run = Run(OPTIONS, tmp_path, TEXTS)
    assert run.state["updates"] == 3
    assert run.go(progress=False)
    assert weights_of(tmp_path) == weights_of(straight.folder)


def test_a_finished_training_stays_finished(straight: Run) -> None:
    before = weights_of(straight.folder)
    assert Run(OPTIONS, straight.folder, TEXTS).go(progress=False)
    assert weights_of(straight.folder) == before


@pytest.mark.parametrize("every", [None, 2])
def test_the_average_is_that_of_the_last_checkpoints(every: int | None, tmp_path: Path) -> None:
    seen: dict[str, dict[str, torch.Tensor]] = {}
    options = replace(OPTIONS, average=3, average_every=every, updates=20)

    class Watched(Run):
        def snapshot(self) -> None:
            super().snapshot()
            last = snapshots(self.folder)[-1]
            seen[last.stem] = {n: p.detach().clone() for n, p in weights(self.system.model).items()}

    run = Watched(options, tmp_path, TEXTS)
    assert run.go(progress=False)
    kept = snapshots(tmp_path)
    assert [path.stem for path in kept] == sorted(seen)[-3:]
    assert len(kept) > 1
    assert int(kept[-1].stem) == options.updates
    loss = run.average()
    averaged = load_system(tmp_path, weights=AVERAGED)
    for name, parameter in weights(averaged.model).items():
        mean = sum(seen[path.stem][name].double() for path in kept) / len(kept)
        torch.testing.assert_close(parameter.detach(), mean.float(), rtol=0, atol=1e-7)
    order = token_batches(run.valid.lengths(), OPTIONS.max_tokens, shuffle=False)
    exact = evaluate(averaged.model, (run.valid.batch(numbers) for numbers in order))
    assert loss == pytest.approx(exact.loss)
    assert loss != pytest.approx(run.measure().loss, abs=1e-6)


def test_interrupted_between_checkpoints_the_average_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(OPTIONS, average=2, average_every=3)
    for name, stops in (("straight", []), ("stopped", [1, 3])):
        for updates in stops:
            with monkeypatch.context() as patch:
                stop_after(updates, patch, lambda: signal.raise_signal(signal.SIGINT))
                assert not Run(options, tmp_path / name, TEXTS).go(progress=False)
        run = Run(options, tmp_path / name, TEXTS)
        assert run.go(progress=False)
        run.average()
    files = [tmp_path / name / AVERAGED for name in ("straight", "stopped")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_finished_training_goes_on_to_more_updates(straight: Run, tmp_path: Path) -> None:
    assert Run(replace(OPTIONS, updates=3), tmp_path, TEXTS).go(progress=False)
    assert Run(OPTIONS, tmp_path, TEXTS).go(progress=False)
    assert weights_of(tmp_path) == weights_of(straight.folder)
    assert load_system(tmp_path).training == straight.system.training
    with pytest.raises(UsageError, match="--updates 8, not 3"):
        Run(replace(OPTIONS, updates=3), tmp_path, TEXTS)


def test_an_interrupted_training_may_end_earlier(
    straight: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(3, patch, lambda: signal.raise_signal(signal.SIGINT))
        run = Run(replace(OPTIONS, updates=20), tmp_path, TEXTS)
        assert not run.go(progress=False)
    assert run.state["updates"] == 4
    with pytest.raises(UsageError, match="--updates 20, not 3"):
        Run(replace(OPTIONS, updates=3), tmp_path, TEXTS)
    assert Run(OPTIONS, tmp_path, TEXTS).go(progress=False)
    assert weights_of(tmp_path) == weights_of(straight.folder)
    assert load_system(tmp_path).training == straight.system.training


def test_a_training_begun_before_an_option_existed_goes_on(straight: Run, tmp_path: Path) -> None:
    shutil.copytree(straight.folder, tmp_path / "old")
    path = tmp_path / "old" / "config.json"
    data = json.loads(path.read_text())
    del data["training"]["options"]["average"]
    path.write_text(json.dumps(data))
    assert Run(OPTIONS, tmp_path / "old", TEXTS).state["updates"] == OPTIONS.updates
    with pytest.raises(UsageError, match="--average 0, not 4"):
        Run(replace(OPTIONS, average=4), tmp_path / "old", TEXTS)


def test_a_full_disk_keeps_the_checkpoint_before(
    straight: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, writes = os.fsync, itertools.count()

    def fills_up(number: int) -> None:
        if next(writes) >= 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(number)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fills_up)
        with pytest.raises(FileError, match="No space left on device; free some"):
            Run(OPTIONS, tmp_path, TEXTS, running=Running(save_every=0.0)).go(progress=False)
    assert list(tmp_path.rglob("*.part")) == []
    run = Run(OPTIONS, tmp_path, TEXTS)
    assert 0 < run.state["updates"] < OPTIONS.updates
    assert run.go(progress=False)
    assert weights_of(tmp_path) == weights_of(straight.folder)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot be written"):
        Run(OPTIONS, tmp_path / "file" / "run", TEXTS)


@pytest.mark.parametrize(
    ("change", "words"), [({"seed": 5}, "--seed 0, not 5"), ({"peak": 1e-3}, "--peak 0.005")]
)
def test_other_options_are_refused(change: dict[str, Any], words: str, straight: Run) -> None:
    with pytest.raises(UsageError, match=words) as error:
        Run(replace(OPTIONS, **change), straight.folder, TEXTS)
    assert str(straight.folder) in str(error.value)
    assert "--out" in str(error.value)


def test_another_text_is_refused(straight: Run) -> None:
    with pytest.raises(UsageError, match="another text"):
        Run(OPTIONS, straight.folder, (load_corpus("grammar", size=61), TEXTS[1]))


def test_a_damaged_training_goes_back_to_the_one_before(straight: Run, tmp_path: Path) -> None:
    assert Run(OPTIONS, tmp_path, TEXTS, running=Running(save_every=0.0, keep=3)).go(progress=False)
    older, old, new = trainings(tmp_path)
    new.write_bytes(new.read_bytes()[:-1])
    old.write_bytes(b"")
    with pytest.warns(UserWarning, match=rf"{new.name}: damaged .* going back to {older.name}"):
        run = Run(OPTIONS, tmp_path, TEXTS)
    assert run.state["updates"] == OPTIONS.updates - 2
    assert {path.suffix for path in (tmp_path / "training").iterdir()} == {
        ".damaged", ".safetensors"
    }  # fmt: skip
    assert run.go(progress=False)
    assert weights_of(tmp_path) == weights_of(straight.folder)


def test_a_training_of_which_all_is_damaged_is_refused(straight: Run, tmp_path: Path) -> None:
    shutil.copytree(straight.folder, tmp_path / "t")
    for path in trainings(tmp_path / "t"):
        path.write_bytes(path.read_bytes()[:-1])
    for _ in range(2):  # and stays so
        with pytest.raises(CheckpointError, match=r"00000008\.safetensors: damaged"):
            Run(OPTIONS, tmp_path / "t", TEXTS)


def test_a_batch_must_hold_the_longest_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--max-tokens 5: a sentence has"):
        Run(replace(OPTIONS, max_tokens=5), tmp_path / "run", TEXTS)
    assert not (tmp_path / "run").exists()


def test_words_make_two_vocabularies(tmp_path: Path) -> None:
    options = replace(OPTIONS, tokenizer="words", updates=2)
    assert Run(options, tmp_path, TEXTS).go(progress=False)
    again = load_system(tmp_path)
    assert not again.shared
    assert len(translate_lines(again, TEXTS[1].source)) == 12


def test_a_system_of_lower_case_reads_capitals(tmp_path: Path) -> None:
    options = replace(OPTIONS, tokenizer="bpe-lower", updates=2)
    assert Run(options, tmp_path, TEXTS).go(progress=False)
    again = load_system(tmp_path)
    assert again.shared
    found = translate_lines(again, ["DER MANN SCHLÄFT.", "Der Mann schläft."])
    assert found[0] == found[1] == found[0].lower()


def test_a_second_signal_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with interruption() as caught:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)  # the same, by another way
        assert caught == [signal.SIGTERM, signal.SIGINT]
        now[0] += 2
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    found: list[list[int]] = []

    def work() -> None:
        with interruption() as caught:
            found.append(caught)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [[]]


# --- translating and scoring ---------------------------------------------------


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


def test_nothing_to_translate(system: System, capsys: pytest.CaptureFixture[str]) -> None:
    assert translate_lines(system, [], progress=True) == []
    assert "line" in capsys.readouterr().err


def test_a_long_line_is_named(system: System) -> None:
    with pytest.raises(CorpusError, match=r"mine\.txt, line 3: .* more than the 127 .*split"):
        translate_lines(system, ["a", "", "wort " * 400], name="mine.txt")


def test_the_record_can_be_read_back(straight: Run, system: System) -> None:
    record = make_record(
        system, straight.state, {"val": {"bleu": 1.0}}, "the command", pairs=len(straight.train)
    )
    assert json.loads(json.dumps(record)) == record
    assert record["command"] == "the command"
    assert record["corpus"]["pairs"] == len(straight.train) > 0
    assert record["seed"] == 0
    assert record["parameters"] == sum(p.numel() for p in system.model.parameters())
    assert record["hardware"]["processor"] == processor()
    assert record["curve"] == straight.state["curve"]
    assert set(record["versions"]) >= {"torch", "python", "sacrebleu"}


def test_without_git_or_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert module.commit() == "unknown"
    monkeypatch.setattr(module.Path, "read_text", lambda *_, **__: exec("raise OSError"))
    for cores in (1, 3):
        monkeypatch.setattr(module.os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        assert processor().endswith(f", {cores} core{'s' * (cores > 1)}")


# --- how a training runs ---------------------------------------------------------


def broken(run: Run) -> None:
    """Let the next losses be no numbers."""
    with torch.no_grad():
        run.system.model.generator.proj.bias.fill_(float("nan"))


def test_a_loss_that_is_no_number_stops_and_can_be_seen_again(tmp_path: Path) -> None:
    run = Run(OPTIONS, tmp_path, TEXTS)
    broken(run)
    before = [p.detach().clone() for p in run.system.model.parameters()]
    with pytest.raises(
        NonFiniteError, match=r"update 1, epoch 1, lines [\d, ]+.*: the loss of"
    ) as e:
        run.go(progress=False)
    (path,) = (tmp_path / "non_finite").iterdir()
    assert path.name in str(e.value)
    for a, b in zip(before, run.system.model.parameters(), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
    lines = load_tensors(path)[1]["lines"]
    groups = next(iter(updates_to_come(run.train, OPTIONS, 0)))[2]
    assert lines == sorted(i + 1 for numbers in groups for i in numbers)
    assert all(math.isnan(number) for number in replay(path))


def test_a_kept_update_is_computed_again_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, seen = Run(OPTIONS, tmp_path, TEXTS), []
    real = module.update_together

    def fails(*arguments: Any, **named: Any) -> Any:
        random = torch.get_rng_state()
        with torch.no_grad():
            twin = copy.deepcopy(arguments[0])
        made, norm = real(twin, arguments[1], make_adam(twin.model), run.world, None, 0.1)
        seen.append(norm)
        torch.set_rng_state(random)
        torch.rand(5)  # whatever was drawn in the update
        raise NonFiniteError(math.inf, norm, made.tokens)

    monkeypatch.setattr(module, "update_together", fails)
    with pytest.raises(NonFiniteError):
        run.go(progress=False)
    (path,) = (tmp_path / "non_finite").iterdir()
    torch.manual_seed(77)
    loss, norm = replay(path)
    assert math.isfinite(loss)
    assert norm == pytest.approx(seen[0], rel=1e-6)


def test_losses_that_are_no_number_are_left_out_but_not_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, count = module.update_together, itertools.count(1)

    def sometimes(*arguments: Any, **named: Any) -> Any:
        if next(count) in (2, 3):
            raise NonFiniteError(math.nan, math.nan, 9)
        return real(*arguments, **named)

    running = Running(non_finite="skip", log_every=4)
    with monkeypatch.context() as patch:
        patch.setattr(module, "update_together", sometimes)
        run = Run(OPTIONS, tmp_path / "a", TEXTS, running=running)
        with pytest.warns(UserWarning, match="left out: update 2, epoch 1, lines"):
            assert run.go(progress=False)
    assert run.schedule.last_epoch == run.state["updates"] == OPTIONS.updates
    assert [row["skipped"] for row in read_journal(tmp_path / "a/log.jsonl")] == [2, 0]
    run = Run(replace(OPTIONS, updates=40), tmp_path / "b", TEXTS, running=running)
    broken(run)
    with pytest.warns(UserWarning, match="left out"), pytest.raises(NonFiniteError):
        run.go(progress=False)
    assert run.state["updates"] == module.MOST_SKIPPED - 1


def test_the_log_adds_up(tmp_path: Path) -> None:
    run = Run(OPTIONS, tmp_path, TEXTS, running=Running(log_every=3))
    assert run.go(progress=False)
    rows = read_journal(tmp_path / "log.jsonl")
    assert [row["update"] for row in rows] == [3, 6, 8]
    tokens = [
        sum(run.train.batch(numbers).ntokens for numbers in groups)
        for *_, groups in updates_to_come(run.train, OPTIONS, 0)
    ]
    assert [row["tokens"] for row in rows] == [
        sum(tokens[a:b]) for a, b in ((0, 3), (3, 6), (6, 8))
    ]
    assert sum(tokens) == run.state["tokens"]
    for row in rows:
        assert row["rate"] == pytest.approx(
            rate(int(row["update"]), 128, OPTIONS.peak * (128 * 4) ** 0.5, 4)
        )
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert "share_of_peak" not in row  # of a processor that is in no table


def test_checkpoints_are_few_and_steps_can_be_counted(tmp_path: Path) -> None:
    running = Running(save_every=0.0, keep=3, steps=5)
    run = Run(OPTIONS, tmp_path, TEXTS, running=running)
    assert not run.go(progress=False)
    assert run.stopped is None
    assert [int(path.stem) for path in trainings(tmp_path)] == [3, 4, 5]
    assert Run(OPTIONS, tmp_path, TEXTS, running=running).go(progress=False)
    assert [int(path.stem) for path in trainings(tmp_path)] == [6, 7, 8]


def test_saving_takes_a_small_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def save() -> None:
        now[0] += 10

    clock, saving = module.SaveClock(60.0), 0.0
    for _ in range(10_000):
        now[0] += 1
        if clock.due():
            clock.measure(save)
            saving += 10
    assert 0.04 < saving / now[0] < 0.06
    assert not module.SaveClock(60.0).due()


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_a_training_in_sixteen_bits_resumes_to_the_bit(name: Any, tmp_path: Path) -> None:
    options = replace(OPTIONS, precision=name, clip=0.5, updates=5)
    straight = Run(options, tmp_path / "a", TEXTS)
    assert straight.go(progress=False)
    assert not Run(options, tmp_path / "b", TEXTS, running=Running(steps=2)).go(progress=False)
    assert Run(options, tmp_path / "b", TEXTS).go(progress=False)
    assert weights_of(tmp_path / "a") == weights_of(tmp_path / "b")
    with pytest.raises(UsageError, match=f"has --precision {name}, not float32"):
        Run(replace(options, precision="float32"), tmp_path / "a", TEXTS)


def test_what_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--precision tf32: needs an NVIDIA GPU"):
        Run(replace(OPTIONS, precision="tf32"), tmp_path / "a", TEXTS)
    with pytest.raises(UsageError, match="--pieces of a model: for several processes"):
        Run(OPTIONS, tmp_path / "b", TEXTS, running=Running(pieces=True))
    with pytest.raises(UsageError, match="--clip 0"):
        Run(replace(OPTIONS, clip=0.0), tmp_path / "c", TEXTS)


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"keep": 0}, "--keep 0"),
        ({"log_every": 0}, "--log-every 0"),
        ({"steps": 0}, "--steps 0"),
        ({"save_every": -1.0}, "--save-every -1"),
        ({"save_every": float("nan")}, "--save-every nan"),
    ],
)
def test_ways_of_running_that_cannot_work(
    change: dict[str, Any], flag: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=flag):
        Run(OPTIONS, tmp_path / "run", TEXTS, running=Running(**change))
    assert not (tmp_path / "run").exists()


def test_tensorboard_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    run = Run(OPTIONS, tmp_path, TEXTS, running=Running(tensorboard=tmp_path / "board"))
    with pytest.raises(UsageError, match=r"--tensorboard: .* pip install tensorboard"):
        run.go(progress=False)


def test_a_log_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.Journal, "write", full)
    run = Run(OPTIONS, tmp_path, TEXTS, running=Running(log_every=2))
    with pytest.raises(CheckpointError, match=r"log\.jsonl: cannot be written: No space left"):
        run.go(progress=False)


def test_a_training_of_an_older_version_is_left_alone(straight: Run, tmp_path: Path) -> None:
    shutil.copytree(straight.folder, tmp_path / "old")
    newest = trainings(tmp_path / "old")[-1]
    newest.rename(tmp_path / "old/training.safetensors")
    shutil.rmtree(tmp_path / "old/training")
    before = (tmp_path / "old/model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="was written by an older version"):
        Run(OPTIONS, tmp_path / "old", TEXTS)
    assert (tmp_path / "old/model.safetensors").read_bytes() == before


def test_the_pace_leaves_validation_out(straight: Run) -> None:
    validated = straight.state["seconds"] - straight.state["update_seconds"]
    assert straight.state["update_seconds"] > 0
    assert validated > 0
