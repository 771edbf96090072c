"""What `ddpexp help` explains beside commands, groups, options and keys."""

from __future__ import annotations

_TIMES = """\
times: where the time of the steps goes, in every record, in seconds a step.

  times/data           until the next batch is there
  times/forward, times/backward
                       of the passes of all micro-batches
  times/waiting        in collectives, until the slowest rank is there
  times/communication  in collectives beyond that
  times/optimizer      of clipping and of the update
  times/other          of callbacks and averages of weights
  times/record, times/evaluation, times/checkpoint
                       of these, shared out over the steps of a record
  times/slow_rank, times/slow_factor
                       the rank for which the others wait in most steps (-1:
                       none, -2: not known yet), and how much slower it is

With several workers a value is the median over the ranks, with _least and
_greatest beside it.

    ddpexp status RUN_DIR    how long a step takes, and what is worth changing
    ddpexp report RUN_DIR    the times over the steps, as a page
    ddpexp table DIR --columns times/data,times/waiting

docs/times.md."""

TOPICS = {"times": _TIMES}
"""The texts, by what is typed behind `ddpexp help`."""
