"""The phases of which the time of the training consists. Free of torch and numpy."""

from __future__ import annotations

PHASES = ("data", "forward", "backward", "collective", "optimizer", "other", "record", "evaluation", "checkpoint")
DATA, FORWARD, BACKWARD, COLLECTIVE, UPDATE, OTHER, RECORD, EVALUATION, CHECKPOINT = range(len(PHASES))
