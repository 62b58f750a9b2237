"""What is written is whole and UTF-8, or an error; nothing is overwritten by mistake."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from annotated_transformer.cli.main import main
from annotated_transformer.cli.output import check_target, log, write_output
from annotated_transformer.data.files import FileError
from annotated_transformer.engine.config import UsageError
from tests.cli.command import Capture, fails, write
from tests.processes import needs_full

WRITE = """
import sys
from annotated_transformer.cli import main, output
main.run = lambda words: output.write_output("\\u00dcbung \\u53e5\\u5b50\\n" * int(words[0])) or 0
sys.exit(main.main(sys.argv[1:]))
"""


@needs_full
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_an_error(unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-c", WRITE, "20000"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, env=environment)
    told = b"annotated-transformer: standard output: cannot be written: No space left on device"
    assert (done.returncode, done.stderr) == (2, told + b"; redirect it elsewhere\n")


class Slow(io.RawIOBase):
    """A stream that takes seven bytes at a time, as a disk that fills up does."""

    def __init__(self, room: int) -> None:
        self.data, self.room = b"", room

    def writable(self) -> bool:
        return True

    def write(self, data: memoryview) -> int:  # type: ignore[override]
        taken = bytes(data[: min(7, self.room - len(self.data))])
        if not taken:
            raise OSError(28, "No space left on device")
        self.data += taken
        return len(taken)


def test_short_writes_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Übung macht den Meister\n" * 5
    for room in (1000, 50):
        slow = Slow(room)
        stream = io.TextIOWrapper(slow, encoding="ascii", write_through=True)  # type: ignore[type-var]
        monkeypatch.setattr(sys, "stdout", stream)
        if room == 1000:
            write_output(text)
            assert slow.data == text.encode()
        else:
            with pytest.raises(FileError, match="standard output: cannot be written: No space"):
                write_output(text)


def test_output_is_utf8_whatever_the_locale() -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", WRITE, "2"]
    done = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert done.stdout == "Übung 句子\n".encode() * 2


def test_nobody_reads_on() -> None:
    command = f"'{sys.executable}' -c '{WRITE}' 100000 | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode() == "Übung 句子\n"


def test_closed_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(FileError, match="standard output: cannot be written: it is closed"):
        write_output("x")
    monkeypatch.setattr(sys, "stderr", None)
    log("nothing")
    assert main(["trian"]) == 2


def test_the_input_is_not_overwritten(tmp_path: Path, capsys: Capture) -> None:
    path = write(tmp_path / "f", ["gut"])
    (tmp_path / "link").symlink_to(path)
    for name in (path, str(tmp_path / "link")):
        line = fails(capsys, "translate", "m", path, "-o", name)
        assert f"--output {name}: is also the input" in line
    assert Path(path).read_text() == "gut\n"


def test_a_target_is_checked_before_the_work(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "file"
    file.write_text("")
    check_target("--record", tmp_path / "new" / "record.json")
    with pytest.raises(UsageError, match=r"--record .*: is a folder; name a file"):
        check_target("--record", tmp_path)
    with pytest.raises(UsageError, match="is a file; choose a folder"):
        check_target("--record", file / "record.json")
    assert "--record" in fails(capsys, "train", "--record", tmp_path)
    assert "--record" in fails(capsys, "ablation", "m", "--record", tmp_path)
    assert "--output" in fails(capsys, "translate", "m", "-o", tmp_path)


def test_no_file_takes_the_number_of_a_closed_stream() -> None:
    code = (
        "import os, sys; from annotated_transformer.cli.main import main\n"
        "os.close(0); os.close(2); main(['train', '--updates', '0'])\n"
        "print(os.open(sys.executable, os.O_RDONLY) > 2)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


BAR = """
import time, types
from annotated_transformer.cli import main

def run(command):
    from tqdm import tqdm
    for _ in tqdm(range(20)):
        time.sleep(0.05)
    return 0

main.import_module = lambda name: types.SimpleNamespace(run=run)
main.main(["plot", "nowhere"])
"""


@pytest.mark.parametrize(("interval", "least", "most"), [(None, 1, 3), ("0.1", 5, 99)])
def test_a_bar_does_not_fill_a_log(interval: str | None, least: int, most: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TQDM_MININTERVAL"}
    environment |= {"TQDM_MININTERVAL": interval} if interval else {}
    words = [sys.executable, "-c", BAR]
    done = subprocess.run(words, capture_output=True, env=environment, check=True)
    assert b"20/20" in done.stderr
    assert least <= done.stderr.count(b"\r") <= most
