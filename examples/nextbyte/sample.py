"""Print what a trained GPT writes: python examples/nextbyte/sample.py RUN_DIR [PROMPT]."""

import sys
from pathlib import Path

import ddpexp

if len(sys.argv) < 2:
    sys.exit(__doc__)
try:
    run = ddpexp.open_run(sys.argv[1], config_dir=Path(__file__).parent / "conf")
    print(run.model().sample(400, *sys.argv[2:3]))
except ddpexp.DdpexpError as error:
    sys.exit(str(error))
