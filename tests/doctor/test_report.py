"""How findings of several hosts become lines, and what probes that hang or fail become."""

from __future__ import annotations

import json
import threading

import pytest

from ddpexp.doctor import checks
from ddpexp.doctor.gather import Facts, Gathering
from ddpexp.doctor.report import Finding, as_json, as_text, bad, doubtful, exit_code, good, merge
from ddpexp.doctor.setting import Setting


def test_hosts_that_agree_share_a_line() -> None:
    merged = merge({"a": [good("gpu", "8 x H100", "31 C")], "b": [good("gpu", "8 x H100", "44 C")]})
    assert [(found.hosts, found.measured) for found in merged] == [(("a", "b"), "31 C")]
    text = as_text(merged, ["a", "b"], "on a, b", 1.0)
    assert text.splitlines()[1] == "good      gpu           8 x H100, 31 C"


def test_hosts_that_differ_have_lines_of_their_own() -> None:
    findings = {"a": [good("gpu", "8 x H100"), good("tmp", "/tmp")], "b": [doubtful("gpu", "7 x H100", "look")]}
    lines = as_text(merge(findings), ["a", "b"], "on a, b", 1.0).splitlines()
    assert lines[1:4] == [
        "good      gpu           a: 8 x H100",
        "doubtful  gpu           b: 7 x H100",
        "                        -> look",
    ]
    assert lines[-1] == "2 good, 1 doubtful, 0 bad in 1.0 s"


def test_the_keys_of_json_are_stable() -> None:
    [line] = as_json(merge({"a": [bad("shm", "none", "make one", "0 MB", size=0)]})).splitlines()
    assert json.loads(line) == {
        "check": "shm",
        "level": "bad",
        "hosts": ["a"],
        "text": "none, 0 MB",
        "advice": "make one",
        "facts": {"size": 0},
    }


@pytest.mark.parametrize(
    ("findings", "code"),
    [([good("a", "")], 0), ([good("a", ""), doubtful("b", "", "")], 0), ([bad("c", "", ""), good("a", "")], 1)],
)
def test_the_exit_code_is_1_if_a_finding_is_bad(findings: list[Finding], code: int) -> None:
    assert exit_code(findings) == code


def test_control_characters_of_others_are_escaped() -> None:
    assert "\\x1b" in as_text(merge({"a": [good("gpu", "\x1b[2J")]}), ["a"], "", 0.0)


def test_a_probe_that_hangs_or_fails_holds_up_no_other_one() -> None:
    release = threading.Event()

    def hangs() -> Facts:
        release.wait(60)
        return {}

    def fails() -> Facts:
        raise OSError(5, "Input/output error")

    facts = Gathering.start({"hangs": hangs, "fails": fails, "works": lambda: {"size": 3}}).facts(0.5)
    release.set()
    assert facts["works"] == {"size": 3}
    assert facts["fails"] == {"error": "Input/output error"}
    assert facts["hangs"]["hung"] >= 0.5


def unanswered(name: str, check: str, answer: Facts) -> list[Finding]:
    setting = Setting("/data/outputs")
    facts: dict[str, Facts] = {probe: {"hung": 10.0} for probe in checks.probes(setting, None)}
    findings = checks.judge_host({**facts, name: answer}, setting)
    return [found for found in findings if found.check == check]


def test_every_probe_may_hang() -> None:
    [finding] = unanswered("files", "file_system", {"hung": 10.0})
    assert (finding.level, finding.text) == ("bad", "no answer within 10 s")
    assert "file server" in finding.advice
    assert unanswered("scheduler", "scheduler", {"hung": 10.0})[0].level == "doubtful"


def test_every_probe_may_fail() -> None:
    [finding] = unanswered("cores", "cores", {"error": "Permission denied"})
    assert (finding.level, finding.text) == ("doubtful", "it cannot be found out: Permission denied")


def test_hosts_that_differ_in_what_should_agree_are_doubtful() -> None:
    facts: dict[str, Facts] = {"gpus": {}}
    found = {"a": [good("versions", "torch 2.10")], "b": [good("versions", "torch 2.11")]}
    together = checks.judge_together({"a": facts, "b": facts}, found, {"a": 1.0, "b": 1.0}, [])
    assert ("doubtful", "the hosts differ in versions, see there") in [(one.level, one.text) for one in together]


@pytest.mark.parametrize(("visible", "level"), [(False, "bad"), (True, "good"), (None, None)])
def test_a_folder_that_other_hosts_do_not_see_is_bad(visible: bool | None, level: str | None) -> None:
    hosts: dict[str, dict[str, Facts]] = {
        "a": {"gpus": {}},
        "b": {"gpus": {}, "shared_folder": {"visible": visible, "folder": "/data"}},
    }
    together = checks.judge_together(hosts, {"a": [], "b": []}, {}, [])
    assert [one.level for one in together if one.check == "shared_folder"] == ([level] if level else [])


def networks(**speeds: int | None) -> dict[str, dict[str, Facts]]:
    infiniband = {"ports": [{"name": "mlx5_0:1", "active": True, "gbit": 200.0}]}
    return {
        name: {"gpus": {}, "infiniband": infiniband, "network": {"speed_mbit": speed}} for name, speed in speeds.items()
    }


@pytest.mark.parametrize(
    ("backend", "hosts", "expected"),
    [
        ("nccl", networks(a=10_000, b=10_000), 25.0),  # InfiniBand
        ("gloo", networks(a=10_000, b=1_000), 0.125),  # the slower of the two interfaces
        ("gloo", networks(a=10_000, b=None), None),  # a virtual one reports no speed
    ],
)
def test_an_all_reduce_between_hosts_is_compared_with_their_network(
    backend: str, hosts: dict[str, dict[str, Facts]], expected: float | None
) -> None:
    result = {"ranks": 2, "backend": backend, "num_bytes": 8, "latency_us": 1.0, "correct": True,
              "bus_gigabytes_a_second": 1.0}  # fmt: skip
    together = checks.judge_together(hosts, {name: [] for name in hosts}, {}, [(None, result)])
    assert together[0].text.startswith("2 ranks of 2 hosts over ")
    assert together[0].facts["expected_gigabytes_a_second"] == expected
