"""What the comments of a YAML file say, and of which key."""

from __future__ import annotations

import pytest

from ddpexp.config.comments import Comments, comments_of


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", Comments("", {}, None)),
        ("a: 1\n", Comments("", {}, None)),
        ("# What a is.\na: 1\n", Comments("", {"a": "What a is."}, None)),
        ("a: 1  # What a is.\n", Comments("", {"a": "What a is."}, None)),
        ("# Above.\na: [1, 2] # Behind.\n", Comments("", {"a": "Above.\nBehind."}, None)),
        ("# The file.\n_target_: mine.Net\n# What a is.\na: 1\n", Comments("The file.", {"a": "What a is."}, None)),
        ("# The file.\n\n# What a is.\na: 1\n", Comments("The file.", {"a": "What a is."}, None)),
        ("# The file.\n\na: 1\n", Comments("The file.", {}, None)),
        ("# @package _global_\n# The file.\ndefaults: []\n", Comments("The file.", {}, "_global_")),
        ("# @package model.head\n# What a is.\na: 1\n", Comments("", {"a": "What a is."}, "model.head")),
        ("# Two\n# lines.\na: 1\n", Comments("", {"a": "Two lines."}, None)),
        ("# One.\n#\n# Another.\na: 1\n", Comments("", {"a": "One.\n\nAnother."}, None)),
        ("# As in\n#     ls x\n# or so.\na: 1\n", Comments("", {"a": "As in\n    ls x\nor so."}, None)),
        (
            "# The section.\na:\n  # Its key.\n  b: 1\n  c: 2\n",
            Comments("", {"a": "The section.", "a.b": "Its key."}, None),
        ),
        ("a:\n  b: 1\n  # At the end of a, not about c.\nc: 2\n", Comments("", {}, None)),
        ("# Of a alone.\na: {b: 1, c: 2}\n", Comments("", {"a": "Of a alone."}, None)),
        ("# Of a, not of d.\na: 1\n\nd: 2\n", Comments("", {"a": "Of a, not of d."}, None)),
        ("a: 'x # y'\nb: |\n  # no comment\nc: x#y\n", Comments("", {}, None)),
        ("a: ???\r\n# What b is.\r\nb: null\r\n", Comments("", {"b": "What b is."}, None)),
        ("- a  # of a list\n", Comments("", {}, None)),
    ],
)
def test_a_comment_is_about_the_file_or_about_the_key_that_it_stands_at(text: str, found: Comments) -> None:
    assert comments_of(text) == found
