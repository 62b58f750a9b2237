"""BLEU at each validation, the weights that are best by it, and runs that stop without progress."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from annotated_transformer.engine import validator
from annotated_transformer.engine.checkpointer import read_state
from annotated_transformer.engine.checkpoints import (
    AVERAGED,
    WEIGHTS,
    best_weights,
    list_snapshots,
    load_system,
    load_tensors,
)
from annotated_transformer.engine.config import Options, UsageError, check_options
from annotated_transformer.engine.journal import read_journal
from annotated_transformer.engine.state import Point, TrainState
from annotated_transformer.engine.system import translate_lines
from annotated_transformer.engine.trainer import Trainer
from annotated_transformer.training.loop import Progress, evaluate
from annotated_transformer.translation.evaluation import score
from tests.engine.small import OPTIONS, TEXTS, bits_of

EPOCH = 4  # updates of these options
LONG = OPTIONS.replace(updates=40, max_tokens=800, eval_bleu=True)
BLEU = [1.0, 3.0, 2.0, 3.0, 2.5, 9.0, 9.5, 9.6, 9.7, 9.8]  # at the end of each epoch


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[Trainer]:
    """Let validations find the BLEU above, by their number; the run is the last in the list."""
    runs: list[Trainer] = []
    monkeypatch.setattr(validator, "bleu_of", lambda *_: BLEU[len(runs[-1].state.curve)])
    return runs


def trained(folder: Path, options: Options, runs: list[Trainer]) -> Trainer:
    """Start or resume a run, and let it end."""
    runs.append(Trainer(options, folder, TEXTS))
    assert runs[-1].train(progress=False) is (options.run.steps is None)
    return runs[-1]


@pytest.mark.parametrize(("metric", "losses", "bleus"), [
    ("loss", [5, 4, 4, 3, 3.5, 3, 2], [0, 0, 0, 0, 0, 0, 0]),
    ("bleu", [5, 4, 3, 2, 1, 0.5, 0.1], [0, 1, 1, 3, 2.5, 3, 9]),
])  # fmt: skip
def test_patience_is_arithmetic(metric: str, losses: list[float], bleus: list[float]) -> None:
    """Both series improve at the first, second and fourth validation, and then at the seventh."""
    state, better, waiting = TrainState(), [], []
    for loss, bleu in zip(losses, bleus, strict=True):
        better.append(state.validated(Progress(loss, 1), bleu, metric))
        waiting.append(state.stale)
    assert better == [True, True, False, True, False, False, True]
    assert waiting == [0, 0, 1, 0, 1, 2, 0]
    assert (state.best, state.best_bleu) == (min(losses), max(bleus))
    assert not state.out_of_patience(None)
    state.stale = 2
    assert [state.out_of_patience(n) for n in (1, 2, 3)] == [True, True, False]


def test_a_run_stops_where_patience_ends(tmp_path: Path, scripted: list[Trainer]) -> None:
    """BLEU is best at the second validation, and no better at the third, fourth and fifth."""
    options = LONG.replace(best_metric="bleu", patience=3, average=2, average_every=3)
    run = trained(tmp_path, options, scripted)
    assert [point.update for point in run.state.curve] == [EPOCH * n for n in range(1, 6)]
    assert [point.valid_bleu for point in run.state.curve] == BLEU[:5]
    assert load_tensors(tmp_path / "model.safetensors")[1]["update"] == 2 * EPOCH
    assert [int(path.stem) for path in list_snapshots(tmp_path)] == [18, 20]  # the last one, too
    assert (tmp_path / AVERAGED).exists()
    log = [row for row in read_journal(tmp_path / "log.jsonl") if "loss" in row]
    assert [row["update"] for row in log] == [5 * EPOCH]  # although no line was due before
    again = trained(tmp_path, options, scripted)  # the same command has nothing to do
    assert again.state.updates == 5 * EPOCH
    assert asdict(again.state)["curve"] == asdict(run.state)["curve"]


@pytest.mark.parametrize(
    ("metric", "loss", "bleu", "better"),
    [
        ("bleu", 9.0, 3.1, True),
        ("bleu", 0.0, 2.9, False),
        ("loss", 0.0, 2.9, True),
        ("loss", 9.0, 3.1, False),
    ],
)
def test_the_average_is_compared_by_the_metric_of_the_run(
    metric: str, loss: float, bleu: float, *, better: bool, tmp_path: Path,
    scripted: list[Trainer], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The best checkpoint has BLEU 3; of the average, loss and BLEU say opposite things."""
    found = [*BLEU[:4], bleu]

    def loss_of(*words: Any, **options: Any) -> Progress:
        return evaluate(*words, **options) if "world" in options else Progress(loss, 1)

    monkeypatch.setattr(validator, "bleu_of", lambda *_: found[len(scripted[-1].state.curve)])
    monkeypatch.setattr(validator, "evaluate", loss_of)
    options = LONG.replace(best_metric=metric, updates=4 * EPOCH, average=2, average_every=3)
    trained(tmp_path, options, scripted)
    assert load_tensors(tmp_path / AVERAGED)[1]["valid_loss"] == loss
    assert best_weights(tmp_path) == (AVERAGED if better else WEIGHTS)


