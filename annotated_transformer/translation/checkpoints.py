"""Systems and trainings on disk, written atomically, with nothing in them that runs.

Defined in the chapter *Checkpoints* (book/translation/checkpoints.md).
"""

# Written from book/translation/checkpoints.md: edit the chapter instead.

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from annotated_transformer.model.transformer import EncoderDecoder, ModelConfig, build_model
from annotated_transformer.translation.tokenizers import (
    Tokenizer,
    TokenizerError,
    load_tokenizer,
    save_tokenizer,
)


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; the message names the file and the remedy.

    Defined in: book/translation/checkpoints.md
    """


def write_atomically(path: str | Path, data: bytes) -> None:
    """Write a file under a temporary name, flush it to the disk, and rename it.

    Whoever kills the process at any moment finds the old file or the new one.

    Raises:
        CheckpointError: The file cannot be written, for instance for lack of space; what
            was there before is untouched.

    Defined in: book/translation/checkpoints.md
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be written: {error.strerror or error}; "
            "free some space, or choose another folder"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def save_tensors(path: str | Path, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
    """Save tensors, and JSON data in the header, atomically.

    Defined in: book/translation/checkpoints.md
    """
    contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    write_atomically(path, save(contiguous, {"data": json.dumps(data)}))


def load_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Load what :func:`save_tensors` saved.

    Raises:
        CheckpointError: The file is missing, cut off or altered.

    Defined in: book/translation/checkpoints.md
    """
    try:
        raw = Path(path).read_bytes()
        tensors = load(raw)
        (length,) = struct.unpack("<Q", raw[:8])
        data = json.loads(json.loads(raw[8 : 8 + length])["__metadata__"]["data"])
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # safetensors has exceptions of its own
        raise CheckpointError(
            f"{path}: damaged ({error}); take a copy, or delete it and train again"
        ) from None
    return tensors, data


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's parameters by name; a shared one under its first name.

    Defined in: book/translation/checkpoints.md
    """
    return dict(model.named_parameters())


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], path: str | Path) -> None:
    """Copy tensors into a model's parameters.

    Raises:
        CheckpointError: Names or shapes do not fit.

    Defined in: book/translation/checkpoints.md
    """
    for name, parameter in weights(model).items():
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != parameter.shape:
            found = "is missing" if tensor is None else f"has the shape {tuple(tensor.shape)}"
            raise CheckpointError(f"{path}: {name} {found}, expected {tuple(parameter.shape)}")
        with torch.no_grad():
            parameter.copy_(tensor)


FORMAT = 1


@dataclass
class System:
    """A model with its tokenizers: a whole translation system.

    Attributes:
        model: Encoder and decoder.
        config: Sizes of the model.
        languages: Source and target language, as ``("de", "en")``.
        tokenizers: Of source and target; one and the same where the vocabulary is shared.
        training: How it was trained, as data; may be empty.

    Defined in: book/translation/checkpoints.md
    """

    model: EncoderDecoder
    config: ModelConfig
    languages: tuple[str, str]
    tokenizers: tuple[Tokenizer, Tokenizer]
    training: dict[str, Any]

    @property
    def shared(self) -> bool:
        """Whether both languages have one vocabulary."""
        return self.tokenizers[0] is self.tokenizers[1]


def save_description(system: System, folder: str | Path) -> None:
    """Write configuration and tokenizers: all but the weights.

    Defined in: book/translation/checkpoints.md
    """
    folder = Path(folder)
    data = {
        "format": FORMAT,
        "languages": list(system.languages),
        "model": asdict(system.config),
        "shared": system.shared,
        "training": system.training,
    }
    write_atomically(folder / "config.json", (json.dumps(data, indent=2) + "\n").encode())
    names = ("tokenizer.json",) if system.shared else ("source.json", "target.json")
    for name, tokenizer in zip(names, system.tokenizers, strict=False):
        save_tokenizer(tokenizer, folder / name)


def save_system(system: System, folder: str | Path, **data: Any) -> None:
    """Write a system into a folder; ``data`` goes into the header of the weights' file.

    Defined in: book/translation/checkpoints.md
    """
    save_description(system, folder)
    save_tensors(Path(folder) / "model.safetensors", weights(system.model), data)


def load_system(folder: str | Path, *, with_weights: bool = True) -> System:
    """Load a system from a folder; nothing in it can run code.

    Raises:
        CheckpointError: Something is missing or damaged; the message names the file.

    Defined in: book/translation/checkpoints.md
    """
    folder = Path(folder)
    data = _load_json(folder / "config.json")
    try:
        if data["format"] != FORMAT:
            raise CheckpointError(
                f"{folder}: format {data['format']} is unknown; update the package"
            )
        config = ModelConfig(**data["model"])
        first, second = (str(language) for language in data["languages"])
        names = ("tokenizer.json",) if data["shared"] else ("source.json", "target.json")
        loaded = [load_tokenizer(folder / name) for name in names]
        tokenizers = (loaded[0], loaded[-1])
        model = build_model(len(tokenizers[0]), len(tokenizers[1]), config)
        training = dict(data["training"])
    except TokenizerError as error:
        raise CheckpointError(str(error)) from None
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder / 'config.json'}: damaged ({type(error).__name__}: {error}); "
            "take a copy, or train again"
        ) from None
    if with_weights:
        path = folder / "model.safetensors"
        load_weights(model, load_tensors(path)[0], path)
    model.eval()
    return System(model, config, (first, second), tokenizers, training)


def _load_json(path: Path) -> dict[str, Any]:
    """Load a JSON object.

    Defined in: book/translation/checkpoints.md
    """
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


def save_training(
    path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, data: Mapping[str, Any]
) -> None:
    """Save weights, the optimizer's state, the random state, and ``data``, atomically in one file.

    Defined in: book/translation/checkpoints.md
    """
    tensors = {f"model.{name}": tensor for name, tensor in weights(model).items()}
    for number, state in optimizer.state_dict()["state"].items():
        for name, tensor in state.items():
            tensors[f"optimizer.{number}.{name}"] = tensor
    tensors["random"] = torch.get_rng_state()
    save_tensors(path, tensors, data)


def load_training(
    path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Put everything back as :func:`save_training` found it, and return its ``data``.

    Raises:
        CheckpointError: The file is damaged or of another model.

    Defined in: book/translation/checkpoints.md
    """
    tensors, data = load_tensors(path)
    prefix = "model."
    own = {n[len(prefix) :]: t for n, t in tensors.items() if n.startswith(prefix)}
    load_weights(model, own, path)
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, number, key = name.split(".")
            state.setdefault(int(number), {})[key] = tensor
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    torch.set_rng_state(tensors["random"])
    return data
