"""A run goes on where it stopped, to the bit, whatever stopped it; and it leaves a system."""

import copy
import errno
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from annotated_transformer.data.corpora import Preparation, load_corpus
from annotated_transformer.data.files import FileError
from annotated_transformer.data.prepare import prepare_corpus
from annotated_transformer.data.prepared import Prepared
from annotated_transformer.data.tensors import save_tensors
from annotated_transformer.engine import checkpointer, texts, trainer, updater
from annotated_transformer.engine.checkpointer import (
    SaveClock,
    checkpoint_paths,
    read_checkpoint,
    read_state,
)
from annotated_transformer.engine.checkpoints import (
    AVERAGED,
    BEST,
    WEIGHTS,
    CheckpointError,
    average_system,
    best_weights,
    json_with_digest,
    list_snapshots,
    load_system,
    load_tensors,
    weights_of,
)
from annotated_transformer.engine.config import ModelOptions, UsageError
from annotated_transformer.engine.interruption import collect_signals, defer_signals, handle_signals
from annotated_transformer.engine.journal import Journal, read_journal
from annotated_transformer.engine.precision import PreciseLoss
from annotated_transformer.engine.system import System, translate_lines
from annotated_transformer.engine.texts import Texts, updates_to_come
from annotated_transformer.engine.trainer import Trainer, choose_precision
from annotated_transformer.engine.updater import prefetch_items, replay_update
from annotated_transformer.fast import loss as fast_loss
from annotated_transformer.model.complexity import training_flops
from annotated_transformer.model.transformer import ModelConfig
from annotated_transformer.training import loop
from annotated_transformer.training.batches import Batch
from annotated_transformer.training.distributed import DistributedWorld
from annotated_transformer.training.loop import ALONE, NonFiniteError, evaluate
from annotated_transformer.training.optimizer import make_adam, rate
from tests.engine.small import OPTIONS, TEXTS, bits_of

# --- training ------------------------------------------------------------------


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
    data = OPTIONS.data
    made = Preparation(vocabulary=data.vocabulary, max_len=data.max_len)
    return prepare_corpus(folder / "out", files, made, workers=1, shard_size=16)


SHARDED = OPTIONS.replace(corpus="prepared", updates=14, max_tokens=400)


def test_the_position_in_a_prepared_text_is_saved(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = Trainer(SHARDED, tmp_path / "a", prepared)
    assert straight.train(progress=False)
    for updates in (2, 6):
        with monkeypatch.context() as patch:
            stop_after(updates, patch, lambda: signal.raise_signal(signal.SIGINT))
            assert not Trainer(SHARDED, tmp_path / "b", prepared).train(progress=False)
    run = Trainer(SHARDED, tmp_path / "b", prepared)
    assert run.state.epoch > 0  # not by going through all that was before
    asked: list[int] = []
    order = vars(texts)["token_batches"]

    def watched(*arguments: Any, **named: Any) -> Any:
        asked.append(named["epoch"])
        return order(*arguments, **named)

    monkeypatch.setattr(texts, "token_batches", watched)
    assert run.train(progress=False)
    assert bits_of(tmp_path / "a") == bits_of(tmp_path / "b")
    assert min(asked) > 0


def test_a_prepared_text_trains_as_a_text_does(prepared: Prepared, tmp_path: Path) -> None:
    run = Trainer(SHARDED.replace(updates=8), tmp_path, prepared)
    start = measured(run)
    assert start == pytest.approx(
        measured(Trainer(OPTIONS.replace(updates=8), tmp_path / "t", TEXTS))
    )
    assert run.train(progress=False)
    assert measured(run) < start
    assert load_system(tmp_path).fingerprint == run.system.fingerprint


def test_from_the_disk_and_from_memory_the_weights_are_the_same(
    prepared: Prepared, tmp_path: Path
) -> None:
    assert Trainer(SHARDED, tmp_path / "a", prepared).train(progress=False)
    assert Trainer(SHARDED.replace(corpus="files"), tmp_path / "b", TEXTS).train(progress=False)
    assert bits_of(tmp_path / "a") == bits_of(tmp_path / "b")


def test_a_prepared_text_must_fit(prepared: Prepared, tmp_path: Path) -> None:
    for name in ("max_tokens", "max_len"):
        with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} 9: a sentence has"):
            Trainer(SHARDED.replace(**{name: 9}), tmp_path, prepared)
    assert not Trainer(SHARDED.replace(steps=1), tmp_path, prepared).train(progress=False)
    other = copy.copy(prepared)
    other.checksums = (*prepared.checksums[:-1], ("prepared.json", "0" * 64))
    with pytest.raises(UsageError, match="another text"):
        Trainer(SHARDED, tmp_path, other)


def test_a_training_leaves_a_system(straight: Trainer, system: System) -> None:
    curve = straight.state.curve
    assert straight.state.updates == OPTIONS.optim.updates
    assert curve[-1].update == OPTIONS.optim.updates
    best = min(point.valid_loss for point in curve)
    header = load_tensors(straight.folder / "model.safetensors")[1]
    assert header["valid_loss"] == pytest.approx(best, abs=1e-4)
    assert system.training["options"]["vocabulary"] == 300
    assert system.languages == ("de", "en")
    assert list(straight.folder.rglob("*.part")) == []


def log_of(folder: Path) -> list[dict[str, float]]:
    """Return the lines of a log that tell of updates."""
    return [row for row in read_journal(folder / "log.jsonl") if "loss" in row]


def measured(run: Trainer) -> float:
    """Return the validation loss of what is trained."""
    return run.validator.measure(run.updater.replica).loss


def stop_after(updates: int, monkeypatch: pytest.MonkeyPatch, how: Any) -> None:
    """Do something instead of the update after so many."""
    real, count = vars(updater)["update"], itertools.count()

    def counted(*arguments: Any, **named: Any) -> Any:
        if next(count) == updates:
            how()
        return real(*arguments, **named)

    monkeypatch.setattr(updater, "update", counted)


