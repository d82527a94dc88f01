"""Reading what torch.save wrote without executing anything in it, and checking that it is whole."""

import argparse
import io
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vil.messages import one_line


def load_archive(path: Path) -> Any:
    """Read tensors and plain values, and compare the file with its checksums if it has any.

    The argparse options that timm's trainer stores are plain values, too.

    Returns:
        Content of the file, with tensors on the CPU.

    Raises:
        OSError, MemoryError: The disk or the memory fails; the content may be intact.
        ValueError: The file is damaged, or contains more than tensors and plain values.
    """
    # zipfile and torch.load report a failing disk as damage, so read the bytes before they do.
    content = io.BytesIO(path.read_bytes())
    try:
        if content.getbuffer()[:2] == b"PK":  # also if it is cut off
            _check_members(content)
            content.seek(0)
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(content, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} is not a torch.save file, or contains more than tensors and plain values; "
            f"files that could execute code are not read"
        ) from error
    except Exception as error:  # zipfile and torch.load raise many things for a damaged file
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise MemoryError(f"not enough memory for {path}") from error
        raise ValueError(f"{path} is damaged or not a checkpoint: {one_line(error)}") from error


def _check_members(file: io.BytesIO) -> None:
    """Compare a zip archive with its checksums, which torch.load ignores, and with what torch.save writes.

    Raises:
        BadZipFile: If it differs. Damaged archives also raise other errors of zipfile.
    """
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        # Compressed or overlapping parts can unpack to any size.
        compressed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
        overlap = sum(member.file_size for member in members) > len(file.getbuffer())
        repeated = len({member.filename for member in members}) < len(members)
        if compressed or overlap or repeated:
            raise zipfile.BadZipFile(
                "it has compressed, overlapping or repeated parts, which torch.save does not write"
            )
        if damaged := archive.testzip():
            raise zipfile.BadZipFile(f"wrong checksum in {damaged}")


def check_plain(tensors: Mapping[str, Tensor], origin: object) -> None:
    """Raise ValueError unless all tensors are dense and have all of their numbers.

    A file of a few bytes can describe a tensor of any size whose elements share one number in memory.
    """
    for name, value in tensors.items():
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise ValueError(f"{origin}: {name} is not a dense tensor")
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise ValueError(f"{origin}: {name} has fewer values than its shape needs, {(*value.shape,)}")


def check_finite(tensors: Mapping[str, Tensor], origin: object) -> None:
    """Raise ValueError if a plain tensor contains NaN or infinity.

    A tensor without dimensions may be infinite: some models clip to such limits.
    """
    # One-byte floats lack isfinite, so widen them. Fetch all answers from a GPU at once.
    floats = {
        name: value.float() if value.element_size() == 1 else value
        for name, value in tensors.items()
        if value.is_floating_point() or value.is_complex()
    }
    if not floats:
        return
    wrong = [v.isfinite().logical_not().any() if v.ndim else v.isnan() for v in floats.values()]
    names = [name for name, bad in zip(floats, torch.stack(wrong).tolist(), strict=True) if bad]
    if names:
        more = f", nor are {len(names) - 1} other tensors" if len(names) > 1 else ""
        raise ValueError(f"{origin}: {names[0]} is not finite{more}")
