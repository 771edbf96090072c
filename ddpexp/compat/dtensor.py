"""What DTensor and DeviceMesh do not offer in public."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def first_row(tensor: DTensor) -> int:
    """Return the first row of a tensor that this rank holds.

    Private: `torch.distributed.tensor._utils.compute_local_shape_and_global_offset`; torch 2.10 to 2.13.
    Why: a DTensor has its local part in public, but not where that part lies.
    When it goes: `DTensor.__create_chunk_list__` returns it for torch's own checkpoints.
    """
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0]


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return the ranks of all dimensions of a mesh as one dimension. Ranks: all of the parent mesh; communicates.

    Private: `DeviceMesh._flatten`; torch 2.10 to 2.13.
    Why: torch's own parallelisms call it, and it has no other name yet.
    When it goes: `flatten`, or make a process group of the ranks with `torch.distributed.new_group`.
    """
    return mesh._flatten(name) if mesh.ndim > 1 else mesh