@pytest.mark.parametrize("updates", [0, 3, 6])
def test_ctrl_c_finishes_the_update_and_saves(
    updates: int, straight: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(updates, patch, lambda: signal.raise_signal(signal.SIGINT))
        run = Trainer(OPTIONS, tmp_path, TEXTS)
        assert not run.train(progress=False)
    assert run.state.updates == updates + 1
    torch.manual_seed(77)
    again = Trainer(OPTIONS, tmp_path, TEXTS)
    assert again.state.updates == updates + 1
    assert again.train(progress=False)
    assert bits_of(tmp_path) == bits_of(straight.folder)
    for mine, other in zip(again.state.curve, straight.state.curve, strict=True):
        assert mine.train_loss == other.train_loss
        assert mine.valid_loss == other.valid_loss
    models = [(folder / "model.safetensors") for folder in (tmp_path, straight.folder)]
    assert models[0].read_bytes() == models[1].read_bytes()


def test_a_crash_costs_only_what_was_not_saved(
    straight: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash() -> None:
        raise RuntimeError("power cut")

    for updates in (0, 2, 1):
        with monkeypatch.context() as patch:
            stop_after(updates, patch, crash)
            with pytest.raises(RuntimeError, match="power cut"):
                Trainer(OPTIONS.replace(save_every=0.0), tmp_path, TEXTS).train(progress=False)
    run = Trainer(OPTIONS, tmp_path, TEXTS)
    assert run.state.updates == 3
    assert run.train(progress=False)
    assert bits_of(tmp_path) == bits_of(straight.folder)


def test_a_finished_training_stays_finished(straight: Trainer) -> None:
    before = bits_of(straight.folder)
    assert Trainer(OPTIONS, straight.folder, TEXTS).train(progress=False)
    assert bits_of(straight.folder) == before


@pytest.mark.parametrize("every", [None, 2])
def test_the_average_is_that_of_the_last_snapshots(
    every: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, dict[str, torch.Tensor]] = {}
    options = OPTIONS.replace(average=3, average_every=every, updates=20)

    class Watched(checkpointer.Checkpointer):
        def snapshot(self, system: System, update: int, keep: int) -> None:
            super().snapshot(system, update, keep)
            last = list_snapshots(self.folder)[-1]
            seen[last.stem] = {n: p.clone() for n, p in weights_of(system.model).items()}

    monkeypatch.setattr(trainer, "Checkpointer", Watched)
    run = Trainer(options, tmp_path, TEXTS)
    assert run.train(progress=False)
    kept = list_snapshots(tmp_path)
    assert [path.stem for path in kept] == sorted(seen)[-3:]
    assert len(kept) > 1
    assert int(kept[-1].stem) == options.optim.updates
    header = load_tensors(tmp_path / AVERAGED)[1]
    assert header["checkpoints"] == [path.stem for path in kept]
    averaged = load_system(tmp_path, weights=AVERAGED)
    for name, parameter in weights_of(averaged.model).items():
        mean = torch.stack([seen[path.stem][name].double() for path in kept]).mean(0)
        torch.testing.assert_close(parameter.detach(), mean.float(), rtol=0, atol=1e-7)
    exact = evaluate(averaged.model, run.validator.batches(ALONE)).loss
    assert (
        run.validator.average(tmp_path)
        == pytest.approx(header["valid_loss"])
        == pytest.approx(exact)
    )
    assert exact != pytest.approx(measured(run), abs=1e-6)


def test_weights_from_a_lost_future_are_not_averaged(tmp_path: Path) -> None:
    options = OPTIONS.replace(average=4, average_every=2, save_every=1e6)
    assert not Trainer(options.replace(steps=4), tmp_path, TEXTS).train(progress=False)
    for number in (3, 6, 99):  # as a run leaves them that is killed before its next checkpoint
        shutil.copy(list_snapshots(tmp_path)[0], tmp_path / f"snapshots/{number:08d}.safetensors")
    assert Trainer(options.replace(updates=5), tmp_path, TEXTS).train(progress=False)
    assert [int(path.stem) for path in list_snapshots(tmp_path)] == [2, 3, 4, 5]


def test_the_better_weights_are_taken(tmp_path: Path) -> None:
    run = Trainer(OPTIONS.replace(average=2, average_every=2), tmp_path, TEXTS)
    assert run.train(progress=False)
    losses = {name: load_tensors(tmp_path / name)[1]["valid_loss"] for name in (WEIGHTS, AVERAGED)}
    assert run.state.best == losses[WEIGHTS]
    better = min(losses, key=losses.__getitem__)
    assert best_weights(tmp_path) == better
    for wanted in (WEIGHTS, AVERAGED):  # whatever the losses say
        for name in losses:
            tensors, data = load_tensors(tmp_path / name)
            data["valid_loss"] = 1.0 if name == wanted else 2.0
            save_tensors(tmp_path / name, {n: t.clone() for n, t in tensors.items()}, data)
        assert best_weights(tmp_path) == wanted
        own, best = (load_system(tmp_path, weights=w).model for w in (wanted, BEST))
        assert all(map(torch.equal, own.parameters(), best.parameters()))
    average_system(tmp_path)  # the same mean, by the command: its loss is known
    assert best_weights(tmp_path) == AVERAGED
    average_system(tmp_path, 1)  # another one: nobody knows its loss
    assert best_weights(tmp_path) == WEIGHTS


def test_interrupted_between_checkpoints_the_average_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = OPTIONS.replace(average=2, average_every=3)
    for name, stops in (("straight", []), ("stopped", [1, 3])):
        for updates in stops:
            with monkeypatch.context() as patch:
                stop_after(updates, patch, lambda: signal.raise_signal(signal.SIGINT))
                assert not Trainer(options, tmp_path / name, TEXTS).train(progress=False)
        assert Trainer(options, tmp_path / name, TEXTS).train(progress=False)
    means = [tmp_path / name / AVERAGED for name in ("straight", "stopped")]
    assert means[0].read_bytes() == means[1].read_bytes()


def test_a_signal_during_the_last_update_is_no_end(
    straight: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is saved; averaging and scoring are left to the same command."""
    options = OPTIONS.replace(average=1, average_every=3)
    with monkeypatch.context() as patch:
        stop_after(7, patch, lambda: signal.raise_signal(signal.SIGTERM))
        run = Trainer(options, tmp_path, TEXTS)
        assert not run.train(progress=False)
    assert (run.stopped, run.state.updates) == (signal.SIGTERM, 8)
    assert not (tmp_path / AVERAGED).exists()
    assert run.train(progress=False)
    assert run.stopped is None
    assert (tmp_path / AVERAGED).exists()
    assert bits_of(tmp_path) == bits_of(straight.folder)


def test_a_finished_training_goes_on_to_more_updates(straight: Trainer, tmp_path: Path) -> None:
    assert Trainer(OPTIONS.replace(updates=3), tmp_path, TEXTS).train(progress=False)
    assert Trainer(OPTIONS, tmp_path, TEXTS).train(progress=False)
    assert bits_of(tmp_path) == bits_of(straight.folder)
    assert load_system(tmp_path).training == straight.system.training
    with pytest.raises(UsageError, match="--updates 8, not 3"):
        Trainer(OPTIONS.replace(updates=3), tmp_path, TEXTS)


def test_an_interrupted_training_may_end_earlier(
    straight: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(3, patch, lambda: signal.raise_signal(signal.SIGINT))
        run = Trainer(OPTIONS.replace(updates=20), tmp_path, TEXTS)
        assert not run.train(progress=False)
    assert run.state.updates == 4
    for fewer in (3, 4):  # the end of a run of four updates would be missing
        with pytest.raises(UsageError, match=f"--updates 20, not {fewer}"):
            Trainer(OPTIONS.replace(updates=fewer), tmp_path, TEXTS)
    assert Trainer(OPTIONS, tmp_path, TEXTS).train(progress=False)
    assert bits_of(tmp_path) == bits_of(straight.folder)
    assert load_system(tmp_path).training == straight.system.training


def test_a_training_begun_before_an_option_existed_goes_on(
    straight: Trainer, tmp_path: Path
) -> None:
    shutil.copytree(straight.folder, tmp_path / "old")
    path = tmp_path / "old" / "config.json"
    data = json.loads(path.read_text())
    del data["training"]["options"]["average"], data["sha256"]
    path.write_bytes(json_with_digest(data))
    assert Trainer(OPTIONS, tmp_path / "old", TEXTS).state.updates == OPTIONS.optim.updates
    path.write_bytes(json_with_digest(data))
    with pytest.raises(UsageError, match="--average 0, not 4"):
        Trainer(OPTIONS.replace(average=4), tmp_path / "old", TEXTS)


def test_a_full_disk_keeps_the_checkpoint_before(
    straight: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, writes = os.fsync, itertools.count()

    def fills_up(number: int) -> None:
        if next(writes) >= 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(number)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fills_up)
        with pytest.raises(FileError, match="No space left on device; free some"):
            Trainer(OPTIONS.replace(save_every=0.0), tmp_path, TEXTS).train(progress=False)
    assert list(tmp_path.rglob("*.part")) == []
    run = Trainer(OPTIONS, tmp_path, TEXTS)
    assert 0 < run.state.updates < OPTIONS.optim.updates
    assert run.train(progress=False)
    assert bits_of(tmp_path) == bits_of(straight.folder)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "run", tmp_path / "file"):
        with pytest.raises(FileError, match=r"be written: .*; choose another folder") as error:
            Trainer(OPTIONS, place, TEXTS)
        assert "space" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"), [({"seed": 5}, "--seed 0, not 5"), ({"peak": 1e-3}, "--peak 0.005")]
)
def test_other_options_are_refused(change: dict[str, Any], words: str, straight: Trainer) -> None:
    with pytest.raises(UsageError, match=words) as error:
        Trainer(OPTIONS.replace(**change), straight.folder, TEXTS)
    assert str(straight.folder) in str(error.value)
    assert "--out" in str(error.value)


def test_another_text_is_refused(straight: Trainer) -> None:
    with pytest.raises(UsageError, match="another text"):
        Trainer(OPTIONS, straight.folder, (load_corpus("grammar", size=61), TEXTS[1]))


def test_files_of_one_name_and_their_order_are_told_apart(tmp_path: Path) -> None:
    def named(first: str, second: str, *names: str) -> Texts:
        digests = tuple(zip(names, (first, second), strict=True))
        return replace(TEXTS[0], checksums=digests), TEXTS[1]

    for folder, names in (("one", ("train.txt", "train.txt")), ("two", ("x.txt", "y.txt"))):
        run = Trainer(OPTIONS.replace(steps=1), tmp_path / folder, named("a", "b", *names))
        assert not run.train(progress=False)
        others = [named("c", "b", *names), named("b", "a", *names[::-1])]
        for other in others:
            with pytest.raises(UsageError, match="another text"):
                Trainer(OPTIONS, tmp_path / folder, other)
        Trainer(OPTIONS, tmp_path / folder, named("a", "b", *names)).files.release()


def test_a_program_with_the_newer_setting_of_precision_trains(tmp_path: Path) -> None:
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert Trainer(OPTIONS, tmp_path, TEXTS).train(progress=False)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_another_validation_text_is_refused(straight: Trainer) -> None:
    """Its losses would stand in one curve with the others."""
    texts = TEXTS[0], load_corpus("grammar", split="test", size=7)
    with pytest.raises(UsageError, match="other validation text; give the same"):
        Trainer(OPTIONS, straight.folder, texts)
    now = straight.system.training
    older = {name: value for name, value in now.items() if name != "valid"}
    assert older != now
    trainer.check_same(older, now, straight.folder, 0)


def test_a_damaged_training_goes_back_to_the_one_before(straight: Trainer, tmp_path: Path) -> None:
    assert Trainer(OPTIONS.replace(save_every=0.0, keep=3), tmp_path, TEXTS).train(progress=False)
    older, old, new = checkpoint_paths(tmp_path)
    new.write_bytes(new.read_bytes()[:-1])
    old.write_bytes(b"")
    with pytest.warns(UserWarning, match=rf"damaged .* resuming from {older.name}") as told:
        run = Trainer(OPTIONS, tmp_path, TEXTS)
    assert [path.name in str(w.message) for path, w in zip((new, old), told, strict=True)] == [1, 1]
    assert run.state.updates == OPTIONS.optim.updates - 2
    assert {path.suffix for path in (tmp_path / "training").iterdir()} == {
        ".damaged", ".safetensors"
    }  # fmt: skip
    assert run.train(progress=False)
    assert bits_of(tmp_path) == bits_of(straight.folder)


def test_a_training_of_which_all_is_damaged_is_refused(straight: Trainer, tmp_path: Path) -> None:
    shutil.copytree(straight.folder, tmp_path / "t")
    for path in checkpoint_paths(tmp_path / "t"):
        path.write_bytes(path.read_bytes()[:-1])
    for _ in range(2):  # and stays so
        with pytest.raises(CheckpointError, match=r"00000008\.safetensors: damaged"):
            Trainer(OPTIONS, tmp_path / "t", TEXTS)


def test_a_batch_must_hold_the_longest_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--max-tokens 5: a sentence has"):
        Trainer(OPTIONS.replace(max_tokens=5), tmp_path / "run", TEXTS)
    assert not (tmp_path / "run").exists()


def test_words_make_two_vocabularies(tmp_path: Path) -> None:
    options = OPTIONS.replace(tokenizer="words", updates=2)
    assert Trainer(options, tmp_path, TEXTS).train(progress=False)
    again = load_system(tmp_path)
    assert not again.shared
    assert len(translate_lines(again, TEXTS[1].source)) == 12


def test_a_system_of_lower_case_reads_capitals(tmp_path: Path) -> None:
    options = OPTIONS.replace(tokenizer="bpe-lower", updates=2)
    assert Trainer(options, tmp_path, TEXTS).train(progress=False)
    again = load_system(tmp_path)
    assert again.shared
    found = translate_lines(again, ["DER MANN SCHLÄFT.", "Der Mann schläft."])
    assert found[0] == found[1] == found[0].lower()


def test_a_second_signal_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGINT)
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with collect_signals() as caught:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)  # the same, by another way
        assert caught == [signal.SIGTERM, signal.SIGINT]
        now[0] += 2
        with pytest.raises(KeyboardInterrupt) as ended:
            signal.raise_signal(signal.SIGTERM)
        assert ended.value.args == (signal.SIGTERM,)
    assert signal.getsignal(signal.SIGINT) is before


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    found: list[list[int]] = []

    def work() -> None:
        with collect_signals() as caught:
            found.append(caught)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [[]]


# --- how a training runs ---------------------------------------------------------


def bias_of(run: Trainer) -> torch.nn.Parameter:
    """Return the generator's bias."""
    return run.system.model.get_parameter("generator.proj.bias")


def broken(run: Trainer) -> None:
    """Let the next losses be no numbers."""
    with torch.no_grad():
        bias_of(run).fill_(float("nan"))


def test_a_loss_that_is_no_number_stops_and_can_be_seen_again(tmp_path: Path) -> None:
    run = Trainer(OPTIONS, tmp_path, TEXTS)
    broken(run)
    before = [p.detach().clone() for p in run.system.model.parameters()]
    with pytest.raises(
        NonFiniteError, match=r"update 1, epoch 1, lines [\d, ]+.*: the loss of"
    ) as e:
        run.train(progress=False)
    (path,) = (tmp_path / "non_finite").iterdir()
    assert path.name in str(e.value)
    for a, b in zip(before, run.system.model.parameters(), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
    lines = load_tensors(path)[1]["lines"]
    groups = next(iter(updates_to_come(run.pairs, OPTIONS.optim, 0)))[2]
    assert lines == sorted(i + 1 for numbers in groups for i in numbers)
    assert all(math.isnan(number) for number in replay_update(path))


def test_a_kept_update_is_computed_again_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, seen = Trainer(OPTIONS, tmp_path, TEXTS), []
    real = vars(updater)["update"]

    def fails(replica: PreciseLoss, batches: Any, *_: Any, loss: Any, **__: Any) -> Any:
        random = torch.get_rng_state()
        twin = copy.deepcopy(run.system.model)
        made = real(PreciseLoss(twin), batches, make_adam(twin), None, 0.1, loss=loss)
        seen.append(made.grad_norm)
        torch.set_rng_state(random)
        torch.rand(5)  # whatever was drawn in the update
        raise NonFiniteError(math.inf, made.grad_norm, made.tokens)

    monkeypatch.setattr(updater, "update", fails)
    with pytest.raises(NonFiniteError):
        run.train(progress=False)
    (path,) = (tmp_path / "non_finite").iterdir()
    torch.manual_seed(77)
    loss, norm = replay_update(path)
    assert math.isfinite(loss)
    assert norm == seen[0]


def test_losses_that_are_no_number_are_left_out_but_not_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, count = vars(updater)["update"], itertools.count(1)

    def sometimes(*arguments: Any, **named: Any) -> Any:
        if next(count) in (2, 3):
            raise NonFiniteError(math.nan, math.nan, 9)
        return real(*arguments, **named)

    running = dict(non_finite="skip", log_every=4)
    with monkeypatch.context() as patch:
        patch.setattr(updater, "update", sometimes)
        run = Trainer(OPTIONS.replace(**running), tmp_path / "a", TEXTS)
        with pytest.warns(UserWarning, match="skipped: update [23], epoch 1, lines"):
            assert run.train(progress=False)
    assert run.updater.schedule.last_epoch == run.state.updates == OPTIONS.optim.updates
    assert [row["skipped"] for row in log_of(tmp_path / "a")] == [2, 0]
    flops = [training_flops_of(run, [1, 4]), training_flops_of(run, [5, 6, 7, 8])]
    assert run.state.flops == sum(flops)  # of what was made
    run = Trainer(OPTIONS.replace(updates=40).replace(**running), tmp_path / "b", TEXTS)
    broken(run)
    with pytest.warns(UserWarning, match="skipped"), pytest.raises(NonFiniteError):
        run.train(progress=False)
    assert run.state.updates == updater.MOST_SKIPPED - 1


def training_flops_of(run: Trainer, updates: list[int]) -> int:
    """Return the operations of some updates, counted from 1."""
    coming = updates_to_come(run.pairs, OPTIONS.optim, 0)
    groups = [torch.cat(list(each)).long() for *_, each in coming]
    chosen = torch.cat([groups[update - 1] for update in updates])
    lengths = run.pairs.lengths()[chosen].T.tolist()
    assert isinstance(run.system.config, ModelConfig)
    return training_flops(run.system.config, len(run.system.tokenizers[1]), *lengths)


def test_the_log_adds_up(tmp_path: Path) -> None:
    run = Trainer(OPTIONS.replace(log_every=3), tmp_path, TEXTS)
    assert run.train(progress=False)
    rows = log_of(tmp_path)
    assert [row["update"] for row in rows] == [3, 6, 8]
    validated = [row for row in read_journal(tmp_path / "log.jsonl") if "valid_loss" in row]
    assert [row["update"] for row in validated] == [point.update for point in run.state.curve]
    for row, point in zip(validated, run.state.curve, strict=True):
        assert row["valid_loss"] == pytest.approx(point.valid_loss, abs=1e-4)
    tokens = [
        sum(run.pairs.batch(numbers).ntokens for numbers in groups)
        for *_, groups in updates_to_come(run.pairs, OPTIONS.optim, 0)
    ]
    assert [row["tokens"] for row in rows] == [
        sum(tokens[a:b]) for a, b in ((0, 3), (3, 6), (6, 8))
    ]
    assert sum(tokens) == run.state.tokens
    for row in rows:
        assert row["rate"] == pytest.approx(rate(int(row["update"]), 32, 5e-3 * (32 * 4) ** 0.5, 4))
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert "share_of_peak" not in row  # of a processor that is in no table


def test_checkpoints_are_few_and_steps_can_be_counted(tmp_path: Path) -> None:
    running = dict(save_every=0.0, keep=3, steps=5)
    run = Trainer(OPTIONS.replace(**running), tmp_path, TEXTS)
    assert not run.train(progress=False)
    assert run.stopped is None
    assert [int(path.stem) for path in checkpoint_paths(tmp_path)] == [3, 4, 5]
    assert Trainer(OPTIONS.replace(**running), tmp_path, TEXTS).train(progress=False)
    assert [int(path.stem) for path in checkpoint_paths(tmp_path)] == [6, 7, 8]


def test_saving_takes_a_small_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def save() -> None:
        now[0] += 10

    clock, saving = SaveClock(60.0), 0.0
    for _ in range(10_000):
        now[0] += 1
        if clock.due():
            clock.measure(save)
            saving += 10
    assert 0.04 < saving / now[0] < 0.06
    assert not SaveClock(60.0).due()


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_a_training_in_sixteen_bits_resumes_to_the_bit(name: Any, tmp_path: Path) -> None:
    options = OPTIONS.replace(precision=name, clip=0.5, updates=5)
    straight = Trainer(options, tmp_path / "a", TEXTS)
    assert straight.train(progress=False)
    assert not Trainer(options.replace(steps=2), tmp_path / "b", TEXTS).train(progress=False)
    assert Trainer(options, tmp_path / "b", TEXTS).train(progress=False)
    assert bits_of(tmp_path / "a") == bits_of(tmp_path / "b")
    with pytest.raises(UsageError, match=f"with --precision {name}, not float32"):
        Trainer(options.replace(precision="float32"), tmp_path / "a", TEXTS)


def test_what_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--precision tf32: needs an NVIDIA GPU"):
        Trainer(OPTIONS.replace(precision="tf32"), tmp_path / "a", TEXTS)
    with pytest.raises(UsageError, match="--sharded: needs several processes"):
        Trainer(OPTIONS.replace(sharded=True), tmp_path / "b", TEXTS)
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="--device cuda: PyTorch finds no such device here"):
            Trainer(OPTIONS.replace(device="cuda"), tmp_path / "c", TEXTS)
    with pytest.raises(UsageError, match="--clip 0"):
        Trainer(OPTIONS.replace(clip=0.0), tmp_path / "c", TEXTS)


def test_an_apple_gpu_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    options, world = OPTIONS.replace(device="mps"), DistributedWorld()
    for there in (False, True):
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda there=there: there)
        if there:
            assert choose_precision(options, world).device.type == "mps"
        else:
            with pytest.raises(UsageError, match="--device mps: PyTorch finds no such device here"):
                choose_precision(options, world)
    with pytest.raises(UsageError, match="--device mps: several processes must run on"):
        choose_precision(options, DistributedWorld(0, 2))


class Narrow(TorchDispatchMode):
    """Has no float64, as Apple's GPUs have none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else [found]:
            assert not (isinstance(each, torch.Tensor) and each.dtype == torch.float64), func
        return found


def test_without_float64_sums_are_float32(
    straight: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (loop, fast_loss):
        monkeypatch.setattr(module, "sum_type", lambda _: torch.float32)
    run = Trainer(OPTIONS, tmp_path, TEXTS)
    with Narrow():
        run.updater.make_update(run.state, *first_update(run))
        measured(run)
    assert run.state.tokens > 0
    monkeypatch.undo()
    with pytest.raises(AssertionError), Narrow():
        run.updater.make_update(run.state, *first_update(run))


def first_update(run: Trainer) -> tuple[Sequence[torch.Tensor], list[Batch]]:
    """Return the pairs of the next update, and its batches."""
    groups = next(updates_to_come(run.pairs, run.options.optim, run.state.updates))[2]
    return groups, run.updater.batches(groups)


@pytest.mark.parametrize("ahead", [False, True])
def test_what_comes_is_made_one_ahead(ahead: bool) -> None:
    made: list[int] = []

    def make(n: int) -> int:
        made.append(n)
        if n == 4:
            raise FileError("damaged")
        return n * n

    stream = prefetch_items(range(6), make, ahead)
    for n in range(4):
        assert next(stream) == (n, n * n)
        end = time.monotonic() + 20
        while len(made) < n + 1 + ahead and time.monotonic() < end:
            time.sleep(0.001)
        assert made == list(range(n + 1 + ahead))
    with pytest.raises(FileError, match="damaged"):
        next(stream)
    assert list(prefetch_items([], make, ahead)) == []
    assert list(prefetch_items([2], make, ahead)) == [(2, 4)]


def test_tensorboard_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    run = Trainer(OPTIONS.replace(tensorboard=tmp_path / "board"), tmp_path, TEXTS)
    with pytest.raises(UsageError, match=r"--tensorboard: .* pip install tensorboard"):
        run.train(progress=False)


def test_a_log_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Journal, "write", full)
    run = Trainer(OPTIONS.replace(log_every=2), tmp_path, TEXTS)
    with pytest.raises(FileError, match=r"log\.jsonl: cannot be written: No space left.*; free"):
        run.train(progress=False)
    (tmp_path / "log.jsonl").unlink()
    (tmp_path / "log.jsonl").mkdir()
    with pytest.raises(FileError, match=r"log\.jsonl: cannot be written: Is a directory; choose"):
        run.train(progress=False)


def test_a_run_of_an_older_version_is_left_alone(straight: Trainer, tmp_path: Path) -> None:
    shutil.copytree(straight.folder, tmp_path / "old")
    path = tmp_path / "old/config.json"
    data = json.loads(path.read_text())
    del data["sha256"]
    path.write_text(json.dumps({**data, "format": 1}))
    before = (tmp_path / "old/model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=r"was written in format 1, but .* reads format 2"):
        Trainer(OPTIONS, tmp_path / "old", TEXTS)
    assert (tmp_path / "old/model.safetensors").read_bytes() == before


def test_the_pace_leaves_validation_out(straight: Trainer) -> None:
    validated = straight.state.seconds - straight.state.update_seconds
    assert straight.state.update_seconds > 0
    assert validated > 0


# --- the folder ------------------------------------------------------------------------------


def test_weights_without_a_checkpoint_are_not_overwritten(
    straight: Trainer, tmp_path: Path
) -> None:
    shutil.copytree(straight.folder, tmp_path / "t")
    shutil.rmtree(tmp_path / "t/training")
    before = {path: path.read_bytes() for path in (tmp_path / "t").rglob("*") if path.is_file()}
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"model\.safetensors: exists, but .* no check"):
            Trainer(OPTIONS, tmp_path / "t", TEXTS)
        assert all(path.read_bytes() == data for path, data in before.items())
    (tmp_path / "t" / WEIGHTS).unlink()
    assert Trainer(OPTIONS, tmp_path / "t", TEXTS).train(progress=False)
    assert bits_of(tmp_path / "t") == bits_of(straight.folder)


def test_a_run_killed_between_its_first_weights_and_its_first_checkpoint_begins_again(
    straight: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(checkpointer.Checkpointer, "save", killed)
        with pytest.raises(RuntimeError, match="killed"):
            Trainer(OPTIONS, tmp_path, TEXTS).train(progress=False)
    assert (tmp_path / WEIGHTS).exists()
    run = Trainer(OPTIONS, tmp_path, TEXTS)
    assert run.state.updates == 0
    assert run.train(progress=False)
    assert bits_of(tmp_path) == bits_of(straight.folder)
    assert [path.name for path in (tmp_path / "training").iterdir()] == ["00000008.safetensors"]


def test_a_run_that_another_process_has_begun_meanwhile_is_left_alone(
    straight: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = trainer.find_system

    def slow(*arguments: Any) -> System:
        shutil.copytree(straight.folder, tmp_path / "t")
        return real(*arguments)

    monkeypatch.setattr(trainer, "find_system", slow)
    with pytest.raises(UsageError, match="another process has started a run there; try again"):
        Trainer(OPTIONS, tmp_path / "t", TEXTS)
    assert bits_of(tmp_path / "t") == bits_of(straight.folder)


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    run = Trainer(OPTIONS, tmp_path, TEXTS)
    part = tmp_path / f".{WEIGHTS}.1.part"  # of a process that is alive: it has the number 1
    part.write_bytes(b"half")
    with pytest.raises(UsageError, match="or a Trainer that has not ended") as error:
        Trainer(OPTIONS, tmp_path, TEXTS)
    assert str(tmp_path) in str(error.value)
    code = (
        "import sys; from tests.engine.small import *; "
        "from annotated_transformer.engine.trainer import Trainer\n"
        "try: Trainer(OPTIONS, sys.argv[1], TEXTS)\n"
        "except Exception as error: print(type(error).__name__)\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout.split() == ["UsageError"]
    assert part.exists()
    assert run.train(progress=False)
    assert Trainer(OPTIONS, tmp_path, TEXTS).train(progress=False)  # afterwards it is free


def test_a_folder_of_another_program_is_left_alone(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "marian"}', encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"another program, or an export; choose .*--out"):
        Trainer(OPTIONS, tmp_path, TEXTS)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert config.read_text(encoding="utf-8") == '{"model_type": "marian"}'


def test_a_run_that_fails_leaves_its_folder_free(tmp_path: Path) -> None:
    run = Trainer(OPTIONS, tmp_path, TEXTS)
    broken(run)
    with pytest.raises(NonFiniteError) as error:  # whose frames keep the run alive
        run.train(progress=False)
    assert Trainer(OPTIONS.replace(peak=1e-3), tmp_path, TEXTS).train(progress=False)
    assert error.value.tokens > 0


def test_only_what_killed_processes_of_ours_left_is_removed(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    ours = [f".{name}.{process.pid}.part" for name in (WEIGHTS, "config.json")]
    foreign = [".upload.part", ".upload.12.part", "mine.part", f".{WEIGHTS}.1.part"]
    (tmp_path / "training").mkdir()
    for folder in (tmp_path, tmp_path / "training"):
        for name in (*ours, *foreign):
            (folder / name).write_bytes(b"half")
    Trainer(OPTIONS, tmp_path, TEXTS)
    for folder in (tmp_path, tmp_path / "training"):
        assert {path.name for path in folder.glob("*.part")} == set(foreign)


OTHERS = {  # the sizes that another architecture does not have
    name: getattr(ModelOptions(), name) for name in ("d_model", "d_ff", "heads", "norm", "preset")
}


@pytest.mark.parametrize(
    "change", [{"precision": "bfloat16"}, {"seed": 3}, {**OTHERS, "architecture": "rnn"}]
)
def test_a_run_that_never_saved_does_not_refuse_a_corrected_command(
    change: dict[str, Any], straight: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        raise RuntimeError("out of memory")

    stop_after(1, monkeypatch, fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        Trainer(OPTIONS.replace(**change), tmp_path, TEXTS).train(progress=False)
    assert (tmp_path / "config.json").exists()
    monkeypatch.undo()
    assert Trainer(OPTIONS, tmp_path, TEXTS).train(progress=False)
    assert bits_of(tmp_path) == bits_of(straight.folder)
    assert load_system(tmp_path).training == straight.system.training


def test_stray_files_are_ignored(straight: Trainer, tmp_path: Path) -> None:
    assert not Trainer(OPTIONS.replace(steps=3), tmp_path, TEXTS).train(progress=False)
    for name in ("notes.txt", "best.safetensors", "00000003 copy.safetensors", "x/00000009"):
        (tmp_path / "training" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "training" / name).write_text("mine")
    run = Trainer(OPTIONS, tmp_path, TEXTS)
    assert run.state.updates == 3
    assert run.train(progress=False)
    assert bits_of(tmp_path) == bits_of(straight.folder)
    assert (tmp_path / "training/best.safetensors").read_text() == "mine"


def test_no_bit_of_a_checkpoint_can_change_unnoticed(tmp_path: Path) -> None:
    options = OPTIONS.replace(save_every=0.0, keep=2, d_model=8, d_ff=8, heads=1)
    assert not Trainer(options.replace(steps=4), tmp_path, TEXTS).train(progress=False)
    older, newer = checkpoint_paths(tmp_path)
    raw = newer.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    rng = random.Random(0)
    text = [raw.index(name) for name in (b"updates", b"flops", b"seconds", b"last_lr")]
    places = [place + rng.randrange(30) for place in text for _ in range(4)]
    places += [rng.randrange(8 + length) for _ in range(15)] + [length + 99, len(raw) - 1]
    whole = read_checkpoint(newer)
    for place in places:
        altered = bytearray(raw)
        altered[place] ^= 1 << rng.randrange(8)
        newer.write_bytes(altered)
        try:
            tensors, found = read_checkpoint(newer)
        except CheckpointError:
            continue
        assert found == whole[1]  # a space at the end of the header
        assert all(torch.equal(tensors[name], tensor) for name, tensor in whole[0].items())
    altered = bytearray(raw)
    (digit,) = re.finditer(rb"[^_]updates\W+(4)", raw)
    altered[digit.start(1)] = ord("6")
    newer.write_bytes(altered)
    with pytest.warns(UserWarning, match=f"{newer.name}: damaged .* resuming from {older.name}"):
        run = Trainer(options, tmp_path, TEXTS)
    assert run.state.updates == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("updates", "7"), ("updates", 7.5), ("updates", None), ("updates", True)),
        *(("curve", {}), ("curve", [{"update": 1}]), ("curve", [3])),
        *(("best", "low"), ("window", []), ("seconds", "1"), ("speed", 1), ("commit", 4)),
    ],
)
def test_a_state_of_a_wrong_type_is_damaged(
    name: str, value: object, straight: Trainer, tmp_path: Path
) -> None:
    shutil.copytree(straight.folder, tmp_path / "t")
    path = checkpoint_paths(tmp_path / "t")[-1]
    tensors, data = load_tensors(path)
    data["state"][name] = value
    save_tensors(path, {n: t.clone() for n, t in tensors.items()}, data)
    with pytest.raises(CheckpointError, match=rf"damaged \(state: .*{name}") as error:
        Trainer(OPTIONS, tmp_path / "t", TEXTS)
    assert "\n" not in str(error.value)
    assert read_state(tmp_path / "t") is None


def test_how_far_a_run_is_can_be_read_while_it_runs(straight: Trainer, tmp_path: Path) -> None:
    assert read_state(straight.folder) == straight.state
    assert read_state(tmp_path) is None
    Trainer(OPTIONS.replace(save_every=0.0, steps=3), tmp_path, TEXTS).train(progress=False)
    checkpoint_paths(tmp_path)[-1].write_bytes(b"half")
    state = read_state(tmp_path)
    assert state is not None
    assert state.updates == 2


def test_the_bar_shows_the_validation_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Trainer(OPTIONS.replace(updates=20), tmp_path, TEXTS)
    assert run.train()
    told = capsys.readouterr().err
    assert f"validation {run.state.curve[0].valid_loss:.3f}" in told


def test_nothing_is_shown_where_standard_streams_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    assert Trainer(OPTIONS.replace(updates=1), tmp_path, TEXTS).train()
    assert len(translate_lines(load_system(tmp_path), ["a"], progress=True)) == 1


def test_the_end_of_a_terminal_is_a_termination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(signal, "SIGHUP"):
        pytest.skip("no such signal")
    stop_after(2, monkeypatch, lambda: signal.raise_signal(signal.SIGHUP))
    run = Trainer(OPTIONS, tmp_path, TEXTS)
    assert not run.train(progress=False)
    assert (run.state.updates, run.stopped) == (3, signal.SIGHUP)
    assert [path.stem for path in checkpoint_paths(tmp_path)] == ["00000003"]


# --- precision -------------------------------------------------------------------------------


def overflowing(run: Trainer, times: float = math.inf) -> None:
    """Let the gradients of the next updates overflow, whatever the scale."""
    count = itertools.count()

    def worse(grad: torch.Tensor) -> torch.Tensor:
        return grad * math.inf if next(count) < times else grad

    bias_of(run).register_hook(worse)


def test_float16_that_always_overflows_ends_with_an_error(tmp_path: Path) -> None:
    run = Trainer(OPTIONS.replace(precision="float16", updates=60), tmp_path, TEXTS)
    before = [p.detach().clone() for p in run.system.model.parameters()]
    overflowing(run)
    with pytest.raises(NonFiniteError, match=r"update 25, .* gradient norm .*saved in"):
        run.train(progress=False)  # 15 that halve the scale to 1, then 10 without hope
    assert run.state.learned == 0
    assert all(map(torch.equal, before, run.system.model.parameters()))
    (path,) = (tmp_path / "non_finite").iterdir()
    assert load_tensors(path)[1]["scale"] == 1.0
    assert all(map(math.isfinite, replay_update(path)))  # without the hook


def test_float16_that_never_learned_is_not_called_finished(tmp_path: Path) -> None:
    run = Trainer(OPTIONS.replace(precision="float16"), tmp_path, TEXTS)
    overflowing(run)
    with pytest.raises(NonFiniteError, match="all 8 updates failed"):
        run.train(progress=False)


def test_overflows_that_end_are_forgotten(tmp_path: Path) -> None:
    run = Trainer(OPTIONS.replace(precision="float16", updates=30), tmp_path, TEXTS)
    overflowing(run, 15 + updater.MOST_SKIPPED - 1)
    with pytest.warns(UserWarning, match="24 of 30 updates changed nothing, .*; try --precision"):
        assert run.train(progress=False)
    assert run.state.learned == 30 - 15 - updater.MOST_SKIPPED + 1
    assert run.state.skipped == 0


@pytest.mark.parametrize(("every", "points"), [(3, [3, 6, 8]), (4, [4, 8]), (100, [8])])
def test_validations_come_as_often_as_asked(tmp_path: Path, every: int, points: list[int]) -> None:
    run = Trainer(OPTIONS.replace(validate_every=every), tmp_path / "straight", TEXTS)
    assert run.train(progress=False)
    assert [point.update for point in run.state.curve] == points
    options = OPTIONS.replace(validate_every=every, steps=5)
    assert not Trainer(options, tmp_path / "stopped", TEXTS).train(progress=False)
    again = Trainer(options, tmp_path / "stopped", TEXTS)  # and goes on to the same numbers
    assert again.train(progress=False)
    assert [(p.update, p.valid_loss, p.train_loss) for p in again.state.curve] == [
        (p.update, p.valid_loss, p.train_loss) for p in run.state.curve
    ]


def test_half_of_the_updates_may_overflow_without_a_warning(tmp_path: Path) -> None:
    run = Trainer(OPTIONS.replace(precision="float16"), tmp_path, TEXTS)
    overflowing(run, 4)
    assert run.train(progress=False)  # a warning would be an error here
    assert run.state.learned == 4


def test_an_update_in_tf32_can_be_computed_again_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Trainer(OPTIONS, tmp_path, TEXTS)
    broken(run)
    with pytest.raises(NonFiniteError):
        run.train(progress=False)
    (path,) = (tmp_path / "non_finite").iterdir()
    tensors, data = load_tensors(path)
    data["options"]["precision"] = "tf32"
    save_tensors(path, {n: t.clone() for n, t in tensors.items()}, data)
    with pytest.warns(UserWarning, match="precision tf32: .*; using float32 instead"):
        assert all(math.isnan(number) for number in replay_update(path))


def test_a_compiled_run_learns_as_one_that_is_not(tmp_path: Path) -> None:
    # One bucket of lengths for each split: each is compiled.
    options = OPTIONS.replace(dropout=0.0, updates=3, average=1, max_tokens=9000)
    losses = []
    for compiled in (False, True):
        folder = tmp_path / str(compiled)
        run = Trainer(options.replace(compile=compiled), folder, TEXTS, compiler="aot_eager")
        assert run.train(progress=False)
        losses.append([run.state.curve[-1].train_loss, run.state.curve[-1].valid_loss])
    assert losses[1] == pytest.approx(losses[0], abs=2e-4)


def test_what_is_undisturbed_is_done_before_the_signal_counts() -> None:
    done = []

    def work() -> None:
        with defer_signals():
            signal.raise_signal(signal.SIGTERM)
            done.append("work")
        done.append("more")

    with handle_signals(signal.default_int_handler), pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert (done, caught.value.args) == (["work"], (signal.SIGTERM,))
