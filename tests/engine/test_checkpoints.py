"""Checkpoints: whole or absent, bit for bit, and nothing in them runs."""

import json
import os
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from annotated_transformer.data.files import write_atomically
from annotated_transformer.data.tensors import save_tensors
from annotated_transformer.engine import checkpoints
from annotated_transformer.engine.checkpoints import (
    AVERAGED,
    WEIGHTS,
    CheckpointError,
    average_system,
    average_weights,
    best_weights,
    check_fingerprint,
    json_with_digest,
    list_snapshots,
    load_system,
    load_tensors,
    load_weights,
    restore_run,
    run_tensors,
    save_system,
    save_weights,
    weights_of,
)
from annotated_transformer.engine.system import System, join_systems
from annotated_transformer.model.transformer import ModelConfig, build_model
from annotated_transformer.training.batches import make_batch
from annotated_transformer.training.distributed import DistributedWorld
from annotated_transformer.training.loop import update
from annotated_transformer.training.optimizer import make_adam
from annotated_transformer.translation.tokenizers import BPETokenizer, WordTokenizer

TEXT = ["der Hund schläft", "die Katze trinkt Milch", 'sagt "ja"\tund geht'] * 3
CONFIG = ModelConfig(N=1, d_model=16, d_ff=16, h=2, max_len=32)


def make_system(shared: bool = True, vocabulary: int = 270, seed: int = 0) -> System:
    """Return a small untrained system."""
    torch.manual_seed(seed)
    if shared:
        both = BPETokenizer.train(TEXT, vocabulary)
        model = build_model(len(both), len(both), CONFIG)
        return System(model, CONFIG, ("de", "en"), (both, both), {"options": {"seed": seed}})
    config = ModelConfig(N=1, d_model=16, d_ff=16, h=2, max_len=32, tie="target")
    first, second = WordTokenizer.train(TEXT, "de"), WordTokenizer.train(TEXT[:2] * 2, "en")
    model = build_model(len(first), len(second), config)
    return System(model, config, ("de", "en"), (first, second), {})


def one_line(error: pytest.ExceptionInfo[CheckpointError], path: Path) -> None:
    """Check that a message is one line that names a file."""
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


# --- tensors -------------------------------------------------------------------

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=4),
    kinds=st.lists(st.sampled_from(TYPES), min_size=4, max_size=4),
    data=st.dictionaries(st.text(max_size=5), st.integers() | st.text() | st.floats(-1, 1)),
)
def test_tensors_come_back(
    tmp_path: Path, shapes: list[list[int]], kinds: list[torch.dtype], data: dict[str, Any]
) -> None:
    tensors = {
        str(n): (torch.randn(shape) * 9).to(kind)
        for n, (shape, kind) in enumerate(zip(shapes, kinds, strict=False))
    }
    save_tensors(tmp_path / "t", tensors, data)
    loaded, found = load_tensors(tmp_path / "t")
    assert found == data
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def test_the_same_tensors_give_the_same_bytes(tmp_path: Path) -> None:
    tensors = {name: torch.ones(2) for name in "badc"}
    for path in (tmp_path / "a", tmp_path / "b"):
        save_tensors(path, tensors, {"x": 1, "y": [2]})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_transposed_tensor_comes_back(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).view(2, 3).T
    save_tensors(tmp_path / "t", {"t": tensor}, {})
    assert torch.equal(load_tensors(tmp_path / "t")[0]["t"], tensor)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 0.999), cut=st.booleans())
def test_an_altered_file_is_refused(tmp_path: Path, place: float, cut: bool) -> None:
    path = tmp_path / "t"
    tensors, data = {"w": torch.ones(50), "b": torch.zeros(3)}, {"a": 1, "text": "ab" * 40}
    save_tensors(path, tensors, data)
    raw = bytearray(path.read_bytes())
    index = int(place * len(raw))
    if cut:
        del raw[index:]
    else:
        raw[index] ^= 0x55
    path.write_bytes(raw)
    refused: CheckpointError | None = None
    try:
        loaded, found = load_tensors(path)
    except CheckpointError as error:
        refused = error
    if refused is not None:
        assert str(path) in str(refused)
        assert "\n" not in str(refused)
        return
    assert not cut  # a blank at the end of the header says nothing
    assert found == data
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_types_and_shapes_are_part_of_the_digest(tmp_path: Path) -> None:
    path = tmp_path / "t"
    save_tensors(path, {"w": torch.ones(6, 4)}, {})
    raw = path.read_bytes()
    for old, new in ((b"F32", b"I32"), (b"[6,4]", b"[4,6]"), (b'"w"', b'"v"')):
        assert raw.count(old) == 1
        path.write_bytes(raw.replace(old, new))
        with pytest.raises(CheckpointError, match="digest"):
            load_tensors(path)
        load_tensors(path, verify=False)  # it is the digest that told


