"""Tests of archives."""

import io
import os
import stat
import struct
import tarfile
import zipfile
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

from annotated_transformer.data import archives
from annotated_transformer.data.archives import locate_file, unpack_archive
from annotated_transformer.data.files import lock_folder
from tests.data.small import message

Member = tuple[str, bytes | tarfile.TarInfo]


def tar(path: Path, *members: Member, mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as tape:  # type: ignore[call-overload]
        for name, content in members:
            info = content if isinstance(content, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.name = name
            data = b"" if isinstance(content, tarfile.TarInfo) else content
            info.size = len(data)
            tape.addfile(info, io.BytesIO(data))
    return path


def special(kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo()
    info.type, info.linkname = kind, target
    return info


def zipped(path: Path, *members: tuple[str | zipfile.ZipInfo, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return path


def everything(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


CONTENTS = {"a.de": b"eins\n", "sub/b.en": b"two\n", "./c": b""}


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz", "zip"])
def test_a_good_archive_is_unpacked_once(tmp_path: Path, mode: str) -> None:
    archive = tmp_path / "x"
    if mode == "zip":
        zipped(archive, *CONTENTS.items(), ("empty/", b""))
    else:
        tar(archive, *CONTENTS.items(), ("empty", special(tarfile.DIRTYPE)), mode=mode)
    folder = unpack_archive(archive, tmp_path / "out")
    assert everything(folder) == {"a.de": b"eins\n", "sub/b.en": b"two\n", "c": b""}
    (folder / "a.de").write_bytes(b"mine")
    assert unpack_archive(archive, folder) == folder
    assert (folder / "a.de").read_bytes() == b"mine"


BAD_NAMES = [
    "../out.txt",
    "a/../../out.txt",
    "/out.txt",
    "..\\out.txt",
    "\\out.txt",
    "c:out.txt",
    "..",
]


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize("pack", [tar, zipped])
def test_names_that_lead_out_are_refused(tmp_path: Path, name: str, pack: Any) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    archive = pack(inner / "x", ("good", b"1"), (name, b"2"))
    before = everything(tmp_path)
    text = message(lambda: unpack_archive(archive, inner / "out"))
    assert f"{archive}, member {name}" in text
    assert "leads out" in text
    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    "member",
    [
        special(tarfile.SYMTYPE, "/etc"),
        special(tarfile.SYMTYPE, "good"),
        special(tarfile.LNKTYPE, "good"),
        special(tarfile.FIFOTYPE),
        special(tarfile.CHRTYPE),
        special(tarfile.BLKTYPE),
    ],
)
def test_links_and_devices_are_refused(tmp_path: Path, member: tarfile.TarInfo) -> None:
    archive = tar(tmp_path / "x.tgz", ("good", b"1"), ("odd", member), ("odd/file", b"2"))
    text = message(lambda: unpack_archive(archive, tmp_path / "out"))
    assert f"{archive}, member odd" in text
    assert "link or a device" in text
    assert [path.name for path in tmp_path.iterdir()] == ["x.tgz"]


def test_a_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    info = zipfile.ZipInfo("odd")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    archive = zipped(tmp_path / "x.zip", (info, b"/etc"))
    assert "member odd: refused because it is" in message(
        lambda: unpack_archive(archive, tmp_path / "out")
    )


@pytest.mark.parametrize("pack", [tar, zipped])
def test_bytes_and_files_are_limited(tmp_path: Path, pack: Any) -> None:
    archive = pack(tmp_path / "x", ("a", bytes(600)), ("b", bytes(600)))
    assert everything(unpack_archive(archive, tmp_path / "1", max_bytes=1200))
    text = message(lambda: unpack_archive(archive, tmp_path / "2", max_bytes=1199))
    assert "member b: refused because the files exceed 1199 bytes" in text
    text = message(lambda: unpack_archive(archive, tmp_path / "3", max_files=1))
    assert "more than 1 files" in text
    assert not (tmp_path / "2").exists()
    assert not (tmp_path / "3").exists()


@pytest.mark.parametrize("claimed", [10, 4999, 10**9])
def test_a_zip_that_lies_about_a_size_is_refused(tmp_path: Path, claimed: int) -> None:
    archive = zipped(tmp_path / "x.zip", ("a", bytes(5000)))
    content, true = archive.read_bytes(), struct.pack("<L", 5000)
    assert content.count(true) == 2  # before the member, and in the table
    archive.write_bytes(content.replace(true, struct.pack("<L", claimed)))
    assert "x.zip" in message(lambda: unpack_archive(archive, tmp_path / "out", max_bytes=10**6))
    assert [path.name for path in tmp_path.iterdir()] == ["x.zip"]


def test_a_name_that_comes_twice_is_refused(tmp_path: Path) -> None:
    archive = tar(tmp_path / "x", ("a", b"1"), ("a", b"2"))
    assert "twice" in message(lambda: unpack_archive(archive, tmp_path / "out"))
    archive = tar(tmp_path / "y", ("a", b"1"), ("a/b", b"2"))
    assert str(archive) in message(lambda: unpack_archive(archive, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("pack", [tar, zipped])
def test_damaged_archives(tmp_path: Path, pack: Any) -> None:
    archive = pack(tmp_path / "x", ("a", os.urandom(5000)))
    content = archive.read_bytes()
    for damaged in (content[:2000], content[:2], b"", b"no archive at all" * 50):
        archive.write_bytes(damaged)
        text = message(lambda: unpack_archive(archive, tmp_path / "out"))
        assert str(archive) in text
        assert not (tmp_path / "out").exists()


def test_rights_and_owners_are_not_taken_over(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x", "w") as tape:
        info = tarfile.TarInfo("a")
        info.mode, info.uid, info.gid = 0o6777, 12345, 12345
        tape.addfile(info)
    found = (unpack_archive(tmp_path / "x", tmp_path / "out") / "a").stat()
    assert not found.st_mode & (stat.S_ISUID | stat.S_ISGID | stat.S_IWGRP | stat.S_IWOTH)
    assert (found.st_uid, found.st_gid) == (os.getuid(), os.getgid())


def test_a_tar_that_begins_like_a_zip(tmp_path: Path) -> None:
    archive = tar(tmp_path / "x", ("PK", b"1"), mode="w")
    assert everything(unpack_archive(archive, tmp_path / "out")) == {"PK": b"1"}


def test_a_damaged_header_of_a_tar(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x", "w", format=tarfile.PAX_FORMAT) as tape:
        info = tarfile.TarInfo("a")
        info.pax_headers = {"GNU.sparse.map": "x", "GNU.sparse.size": "1"}
        tape.addfile(info, io.BytesIO(b""))
    assert "not a whole tar or zip" in message(
        lambda: unpack_archive(tmp_path / "x", tmp_path / "out")
    )


def test_a_negative_size_gives_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tar(tmp_path / "x", ("a", b"1"), ("b", b"2" * 20))
    members = [("a", -100, True, lambda: io.BytesIO(b"")),
               ("b", 20, True, lambda: io.BytesIO(b"2" * 20))]  # fmt: skip
    monkeypatch.setattr(archives, "_members", lambda _: members)
    told = message(lambda: unpack_archive(archive, tmp_path / "out", max_bytes=50))
    assert "exceed 50 bytes" in told


def test_contents_of_a_pipe_replace_what_a_killed_process_left(tmp_path: Path) -> None:
    pipe = tmp_path / "63"
    os.mkfifo(pipe)
    for content in (b"one", b"two"):
        with futures.ThreadPoolExecutor() as pool:
            pool.submit(pipe.write_bytes, content)
            found = locate_file(pipe, tmp_path / "u")
        assert [path.read_bytes() for path in found.parent.iterdir()] == [content]
        (found.parent / ".63.999999999.part").write_bytes(b"half")


def test_a_name_in_a_zip_that_is_no_text(tmp_path: Path) -> None:
    archive = zipped(tmp_path / "x", ("ä", b"1"))
    archive.write_bytes(archive.read_bytes().replace("ä".encode(), b"\xc3("))
    assert "('utf-8' codec" in message(lambda: unpack_archive(archive, tmp_path / "out"))


def test_what_another_process_unpacks_is_waited_for(tmp_path: Path) -> None:
    archive = tar(tmp_path / "x", ("a", b"1"))
    with futures.ThreadPoolExecutor() as pool:
        with lock_folder(tmp_path, wait=False):
            (tmp_path / ".out.part").mkdir()  # the other's
            folder = pool.submit(unpack_archive, archive, tmp_path / "out")
            with pytest.raises(futures.TimeoutError):
                folder.result(timeout=0.3)
            (tmp_path / ".out.part" / "b").write_bytes(b"2")
            (tmp_path / ".out.part").rename(tmp_path / "out")
        assert everything(folder.result()) == {"b": b"2"}


def test_what_a_killed_process_left_is_no_archive(tmp_path: Path) -> None:
    archive = tar(tmp_path / "x", ("a", b"1"))
    (tmp_path / ".out.part").mkdir()
    (tmp_path / ".out.part" / "half").write_bytes(b"?")
    assert everything(unpack_archive(archive, tmp_path / "out")) == {"a": b"1"}
    assert not (tmp_path / ".out.part").exists()


def test_paths_go_on_inside_archives(tmp_path: Path) -> None:
    archive = tar(tmp_path / "x.tgz", ("t/a.de", b"eins\n"))
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    assert locate_file(plain, tmp_path / "u") == plain
    assert locate_file(archive / "t" / "a.de", tmp_path / "u").read_bytes() == b"eins\n"
    assert "has no member t/b.de" in message(
        lambda: locate_file(archive / "t/b.de", tmp_path / "u")
    )
    assert "no such file" in message(lambda: locate_file(tmp_path / "none", tmp_path / "u"))
    assert "no such file" in message(lambda: locate_file(tmp_path / "none/a.de", tmp_path / "u"))


def test_archives_of_one_name_are_told_apart(tmp_path: Path) -> None:
    found = []
    for folder, text in (("old", b"one"), ("new", b"two"), ("old", b"three")):
        (tmp_path / folder).mkdir(exist_ok=True)
        tar(tmp_path / folder / "x.tgz", ("a.de", text))
        found.append(locate_file(tmp_path / folder / "x.tgz" / "a.de", tmp_path / "u").read_bytes())
    assert found == [b"one", b"two", b"three"]
