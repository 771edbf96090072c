"""The norm of a gradient, row by row: the same bits whether a rank holds all rows of a parameter or some.

The rows of all parameters have one order, in which their norms are added up. On GPUs, where sums over ranks have no
order of their own, whole parts of parameters are faster, except for the exact reduction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ddpexp.compat import operators

_PIECE = 16_384  # elements: torch divides longer sums among threads, if a tensor has only one row


def row_norms(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the 2-norm of each row; of long rows, that of each piece. Shapes: (num_pieces, num_rows)."""
    if gradient.dim() < 2:
        return gradient.abs().to(dtype).view(1, -1)
    row_size = math.prod(gradient.shape[1:])
    if not gradient.is_contiguous() and has_contiguous_rows(gradient):
        gradient = gradient.as_strided((len(gradient), row_size), (row_size, 1))
    rows = gradient.reshape(len(gradient), row_size)
    pieces = torch.split(rows, _PIECE, dim=1) if row_size > _PIECE else (rows,)
    norms = [torch.linalg.vector_norm(piece, dim=1, dtype=dtype) for piece in pieces]
    return torch.stack(norms) if len(norms) > 1 else norms[0].unsqueeze(0)


def num_row_norms(shape: Sequence[int]) -> int:
    """Return how many numbers `row_norms` returns for a gradient."""
    if len(shape) < 2:
        return math.prod(shape)
    return shape[0] * -(-max(math.prod(shape[1:]), 1) // _PIECE)


def norm_of_rows(norms: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of everything, given the norms of the rows of each parameter."""
    return torch.linalg.vector_norm(torch.cat([values.view(-1) for values in norms]))  # type: ignore[no-any-return]


def norm_of_tensors(gradients: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return the 2-norm of everything in few launches, summed in an order that depends on the parts that a rank holds.

    Each row for itself takes a launch or more for each parameter: 163 for ResNet-50.
    """
    if not gradients:
        return torch.zeros((), dtype=dtype)
    return torch.linalg.vector_norm(torch.stack(operators.foreach_norm(gradients, 2, dtype)))  # type: ignore[no-any-return]


def norm_dtype(gradients: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype of a norm: the three digits of a 16-bit sum are too few to clip by."""
    return torch.float64 if any(gradient.dtype == torch.float64 for gradient in gradients) else torch.float32


def has_contiguous_rows(tensor: Tensor) -> bool:
    """Return whether each row of a tensor, and each range of rows, is one piece of memory."""
    if tensor.dim() == 0 or tensor.layout is not torch.strided or not tensor.numel():
        return False
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride != expected:
            return False  # gaps, or elements that share memory
        expected *= length
    return tensor.shape[0] == 1 or tensor.stride(0) == tensor.numel() // tensor.shape[0]
