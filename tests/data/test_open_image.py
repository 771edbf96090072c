"""Whatever the name of a file, only what is of a usual format by its content meets a decoder of Pillow."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import pytest
from ddpexp.recipes.segment import Pairs
from PIL import Image

from ddpexp.data.image_folder.decode import BrokenImageError, decode, size_of
from ddpexp.data.image_folder.options import StoredSize
from ddpexp.data.open_image import FORMATS, open_image
from ddpexp.data.tar_shards import dataset as tar_shards
from ddpexp.loggers.remote.base import Medium

Image.init()
OTHERS = sorted(set(Image.OPEN) - set(FORMATS))
POSTSCRIPT = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n"
    b"(canary) (w) file dup (run) writestring closefile showpage\n%%EOF\n"
)
_STORED = StoredSize(64, 64)


@cache
def content_of(kind: str) -> bytes:
    """Return a file of a format: as Pillow writes it, or as far as its plugin recognizes it."""
    if kind == "EPS":
        return POSTSCRIPT
    for mode in ("RGB", "L", "1", "P", "RGBA"):
        file = io.BytesIO()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of formats that Pillow is about to drop
                Image.new(mode, (32, 32)).save(file, kind)
        except (KeyError, OSError, ValueError, AttributeError):
            continue
        return file.getvalue()
    return MAGIC.get(kind, b"")


# What the plugins that only read look for, by Pillow's own sources.
MAGIC = {
    "BUFR": b"BUFR" + bytes(64), "CUR": b"\0\0\2\0" + bytes(64), "DCX": b"\xb1\x68\xde\x3a" + bytes(64),
    "FITS": b"SIMPLE  =                    T" + bytes(64), "FLI": bytes(4) + b"\x11\xaf\x01\0" + bytes(128),
    "FPX": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(64), "FTEX": b"FTEX" + bytes(64),
    "GBR": b"\0\0\0\x1c\0\0\0\1" + bytes(64), "GRIB": b"GRIB\0\0\0\1" + bytes(64),
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(64), "MCIDAS": bytes(4) + b"\0\0\0\4" + bytes(256),
    "MIC": b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(64), "PIXAR": b"\200\350\000\000" + bytes(1024),
    "PSD": b"8BPS\0\1" + bytes(64), "QOI": b"qoif\0\0\0\1\0\0\0\1\3\0" + bytes(16),
    "SUN": b"\x59\xa6\x6a\x95" + bytes(64),
       "WMF": b"\xd7\xcd\xc6\x9a\0\0" + bytes(64), "XPM": b"/* XPM */" + bytes(64), "XVTHUMB": b"P7 332" + bytes(64),
    "IPTC": b"\x1c\x01\x5a\0\0" + bytes(64), "BLP": b"BLP2" + bytes(64),
}  # fmt: skip


def folder_of_images(path: Path, data: bytes) -> Any:
    return decode(str(path), _STORED, 3)


def size_in_a_folder(path: Path, data: bytes) -> Any:
    return size_of(str(path), _STORED)


def image_of_a_hub(path: Path, data: bytes) -> Any:
    return decode(data, _STORED, 3)


def tar_member(path: Path, data: bytes) -> Any:
    return tar_shards.decode(data, "jpg")


def masks(path: Path, data: bytes) -> Any:
    return Pairs([(str(path), str(path))])[0]


def records_of_a_run(path: Path, data: bytes) -> Any:
    wandb = pytest.importorskip("wandb")
    from ddpexp.loggers.remote.wandb import _medium

    assert wandb
    return _medium(Medium("image", "a picture", png=data))


ROOMS = [folder_of_images, size_in_a_folder, image_of_a_hub, tar_member, masks, records_of_a_run]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.__name__)
def test_a_file_of_another_format_meets_no_plugin_of_it(
    room: Callable[[Path, bytes], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    called = []

    def reached(*_: Any) -> NoReturn:
        called.append("factory")
        raise AssertionError("a plugin is used")

    def asked(_: bytes) -> bool:
        called.append("accept")
        return True

    for kind in OTHERS:
        data = content_of(kind)
        for suffix in ("jpg", "png", "webp"):
            path = tmp_path / f"{kind}.{suffix}"
            path.write_bytes(data)
            with monkeypatch.context() as patch:
                for other in OTHERS:
                    patch.setitem(Image.OPEN, other, (reached, asked))
                with pytest.raises((OSError, BrokenImageError)):
                    room(path, data)
            assert called == [], kind


def test_every_plugin_has_a_file_in_this_test() -> None:
    without = {kind for kind in OTHERS if not content_of(kind)}
    assert without <= {"MPEG", "PCD", "GD", "IMT", "HDF5", "WAL", "CGM"}, without


def test_postscript_called_jpg_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in place of Ghostscript says whether it was started."""
    gs, canary = tmp_path / "bin" / "gs", tmp_path / "canary"
    gs.parent.mkdir()
    gs.write_text(f"#!/bin/sh\ntouch {canary}\necho 10.0\n")
    gs.chmod(0o755)
    monkeypatch.setenv("PATH", f"{gs.parent}:/usr/bin:/bin")
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    path = tmp_path / "x.jpg"
    path.write_bytes(POSTSCRIPT)
    for room in ROOMS[:5]:
        with pytest.raises((OSError, BrokenImageError), match="it is no JPEG, PNG, WebP, BMP, GIF, TIFF or PNM image"):
            room(path, POSTSCRIPT)
    assert not canary.exists()
    with Image.open(path) as image, suppress(Exception):  # the program above draws nothing
        image.load()
    assert canary.exists()  # without the helper it is started


@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_promised_is_read_whatever_its_name(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "image.jpg"
    Image.new("RGB", (8, 6), "red").save(path, kind)
    with open_image(path) as image:
        assert (image.format, image.size, image.convert("RGB").getpixel((1, 1))[0] > 250) == (kind, (8, 6), True)
