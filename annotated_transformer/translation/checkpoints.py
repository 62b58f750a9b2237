# Written from book/translation/checkpoints.md: edit the chapter instead.
"""Systems and trainings on disk, written atomically, with nothing in them that runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from annotated_transformer.background.convolutional import ConvolutionConfig
from annotated_transformer.background.seq2seq import RecurrentConfig, Translator
from annotated_transformer.data.files import FileError, write_atomically
from annotated_transformer.model.transformer import ModelConfig
from annotated_transformer.training.distributed import World, parted, whole
from annotated_transformer.translation.tokenizers import (
    BPETokenizer,
    Tokenizer,
    TokenizerError,
    load_tokenizer,
)


class CheckpointError(FileError):
    """A checkpoint that cannot be read or written; the message names the file and the remedy."""


def remove_leftovers(folder: str | Path) -> None:
    """Remove the temporary files that a killed process left in a folder."""
    for part in Path(folder).glob(".*.part"):
        with contextlib.suppress(OSError):
            part.unlink()


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of tensors with their names, in hexadecimal digits."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def save_tensors(path: str | Path, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
    """Save tensors, and JSON data in the header, atomically."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # One entry: safetensors writes several in an order that changes from run to run.
    header = {"data": json.dumps({**data, "sha256": digest(plain)})}
    write_atomically(path, save(plain, header))


