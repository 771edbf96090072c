"""The families: an example, its plain program, and the sizes that this program has and the recipe's file has not."""

from __future__ import annotations

from tests.families import clip, detect, diffusion, fixmatch, moco, sharpness, simclr, sine, vae
from tests.families.family import GLOBAL_BATCH_SIZE, NUM_EVAL, NUM_TRAIN, Family

FAMILIES = (
    Family("simclr", simclr.plain, ("model.width=8", "model.features=4")),
    Family("clip", clip.plain, ("model.width=8", "model.features=4")),
    Family("detect", detect.plain, ("model.width=8", "model.queries=3")),
    Family("vae", vae.plain, ("model.width=16", "model.features=4")),
    Family("moco", moco.plain, ("model.width=8", "model.features=4", "model.num_keys=64", "task.decay=0.9")),
    Family(
        "fixmatch", fixmatch.plain,
        ("model.width=8", "task.threshold=0.3", "task.weight=2", "task.decay=0.9"),
        ("data.sources.labelled.train=12", "data.sources.labelled.test=24", "data.sources.unlabelled.train=84"),
    ),
    Family(
        "diffusion", diffusion.plain,
        ("model.width=8", "model.num_times=20", "scheduler=constant", "trainer.ema_decay=0.9"),
    ),
    Family("sine", sine.plain, ("model.hidden=8",), (f"data.train={GLOBAL_BATCH_SIZE}", f"data.test={NUM_EVAL}")),
    Family(
        "sharpness", sharpness.plain, ("model.hidden=8", "scheduler=constant"),
        (f"data.train={NUM_TRAIN}", f"data.test={NUM_EVAL}", "+data.wrong=0.2"),
    ),
)  # fmt: skip
