"""Preparing MNIST; the rules are those of `ddpexp.data.published`.

Standard library only, and fast to import, like the modules it imports: the launching command imports this module.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from ddpexp.data.images.files import found_images
from ddpexp.data.mirrors import Patience
from ddpexp.data.mnist import idx
from ddpexp.data.published import LabeledImages, Published, StandIn, joint_hash
from ddpexp.errors import RefusedError
from ddpexp.settings.key import Key

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
SHAPE = (28, 28)
MEAN, STD = 0.1307, 0.3081  # of the training images, as fractions of 255
EMBEDDED_VERSION = 1  # increase it when synthetic.py changes: it is part of the name of caches
EMBEDDED_MOST = 1_000_000  # images per part: they are drawn in memory
_DIGITS = tuple(map(str, range(10)))


def prepare(
    root: str | None,
    source: Literal["auto", "files", "download", "embedded"],
    embedded_train: Annotated[int, Key(at_least=1, at_most=EMBEDDED_MOST)] = 60_000,
    embedded_test: Annotated[int, Key(at_least=1, at_most=EMBEDDED_MOST)] = 10_000,
    *,
    mirrors: Sequence[str] = MIRRORS,
    patience: Patience | None = None,
) -> dict[str, Any]:
    """Make sure that a decoded cache exists; return a description of the data, as `Published.prepare`."""
    mnist = _mnist()
    if root is not None and source != "embedded":
        _check_not_images(mnist, root, source)
    return mnist.prepare(root, source, (embedded_train, embedded_test), mirrors, patience)


def _check_not_images(mnist: Published, root: str, source: str) -> None:
    """Check that a folder without MNIST does not hold images of the user's own."""
    folder = mnist.folder(root, source)
    if not mnist.is_in(folder) and (images := found_images(folder)) is not None:
        raise RefusedError(
            f"holds {images}, but none of the four MNIST files that data=mnist reads there",
            key="data.root",
            value=folder,
            suggestion="For images of your own see data=images, or a recipe of your own; for MNIST leave data.root out "
            "or name another folder.",
        )


def _mnist() -> Published:
    return Published(
        name="mnist",
        title="MNIST",
        files=idx.FILES,
        sha256=joint_hash([file.sha256 for file in idx.FILES]),
        unpack=_unpacked,
        shape=SHAPE,
        mean=(MEAN,),
        std=(STD,),
        classes=_DIGITS,
        stand_in=StandIn("embedded-digits", "synthetic digits", f"embedded-v{EMBEDDED_VERSION}", _DIGITS, _draw),
        space="about 70 MB",
        hint=idx.HINT,
    )


def _unpacked(contents: Sequence[bytes]) -> tuple[LabeledImages, LabeledImages]:
    images, labels = len(idx.header((0, *SHAPE))), len(idx.header((0,)))  # bytes of the headers
    train, test = (
        LabeledImages(memoryview(contents[number])[images:], memoryview(contents[number + 1])[labels:])
        for number in (0, 2)
    )
    return train, test


def _draw(number: int, seed: int) -> tuple[LabeledImages, Sequence[str]]:
    """Draw a part, with the hashes of the IDX files that would hold it."""
    from ddpexp.data.mnist import synthetic  # late: it imports numpy, which the command does not need otherwise

    arrays = synthetic.draw(number, seed)
    hashes = [hashlib.sha256(idx.header(array.shape) + array.tobytes()).hexdigest() for array in arrays]
    return LabeledImages(*(array.tobytes() for array in arrays)), hashes
