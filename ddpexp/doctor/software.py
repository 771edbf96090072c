"""The versions of Python, torch, Hydra and ddpexp, against those that this ddpexp supports."""

from __future__ import annotations

import platform
import re
from importlib import metadata
from pathlib import Path

import ddpexp
from ddpexp.doctor.gather import Facts
from ddpexp.doctor.report import Finding, bad, doubtful, good
from ddpexp.doctor.setting import Setting
from ddpexp.run.repository import snapshot
from ddpexp.system.hardware import count_gpus, torch_cuda, why_hidden

_SHOWN = ("torch", "hydra-core", "omegaconf")
# For a checkout that is not installed; pyproject.toml has the reasons. Another Python has ended the command already.
SUPPORTED = {"torch": ">=2.10", "hydra-core": ">=1.3.7,<1.5", "omegaconf": ">=2.3,<2.5"}


def gather_software(code: str | None) -> Facts:
    """Return the installed versions, the supported ranges, and the commit of the code.

    `code` is the folder of the recipe's code; None: the current one.
    """
    installed = {name: _version(name) for name in _SHOWN}
    git = snapshot(Path(code) if code else None, ()).git
    return {
        "python": platform.python_version(),
        "versions": installed,
        "supported": SUPPORTED,
        "ddpexp": ddpexp.__version__,
        "git": dict(git) if git is not None else None,
        "torch_cuda": torch_cuda(),
        "gpus": count_gpus(),
        "why_no_gpu": why_hidden(),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, without what marks builds and pre-releases."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def is_within(version: str, bounds: str) -> bool | None:
    """Return whether a version is within bounds such as `>=1.3.7,<1.5`; None: it is above them."""
    for bound in bounds.split(","):
        limit = numbers(bound.lstrip("<>="))
        if bound.startswith(">=") and numbers(version) < limit:
            return False
        if bound.startswith("<") and numbers(version) >= limit:
            return None
    return True


def judge_software(facts: Facts, setting: Setting) -> list[Finding]:
    """Judge the versions, and whether torch can use the GPUs that are there."""
    versions = {"python": facts["python"], **facts["versions"]}
    text = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    findings = []
    for name, version in versions.items():
        bounds = facts["supported"].get(name)
        within = is_within(version, bounds) if version is not None and bounds else version is not None
        if not within:
            what = f"{name} {version} is outside {bounds}" if version is not None else f"{name} is not installed"
            report = doubtful if within is None else bad
            advice = f"install a supported version: pip install '{name}{bounds}'"
            findings.append(report("versions", what, advice, versions=versions))
    findings = findings or [good("versions", text, versions=versions)]
    return [*findings, _build(facts), _code(facts)]


def _build(facts: Facts) -> Finding:
    cuda = facts["torch_cuda"]
    values = {name: facts[name] for name in ("torch_cuda", "gpus", "why_no_gpu")}
    if facts["gpus"]:
        return good("torch_build", f"torch for {f'CUDA {cuda}' if cuda else 'ROCm'}{facts['why_no_gpu']}", **values)
    if facts["why_no_gpu"]:
        advice = (
            "install a build of torch for CUDA (pytorch.org/get-started)" if cuda is None else
            "unset CUDA_VISIBLE_DEVICES, or ask the scheduler for GPUs"
        )  # fmt: skip
        text = f"no GPU can be used{facts['why_no_gpu']}"
        return bad("torch_build", text, f"{advice}: a run would use CPU workers", **values)
    return good("torch_build", f"torch for {f'CUDA {cuda}' if cuda else 'the CPU'}, and no GPU here", **values)


def _code(facts: Facts) -> Finding:
    git, text = facts["git"], f"ddpexp {facts['ddpexp']}"
    if git is not None and git.get("commit"):
        text += f", the code here at commit {str(git['commit'])[:12]}" + (
            " with uncommitted changes" if git.get("dirty") else ""
        )
    return good("code", text, ddpexp=facts["ddpexp"], git=git)
