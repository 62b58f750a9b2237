"""Systems and runs on disk, written atomically with digests; loading never executes code."""

import contextlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from annotated_transformer.data.files import FileError, load_object, not_read, write_atomically
from annotated_transformer.data.symbols import load_any_tokenizer
from annotated_transformer.data.tensors import read_tensors, save_tensors, state_digest
from annotated_transformer.engine.config import check_sizes
from annotated_transformer.engine.system import ARCHITECTURES, System, architecture_name
from annotated_transformer.engine.typed import convert_json
from annotated_transformer.training.distributed import DistributedWorld, full_tensor, shard_like
from annotated_transformer.translation.tokenizers import TokenizerError

FORMAT = 2  # of a system's folder
WEIGHTS = "model.safetensors"
AVERAGED = "averaged.safetensors"
BEST = "best"  #: Stands for the weights file to use, see :func:`best_weights`.


class CheckpointError(FileError):
    """A checkpoint cannot be read or written; the message names the file and the remedy."""


def damaged_error(path: str | Path, reason: object) -> CheckpointError:
    """Return the error for a file with invalid contents."""
    words = " ".join(str(reason).split()) or type(reason).__name__
    return CheckpointError(f"{path}: damaged ({words}); restore it, or delete it and train again")


def unreadable_error(path: str | Path, error: OSError) -> CheckpointError:
    """Return the error for a file that cannot be read."""
    remedy = "copy the whole folder of the run, or train again"
    return CheckpointError(not_read(error, path, remedy))


# --- tensors ---------------------------------------------------------------------------------


