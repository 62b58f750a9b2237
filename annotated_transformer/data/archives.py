"""Safe unpacking of untrusted archives."""

import contextlib
import hashlib
import os
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, cast

from annotated_transformer.data.files import (
    CorpusError,
    digest_of,
    lock_folder,
    not_written,
    write_atomically,
)
from annotated_transformer.data.text import DAMAGED, reading_errors

MAX_BYTES = 64 * 2**30  # default limit on an archive's unpacked size
MAX_FILES = 10_000
# The last two are raised for a member's damaged or undecodable header, and an encrypted member.
BROKEN = (*DAMAGED, tarfile.TarError, zipfile.BadZipFile, ValueError, RuntimeError)


def unpack_archive(
    archive: str | Path, folder: str | Path, max_bytes: int = MAX_BYTES, max_files: int = MAX_FILES
) -> Path:
    """Unpack the plain files of a tar or zip archive into a folder, never outside it.

    Args:
        archive: The archive; a tar may be compressed with gzip, bzip2 or xz.
        folder: Where the files go. An existing one counts as complete, and nothing is done.
        max_bytes: Limit on the unpacked size, in bytes.
        max_files: Limit on the number of files.

    Returns:
        The folder.

    Raises:
        CorpusError: The archive is damaged, or a member is refused; the message names
            both. No files are left behind.
    """
    archive, folder = Path(archive), Path(folder)
    if folder.exists():
        return folder
    part = folder.with_name(f".{folder.name}.part")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with lock_folder(folder.parent, wait=True), contextlib.ExitStack() as stack:
            if not folder.exists():  # otherwise another process has unpacked it
                shutil.rmtree(part, ignore_errors=True)
                stack.callback(shutil.rmtree, part, ignore_errors=True)
                part.mkdir()
                _extract(archive, part, max_bytes, max_files)
                os.replace(part, folder)
    except CorpusError:
        raise
    except (*BROKEN, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise CorpusError(f"{archive}: cannot unpack, {not_written(error, folder)}") from None
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CorpusError(
            f"{archive}: not a whole tar or zip archive ({reason}); check it, or download it again"
        ) from None
    return folder


def _members(archive: Path) -> Iterator[tuple[str, int, bool, Callable[[], IO[bytes] | None]]]:
    """Yield an archive's members: name, size, whether a plain file, and what opens it."""
    if tarfile.is_tarfile(archive):
        with tarfile.open(archive) as tape:
            for member in tape:
                if not member.isdir():
                    yield (
                        member.name,
                        member.size,
                        member.isreg(),
                        partial(tape.extractfile, member),
                    )
    else:
        with zipfile.ZipFile(archive) as packed:
            for info in packed.infolist():
                if not info.is_dir():
                    plain = stat.S_IFMT(info.external_attr >> 16) in (0, stat.S_IFREG)
                    yield info.filename, info.file_size, plain, partial(packed.open, info)


def _extract(archive: Path, folder: Path, max_bytes: int, max_files: int) -> None:
    """Extract an archive's members, refusing anything that a corpus does not contain.

    The libraries read no more than the archive's table says. Contents alone are written, without
    rights or owners, and not by tarfile's filters: Pythons that are still in use have none.
    """
    left = max_bytes
    for number, (name, size, plain, open_member) in enumerate(_members(archive), 1):
        left -= abs(size)  # a damaged tar may say less than nothing
        parts = name.replace("\\", "/").split("/")
        if not plain:
            reason = "it is a link or a device"
        elif not parts[0] or ".." in parts or set(":\0") & set(name):  # on any system
            reason = "its path leads out of the folder"
        elif number > max_files:
            reason = f"there are more than {max_files} files"
        elif left < 0:
            reason = f"the files exceed {max_bytes} bytes"
        elif (folder / name).exists():
            reason = "its name occurs twice"
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with cast(IO[bytes], open_member()) as source, (folder / name).open("xb") as file:
                shutil.copyfileobj(source, file)
            continue
        raise CorpusError(f"{archive}, member {name}: refused because {reason}")


def locate_file(path: str | Path, unpacked: str | Path) -> Path:
    """Return the path of a regular file with the given contents, which can be read repeatedly.

    Args:
        path: A file; or a path inside an archive, such as ``nc.tgz/training/a.de``, which is
            unpacked; or a named pipe, which is read to its end.
        unpacked: A folder for the contents of archives and pipes.

    Raises:
        CorpusError: There is no such file, or the archive is refused.
        FileError: The contents of a pipe cannot be written.
    """
    path, unpacked = Path(path), Path(unpacked)
    with reading_errors(path):
        if path.is_file():
            return path
        if path.is_fifo():
            key = hashlib.sha256(bytes(path.absolute())).hexdigest()[:16]
            shutil.rmtree(unpacked / key, ignore_errors=True)  # what a killed process left
            with path.open("rb") as source:
                write_atomically(found := unpacked / key / path.name, source)
            return found
        archive = next((parent for parent in path.parents if parent.is_file()), None)
        if archive is None:
            raise CorpusError(f"{path}: no such file; check the path")
        inside = path.relative_to(archive)
        key = f"{archive.name}-{digest_of(archive)[:16]}"  # the name alone is not unique
    found = unpack_archive(archive, unpacked / key) / inside
    if not found.is_file():
        raise CorpusError(f"{archive}: has no member {inside.as_posix()}; check the path")
    return found
