"""Serve a classifier over HTTP: an image file in, its most likely classes out.

    python examples/serve.py my_model
    curl --data-binary @photo.jpg http://127.0.0.1:8000/predict
    curl http://127.0.0.1:8000/health

SOURCE is whatever ``vil.load`` takes: a release folder, a checkpoint or a name. The service listens after a first
prediction, which compiles the scans; ``/health`` then answers 200. Files that are no image, or exceed the limits, are
answered with 400 or 413, slow ones with 408, requests above ``--waiting`` with 503. SIGTERM ends the service after the
requests that it has begun. All workers use one copy of the weights, and each computes one image at a time, so answers
do not depend on other requests.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # other processes cost little (docs/speed.md)

import argparse
import asyncio
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from PIL import Image
from starlette.requests import ClientDisconnect

import vil


class Classifier:
    """A model, the preparation of its images, and the threads that run both.

    Args:
        source: Weights, as in ``vil.load``.
        workers: Images in work at the same time.
        threads: Threads of torch for one image.
        waiting: Requests accepted at the same time, from their first byte to the answer.
        max_pixels: Pixels of an image, as it is stored and as it is resized.
        top: Classes of an answer.

    Raises:
        ValueError, OSError: If ``vil.load`` does, or if the weights have no classifier.
    """

    def __init__(self, source: str, *, workers: int, threads: int, waiting: int, max_pixels: int, top: int) -> None:
        self.model = vil.load(source).eval()
        if not self.model.num_classes:
            raise ValueError(f"SOURCE must be weights with a classifier, got {source}")
        self.prepare = vil.create_transform(self.model, max_pixels=max_pixels)
        self.names = self.model.pretrained_cfg.get("label_names")
        self.top, self.free = min(top, self.model.num_classes), waiting
        torch.set_num_threads(threads)
        self.pool = ThreadPoolExecutor(workers, "predict", torch.set_num_threads, (threads,))
        with torch.inference_mode():  # compiles the scans
            self.model(self.prepare(Image.new("RGB", (256, 256)))[None])

    def predict(self, content: bytes) -> list[dict[str, Any]]:
        """Return the most likely classes of an image file; HTTP error 400 if it is not one."""
        try:
            images = self.prepare(content)[None]
        except ValueError as error:
            raise HTTPException(400, f"the body must be an image file: {error}") from error
        with torch.inference_mode():
            chances, classes = self.model(images)[0].softmax(0).topk(self.top)
        found = zip(classes.tolist(), chances.tolist(), strict=True)
        return [{"class": i, "name": self.names and self.names[i], "probability": p} for i, p in found]


async def body(request: Request, max_bytes: int) -> bytes:
    """Return the body of a request; HTTP error 413 as soon as it is longer than allowed."""
    too_long = HTTPException(413, f"the body must have at most {max_bytes:,} bytes")
    if int(request.headers.get("content-length", 0)) > max_bytes:
        raise too_long
    parts, length = [], 0
    async for part in request.stream():
        length += len(part)
        if length > max_bytes:
            raise too_long
        parts.append(part)
    return b"".join(parts)


def create_app(classifier: Classifier, max_bytes: int, seconds: float) -> FastAPI:
    """Return the application; a body must arrive within ``seconds``."""
    app = FastAPI(title="Vision Longhorn")

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ready"}

    @app.post("/predict")
    async def predict(request: Request) -> dict[str, Any]:
        if classifier.free < 1:
            raise HTTPException(503, "too many requests are waiting", headers={"Retry-After": "1"})
        classifier.free -= 1  # only this thread changes it
        try:
            content = await asyncio.wait_for(body(request, max_bytes), seconds)
            loop = asyncio.get_running_loop()
            return {"classes": await loop.run_in_executor(classifier.pool, classifier.predict, content)}
        except (asyncio.TimeoutError, ClientDisconnect) as error:
            raise HTTPException(408, f"the body must arrive within {seconds:g} seconds") from error
        finally:
            classifier.free += 1

    return app


def options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("source", metavar="SOURCE")
    add("--host", default="127.0.0.1", help="0.0.0.0 in a container (127.0.0.1)")
    add("--port", type=int, default=8000, help="0 takes any free port (8000)")
    add("--workers", type=int, default=torch.get_num_threads(), help="images at the same time (the CPUs)")
    add("--threads", type=int, default=1, help="threads of torch for an image (1)")
    add("--waiting", type=int, default=64, help="requests accepted at the same time (64)")
    add("--max-bytes", type=int, default=20_000_000, help="of a file (20,000,000)")
    add("--max-pixels", type=int, default=50_000_000, help="of an image (50,000,000)")
    add("--seconds", type=float, default=30.0, help="in which a file must arrive (30)")
    add("--top", type=int, default=5, help="classes of an answer (5)")
    args = parser.parse_args()
    for name in ("workers", "threads", "waiting", "max_bytes", "max_pixels", "top"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if not args.seconds > 0:
        parser.error(f"--seconds must be above 0, got {args.seconds}")
    return args


def main() -> None:
    """Serve until SIGTERM or Ctrl-C."""
    args = options()
    limits = {name: getattr(args, name) for name in ("workers", "threads", "waiting", "max_pixels", "top")}
    app = create_app(Classifier(args.source, **limits), args.max_bytes, args.seconds)
    # uvicorn ends its work at the first signal, and then raises it again.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    uvicorn.run(app, host=args.host, port=args.port, access_log=False)


if __name__ == "__main__":
    main()