def test_without_patience_it_goes_on(tmp_path: Path, scripted: list[Trainer]) -> None:
    run = trained(tmp_path, LONG, scripted)
    assert run.state.updates == 40
    losses = [point.valid_loss for point in run.state.curve]
    best = EPOCH * (losses.index(min(losses)) + 1)  # by the loss, whatever BLEU says
    assert load_tensors(tmp_path / "model.safetensors")[1]["update"] == best


@pytest.mark.parametrize("stops", [(9, 7), (19,), (20,)])
def test_an_interrupted_run_loses_no_patience(
    stops: tuple[int, ...], tmp_path: Path, scripted: list[Trainer]
) -> None:
    options = LONG.replace(best_metric="bleu", patience=3, dropout=0.2)
    straight = trained(tmp_path / "straight", options, scripted)
    for steps in stops:
        scripted.append(Trainer(options.replace(steps=steps), tmp_path / "b", TEXTS))
        finished = scripted[-1].train(progress=False)
        assert finished is (scripted[-1].state.updates == 5 * EPOCH)
    run = trained(tmp_path / "b", options, scripted)
    assert bits_of(tmp_path / "b") == bits_of(tmp_path / "straight")
    names = ("updates", "best", "best_bleu", "stale")
    assert [getattr(run.state, n) for n in names] == [getattr(straight.state, n) for n in names]
    files = [tmp_path / name / "model.safetensors" for name in ("straight", "b")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_bleu_is_that_of_greedy_translations_and_changes_nothing(tmp_path: Path) -> None:
    options = LONG.replace(updates=4, dropout=0.2)
    assert Trainer(options, tmp_path / "a", TEXTS).train(progress=False)
    assert Trainer(options.replace(eval_bleu=False), tmp_path / "b", TEXTS).train(progress=False)
    assert bits_of(tmp_path / "a") == bits_of(tmp_path / "b")
    (row,) = [row for row in read_journal(tmp_path / "a/log.jsonl") if "valid_bleu" in row]
    system = load_system(tmp_path / "a")
    wanted = score(translate_lines(system, TEXTS[1].source), TEXTS[1].target)["bleu"]
    state = read_state(tmp_path / "a")
    assert state is not None
    assert row["valid_bleu"] == wanted == state.curve[-1].valid_bleu
    assert all("valid_bleu" not in row for row in read_journal(tmp_path / "b/log.jsonl"))


def test_options_that_contradict_each_other_are_refused() -> None:
    for changes, words in (
        ({"best_metric": "bleu", "eval_bleu": False}, "--best-metric bleu: needs --eval-bleu"),
        ({"pair": "en-trees"}, "--eval-bleu: not for a parser"),
        ({"sharded": True}, "--eval-bleu: needs whole weights"),
        ({"patience": 0}, "--patience 0: must be at least 1"),
    ):
        with pytest.raises(UsageError, match=words):
            check_options(LONG.replace(**changes))


def test_a_flag_that_is_new_is_named_without_a_value(tmp_path: Path) -> None:
    Trainer(LONG.replace(steps=1), tmp_path, TEXTS).train(progress=False)
    with pytest.raises(UsageError, match="its run was started with --eval-bleu; give"):
        Trainer(LONG.replace(eval_bleu=False), tmp_path, TEXTS)


def test_points_of_older_checkpoints_have_no_bleu() -> None:
    values: dict[str, Any] = dict.fromkeys(Point.__dataclass_fields__, 1)
    del values["valid_bleu"]
    assert Point(**values).valid_bleu is None