def load_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Load what :func:`save_tensors` saved.

    Raises:
        CheckpointError: The file is missing, cut off or altered.
    """
    try:
        raw = Path(path).read_bytes()
        tensors = load(raw)
        (length,) = struct.unpack("<Q", raw[:8])
        data = json.loads(json.loads(raw[8 : 8 + length])["__metadata__"]["data"])
        if data.pop("sha256", "") not in ("", digest(tensors)):
            raise ValueError("its numbers do not have the checksum in its header")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # safetensors has exceptions of its own
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(
            f"{path}: damaged ({reason}); take a copy, or delete it and train again"
        ) from None
    return tensors, data


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's parameters by name; a shared one under its first name.

    Where the model is in pieces, they are put together: all processes must take part.
    """
    return {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], path: str | Path) -> None:
    """Copy tensors into a model's parameters; all of them, or none.

    Raises:
        CheckpointError: Names or shapes do not fit; the message names ``path``.
    """
    own = dict(model.named_parameters())
    wanted = {name: tuple(tensor.shape) for name, tensor in own.items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise CheckpointError(
                f"{path}: does not belong to this model: {name} has the shape "
                f"{found.get(name, 'of nothing')}, not {wanted.get(name, 'of nothing')}; "
                "take the weights, the configuration and the tokenizer from one training"
            )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(parted(tensors[name], parameter))


FORMAT = 1
Architecture: TypeAlias = ModelConfig | RecurrentConfig | ConvolutionConfig
ARCHITECTURES: dict[str, type[Architecture]] = {
    "transformer": ModelConfig,
    "recurrent": RecurrentConfig,
    "convolution": ConvolutionConfig,
}


@dataclass
class System:
    """A model with its tokenizers: a whole translation system.

    Attributes:
        model: Encoder and decoder.
        config: Sizes of the model, of any architecture.
        languages: Source and target language, as ``("de", "en")``.
        tokenizers: Of source and target; one and the same where the vocabulary is shared.
        training: How it was trained, as data; may be empty.
    """

    model: Translator
    config: Architecture
    languages: tuple[str, str]
    tokenizers: tuple[Tokenizer, Tokenizer]
    training: dict[str, Any]

    @property
    def shared(self) -> bool:
        """Whether both languages have one vocabulary."""
        return self.tokenizers[0] is self.tokenizers[1]

    @property
    def lowercase(self) -> bool:
        """Whether it writes no capitals."""
        return isinstance(self.tokenizers[1], BPETokenizer) and self.tokenizers[1].lowercase

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the tokenizers; weights make sense only with those of their training."""
        text = "\n".join(tokenizer.to_json() for tokenizer in self.tokenizers)
        return hashlib.sha256(text.encode()).hexdigest()


def architecture(config: Architecture) -> str:
    """Return the name under which files know a model of this kind."""
    return next(name for name, kind in ARCHITECTURES.items() if isinstance(config, kind))


def save_description(system: System, folder: str | Path) -> None:
    """Write configuration and tokenizers: all but the weights."""
    folder = Path(folder)
    names = ("tokenizer.json",) if system.shared else ("source.json", "target.json")
    for name, tokenizer in zip(names, system.tokenizers, strict=False):
        write_atomically(folder / name, (tokenizer.to_json() + "\n").encode())
    data = {
        "format": FORMAT,
        "languages": list(system.languages),
        "architecture": architecture(system.config),
        "model": asdict(system.config),
        "shared": system.shared,
        "training": system.training,
    }
    write_atomically(folder / "config.json", (json.dumps(data, indent=2) + "\n").encode())


WEIGHTS = "model.safetensors"
AVERAGED = "averaged.safetensors"


def save_weights(system: System, folder: str | Path, name: str = WEIGHTS, **data: Any) -> None:
    """Write the weights into a file of the folder; ``data`` goes into its header."""
    header = {**data, "tokenizers": system.fingerprint}
    save_tensors(Path(folder) / name, weights(system.model), header)


def save_system(system: System, folder: str | Path, **data: Any) -> None:
    """Write a system into a folder; ``data`` goes into the header of the weights' file."""
    save_description(system, folder)
    save_weights(system, folder, **data)


def load_system(folder: str | Path, *, weights: str | None = WEIGHTS) -> System:
    """Load a system from a folder; nothing in it can run code.

    Args:
        folder: Where it was saved.
        weights: Which file of the folder has the weights; with None the model has fresh
            random ones.

    Raises:
        CheckpointError: Something is missing or damaged; the message names the file.
    """
    folder = Path(folder)
    data = _load_json(folder / "config.json")
    try:
        if data["format"] != FORMAT:
            raise ValueError(f"its format {data['format']!r} is unknown to this version")
        kind = data.get("architecture", "transformer")
        if kind not in ARCHITECTURES:
            raise ValueError(f"its architecture {kind!r} is unknown to this version")
        config = ARCHITECTURES[kind](**data["model"])
        first, second = (str(language) for language in data["languages"])
        names = ("tokenizer.json",) if data["shared"] else ("source.json", "target.json")
        loaded = [load_tokenizer(folder / name) for name in names]
        model = config.build(len(loaded[0]), len(loaded[-1]))
        training = dict(data["training"])
    except TokenizerError as error:
        raise CheckpointError(str(error)) from None
    except (KeyError, TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{folder / 'config.json'}: damaged ({type(error).__name__}: {reason}); "
            "take a copy, or train again"
        ) from None
    system = System(model.eval(), config, (first, second), (loaded[0], loaded[-1]), training)
    if weights is not None:
        path = folder / weights
        if weights == AVERAGED and not path.exists():
            raise CheckpointError(
                f"{path}: is not there; train with --average, or run the command average"
            )
        tensors, header = load_tensors(path)
        check_fingerprint(system, header, path)
        load_weights(model, tensors, path)
    return system


def check_fingerprint(system: System, header: Mapping[str, Any], path: str | Path) -> None:
    """Raise CheckpointError if a file's weights were trained with other tokenizers."""
    if header.get("tokenizers", system.fingerprint) != system.fingerprint:
        raise CheckpointError(
            f"{path}: was trained with another tokenizer than the one beside it; "
            "take both from one training"
        )


def _load_json(path: Path) -> dict[str, Any]:
    """Load a JSON object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent}: no checkpoint here ({path.name} is missing); train one first"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged ({error}); take a copy, or train again") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: damaged (no JSON object); take a copy, or train again")
    return data


def training_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, world: World
) -> dict[str, Tensor]:
    """Return weights, the optimizer's memory, and the random state of each process.

    All processes must take part.
    """
    tensors = {f"model.{name}": tensor for name, tensor in weights(model).items()}
    for number, state in sorted(optimizer.state_dict()["state"].items()):
        for name, tensor in sorted(state.items()):  # in one order, for all put pieces together
            tensors[f"optimizer.{number}.{name}"] = whole(tensor)
    for rank, state in enumerate(world.gather(torch.get_rng_state())):
        tensors[f"random.{rank}"] = state
    if world.device.type == "cuda":
        for rank, state in enumerate(world.gather(torch.cuda.get_rng_state())):
            tensors[f"random.{rank}.cuda"] = state
    return tensors


def save_training(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Mapping[str, Any],
    world: World | None = None,
) -> None:
    """Save weights, the optimizer, all random states, and ``data``, atomically in one file.

    All processes must take part; the main one writes.
    """
    world = World() if world is None else world
    tensors = training_tensors(model, optimizer, world)
    if world.main:
        groups = optimizer.state_dict()["param_groups"]
        save_tensors(path, tensors, {**data, "groups": groups, "processes": world.size})


def load_training(
    path: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World | None = None,
) -> dict[str, Any]:
    """Put everything back as :func:`save_training` found it, and return its ``data``.

    Raises:
        CheckpointError: The file is damaged or of another model.
    """
    return restore(path, *load_tensors(path), model, optimizer, world)


def restore(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    data: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World | None = None,
) -> dict[str, Any]:
    """Do as :func:`load_training`, with what was loaded from ``path`` already.

    Where there are more processes than before, the new ones keep their random states.
    """
    world = World() if world is None else world
    own = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
    load_weights(model, own, path)
    try:
        memory = {n: t for n, t in tensors.items() if n.startswith("optimizer.")}
        groups = data.pop("groups", optimizer.state_dict()["param_groups"])
        _load_memory(optimizer, memory, groups)
        if world.rank < data.pop("processes"):
            torch.set_rng_state(tensors[f"random.{world.rank}"])
            if f"random.{world.rank}.cuda" in tensors and world.device.type == "cuda":
                torch.cuda.set_rng_state(tensors[f"random.{world.rank}.cuda"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: damaged ({type(error).__name__}: {error}); delete it and train again"
        ) from None
    return data


def _load_memory(
    optimizer: torch.optim.Optimizer, memory: Mapping[str, Tensor], groups: list[dict[str, Any]]
) -> None:
    """Give an optimizer its memory back, cut as its parameters are cut."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in memory.items():
        _, number, key = name.split(".")
        parameter = parameters[int(number)]
        kept = parted(tensor, parameter) if tensor.shape == parameter.shape else tensor
        state.setdefault(int(number), {})[key] = kept
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def trainings(folder: str | Path) -> list[Path]:
    """Return the files from which a training can go on, the oldest first."""
    return sorted((Path(folder) / "training").glob("*.safetensors"))


def load_newest(folder: str | Path) -> tuple[Path, dict[str, Tensor], dict[str, Any]] | None:
    """Load the newest file that a training can go on from; None where there never was one.

    Damaged ones are renamed, with a warning, if there is a sound one before them.

    Raises:
        CheckpointError: All are damaged, or of an older version.
    """
    if (old := Path(folder) / "training.safetensors").exists():
        raise CheckpointError(
            f"{old}: was written by an older version, which can go on from it; "
            "use that, or another folder"
        )
    damaged: list[tuple[Path, CheckpointError]] = []
    for path in reversed(trainings(folder)):
        try:
            tensors, data = load_tensors(path)
        except CheckpointError as error:
            damaged.append((path, error))
            continue
        for newer, reason in damaged:
            warnings.warn(f"{reason}; going back to {path.name}", stacklevel=2)
            newer.replace(newer.with_suffix(".damaged"))
        return path, tensors, data
    if damaged:
        raise damaged[0][1]
    return None


def keep_last(folder: str | Path, count: int) -> None:
    """Remove all but the newest files that a training can go on from."""
    for path in trainings(folder)[:-count]:
        path.unlink(missing_ok=True)


def average_weights(paths: Sequence[str | Path]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the mean of the weights in several files (section 6.1).

    Args:
        paths: Files of weights of one training.

    Returns:
        The mean of each tensor, in its own type, and the data in the header of the last file.

    Raises:
        CheckpointError: A file is damaged, has other tensors than the others, or was trained
            with another tokenizer.
        ValueError: There is no file.
    """
    if not paths:
        raise ValueError("there is nothing to average")
    sums: dict[str, Tensor] = {}
    trained = set()
    for path in paths:
        tensors, data = load_tensors(path)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        if sums and shapes != {name: tensor.shape for name, tensor in sums.items()}:
            raise CheckpointError(f"{path}: has other tensors than {paths[0]}; take one training")
        trained.add(json.dumps(data.get("tokenizers")))
        if len(trained) > 1:
            raise CheckpointError(f"{path}: has another tokenizer than {paths[0]}")
        for name, tensor in tensors.items():
            sums[name] = sums.get(name, 0) + tensor.double()
    return {name: (sums[name] / len(paths)).to(t.dtype) for name, t in tensors.items()}, data


def snapshots(folder: str | Path) -> list[Path]:
    """Return the checkpoints that a training kept for their average, the oldest first."""
    return sorted((Path(folder) / "snapshots").glob("*.safetensors"))


def average_system(folder: str | Path, last: int | None = None) -> System:
    """Average the last checkpoints of a training, and write the mean beside them.

    Args:
        folder: Where the training is.
        last: How many checkpoints; all that were kept unless given.

    Returns:
        The system with the mean of the weights.

    Raises:
        CheckpointError: There are fewer checkpoints, or one is damaged or of other tokenizers.
    """
    system, paths = load_system(folder, weights=None), snapshots(folder)
    if not paths:
        raise CheckpointError(f"{folder}: kept no checkpoints to average; train with --average")
    count = len(paths) if last is None else last
    if not 0 < count <= len(paths):
        raise CheckpointError(
            f"{folder}: {len(paths)} checkpoints were kept, {count} are to be averaged; "
            f"give a number from 1 to {len(paths)}, or train with --average"
        )
    paths = paths[-count:]
    tensors, data = average_weights(paths)
    check_fingerprint(system, data, paths[-1])
    load_weights(system.model, tensors, paths[-1])
    save_weights(system, folder, AVERAGED, checkpoints=[path.stem for path in paths])
    return system
