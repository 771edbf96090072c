#!/usr/bin/env bash
# On a machine with GPUs: what shows there whether ddpexp is correct, then what it is worth, in at most LIMIT (430) seconds.
# Each result is in OUT/gpu.json the moment it is there, and the same command runs what is left. That file is all that
# has to be brought back: `python -m benchmarks gpu --out FILE` writes RESULTS.md from it on any machine.
#
#     benchmarks/on_gpu.sh [OUT [LIMIT [more arguments of python -m benchmarks gpu]]]
#
# For a machine without a package index, wheels in .whl are installed into a temporary folder first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-benchmarks/gpu-results} limit=${2:-430} python=${PYTHON:-python3}
if compgen -G '.whl/*.whl' >/dev/null && ! "$python" -c 'import hydra' 2>/dev/null; then
    site=$(mktemp -d)
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" .whl/*.whl
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
"$python" -m benchmarks gpu --out "$out" --seconds "$((limit - SECONDS))" "${@:3}"
