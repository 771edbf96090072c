"""The findings of all hosts: which are shown once, as text for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ddpexp.errors import EXIT_DONE, EXIT_FAILED
from ddpexp.system.text import first_few, one_line

Level = Literal["good", "doubtful", "bad"]
LEVELS: tuple[Level, ...] = ("good", "doubtful", "bad")
_SHOWN_HOSTS = 4


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str  # a stable name, such as gpu or file_system
    level: Level
    text: str  # what was found
    advice: str = ""  # what to do; empty where there is nothing to do
    measured: str = ""  # times and free space, which differ from host to host without meaning anything
    facts: Mapping[str, Any] = field(default_factory=dict)  # plain values, for programs
    hosts: tuple[str, ...] = ()  # where it was found

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON. The keys are stable."""
        return {
            "check": self.check,
            "level": self.level,
            "hosts": list(self.hosts),
            "text": self._text(),
            "advice": self.advice or None,
            "facts": dict(self.facts),
        }

    def lines(self, names: bool) -> list[str]:
        """Return the line for people, and one with the advice. `names`: with the hosts in front."""
        hosts = f"{first_few(self.hosts, _SHOWN_HOSTS)}: " if names else ""
        shown = [f"{self.level:<9} {self.check:<13} {one_line(hosts + self._text())}"]
        if self.advice:
            shown.append(f"{'':<24}-> {one_line(self.advice)}")
        return shown

    def _text(self) -> str:
        return f"{self.text}, {self.measured}" if self.measured else self.text


def good(check: str, text: str, measured: str = "", **facts: Any) -> Finding:
    """Return a finding that needs no attention."""
    return Finding(check, "good", text, "", measured, facts)


def doubtful(check: str, text: str, advice: str, measured: str = "", **facts: Any) -> Finding:
    """Return a finding that may slow a run down or end it."""
    return Finding(check, "doubtful", text, advice, measured, facts)


def bad(check: str, text: str, advice: str, measured: str = "", **facts: Any) -> Finding:
    """Return a finding with which a run would fail, or not use what the machine has."""
    return Finding(check, "bad", text, advice, measured, facts)


def merge(by_host: Mapping[str, Sequence[Finding]]) -> list[Finding]:
    """Return the findings of all hosts, those that agree once with all their hosts, check by check.

    Findings agree if check, level, text and advice are the same; what was measured is that of the first host.
    """
    merged: dict[tuple[str, str, str, str], Finding] = {}
    for host, findings in by_host.items():
        for finding in findings:
            key = (finding.check, finding.level, finding.text, finding.advice)
            before = merged.get(key)
            hosts = (*before.hosts, host) if before is not None else (host,)
            merged[key] = replace(before or finding, hosts=tuple(dict.fromkeys(hosts)))
    order = {check: place for place, check in enumerate(dict.fromkeys(key[0] for key in merged))}
    return sorted(merged.values(), key=lambda finding: order[finding.check])


def as_text(findings: Sequence[Finding], hosts: Sequence[str], headline: str, seconds: float) -> str:
    """Return the report for people. Where several hosts differ, the lines name theirs."""
    lines = [one_line(headline)]
    for finding in findings:
        names = len(hosts) > 1 and set(finding.hosts) != set(hosts)
        lines += finding.lines(names)
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS}
    summary = ", ".join(f"{count} {level}" for level, count in counts.items())
    return "\n".join([*lines, f"{summary} in {seconds:.1f} s"])


def as_json(findings: Iterable[Finding]) -> str:
    """Return the report for programs, an object per line."""
    return "\n".join(json.dumps(finding.as_dict()) for finding in findings)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return the exit code: 1 if a finding is bad."""
    return EXIT_FAILED if any(finding.level == "bad" for finding in findings) else EXIT_DONE
