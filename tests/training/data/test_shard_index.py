"""The index beside a shard: which shard it holds for, and what becomes of damaged tars."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from vil.training.data.shard_index import index_path, load_index, read_index, stamp_of, write_index
from vil.training.data.shard_scan import scan_shard
from vil.training.errors import DataError

MEMBERS = {"a.jpg": b"first", "a.cls": b"1", "b.jpg": b"second", "b.cls": b"2"}


def write_tar(path: Path, members: dict[str, bytes], mode: str = "w") -> Path:
    """Write a shard in place, as another program would."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode=mode) as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    path.write_bytes(content.getvalue())
    return path


def labels(shard: Path) -> list[int | str | None]:
    return [sample.label for sample in load_index(shard)]


def add_checksums(shard: Path) -> None:
    """Turn a scanned index into one as make_shards.py writes it."""
    samples = [sample._replace(crc32=7) for sample in scan_shard(shard)]
    write_index(shard, samples, stamp_of(shard))


# Which shard it holds for


@pytest.mark.parametrize("keeps", ["neither time", "mtime"])
def test_shard_that_is_written_anew_is_scanned_anew(tmp_path: Path, keeps: str) -> None:
    shard = write_tar(tmp_path / "a.tar", MEMBERS)
    assert labels(shard) == [1, 2]
    before = shard.stat()
    write_tar(shard, MEMBERS | {"a.cls": b"3"})
    assert shard.stat().st_size == before.st_size
    times = before.st_mtime_ns + (keeps == "neither time")
    os.utime(shard, ns=(times, times))
    assert labels(shard) == [3, 2]
    assert read_index(shard).stamp == stamp_of(shard)


@pytest.mark.parametrize("change", [{"a.cls": b"3"}, {"a.jpg": b"1st"}, {"c.cls": b"3"}])
def test_checksums_of_another_shard_are_an_error(tmp_path: Path, change: dict[str, bytes]) -> None:
    shard = write_tar(tmp_path / "a.tar", MEMBERS)
    add_checksums(shard)
    write_tar(shard, MEMBERS | change)
    os.utime(shard, ns=(1, 1))
    before = index_path(shard).read_bytes()
    message = (
        r"index .*a\.tar\.idx\.json does not belong to its shard, whose keys.*delete the index"
    )
    with pytest.raises(DataError, match=message):
        load_index(shard)
    assert index_path(shard).read_bytes() == before


def test_damaged_index_is_an_error(tmp_path: Path) -> None:
    """Also where it is still one of the shard."""
    shard = write_tar(tmp_path / "a.tar", MEMBERS)
    load_index(shard)
    content = index_path(shard).read_bytes()
    assert content.count(b"512,5,1,null") == 1
    index_path(shard).write_bytes(content.replace(b"512,5,1,null", b"512,5,3,null"))
    with pytest.raises(DataError, match=r"index .*a\.tar\.idx\.json is damaged; delete it"):
        load_index(shard)


# What is wrong with a tar


def with_size(member: bytes, size: bytes) -> bytes:
    """Put another size into a header, and make its checksum right."""
    header = bytearray(member[:512])
    header[124:136] = size.ljust(12, b"\0")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + member[512:]


@pytest.mark.parametrize("kind", [b"0", b"x", b"g", b"L", b"K", b"S", b"5", b"7"])
@pytest.mark.parametrize(
    "size",
    [
        b"-1000\0",  # octal
        (2**96 - 512).to_bytes(12, "big"),  # -512 in base 256
        (2**96 - 2**40).to_bytes(12, "big"),
        (2**95 + 2**34).to_bytes(12, "big"),  # 16 GiB
        (2**95 + 2**90).to_bytes(12, "big"),
        b"77777777777\0",
    ],
)
def test_impossible_size_is_an_error(tmp_path: Path, kind: bytes, size: bytes) -> None:
    content = write_tar(tmp_path / "a.tar", MEMBERS).read_bytes()
    second = bytearray(content[1024:])
    second[156:157] = kind
    (tmp_path / "a.tar").write_bytes(content[:1024] + with_size(bytes(second), size))
    with pytest.raises(DataError, match=r"a\.tar (is|holds) "):
        load_index(tmp_path / "a.tar")