class Payload:
    """An object whose unpickling makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_a_pickle_is_refused_and_does_not_run(tmp_path: Path) -> None:
    save_system(make_system(), tmp_path)
    mark = tmp_path / "it-ran"
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        good = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(pickle.dumps(Payload(mark)))
        with pytest.raises(CheckpointError) as error:
            load_system(tmp_path)
        one_line(error, tmp_path / name)
        torch.save({"w": Payload(mark)}, tmp_path / name)
        with pytest.raises(CheckpointError):
            load_system(tmp_path)
        assert not mark.exists()
        (tmp_path / name).write_bytes(good)
    load_system(tmp_path)
    pickle.loads(pickle.dumps(Payload(mark)))  # the payload was a live one
    assert mark.exists()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="says how much is in memory")
def test_without_a_digest_only_what_is_used_is_read(tmp_path: Path) -> None:
    def resident() -> int:
        text = Path("/proc/self/status").read_text()
        return sum(int(size) for size in re.findall(r"Rss(?:Anon|File):\s*(\d+) kB", text))

    save_tensors(tmp_path / "t", {name: torch.ones(8_000_000) for name in "abcd"}, {})  # 128 MB
    before = resident()
    tensors, _ = load_tensors(tmp_path / "t", verify=False)
    assert float(tensors["c"][5]) == 1.0
    assert resident() - before < 64_000
    again, _ = load_tensors(tmp_path / "t")
    assert resident() - before > 100_000  # the main process looks at all of it
    assert tensors.keys() == again.keys()


# --- systems -------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
def test_a_system_comes_back(shared: bool, tmp_path: Path) -> None:
    system = make_system(shared)
    save_system(system, tmp_path, valid_loss=1.5)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    again = load_system(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert again.shared == shared
    assert again.config == system.config
    assert again.languages == system.languages
    assert again.training == system.training
    assert again.fingerprint == system.fingerprint
    assert not again.model.training
    for name, tensor in weights_of(system.model).items():
        assert torch.equal(weights_of(again.model)[name], tensor)
    assert load_tensors(tmp_path / "model.safetensors")[1]["valid_loss"] == 1.5
    if shared:  # still one matrix
        names = ("src_embed.0.lut.weight", "tgt_embed.0.lut.weight", "generator.proj.weight")
        assert len({again.model.get_parameter(name).data_ptr() for name in names}) == 1


FILES = ["config.json", "tokenizer.json", "model.safetensors"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", ["missing", "empty", "truncated", "folder", "binary"])
def test_a_harmed_system_is_refused(name: str, harm: str, tmp_path: Path) -> None:
    save_system(make_system(), tmp_path)
    path = tmp_path / name
    raw = path.read_bytes()
    path.unlink()
    if harm == "folder":
        path.mkdir()
    elif harm != "missing":
        path.write_bytes({"empty": b"", "truncated": raw[:-9], "binary": b"\xff\x00" * 99}[harm])
    with pytest.raises(CheckpointError) as error:
        load_system(tmp_path)
    one_line(error, tmp_path if harm == "missing" else path)


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"N": "many"}},
        {"model": {"rows": 3}},
        {"model": {"d_model": -4}},
        {"model": []},
        {"languages": ["de"]},
        {"shared": False},
        {"training": 5},
        {"training": None},
        {"tokenizers": "0"},
        {"architecture": "perceptron"},
        {"model": {"N": 1, "d_model": "16"}},
        *({"model": {name: 10**6}} for name in ("N", "d_model", "d_ff", "h", "d_k", "max_len")),
        {"model": {"d_ff": 10**30}},
        {"architecture": []},
        {"architecture": "recurrent", "model": {"layers": 10**6}},
    ],
)
def test_a_wrong_configuration_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    save_system(make_system(), tmp_path)
    path = tmp_path / "config.json"
    data = {k: v for k, v in json.loads(path.read_text()).items() if k != "sha256"}
    path.write_bytes(json_with_digest({**data, **change}))  # with the right digest
    with pytest.raises(CheckpointError) as error:
        load_system(tmp_path)
    one_line(error, tmp_path)
    path.write_text("[]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        load_system(tmp_path)


def test_a_configuration_that_was_changed_is_refused(tmp_path: Path) -> None:
    save_system(make_system(), tmp_path)
    path = tmp_path / "config.json"
    text = path.read_text()
    for old, new in (('"h": 2', '"h": 4'), ('"post"', '"pre"'), ('"seed": 0', '"seed": 1')):
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
        with pytest.raises(CheckpointError, match="digest") as error:
            load_system(tmp_path)
        one_line(error, path)
    path.write_text(json.dumps(json.loads(text)))  # laid out in another way, it is the same
    load_system(tmp_path)


@pytest.mark.parametrize("version", [1, 99, None])
def test_another_format_is_refused(version: object, tmp_path: Path) -> None:
    save_system(make_system(), tmp_path)
    path = tmp_path / "config.json"
    data = {**json.loads(path.read_text()), "format": version}
    del data["sha256"]  # format 1 had none
    path.write_text(json.dumps(data))
    told = f"was written in format {version}, but this version reads format 2; use the version"
    with pytest.raises(CheckpointError, match=told) as error:
        load_system(tmp_path)
    one_line(error, tmp_path)


def test_what_another_program_wrote_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "marian"}')
    with pytest.raises(CheckpointError, match="is of another program, or an export; give") as error:
        load_system(tmp_path)
    one_line(error, tmp_path / "config.json")


class Gelu(nn.Module):
    """Another feed-forward network with the same parameters."""

    def __init__(self, usual: Any) -> None:
        super().__init__()
        self.w_1, self.w_2 = usual.w_1, usual.w_2

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w_2(F.gelu(self.w_1(x)))
        return y


def swapped(system: System) -> System:
    """Give a layer of a system another kind of feed-forward network."""
    layer: Any = system.model.get_submodule("encoder.layers.0")
    layer.feed_forward = Gelu(layer.feed_forward)
    return system


def reordered(system: System) -> System:
    """Move a norm of a system before its sub-layer."""
    part: Any = system.model.get_submodule("encoder.layers.0.sublayer.1")
    part.order = "pre"
    return system


def other_config(**sizes: Any) -> Callable[[System], System]:
    """Give a system a configuration that is not its model's."""
    return lambda system: replace(system, config=replace(CONFIG, **sizes))


