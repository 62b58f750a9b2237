"""Tensors on disk, with data and a digest of both in the header; loading never executes code."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from annotated_transformer.data.files import parse_object, regular_file, write_atomically


def state_digest(tensors: Mapping[str, Tensor], text: str) -> str:
    """Return the SHA-256 of a text and of tensors, including their names, dtypes and shapes."""
    found = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        if tensor.numel():  # no bytes can be viewed of an empty one
            found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def save_tensors(path: str | Path, tensors: Mapping[str, Tensor], data: Mapping[str, Any]) -> None:
    """Atomically save tensors, JSON data in the header, and a digest of both."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(dict(data))
    # A single entry, because safetensors writes several in an order that varies between runs.
    header = {"data": json.dumps({"sha256": state_digest(plain, text), "json": text})}
    write_atomically(path, save(plain, header))


def read_tensors(
    path: str | Path, *, verify: bool = True
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file of :func:`save_tensors`; without ``verify``, tensors are read when used.

    Raises:
        OSError: The file is missing or cannot be read.
        ValueError: It is truncated or altered, or no such file.
    """
    try:
        with regular_file(path).open("rb"), safe_open(path, framework="pt") as file:
            header = parse_object(file.metadata()["data"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if verify and state_digest(tensors, header["json"]) != header["sha256"]:
            raise ValueError("the contents do not match the digest in the header")
        return tensors, parse_object(header["json"])
    except OSError:
        raise
    except Exception as error:  # safetensors has exceptions of its own
        raise ValueError(str(error) or type(error).__name__) from None
