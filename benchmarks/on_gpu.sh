#!/usr/bin/env bash
# On a machine with GPUs, from a checkout whose dependencies are installed: the tests that need a GPU, ddpexp doctor and
# all measurements, in at most SECONDS (540); call it again until nothing is left. OUT/gpu.json is all that has to be
# brought back: benchmarks/on_gpu.sh OUT writes RESULTS.md from it on any machine.
#
#     benchmarks/on_gpu.sh [OUT [SECONDS [more arguments of python -m benchmarks gpu]]]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-benchmarks/gpu-results} seconds=${2:-540}
exec "${PYTHON:-python}" -m benchmarks gpu --out "$out" --seconds "$seconds" "${@:3}"
