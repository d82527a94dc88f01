"""The service answers over HTTP as one thread does, whoever else asks and whatever they send."""

import http.client
import io
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models import save_for_hf

import vil

for _needed in ("fastapi", "uvicorn"):
    pytest.importorskip(_needed)

ROOT = Path(__file__).parents[2]
MAX_BYTES = 300_000
HANGING = 120  # seconds after which a test fails


class Service:
    """A running service and its address."""

    def __init__(self, source: Path, *arguments: str) -> None:
        command = [sys.executable, str(ROOT / "examples" / "serve.py"), str(source), "--port", "0", *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.lines: list[str] = []
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"running on http://127.0.0.1:(\d+)", line):
                self.port = int(found[1])
                return
        raise AssertionError("".join(self.lines))

    def ask(self, content: object, method: str = "POST", path: str = "/predict") -> tuple[int, dict]:
        """Send a request; an iterable is sent in chunks, without its length."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANGING)
        try:
            connection.request(method, path, content)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def memory(self) -> int:
        """Return the bytes of memory that the process uses."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGESIZE")

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        self.lines += self.process.communicate(timeout=HANGING)[1].splitlines(keepends=True)
        return self.process.returncode


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"img_size": 32, "embed_dim": 32, "depth": 2}
    model = timm.create_model("vil_tiny", num_classes=4, **sizes)
    model.pretrained_cfg |= {"num_classes": 4, "label_names": list("abcd"), "input_size": (3, 32, 32)}
    torch.nn.init.normal_(model.head.weight)
    folder = tmp_path_factory.mktemp("service") / "weights"
    save_for_hf(model, folder, model_args=sizes, safe_serialization=True)
    return folder


@pytest.fixture(scope="module")
def service(source: Path) -> Iterator[Service]:
    running = Service(source, "--max-bytes", str(MAX_BYTES), "--max-pixels", "1000000", "--workers", "3")
    yield running
    assert running.stop() == 0
    assert "Traceback" not in "".join(running.lines)


def encoded(width: int, height: int, kind: str = "PNG", mode: str = "RGB") -> bytes:
    generator = np.random.default_rng(width * height)
    pixels = Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8)).convert(mode)
    file = io.BytesIO()
    pixels.save(file, kind)
    return file.getvalue()


IMAGES = [
    *(encoded(32 + 7 * i, 90 - 5 * i) for i in range(8)),
    *(encoded(50, 40, "JPEG", mode) for mode in ("RGB", "L", "CMYK")),
    *(encoded(50, 40, "PNG", mode) for mode in ("RGBA", "LA", "P", "1", "I;16")),
    *(encoded(50, 40, kind) for kind in ("WEBP", "GIF", "BMP", "TIFF")),
]


def expected(source: Path) -> list[list[float]]:
    """Return the probabilities of all classes in one thread."""
    model = vil.load(source).eval()
    prepare = vil.create_transform(model)
    with torch.inference_mode():
        return [model(prepare(image)[None])[0].softmax(0).tolist() for image in IMAGES]


def check(answer: tuple[int, dict], probabilities: list[float]) -> None:
    status, content = answer
    assert status == 200, content
    assert {found["class"]: found["probability"] for found in content["classes"]} == dict(enumerate(probabilities))
    ordered = sorted(probabilities, reverse=True)
    assert [found["probability"] for found in content["classes"]] == ordered
    assert all(found["name"] == "abcd"[found["class"]] for found in content["classes"])


def test_many_clients_get_the_answers_of_one_thread(service: Service, source: Path) -> None:
    assert service.ask(None, "GET", "/health") == (200, {"status": "ready"})
    answers = expected(source)
    with ThreadPoolExecutor(8) as clients:
        found = list(clients.map(service.ask, IMAGES * 3))
    for answer, probabilities in zip(found, answers * 3, strict=True):
        check(answer, probabilities)


def png(width: int, height: int, pixels: bytes = b"") -> bytes:
    """Return a PNG whose header claims a size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


def hostile() -> list[tuple[object, int]]:
    """Return bodies and the status that each must get."""
    whole = {kind: encoded(60, 40, kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")}
    noise = np.random.default_rng(0)
    bad = [b"", b"\0", b"GIF89a", b"text", b"{}", b"%PDF-1.4", b"<svg xmlns='http://www.w3.org/2000/svg'/>"]
    bad += [noise.bytes(size) for size in (2, 3, 100, 10_000)]
    bad += [content[: len(content) // 2] for content in whole.values()]
    bad += [content[:20] for content in whole.values()]
    bad += [whole["PNG"][:8] + noise.bytes(500), whole["JPEG"][:4] + noise.bytes(500)]
    bad += [png(100_000, 100_000), png(0, 0), png(2**31 - 1, 1), png(30, 30), png(5_000, 5_000, bytes(75_005_000))]
    bad += [encoded(1, 20_000), encoded(20_000, 1), encoded(1_100, 1, "BMP") * 2]
    bad += [b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"P6 100000 100000 255\n", b"P6 9 9"]
    too_long = [bytes(MAX_BYTES + 1), iter([bytes(MAX_BYTES), b"\0"])]
    return [(content, 400) for content in bad] + [(content, 413) for content in too_long]


def test_hostile_requests_get_an_error_of_theirs(service: Service, source: Path) -> None:
    sent = hostile()
    assert len(sent) >= 38
    for content, status in sent:
        found, answer = service.ask(content)
        assert found == status, (content if isinstance(content, bytes) else "chunks", answer)
        assert isinstance(answer["detail"], str)
    assert service.ask(None, "GET")[0] == 405
    assert service.ask(b"", path="/elsewhere")[0] == 404
    with socket.create_connection(("127.0.0.1", service.port), timeout=HANGING) as connection:
        connection.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc")  # and leaves
    check(service.ask(IMAGES[0]), expected(source)[0])


@pytest.mark.ci
def test_memory_stays_flat(service: Service) -> None:
    with ThreadPoolExecutor(8) as clients:
        for count in (150, 500):
            images = [IMAGES[i % len(IMAGES)] for i in range(count)]
            assert {status for status, _ in clients.map(service.ask, images)} == {200}
            if count == 150:
                before = service.memory()
    assert service.memory() - before < 30e6


def test_limits_and_a_clean_end(source: Path) -> None:
    service = Service(source, "--waiting", "1", "--seconds", "1000", "--top", "2")
    content = IMAGES[0]
    with socket.create_connection(("127.0.0.1", service.port), timeout=HANGING) as begun:
        head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        begun.sendall(head.encode() + content[:10])
        while service.ask(content)[0] != 503:  # until the service has read the first request's head
            pass
        service.process.send_signal(signal.SIGTERM)
        next(line for line in service.process.stderr if "Shutting down" in line)
        begun.sendall(content[10:])  # a request that has begun is answered
        answer = b"".join(iter(lambda: begun.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200")
    assert len(json.loads(answer.partition(b"\r\n\r\n")[2])["classes"]) == 2
    service.process.communicate(timeout=HANGING)
    assert service.process.returncode == 0


@pytest.mark.ci
def test_a_slow_body_and_a_wrong_option_are_refused(source: Path) -> None:
    service = Service(source, "--seconds", "0.01")
    with socket.create_connection(("127.0.0.1", service.port), timeout=HANGING) as connection:
        connection.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc")
        assert connection.recv(65536).startswith(b"HTTP/1.1 408")
    assert service.stop() == 0
    command = [sys.executable, str(ROOT / "examples" / "serve.py"), str(source), "--workers", "0"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 2
    assert "--workers must be at least 1, got 0" in done.stderr
