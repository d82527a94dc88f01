"""Shards and indexes with anything done to them: what is read is right, or a DataError, and soon."""

import io
import signal
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vil.training.errors import DataError
from vil.training.shards import Sample, index_path, load_index, scan, stamp_of, write_index

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")
quick = pytest.importorskip("tests.training.fuzzing").quick

SECONDS = 5.0  # in which anything must have been read; it takes milliseconds
MOST_BYTES = 16 << 20
FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
KINDS = b"0123456789xgLKSVDNM\0"


def few_and_many(*strategies: st.SearchStrategy) -> Callable[[Callable], Callable]:
    """Test with a few examples each time, and with many where slow tests run."""

    def decorate(test: Callable) -> Callable:
        @pytest.mark.parametrize(
            "examples", [60, pytest.param(600, marks=pytest.mark.nightly)], ids=["few", "many"]
        )
        def run(tmp_path: Path, examples: int) -> None:
            @hypothesis.settings(
                quick, max_examples=examples, deadline=None
            )  # SECONDS ends what hangs
            @hypothesis.given(st.tuples(*strategies))
            def on_one(drawn: tuple) -> None:
                with soon():
                    test(tmp_path, *drawn)

            on_one()

        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate


@contextmanager
def soon() -> Iterator[None]:
    """Fail if something takes long."""

    def fail(*_: object) -> None:
        raise TimeoutError(f"not read within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def tar(form: int, names: list[str]) -> bytes:
    """Return a shard with an image, a label and another file for each name."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=form) as archive:
        for number, name in enumerate(names):
            files = {"jpg": b"%d" % number * 300, "cls": b"%d" % number, "json": b"{}"}
            for extension, data in files.items():
                member = tarfile.TarInfo(f"{name}.{extension}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return content.getvalue()


NAMES = ["a", "b/c", "d" * 120]  # the last is longer than a header holds, but not a ustar header
TARS = [tar(form, NAMES[: 2 + (form != tarfile.USTAR_FORMAT)]) for form in FORMATS]


def scanned(folder: Path, content: bytes) -> list[Sample] | None:
    """Scan a shard; None if it is refused."""
    shard = folder / "a.tar"
    shard.write_bytes(content)
    try:
        samples = scan(shard)
    except DataError:
        return None
    # What is claimed of any tar: images lie in it, one after the other, each behind a header.
    keys, end = set(), 0
    for sample in samples:
        assert sample.key not in keys
        keys.add(sample.key)
        if sample.offset is not None:
            assert sample.offset % 512 == 0
            assert 512 <= end + 512 <= sample.offset <= sample.offset + sample.size <= len(content)
            end = sample.offset
        else:
            assert sample.label is not None
    return samples


@few_and_many(st.integers(0, 10**6), st.integers(0, 7))
def test_bit_flipped_in_a_tar(folder: Path, place: int, bit: int) -> None:
    """Of ustar, where no header is without a checksum."""
    content = bytearray(TARS[0])
    whole = scanned(folder, TARS[0])
    place %= len(content.rstrip(b"\0")) + 2000
    content[place] ^= 1 << bit
    found = scanned(folder, bytes(content))
    if found is None:
        return
    for before, after in zip(whole, found, strict=True):
        assert before._replace(label=None) == after._replace(label=None)
    changed = [a for a, b in zip(whole, found, strict=True) if a.label != b.label]
    in_labels = [sample.offset + 512 + 512 <= place < sample.offset + 1536 for sample in whole]
    assert len(changed) <= sum(in_labels)


def header(name: bytes, kind: int, size: bytes, rest: bytes) -> bytes:
    """Return a header with a right checksum whatever it says."""
    block = bytearray(name.ljust(100, b"\0")[:100] + b"0000644\0" + b"0000000\0" * 2)
    block += size[:12].ljust(12, b"\0") + b"00000000000\0" + b" " * 8 + bytes([kind])
    block += bytes(100) + b"ustar  \0" + bytes(512)
    del block[512:]
    block[386 : 386 + len(rest)] = rest[:96]  # sparse headers have their numbers there
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


numbers = st.one_of(
    st.integers(-(2**13), 2**13).map(lambda n: b"%o" % n),
    st.integers(-(2**87), 2**87).map(lambda n: (n % 2**96).to_bytes(12, "big")),
    st.integers(0, 2**95 - 1).map(lambda n: (2**95 + n).to_bytes(12, "big")),
    st.binary(max_size=12),
)
records = st.one_of(
    st.binary(max_size=600),
    st.tuples(
        st.sampled_from([b"size", b"GNU.sparse.size", b"GNU.sparse.realsize", b"GNU.sparse.major"]),
        st.one_of(st.integers(-(2**70), 2**70).map(lambda n: b"%d" % n), st.binary(max_size=9)),
    ).map(lambda pair: b"%d %s=%s\n" % (len(pair[0] + pair[1]) + 5, *pair)),
)
members = st.tuples(
    st.sampled_from([b"a.jpg", b"a.cls", b"b.png", b"././@LongLink"]),
    st.sampled_from(KINDS),
    numbers,
    st.binary(max_size=96),
    records,
)


@few_and_many(st.lists(members, min_size=1, max_size=6))
def test_headers_that_say_anything(
    folder: Path, drawn: list[tuple[bytes, int, bytes, bytes, bytes]]
) -> None:
    content = TARS[0].rstrip(b"\0")
    content += bytes(-len(content) % 512)
    for name, kind, size, rest, body in drawn:
        content += header(name, kind, size, rest) + body + bytes(-len(body) % 512)
    tracemalloc.start()
    try:
        scanned(folder, content + bytes(1024))
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


# Their indexes


def made(folder: Path, checksums: bool) -> tuple[Path, bytes]:
    """Return a shard and its index."""
    shard = folder / "a.tar"
    if not shard.exists():
        shard.write_bytes(TARS[0])
    samples = scan(shard)
    if checksums:
        samples = [sample._replace(crc32=10**8 + sample.offset) for sample in samples]
    write_index(shard, samples, stamp_of(shard))
    return shard, index_path(shard).read_bytes()


def loaded(shard: Path, content: bytes, checksums: bool) -> None:
    """Load a shard with another index: it must be refused or right."""
    expected = load_index(shard)
    index_path(shard).write_bytes(content)
    try:
        found = load_index(shard)
    except DataError:
        return
    if not checksums or not any(sample.crc32 for sample in found):
        expected = [sample._replace(crc32=None) for sample in expected]
    assert found == expected


@few_and_many(st.booleans(), st.integers(0, 600), st.integers(0, 600), st.binary(max_size=30))
def test_spliced_index(folder: Path, checksums: bool, start: int, end: int, piece: bytes) -> None:
    shard, content = made(folder, checksums)
    loaded(shard, content[:start] + piece + content[end:], checksums)