@pytest.mark.parametrize(
    ("changed", "part"),
    [
        (reordered, "encoder.layers.0.sublayer.1 (SublayerConnection)"),
        (other_config(h=4), "self_attn (MultiHeadedAttention)"),
        (other_config(max_len=20), "src_embed.1 (PositionalEncoding)"),
        (other_config(tie="target"), "tgt_embed.0.lut.weight"),
        (swapped, "encoder.layers.0.feed_forward (Gelu)"),
        (lambda system: join_systems([system, system]), "the model (Ensemble)"),
        (lambda system: replace(system, config=replace(CONFIG, d_ff=8)), "w_1 (Linear)"),
        (lambda system: replace(system, model=build_model(20, 20, CONFIG)), "lut (Embedding)"),
    ],
)
def test_a_model_that_would_come_back_as_another_is_not_saved(
    changed: Callable[[System], System], part: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(part)):
        save_system(changed(make_system()), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nested_too_deeply(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="damaged"):
        load_system(tmp_path)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    save_system(make_system(), tmp_path / "a")
    save_system(make_system(vocabulary=280), tmp_path / "b")
    (tmp_path / "b/model.safetensors").replace(tmp_path / "a/model.safetensors")
    with pytest.raises(CheckpointError, match="another tokenizer") as error:
        load_system(tmp_path / "a")
    one_line(error, tmp_path / "a/model.safetensors")


def test_a_tokenizer_of_the_same_size_from_elsewhere_is_refused(tmp_path: Path) -> None:
    save_system(make_system(), tmp_path)
    other = BPETokenizer.train(["something else, quite another text"] * 3, 270)
    (tmp_path / "tokenizer.json").write_text(other.to_json())
    with pytest.raises(CheckpointError, match="another tokenizer"):
        load_system(tmp_path)


@pytest.mark.parametrize("change", ["shape", "missing", "extra"])
def test_weights_go_in_whole_or_not_at_all(change: str) -> None:
    model, source = make_system().model, make_system(seed=1).model
    before = {name: tensor.clone() for name, tensor in weights_of(model).items()}
    tensors = dict(weights_of(source))
    last = list(tensors)[-1]
    if change == "shape":
        tensors[last] = torch.zeros(1, 2, 3)
    elif change == "missing":
        del tensors[last]
    else:
        tensors["zzz"] = torch.zeros(2)
    with pytest.raises(CheckpointError, match=r"^file: does not"):
        load_weights(model, tensors, "file")
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(model).items())


