"""Texts for a trained model, as the windows of data=text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ddpexp.data.inputs import INPUT, Inputs, schema_of, texts_of
from ddpexp.data.text import tokenizer as tokenizers
from ddpexp.data.text.dataset import Windows
from ddpexp.errors import RefusedError


def read(given: Any, known: Mapping[str, Any], /, **options: Any) -> Inputs:
    """Return the windows of a text as samples, as an evaluation reads them. Raises: RefusedError."""
    schema = schema_of(known)
    texts, _, _ = texts_of(given)
    tokenizer = tokenizers.from_record(schema.vocabulary or {})
    if len(texts) > 1 or options.get("documents") is not None:
        reason = "is of several texts" if len(texts) > 1 else "is one text, and the run reads documents"
        raise RefusedError(
            f"The input {reason}, whose windows cannot be told apart",
            place=INPUT,
            suggestion="Name the files of an evaluation set with data.eval_path=FILES, and type --split eval.",
        )
    tokens = torch.from_numpy(np.array(tokenizer.encode(texts[0]), np.int32))
    if len(tokens) <= schema.shape[0]:
        raise RefusedError(
            f"has {len(tokens):,} tokens, and the model reads windows of {schema.shape[0]:,} and the token after each",
            place=INPUT,
            suggestion="Give a longer text; a model of texts continues a shorter one with ddpexp generate.",
        )
    return Inputs(Windows(tokens, schema.shape[0], whole=True), None, False)
