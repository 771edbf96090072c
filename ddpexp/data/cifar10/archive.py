"""The archive of CIFAR-10 for Python: its hash, and the pictures and labels in it.

The batches in it are pickles, which could run code. They are read as the list of instructions that a pickle is,
of which none is carried out.
"""

from __future__ import annotations

import io
import pickletools
import tarfile
import zlib
from collections.abc import Sequence

from ddpexp.data.published import LabeledImages
from ddpexp.data.published_files import PublishedFile, WrongError

SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32
_INTEGERS = ("BININT", "BININT1", "BININT2")


TRAIN = tuple(f"cifar-10-batches-py/data_batch_{number}" for number in range(1, 6))  # the batches in it
TEST = ("cifar-10-batches-py/test_batch",)
NAME = "cifar-10-python.tar.gz"
# Source: the SHA-256 in Keras's loader. The MD5 of the same file is c58f30108f718f92721af3d95e74349a.
ARCHIVE = PublishedFile(
    NAME, NAME, 170_498_071, "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce", (NAME,)
)


def unpack(contents: Sequence[bytes]) -> tuple[LabeledImages, LabeledImages]:
    """Return the pictures to train on and to test with. Raises: WrongError, if the archive holds something else."""
    [content] = contents
    batches: dict[str, LabeledImages] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as tar:
            for member in tar:
                if member.name in (*TRAIN, *TEST) and (stream := tar.extractfile(member)) is not None:
                    batches[member.name] = read_batch(stream.read())
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise WrongError(f"cannot be unpacked ({error})") from None
    missing = [name for name in (*TRAIN, *TEST) if name not in batches]
    if missing:
        raise WrongError(f"lacks {', '.join(missing)}")
    return _joined([batches[name] for name in TRAIN]), _joined([batches[name] for name in TEST])


def read_batch(content: bytes) -> LabeledImages:
    """Return what a batch holds: a pickled mapping of Python 2 with an array `data` and a list `labels`.

    Raises:
        WrongError: it is no such pickle.
    """
    key = ""
    pixels = b""
    labels = bytearray()
    try:
        for code, argument, _ in pickletools.genops(content):
            if isinstance(argument, str) and argument in ("data", "labels", "filenames", "batch_label"):
                key = argument
            elif key == "labels" and code.name in _INTEGERS and isinstance(argument, int):
                labels.append(argument)
            elif key == "data" and isinstance(argument, str) and len(argument) >= _PIXELS:
                pixels = argument.encode("latin-1")
    except ValueError as error:
        raise WrongError(f"holds a batch that cannot be read ({error})") from None
    if not labels or len(pixels) != _PIXELS * len(labels) or max(labels) > 9:
        raise WrongError(f"holds a batch of {len(pixels):,} bytes and {len(labels):,} labels, not a picture for each")
    return LabeledImages(pixels, bytes(labels))


def _joined(parts: list[LabeledImages]) -> LabeledImages:
    return LabeledImages(b"".join(part.pixels for part in parts), b"".join(part.labels for part in parts))