def test_saving_stops_before_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between two files, a folder looks as if nothing had begun."""
    real = write_atomically

    def dies(path: str | Path, data: bytes) -> None:
        real(path, data)
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "write_atomically", dies)
    with pytest.raises(KeyboardInterrupt):
        save_system(make_system(), tmp_path)
    assert not (tmp_path / "config.json").exists()


# --- runs ----------------------------------------------------------------------


def train(model: Any, optimizer: torch.optim.Optimizer, updates: int) -> None:
    """Make some updates with dropout."""
    batch = make_batch([[5, 6, 7], [8]], [[9, 10], [11, 12, 13]])
    model.train()
    for _ in range(updates):
        update(model, [batch], optimizer)


def fresh() -> tuple[Any, torch.optim.Adam]:
    """Return the model that all runs begin with."""
    model = make_system().model
    return model, make_adam(model, lr=1e-3)


def test_going_on_equals_not_having_stopped(tmp_path: Path) -> None:
    straight, optimizer = fresh()
    train(straight, optimizer, 5)
    stopped, optimizer = fresh()
    train(stopped, optimizer, 3)
    optimizer.param_groups[0]["lr"] = 1e-3
    groups = optimizer.state_dict()["param_groups"]
    tensors = run_tensors(stopped, optimizer, DistributedWorld())
    save_tensors(tmp_path / "t", tensors, {"groups": groups})
    resumed, optimizer = fresh()
    optimizer.param_groups[0]["lr"] = 0.5  # the rate comes back too
    torch.manual_seed(123)
    restore(tmp_path / "t", resumed, optimizer)
    (tmp_path / "t").write_bytes(b"")  # nothing holds the file any more
    train(resumed, optimizer, 2)
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def restore(path: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Put back what was saved."""
    tensors, data = load_tensors(path)
    restore_run(tensors, data["groups"], model, optimizer, DistributedWorld(), path)


@pytest.mark.parametrize("lost", ["random", "optimizer.0.exp_avg", "model."])
def test_a_training_with_a_part_lost_is_refused(lost: str, tmp_path: Path) -> None:
    model, optimizer = fresh()
    train(model, optimizer, 1)
    tensors = run_tensors(model, optimizer, DistributedWorld())
    groups = optimizer.state_dict()["param_groups"]
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(lost)}
    if lost.startswith("optimizer"):
        kept["optimizer.zero.exp_avg"] = torch.zeros(1)
    save_tensors(tmp_path / "t", kept, {"groups": groups})
    model, optimizer = fresh()
    with pytest.raises(CheckpointError) as error:
        restore(tmp_path / "t", model, optimizer)
    one_line(error, tmp_path / "t")


def test_fingerprint() -> None:
    system = make_system()
    check_fingerprint(system, {"tokenizers": system.fingerprint}, "file")
    with pytest.raises(CheckpointError, match=r"^file: was made"):
        check_fingerprint(system, {"tokenizers": "other"}, "file")


