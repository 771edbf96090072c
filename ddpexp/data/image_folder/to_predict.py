"""Folders of images to predict for: without folders of classes they are all images below `data.root`.

Standard library only, and fast to import: the launching command imports this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import ddpexp.data.image_folder.prepare as labelled
from ddpexp.data.image_folder.options import TransformOptions
from ddpexp.data.image_folder.scan import scan_unlabelled
from ddpexp.data.schema import Schema
from ddpexp.system.terminal import print_message


def prepare(schema: Mapping[str, Any], /, **options: Any) -> dict[str, Any]:
    """Prepare images as `ddpexp.data.image_folder.prepare.prepare` does, with or without classes.

    Classes are numbered as in training. Images without classes are one set, in the order of their paths
    (`is_single_set`). Raises: RefusedError.
    """
    folder = scan_unlabelled(options.get("root"), Schema.read(schema).classes or ())
    if folder is None:
        return labelled.prepare(**options, schema=schema)
    if folder.left_out:
        print_message(f"ddpexp: data.root={folder.root}: {folder.left_out}")
    names = {field.name for field in fields(TransformOptions)}
    chosen = TransformOptions(**{key: value for key, value in options.items() if key in names}).resolved()
    stored = chosen.stored_size(options.get("cache_size", "auto"))
    described = labelled.prepared(folder, stored, options.get("cache", "auto"), options.get("broken", "stop"), chosen)
    return {**described, "is_single_set": True}
