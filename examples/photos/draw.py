"""Draw a folder of photographs to try the example with: python draw.py FOLDER."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

CLASSES = ("circle", "square", "triangle")
NUMBERS = {"train": 40, "val": 10}


def draw(kind: str, seed: str) -> Image.Image:
    """Draw a shape of any color, place and size on a background of another color."""
    dice = random.Random(seed)
    width, height = dice.choice(((200, 150), (150, 200)))
    image = Image.new("RGB", (width, height), tuple(dice.randrange(128) for _ in range(3)))
    size = dice.randrange(60, 110)
    left, top = dice.randrange(width - size), dice.randrange(height - size)
    right, bottom = left + size, top + size
    color, pen = tuple(dice.randrange(128, 256) for _ in range(3)), ImageDraw.Draw(image)
    if kind == "circle":
        pen.ellipse((left, top, right, bottom), fill=color)
    elif kind == "square":
        pen.rectangle((left, top, right, bottom), fill=color)
    else:
        pen.polygon(((left, bottom), ((left + right) // 2, top), (right, bottom)), fill=color)
    return image


def main(root: Path) -> None:
    """Draw all classes of both parts."""
    for part, number in NUMBERS.items():
        for kind in CLASSES:
            folder = root / part / kind
            folder.mkdir(parents=True, exist_ok=True)
            for index in range(number):
                draw(kind, f"{part}-{kind}-{index}").save(folder / f"{index:03}.jpg")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