def load_tensors(
    path: str | Path, *, verify: bool = True
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Load a file of ``save_tensors``; without ``verify``, tensors are read when used.

    Raises:
        CheckpointError: The file is missing, truncated or altered.
    """
    try:
        return read_tensors(path, verify=verify)
    except OSError as error:
        raise unreadable_error(path, error) from None
    except ValueError as error:
        raise damaged_error(path, error) from None


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's parameters by name, with a shared one under its first name.

    If the model is sharded, the shards are gathered, so all processes must call this.
    """
    return {name: full_tensor(parameter.detach()) for name, parameter in model.named_parameters()}


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], path: str | Path) -> None:
    """Copy tensors into a model's parameters (or its shards), either all of them or none.

    Raises:
        CheckpointError: Names or shapes do not match; the message names ``path``.
    """
    own = dict(model.named_parameters())
    wanted = {name: tuple(tensor.shape) for name, tensor in own.items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            raise CheckpointError(
                f"{path}: does not match the model: {name} has shape "
                f"{found.get(name, '(missing)')}, expected {wanted.get(name, '(missing)')}; "
                "use weights, configuration and tokenizer from the same run"
            )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(shard_like(tensors[name], parameter))


# --- systems ---------------------------------------------------------------------------------


def json_with_digest(data: Mapping[str, Any]) -> bytes:
    """Serialise a JSON object together with its digest."""
    text = json.dumps(dict(data), sort_keys=True)
    sealed = {**data, "sha256": state_digest({}, text)}
    return (json.dumps(sealed, indent=2) + "\n").encode()


def save_description(system: System, folder: str | Path) -> None:
    """Write the configuration and tokenizers, but not the weights."""
    folder = Path(folder)
    names = ("tokenizer.json",) if system.shared else ("source.json", "target.json")
    for name, tokenizer in zip(names, system.tokenizers, strict=False):
        write_atomically(folder / name, (tokenizer.to_json() + "\n").encode())
    data = {
        "format": FORMAT,
        "languages": list(system.languages),
        "architecture": architecture_name(system.config),
        "model": asdict(system.config),
        "shared": system.shared,
        "tokenizers": system.fingerprint,
        "training": system.training,
    }
    write_atomically(folder / "config.json", json_with_digest(data))


def save_weights(system: System, path: str | Path, *, write: bool = True, **data: Any) -> None:
    """Write the weights to a file; ``data`` goes into its header.

    If they are sharded, all processes must call this, and only one may ``write``.
    """
    tensors = weights_of(system.model)
    if write:
        save_tensors(path, tensors, {**data, "tokenizers": system.fingerprint})


SIZES = "h d_k d_v order eps max_len".split()  # that the shapes of parameters do not tell


def check_parts(system: System) -> None:
    """Raise CheckpointError for a model with a part that its configuration does not build."""
    with torch.random.fork_rng(devices=[]):  # the weights are not used
        built = system.config.build(*map(len, system.tokenizers))
    known, own = (
        [(name, type(part), [p.shape for p in part.parameters(recurse=False)],
          [getattr(part, size, None) for size in SIZES]) for name, part in model.named_modules()]
        for model in (built, system.model)
    )  # fmt: skip
    what = [f"{name or 'the model'} ({kind.__name__})"
            for name, kind, *_ in (part for part in own if part not in known)]  # fmt: skip
    names = [{name for name, _ in model.named_parameters()} for model in (built, system.model)]
    what += sorted(names[0] ^ names[1])  # shared by one of them alone
    if what:
        told = f"{what[0]} is not what its configuration builds"
        raise CheckpointError(f"{told}; keep its state_dict() with torch.save instead")


def save_system(system: System, folder: str | Path, **data: Any) -> None:
    """Write a system to a folder; ``data`` goes into the header of the weights file.

    Raises:
        CheckpointError: The model has layers or sizes that its configuration does not describe.
    """
    check_parts(system)
    save_description(system, folder)
    save_weights(system, Path(folder) / WEIGHTS, **data)


def load_system(folder: str | Path, *, weights: str | None = BEST) -> System:
    """Load a system from a folder, without executing any code in it.

    Args:
        folder: Where it was saved.
        weights: The file of the folder with the weights, or ``BEST``, see
            :func:`best_weights`; None leaves the model with fresh random weights.

    Raises:
        CheckpointError: A file is missing or damaged; the message names it.
    """
    folder = Path(folder)
    system = _load_description(folder)
    if weights is None:
        return system
    path = folder / (best_weights(folder) if weights == BEST else weights)
    if path.name == AVERAGED and not path.exists():
        raise CheckpointError(f"{path}: missing; train with --average, or run the average command")
    if path.name == WEIGHTS and not path.exists():
        when = "a run writes them at the end of an epoch; repeat its train command to resume it"
        raise CheckpointError(f"{folder}: has no weights yet ({WEIGHTS} is missing): {when}")
    tensors, header = load_tensors(path)
    check_fingerprint(system, header, path)
    load_weights(system.model, tensors, path)
    return system


def _load_description(folder: Path) -> System:
    """Load the configuration and tokenizers; the model has random weights."""
    path = folder / "config.json"
    data = load_run_object(path)
    if "format" not in data:
        raise CheckpointError(f"{path}: is of another program, or an export; give a run's folder")
    if data["format"] != FORMAT:
        raise CheckpointError(
            f"{folder}: was written in format {data['format']!r}, but this version reads "
            f"format {FORMAT}; use the version that wrote it, or train again in another folder"
        )
    try:
        if (sha256 := data.pop("sha256")) != json.loads(json_with_digest(data))["sha256"]:
            raise ValueError(f"the contents do not match the digest {sha256}")
        if (kind := data["architecture"]) not in ARCHITECTURES:
            raise ValueError(f"this version has no architecture {kind!r}")
        config = convert_json(ARCHITECTURES[kind], data["model"])
        check_sizes(vars(config))
        first, second = (str(language) for language in data["languages"])
        names = ("tokenizer.json",) if data["shared"] else ("source.json", "target.json")
        loaded = [load_any_tokenizer(folder / name) for name in names]
        with torch.random.fork_rng(devices=[]):  # first weights are drawn, and replaced
            model = config.build(len(loaded[0]), len(loaded[-1]))
        tokenizers = loaded[0], loaded[-1]
        training = convert_json(dict[str, Any], data["training"])
        convert_json(dict[str, Any], training.get("options", {}))
        system = System(model.eval(), config, (first, second), tokenizers, training)
        fingerprint = data["tokenizers"]
    except TokenizerError as error:
        raise CheckpointError(f"{error}; copy the whole folder of the run") from None
    except (LookupError, TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise damaged_error(path, f"{type(error).__name__}: {error}") from None
    check_fingerprint(system, {"tokenizers": fingerprint}, path)
    return system


def load_run_object(path: Path) -> dict[str, Any]:
    """Load a JSON object of a run's folder; raise CheckpointError if there is none."""
    try:
        return load_object(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        here = f"no system here ({path.name} is missing)" if path.parent.exists() else ""
        what = here or "no such file or folder"
        what = "is a file" if isinstance(error, NotADirectoryError) else what
        raise CheckpointError(f"{path.parent}: {what}; give the folder of a run") from None
    except OSError as error:
        raise unreadable_error(path, error) from None
    except ValueError as error:
        raise damaged_error(path, error) from None


def check_fingerprint(system: System, header: Mapping[str, Any], path: str | Path) -> None:
    """Raise CheckpointError if a file was made with other tokenizers than the system's."""
    if header.get("tokenizers") != system.fingerprint:
        told = f"{path}: was made with another tokenizer than its folder has"
        raise CheckpointError(f"{told}; take both from one run")


def best_weights(folder: str | Path) -> str:
    """Return the weights file to use: the average, if its validation loss is lower.

    If both files have ``valid_bleu``, the higher BLEU decides.
    """
    paths = (Path(folder) / name for name in (WEIGHTS, AVERAGED))
    best, mean = (load_tensors(p, verify=False)[1] if p.exists() else {} for p in paths)
    bleu: list[Any] = [header.get("valid_bleu") for header in (mean, best)]
    if None not in bleu:
        return AVERAGED if bleu[0] > bleu[1] else WEIGHTS
    losses = [float(header.get("valid_loss", math.inf)) for header in (mean, best)]
    return AVERAGED if losses[0] < losses[1] else WEIGHTS


# --- averages --------------------------------------------------------------------------------


def list_snapshots(folder: str | Path) -> list[Path]:
    """Return the snapshots that a run kept for averaging, oldest first."""
    return numbered_files(Path(folder) / "snapshots")


def numbered_files(folder: Path) -> list[Path]:
    """Return the files of a folder that are named after an update, in order."""
    name = re.compile(r"[0-9]{8,}\.safetensors")
    return sorted(path for path in folder.glob("*") if name.fullmatch(path.name))


def average_weights(paths: Sequence[str | Path]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the mean weights of several files of one run (§6.1), and the last one's header.

    Raises:
        CheckpointError: A file is damaged, or its tensors or tokenizers differ from the others.
        ValueError: There is no file.
    """
    if not paths:
        raise ValueError("no files to average")
    sums: dict[str, Tensor] = {}
    first = None
    for path in paths:
        tensors, data = load_tensors(path)
        first = first if sums else data.get("tokenizers")
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        if sums and shapes != {name: tensor.shape for name, tensor in sums.items()}:
            raise CheckpointError(f"{path}: its tensors differ from {paths[0]}; use one run")
        if data.get("tokenizers") != first:
            raise CheckpointError(f"{path}: its tokenizer differs from {paths[0]}; use one run")
        for name, tensor in tensors.items():
            sums[name] = sums.get(name, 0) + tensor.double()
    return {name: (sums[name] / len(paths)).to(t.dtype) for name, t in tensors.items()}, data


def average_system(
    folder: str | Path,
    last: int | None = None,
    *,
    measure: Callable[[System], Mapping[str, float]] | None = None,
) -> System:
    """Average the last snapshots of a run, and save the mean in its folder.

    Args:
        folder: The run's folder.
        last: Number of snapshots; all of them by default.
        measure: Computes ``valid_loss``, and ``valid_bleu`` if that is to be compared. Without it
            the mean is no default choice, unless it is there already and was measured.

    Raises:
        CheckpointError: There are fewer snapshots, or one is damaged or of other tokenizers.
    """
    system, paths = load_system(folder, weights=None), list_snapshots(folder)
    if not paths:
        raise CheckpointError(f"{folder}: has no snapshots to average; train with --average")
    count = len(paths) if last is None else last
    if not 0 < count <= len(paths):
        raise CheckpointError(
            f"{folder}: cannot average {count} of {len(paths)} snapshots; "
            f"give a number from 1 to {len(paths)}, or train with a larger --average"
        )
    paths = paths[-count:]
    tensors, data = average_weights(paths)
    check_fingerprint(system, data, paths[-1])
    load_weights(system.model, tensors, paths[-1])
    header: dict[str, Any] = {"checkpoints": [path.stem for path in paths]}
    target = Path(folder) / AVERAGED
    if measure is not None:
        header.update(measure(system))
    elif target.exists():
        with contextlib.suppress(CheckpointError):  # it may be this mean, and measured
            found = load_tensors(target, verify=False)[1]
            if found.get("checkpoints") == header["checkpoints"]:
                header |= {key: found[key] for key in found if key.startswith("valid_")}
    save_weights(system, target, **header)
    return system


# --- runs ------------------------------------------------------------------------------------


def run_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, world: DistributedWorld
) -> dict[str, Tensor]:
    """Return weights, optimizer moments, and the random state of each process.

    All processes must call this. Shards are gathered tensor by tensor, and only the main process
    keeps the result.
    """
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for number, state in sorted(optimizer.state_dict()["state"].items()):
        for name, tensor in sorted(state.items()):  # same order in all processes
            tensors[f"optimizer.{number}.{name}"] = tensor
    found = {}
    for name, tensor in tensors.items():
        whole = full_tensor(tensor)
        if world.main:
            found[name] = whole
    for rank, state in enumerate(world.gather(torch.get_rng_state())):
        found[f"random.{rank}"] = state
    if next(model.parameters()).device.type == "cuda":
        for rank, state in enumerate(world.gather(torch.cuda.get_rng_state())):
            found[f"random.{rank}.cuda"] = state
    if next(model.parameters()).device.type == "mps":
        found["random.0.mps"] = torch.mps.get_rng_state()
    return found


def load_model(model: nn.Module, tensors: Mapping[str, Tensor], path: str | Path) -> None:
    """Copy the weights from :func:`run_tensors` into a model; see :func:`load_weights`."""
    own = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
    load_weights(model, own, path)


def restore_run(
    tensors: Mapping[str, Tensor],
    groups: list[dict[str, Any]],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: DistributedWorld,
    path: str | Path,
) -> None:
    """Restore what :func:`run_tensors` returned, in any number of processes, sharded or not.

    If there are more processes than before, the new ones keep their random states.

    Raises:
        CheckpointError: A tensor is missing or of another model; the message names ``path``.
    """
    load_model(model, tensors, path)
    try:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        moments: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, number, key = name.split(".")
                like = parameters[int(number)]
                part = shard_like(tensor, like) if tensor.shape == like.shape else tensor
                moments.setdefault(int(number), {})[key] = part.clone()  # releases the mapped file
        optimizer.load_state_dict({"state": moments, "param_groups": groups})
        if (name := f"random.{world.rank}") in tensors or not world.rank:
            torch.set_rng_state(tensors[name])
        if f"{name}.cuda" in tensors and next(model.parameters()).device.type == "cuda":
            torch.cuda.set_rng_state(tensors[f"{name}.cuda"])
        if f"{name}.mps" in tensors and next(model.parameters()).device.type == "mps":
            torch.mps.set_rng_state(tensors[f"{name}.mps"])
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise damaged_error(path, f"{type(error).__name__}: {error}") from None