# --- averages ------------------------------------------------------------------


@settings(max_examples=20)
@given(
    values=st.lists(st.integers(-(2**20), 2**20), min_size=1, max_size=6),
    half=st.booleans(),
)
def test_the_average_is_the_mean_in_double_precision(
    values: list[int], half: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, kind = tmp_path_factory.mktemp("mean"), torch.bfloat16 if half else torch.float32
    paths = [folder / f"{i}" for i in range(len(values))]
    for path, value in zip(paths, values, strict=True):
        save_tensors(path, {"a": torch.full((2,), value, dtype=kind)}, {"value": value})
    tensors, data = average_weights(paths)
    rounded = torch.tensor(values).to(kind).long().tolist()  # whole numbers: the sum is exact
    assert tensors["a"].dtype == kind
    exact = torch.full((2,), sum(rounded) / len(values), dtype=torch.float64)
    assert torch.equal(tensors["a"], exact.to(kind))
    assert data == {"value": values[-1]}


def kept(folder: Path, count: int) -> System:
    """Write a system with checkpoints whose weights are 0, 1, 2, …."""
    system = make_system()
    save_system(system, folder)
    for number in range(count):
        with torch.no_grad():
            for parameter in system.model.parameters():
                parameter.fill_(number)
        save_weights(system, folder / f"snapshots/{number:08d}.safetensors")
    return system


@pytest.mark.parametrize(("last", "mean"), [(None, 1.5), (4, 1.5), (3, 2.0), (1, 3.0)])
def test_the_last_checkpoints_are_averaged(last: int | None, mean: float, tmp_path: Path) -> None:
    kept(tmp_path, 4)
    system = average_system(tmp_path, last)
    loaded = load_system(tmp_path, weights=AVERAGED)
    for model in (system.model, loaded.model):
        assert all((p == mean).all() for p in model.parameters())
    assert not any((p == mean).all() for p in load_system(tmp_path).model.parameters())


def test_the_same_mean_again_is_still_measured(tmp_path: Path) -> None:
    kept(tmp_path, 4)
    average_system(tmp_path, 2, measure=lambda system: {"valid_loss": -1.0})
    assert best_weights(tmp_path) == AVERAGED
    average_system(tmp_path, 2)
    assert best_weights(tmp_path) == AVERAGED
    average_system(tmp_path, 3)  # another mean
    assert best_weights(tmp_path) == WEIGHTS
    (tmp_path / AVERAGED).write_bytes(b"damaged")
    average_system(tmp_path, 2)
    assert best_weights(tmp_path) == WEIGHTS


@pytest.mark.parametrize("last", [3, 0, -1])
def test_more_than_were_kept_cannot_be_averaged(last: int, tmp_path: Path) -> None:
    kept(tmp_path, 2)
    with pytest.raises(CheckpointError, match=f"cannot average {last} of 2 snapshots") as error:
        average_system(tmp_path, last)
    one_line(error, tmp_path)
    assert not (tmp_path / AVERAGED).exists()


def test_checkpoints_of_other_tokenizers_are_not_averaged(tmp_path: Path) -> None:
    kept(tmp_path, 3)
    first, second, _ = list_snapshots(tmp_path)
    tensors, data = load_tensors(first)
    save_tensors(first, tensors, {**data, "tokenizers": ["another"]})
    with pytest.raises(CheckpointError, match="its tokenizer differs from") as error:
        average_system(tmp_path)
    one_line(error, second)


def test_checkpoints_that_do_not_fit_are_not_averaged(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no files to average"):
        average_weights([])
    kept(tmp_path, 3)
    first, second, third = list_snapshots(tmp_path)
    save_tensors(first, {"a": torch.ones(2)}, {})
    with pytest.raises(CheckpointError, match="its tensors differ from") as error:
        average_system(tmp_path)
    one_line(error, second)
    second.write_bytes(second.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="damaged") as error:
        average_system(tmp_path, 2)
    one_line(error, second)
    other = make_system(vocabulary=271)
    save_weights(other, tmp_path / "snapshots" / third.name)
    with pytest.raises(CheckpointError, match="another tokenizer") as error:
        average_system(tmp_path, 1)
    one_line(error, third)
