"""What all exports share: which systems they take, whole folders or none, tokenizers, the card."""

import contextlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from annotated_transformer import __version__
from annotated_transformer.data.files import FileError, load_object, not_written
from annotated_transformer.engine.checkpoints import AVERAGED, check_parts
from annotated_transformer.engine.system import System
from annotated_transformer.model.transformer import ModelConfig, count_parameters
from annotated_transformer.notation import EOS, SPECIAL_TOKENS
from annotated_transformer.translation.tokenizers import BPETokenizer, Tokenizer, WordTokenizer

MARK = "export.json"  # tells that a folder is an export of ours, and what is in it
FORMAT = 1
LETTERS = " Few letters, as the final sigma, are lower-cased differently."  #: On some cards.
JOINED = "￭"  # before a word that is glued to the one before it


class ExportError(ValueError):
    """A target cannot express the system; the one-line message gives the reason and the remedy."""


def transformer_config(system: System, target: str) -> ModelConfig:
    """Return the sizes of a Transformer.

    Raises:
        CheckpointError: The model has a part that its configuration does not build.
        ExportError: The system is of another architecture.
    """
    if not isinstance(system.config, ModelConfig):
        told = f"--to {target}: has no layers of the kind {type(system.config).__name__}"
        raise ExportError(f"{told}; give a run of --architecture transformer")
    check_parts(system)
    return system.config


def check_heads(config: ModelConfig, target: str) -> None:
    """Raise ExportError if the heads' widths are not ``d_model / h`` (Table 3, rows B)."""
    width, rest = divmod(config.d_model, config.h)
    for name in ("d_k", "d_v"):
        own = getattr(config, name)
        if rest or own not in (None, width):
            raise ExportError(
                f"--to {target}: its heads are d_model / h = {config.d_model / config.h:g} wide, "
                f"but this model has {name}={own}; use --to onnx, or train without --d-k and --d-v"
            )


# --- folders ---------------------------------------------------------------------------------


def check_out(out: Path) -> None:
    """Refuse a folder that holds anything but an export of ours.

    Raises:
        FileError: It holds something else, or is a file; the message names it.
    """
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise FileError(f"{out}: is not a folder; choose another name")
    try:
        mark = load_object(out / MARK)
        known = {MARK, *mark["files"]} if mark["format"] == FORMAT else set()
    except (OSError, ValueError, LookupError, TypeError):
        known = set()
    found = (p for p in out.rglob("*") if p.is_symlink() or not p.is_dir() or not any(p.iterdir()))
    files = (path.relative_to(out).as_posix() for path in found)
    if strange := next((name for name in files if name not in known), ""):
        raise FileError(f"{out}: holds {strange}, which no export has written; choose a new folder")


@contextlib.contextmanager
def whole_folder(out: Path, **about: Any) -> Iterator[Path]:
    """Yield a folder to write to, which takes the place of ``out`` once it is complete.

    Args:
        out: The folder of the export; replaced if it is one of ours, see :func:`check_out`.
        about: Further entries of ``export.json``.

    Raises:
        FileError: It cannot be written; what was there is untouched.
    """
    check_out(out)
    out = Path(os.path.realpath(out))
    missing = [folder for folder in out.parents if not folder.exists()]
    new, old = (out.with_name(f".{out.name}.{os.getpid()}.{end}") for end in ("part", "old"))
    try:  # whatever ends it, nothing half written stays
        try:
            new.mkdir(parents=True)
            yield new
            files = sorted(p.relative_to(new).as_posix() for p in new.rglob("*") if p.is_file())
            mark = {"format": FORMAT, "version": __version__, **about, "files": files}
            (new / MARK).write_text(json.dumps(mark, indent=1) + "\n", encoding="utf-8")
            if out.is_dir():  # nothing else may make room, whatever was checked before
                out.rename(old)
            new.rename(out)
        except OSError as error:
            raise not_written(error, out) from None
        except Exception as error:  # libraries in Rust have exceptions of their own for these
            if "os error" not in str(error):
                raise
            told = f"{out}: cannot be written: {' '.join(str(error).split())}"
            raise FileError(f"{told}; free some space, or choose another folder") from None
    finally:
        if old.exists() and not out.exists():
            old.rename(out)
        for path in (new, old):
            shutil.rmtree(path, ignore_errors=True)
        with contextlib.suppress(OSError):  # unless the export is in it
            for path in missing:
                path.rmdir()


# --- tokenizers ------------------------------------------------------------------------------


