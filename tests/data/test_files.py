"""Tests of digests, atomic writes and locks."""

import contextlib
import errno
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

from annotated_transformer.data.files import (
    FileError,
    digest_of,
    load_object,
    lock_folder,
    not_read,
    regular_file,
    write_atomically,
)
from tests.pipes import pipe_at


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EIO])
def test_remedy_for_a_file_that_this_user_may_not_read(number: int) -> None:
    """The errors come from the system's number, as ``open`` raises them."""
    message = not_read(OSError(number, os.strerror(number)), "run/config.json", "copy it again")
    why = f"run/config.json: cannot be read: {os.strerror(number)}"
    remedy = "copy it again" if number == errno.EIO else "let this user read it"
    assert message == f"{why}; {remedy}"


def parts(folder: Path) -> list[Path]:
    """Return the temporary files in a folder."""
    return list(folder.rglob("*.part"))


def one_line(error: pytest.ExceptionInfo[FileError], path: Path) -> None:
    """Check that a message is one line that names a file."""
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1])
def test_digests(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "x").write_bytes(data)
    assert digest_of(tmp_path / "x") == hashlib.sha256(data).hexdigest()
    assert digest_of(str(tmp_path / "x"), "md5") == hashlib.md5(data).hexdigest()


# --- writing -------------------------------------------------------------------


def test_a_file_is_replaced_and_folders_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    for data in (b"old", b"", b"new"):
        write_atomically(path, data)
        assert path.read_bytes() == data
    assert parts(tmp_path) == []


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_atomically(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_a_link_may_lead_to_another_file_system(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no other file system")
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        (tmp_path / "link").symlink_to(Path(folder) / "real")
        for data in (b"old", b"new"):
            write_atomically(tmp_path / "link", data)
            assert (Path(folder) / "real").read_bytes() == data
        assert parts(Path(folder)) == []


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="another system")
def test_the_output_of_the_process_is_written_where_it_leads(tmp_path: Path) -> None:
    code = f"from {write_atomically.__module__} import *; write_atomically('/dev/stdout', b'text')"
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
    assert (tmp_path / "out").read_bytes() == b"text"


def test_a_device_is_written_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(tmp_path / "pipe", b"text")
    assert os.read(reader, 10) == b"text"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_only_regular_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b'{"a": 1}')
    assert (load_object(path), load_object(str(path))) == ({"a": 1}, {"a": 1})
    assert regular_file(path) == path
    assert regular_file(tmp_path) == tmp_path  # opening it says what it is
    with pipe_at(path):
        for read in (regular_file, load_object, digest_of):
            with pytest.raises(OSError, match="not a regular file") as caught:
                read(path)
            assert caught.value.filename == str(path)
    for other, error in (("/dev/null", OSError), (tmp_path / "none", FileNotFoundError)):
        with pytest.raises(error):
            regular_file(other)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_keeps_the_old_file(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, step, full)
    with pytest.raises(FileError, match="No space left") as error:
        write_atomically(path, b"new")
    one_line(error, path)
    assert path.read_bytes() == b"old"
    assert parts(tmp_path) == []


@pytest.mark.parametrize("name", ["folder", "file/below"])
def test_a_file_that_cannot_be_written(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(FileError) as error:
        write_atomically(tmp_path / name, b"new")
    one_line(error, tmp_path / name)


def test_kill_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    program = (
        f"import sys\nfrom {write_atomically.__module__} import write_atomically\n"
        "for turn in range(10**6):\n"
        "    write_atomically(sys.argv[1], bytes([turn % 256]) * 3_000_000)\n"
        "    print(turn, flush=True)\n"
    )
    for attempt in range(5):
        with subprocess.Popen(
            [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(0.007 * attempt)
            process.kill()
        data = path.read_bytes()
        assert len(data) == 3_000_000
        assert len(set(data)) == 1


# --- locks ---------------------------------------------------------------------

HOLD = """
import sys, time
from annotated_transformer.data.files import lock_folder
with lock_folder(sys.argv[1], wait=False):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_lock_is_held_by_one_process_and_freed_when_it_dies(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError), lock_folder(tmp_path, wait=False):
            pytest.fail("two hold it")
        other.kill()
    with lock_folder(tmp_path, wait=False):
        assert list(tmp_path.iterdir()) == []


def test_waiting_for_a_lock_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = []

    def second() -> None:
        with lock_folder(tmp_path, wait=True):
            order.append("second")

    with futures.ThreadPoolExecutor() as pool:
        with lock_folder(tmp_path, wait=True):
            waiting = pool.submit(second)
            with pytest.raises(futures.TimeoutError):
                waiting.result(timeout=0.3)
            order.append("first")
        waiting.result()
    assert order == ["first", "second"]
    assert capsys.readouterr().err == f"{tmp_path}: waiting for another process\n"


def test_a_lock_is_freed_by_an_error(tmp_path: Path) -> None:
    with contextlib.suppress(KeyError), lock_folder(tmp_path, wait=False):
        raise KeyError
    with lock_folder(tmp_path, wait=False):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_there_are_no_locks_nothing_is_held(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", none)
    with lock_folder(tmp_path, wait=False), lock_folder(tmp_path, wait=False):
        pass


def test_a_folder_that_cannot_be_locked(tmp_path: Path) -> None:
    with pytest.raises(OSError), lock_folder(tmp_path / "none", wait=True):
        pass
