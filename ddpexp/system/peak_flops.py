"""How fast GPUs compute at best, by their names: dense matrix products, without structured sparsity."""

from __future__ import annotations

import re
from typing import Literal

Numbers = Literal["bf16", "fp16", "tf32", "fp32"]

# A pattern of the name that the driver gives, then TFLOPS in 16 bits, TF32 and fp32. The first that fits counts.
# Source: the data sheets of NVIDIA and AMD.
_PEAKS: tuple[tuple[str, float, float, float], ...] = (
    (r"GB[23]00|B300", 2500, 1250, 80),
    (r"B200", 2250, 1125, 75),
    (r"H200 NVL|H100 NVL", 835, 417, 60),
    (r"H100 PCIe", 756, 378, 51),
    (r"H200|H100|GH200", 989, 494, 67),
    (r"H20\b", 148, 74, 44),
    (r"A100|A800", 312, 156, 19.5),
    (r"A30\b", 165, 82, 10.3),
    (r"A40\b", 149.7, 74.8, 37.4),
    (r"A10G", 70, 35, 31.5),
    (r"A10\b", 125, 62.5, 31.2),
    (r"RTX A6000", 154.8, 77.4, 38.7),
    (r"L40S", 362, 183, 91.6),
    (r"L40\b", 181, 90.5, 90.5),
    (r"L4\b", 121, 60, 30.3),
    (r"RTX 5090", 209.5, 104.8, 104.8),
    (r"RTX 4090", 165.2, 82.6, 82.6),
    (r"RTX 3090\b", 71, 35.6, 35.6),
    (r"MI35[05]X", 2300, 0, 157),
    (r"MI3(00|25)X", 1307, 654, 163.4),
    (r"MI250X", 191.5, 0, 23.9),  # of one of its two devices
)
# Of these tensor cores multiply fp16 alone.
_ONLY_FP16: tuple[tuple[str, float, float], ...] = ((r"V100", 125, 15.7), (r"\bT4\b", 65, 8.1))


def peak_flops(name: str, numbers: Numbers) -> float | None:
    """Return the most floating-point operations a second of a GPU; None where it is not known."""
    for pattern, half, single in _ONLY_FP16:
        if re.search(pattern, name):
            return {"fp16": half, "fp32": single}.get(numbers, 0) * 1e12 or None
    for pattern, half, tf32, fp32 in _PEAKS:
        if re.search(pattern, name):
            return {"bf16": half, "fp16": half, "tf32": tf32, "fp32": fp32}[numbers] * 1e12 or None
    return None