def token_strings(tokenizer: Tokenizer) -> list[str]:
    """Return a string for each number of the vocabulary, all different.

    Raises:
        ExportError: The strings of two numbers are the same.
    """
    entries = getattr(tokenizer, "entries", ())
    if isinstance(tokenizer, WordTokenizer):
        entries = [f"{JOINED * glued}{word}" for word, glued in entries]
    strings = [*SPECIAL_TOKENS, *entries]
    if len(set(strings)) < len(strings):
        ((twice, _),) = Counter(strings).most_common(1)
        told = f"the vocabulary has {twice!r} twice, and this target knows tokens by their text"
        raise ExportError(f"{told} alone; use --to onnx, or train with another --vocabulary")
    return strings


def portable_tokenizer(tokenizer: BPETokenizer, *, ends: bool) -> Backend:
    """Return an equal tokenizer of the library ``tokenizers``; but see ``LETTERS``.

    With ``ends``, it lets every text end in the end symbol.
    """
    numbers = {token: number for number, token in enumerate(token_strings(tokenizer))}
    backend = Backend(BPE(numbers, list(tokenizer.merges)))
    lower = [normalizers.Lowercase()] if tokenizer.lowercase else []
    backend.normalizer = normalizers.Sequence([*lower, normalizers.Prepend(" ")])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    if ends:
        end = SPECIAL_TOKENS[EOS]
        backend.post_processor = TemplateProcessing(
            single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, EOS)]
        )
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    backend.add_special_tokens(special)
    backend.encode_special_tokens = True  # in a text, "</s>" is five characters
    assert backend.get_vocab_size() == len(tokenizer)
    return backend


def has_sub_words(system: System) -> bool:
    """Whether both languages share sub-words, which need nothing of this package."""
    return system.shared and isinstance(system.tokenizers[0], BPETokenizer)


def save_tokenizers(system: System, folder: Path, *, ends: bool) -> None:
    """Write ``tokenizer.json`` for the library ``tokenizers``, or words as a run has them."""
    if has_sub_words(system):
        backend = portable_tokenizer(cast(BPETokenizer, system.tokenizers[0]), ends=ends)
        backend.save(str(folder / "tokenizer.json"))
        return
    for name, words in zip(("source.json", "target.json"), system.tokenizers, strict=True):
        (folder / name).write_text(words.to_json() + "\n", encoding="utf-8")


# --- the card --------------------------------------------------------------------------------


def model_card(system: System, record: Mapping[str, Any] | None, use: str, lost: str) -> str:
    """Return a model card: what the model is, its scores, how it is used, what was lost.

    Args:
        system: The system.
        record: The record of its run, where there is one; all scores come from it.
        use: Python code that translates with the export.
        lost: What the target leaves out.
    """
    source, target = system.languages
    config, back = system.config, " and back" * ("both_ways" in system.training)
    sizes = ", ".join(f"{name}={value}" for name, value in vars(config).items())
    rows = [f"- Parameters: {count_parameters(system.model):,}", f"- Sizes: {sizes}"]
    rows += lines_of_record(record) if record else ["- There was no record of its run"]
    languages = f'- "{source}"\n- "{target}"'  # or "no" would be false
    lost += LETTERS * system.lowercase
    return (
        f"---\nlanguage:\n{languages}\npipeline_tag: translation\n---\n\n"
        f"# A Transformer from {source} to {target}{back}\n\n"
        "An encoder-decoder as in *Attention Is All You Need* (Vaswani et al., 2017), exported by "
        f"annotated-transformer {__version__}.\n\n" + "\n".join(rows) + "\n\n"
        f"## Use\n\n```python\n{use.strip()}\n```\n\n## What was lost\n\n{lost}\n"
    )


def lines_of_record(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a record says of the run and its scores, as lines of a list.

    If it names the weights, the scores are those of these.
    """
    options = record.get("options", {})
    yield f"- Corpus: {options.get('corpus')} {options.get('pair')}"
    yield f"- Updates: {record.get('updates'):,}, seed {record.get('seed')}"
    yield f"- Commit: {record.get('commit')}, {record.get('date')}"
    weights = record.get("weights")
    if weights:
        yield f"- Weights: {weights}"
    for name, scores in (record.get("scores") or {}).items():
        own = weights is None or name.endswith(", averaged") == (weights == AVERAGED)
        if own and isinstance(scores, Mapping) and "bleu" in scores:
            yield f"- {name}: BLEU {scores['bleu']} (`{scores.get('bleu_signature')}`)"
