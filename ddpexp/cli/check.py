"""The command `ddpexp check`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict

from ddpexp.check.examine import examine
from ddpexp.check.job import Finding
from ddpexp.cli.start import check_runs_once, compose_experiment
from ddpexp.cli.verb import Call
from ddpexp.errors import EXIT_DONE, EXIT_FAILED
from ddpexp.launch.workers.client import Server
from ddpexp.run import outcome
from ddpexp.system.terminal import show
from ddpexp.system.text import counted, one_line


def check(call: Call) -> int:
    """Check the experiment of a command line, print the findings, and return the exit code.

    Raises:
        RefusedError: a run would be refused.
    """
    check_runs_once("check the recipe")
    began = time.monotonic()
    experiment, composed = compose_experiment(call.operands)
    server = call.server or Server()
    outcome.stop_on_signals()
    try:
        findings = examine(experiment, composed.text, server)
    finally:
        server.close()
    if call.as_json:
        show("\n".join(json.dumps(asdict(finding)) for finding in findings))
    else:
        show(_as_text(findings, time.monotonic() - began))
    return EXIT_FAILED if any(finding.ok is False for finding in findings) else EXIT_DONE


def _as_text(findings: Sequence[Finding], seconds: float) -> str:
    words = {True: "ok", False: "problem", None: "-"}
    lines = [f"{words[finding.ok]:<8}{finding.check:<11}{one_line(finding.text)}" for finding in findings]
    count = sum(finding.ok is False for finding in findings)
    verdict = "no problem found" if not count else f"{counted(count, 'problem')} found"
    return "\n".join([*lines, f"{verdict} in {seconds:.1f} s"])
