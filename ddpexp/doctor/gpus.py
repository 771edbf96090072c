"""The GPUs and their driver, as nvidia-smi reports them: `nvidia-smi -q -x` is read, and judged apart from that."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from xml.etree import ElementTree

from ddpexp.doctor.gather import Facts, Gathering
from ddpexp.doctor.report import Finding, bad, doubtful, good
from ddpexp.doctor.setting import Setting
from ddpexp.doctor.software import numbers
from ddpexp.system.hardware import visible_devices
from ddpexp.system.programs import find

_ANSWER_SECONDS = 8.0  # without persistence mode the driver is loaded for each call
_NO_ANSWER = f"no answer in {_ANSWER_SECONDS:g} s"
_SLOW_ANSWER_SECONDS = 2.0
_QUESTIONS = {"query": ("-q", "-x"), "topology": ("topo", "-m"), "nvlink": ("nvlink", "-s")}
_BUSY_MIB = 2048  # beyond what a context and NCCL's buffers take, such as those of this command's own workers
_BUSY_PERCENT = 20
_SLOWED = {
    "hw_thermal_slowdown": "the hardware slows it down because it is too hot",
    "sw_thermal_slowdown": "the driver slows it down because it is too hot",
    "hw_power_brake_slowdown": "the power supply slows it down",
    "hw_slowdown": "the hardware slows it down",
}
# The oldest driver with which each major version of CUDA works. Source: CUDA's guide on compatibility, minor versions.
_OLDEST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}


def gather_gpus(environ: Mapping[str, str] = os.environ) -> Facts:
    """Ask nvidia-smi about the GPUs, their links and their state."""
    program = find("nvidia-smi", environ)
    facts: dict[str, Any] = {
        "visible": [device.gpu for device in visible_devices(environ)],
        "driver": None,
        "gpus": [],
        "topology": "",
        "nvlink": "",
        "failed": None,
        "loaded": os.path.exists("/dev/nvidiactl"),
    }
    facts["environment"] = {
        name: value
        for name, value in environ.items()
        if name.startswith(("NCCL_", "CUDA_"))
        or name in ("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
    }
    if program is None:
        return facts
    questions = {name: partial(_ask, program, arguments) for name, arguments in _QUESTIONS.items()}
    answers = Gathering.start(questions).facts(_ANSWER_SECONDS + 1)
    query = answers["query"]
    if "text" in query:
        facts |= {**parse_query(query["text"]), "answer_seconds": query["seconds"]}
    else:
        facts["failed"] = f"nvidia-smi fails: {query.get('error', _NO_ANSWER)}"
    return facts | {name: answer["text"] for name, answer in answers.items() if name != "query" and "text" in answer}


def _ask(program: str, arguments: Sequence[str]) -> Facts:
    """Return what nvidia-smi prints and the seconds that it took, or the reason why it fails."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            [program, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_ANSWER_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": _NO_ANSWER if isinstance(error, subprocess.TimeoutExpired) else str(error)}
    if done.returncode:
        return {"error": " ".join((done.stdout + done.stderr).split())[:400] or f"exit code {done.returncode}"}
    return {"text": done.stdout, "seconds": round(time.monotonic() - began, 2)}


def parse_query(text: str) -> dict[str, Any]:
    """Return driver, its CUDA version and the GPUs of `nvidia-smi -q -x`."""
    root = ElementTree.fromstring(text)
    return {
        "driver": root.findtext("driver_version"),
        "driver_cuda": root.findtext("cuda_version"),
        "gpus": [_gpu(index, element) for index, element in enumerate(root.iter("gpu"))],
    }


def _gpu(index: int, gpu: ElementTree.Element) -> dict[str, Any]:
    reasons = [element for kind in ("event", "throttle") for element in gpu.findall(f"clocks_{kind}_reasons/*")]
    slowed = [
        name for name in _SLOWED
        for element in reasons
        if element.tag.endswith(f"reason_{name}") and (element.text or "").strip() == "Active"
    ]  # fmt: skip
    processes = [
        {"pid": _number(process.findtext("pid")), "name": process.findtext("process_name")}
        for process in gpu.findall("processes/process_info")
    ]
    migs = gpu.findall("mig_devices/mig_device")
    return {
        "index": index,
        "name": gpu.findtext("product_name"),
        "uuid": gpu.findtext("uuid"),
        "bus": gpu.get("id"),
        "memory_mib": _number(gpu.findtext("fb_memory_usage/total")),
        "used_mib": _number(gpu.findtext("fb_memory_usage/used")),
        "utilization": _number(gpu.findtext("utilization/gpu_util")),
        "temperature": _number(gpu.findtext("temperature/gpu_temp")),
        "persistence": gpu.findtext("persistence_mode") == "Enabled",
        "compute_mode": gpu.findtext("compute_mode"),
        "mig": gpu.findtext("mig_mode/current_mig") == "Enabled",
        "mig_memory_mib": [_number(mig.findtext("fb_memory_usage/total")) for mig in migs],
        "ecc_uncorrectable": sum(
            _number(element.text) or 0
            for element in gpu.findall("ecc_errors/volatile/*")
            if "uncorrectable" in element.tag
        ),
        "remap_pending": gpu.findtext("remapped_rows/remapped_row_pending") == "Yes",
        "remap_failed": gpu.findtext("remapped_rows/remapped_row_failure") == "Yes",
        "retirement_pending": gpu.findtext("retired_pages/pending_retirement") == "Yes",
        "slowed": slowed,
        "fabric": gpu.findtext("fabric/state"),
        "pcie_gen": _number(gpu.findtext("pci/pci_gpu_link_info/pcie_gen/max_link_gen")),
        "pcie_width": _number(gpu.findtext("pci/pci_gpu_link_info/link_widths/current_link_width")),
        "pcie_width_max": _number(gpu.findtext("pci/pci_gpu_link_info/link_widths/max_link_width")),
        "processes": processes,
    }


def _number(text: str | None) -> int | None:
    match = re.search(r"\d+", text or "")
    return int(match[0]) if match else None


def judge_gpus(facts: Facts, setting: Setting) -> list[Finding]:
    """Judge the GPUs and their driver."""
    if facts["failed"] and not facts["loaded"] and not facts["visible"]:
        return [good("gpu", "no GPU here: nvidia-smi is installed, and no driver is loaded", **_seen(facts))]
    if facts["failed"]:
        advice = "see dmesg; after an update of the driver, reboot or reload its module"
        return [bad("gpu", facts["failed"], advice, **_seen(facts))]
    if not facts["gpus"]:
        if facts["visible"]:
            text = f"{len(facts['visible'])} GPUs; nvidia-smi is not installed, so that little is known of them"
            advice = "install nvidia-smi (in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
            return [doubtful("gpu", text, advice, **_seen(facts))]
        text = "no GPU here: a run uses CPU workers" if setting.device == "cpu" else "no GPU is reported"
        return [good("gpu", text, **_seen(facts))]
    used = visible(facts)
    findings = [_summary(facts, used), *(finding for gpu in used for finding in judge_gpu(gpu))]
    seconds = facts.get("answer_seconds", 0.0)
    if seconds > _SLOW_ANSWER_SECONDS and not all(gpu["persistence"] for gpu in used):
        text, advice = "each start waits for the driver to load: persistence mode is off", "nvidia-smi -pm 1, as root"
        findings.append(doubtful("gpu", text, advice, f"nvidia-smi took {seconds:.1f} s", answer_seconds=seconds))
    if variable := facts["environment"].get("CUDA_LAUNCH_BLOCKING"):
        text = f"CUDA_LAUNCH_BLOCKING={variable} makes every kernel wait for the one before"
        findings.append(doubtful("gpu", text, "unset CUDA_LAUNCH_BLOCKING", **_seen(facts)))
    return findings


def visible(facts: Facts) -> list[dict[str, Any]]:
    """Return the GPUs that a run would use, in its order; all where nvidia-smi names them otherwise."""
    by_uuid = {gpu["uuid"]: gpu for gpu in facts["gpus"]}
    chosen = [by_uuid[uuid] for uuid in dict.fromkeys(facts["visible"]) if uuid in by_uuid]
    return chosen or list(facts["gpus"])


def _seen(facts: Facts) -> dict[str, Any]:
    return {name: facts.get(name) for name in ("driver", "driver_cuda", "gpus", "visible")}


def _summary(facts: Facts, used: Sequence[Mapping[str, Any]]) -> Finding:
    kinds = [f"{gpu['name']} ({(gpu['memory_mib'] or 0) / 1024:.0f} GiB)" for gpu in used]
    counted = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    instances = sum(len(gpu["mig_memory_mib"]) for gpu in used)
    text = f"{counted}{f', {instances} MIG instances' if instances else ''}, driver {facts['driver']}"
    if len(used) < len(facts["gpus"]):
        text += f" ({len(used)} of {len(facts['gpus'])} visible)"
    if len(set(kinds)) > 1:
        advice = "choose GPUs of one kind with CUDA_VISIBLE_DEVICES: the slowest sets the pace"
        return doubtful("gpu", text, advice, **_seen(facts))
    hottest = max((gpu["temperature"] or 0 for gpu in used), default=0)
    return good("gpu", text, f"at most {hottest} C" if hottest else "", **_seen(facts))


def judge_gpu(gpu: Mapping[str, Any]) -> list[Finding]:
    """Judge the state of one GPU: nothing where it is well."""
    name, findings = f"GPU {gpu['index']}", []
    values = {"index": gpu["index"], "uuid": gpu["uuid"]}

    def add(make: Any, text: str, advice: str) -> None:
        findings.append(make("gpu", f"{name}: {text}", advice, **values))

    if gpu["compute_mode"] == "Prohibited":
        add(bad, "its compute mode is Prohibited", f"nvidia-smi -i {gpu['index']} -c DEFAULT, as root")
    if gpu["mig"] and not gpu["mig_memory_mib"]:
        add(bad, "MIG is enabled without an instance", "create instances (nvidia-smi mig -cgi), or disable MIG")
    if gpu["fabric"] not in (None, "N/A", "Completed"):
        add(
            bad,
            f"its NVLink fabric is not ready ({gpu['fabric']})",
            "start nvidia-fabricmanager, of the driver's version",
        )
    if gpu["remap_failed"]:
        add(bad, "its memory has more faulty rows than it can replace", "use another GPU, and have this one replaced")
    elif gpu["remap_pending"] or gpu["retirement_pending"]:
        add(
            doubtful,
            "faulty memory is replaced with its next reset",
            "have it reset (nvidia-smi --gpu-reset) while idle",
        )
    if gpu["ecc_uncorrectable"]:
        text = f"{gpu['ecc_uncorrectable']:,} uncorrectable memory errors since the driver was loaded"
        add(doubtful, text, "see dmesg for Xid errors; have it reset or replaced if they recur")
    for reason in gpu["slowed"][:1]:
        add(doubtful, f"{_SLOWED[reason]} ({gpu['temperature']} C)", "check its cooling and power")
    width, widest = gpu["pcie_width"], gpu["pcie_width_max"]
    if width and widest and width < widest:
        add(
            doubtful,
            f"PCIe with {width} of {widest} lanes",
            "reseat the card or its riser; some slots have fewer lanes",
        )
    share = gpu["used_mib"] or 0, gpu["memory_mib"] or 0
    if share[0] > _BUSY_MIB or (gpu["utilization"] or 0) > _BUSY_PERCENT:
        by = ", ".join(f"{process['name']} (process {process['pid']})" for process in gpu["processes"][:3])
        text = f"in use{f' by {by}' if by else ''}: {share[0] / 1024:.1f} of {share[1] / 1024:.0f} GiB"
        add(
            doubtful,
            f"{text}, {gpu['utilization'] or 0} % busy",
            "wait for its end, or choose others with CUDA_VISIBLE_DEVICES",
        )
    return findings


def judge_driver(facts: Facts, torch_cuda: str | None) -> list[Finding]:
    """Judge whether the driver is new enough for the CUDA version that torch was built with."""
    if facts["driver"] is None or torch_cuda is None:
        return []
    values = {"driver": facts["driver"], "driver_cuda": facts["driver_cuda"], "torch_cuda": torch_cuda}
    oldest = _OLDEST_DRIVER.get(numbers(torch_cuda)[0])
    text = f"driver {facts['driver']}, for CUDA up to {facts['driver_cuda']}, and torch for CUDA {torch_cuda}"
    # Packages for compatibility (cuda-compat) let an older driver support more: nvidia-smi reports what they do.
    is_older = numbers(facts["driver_cuda"] or "0")[:1] < numbers(torch_cuda)[:1]
    if is_older and (oldest is None or numbers(facts["driver"]) < numbers(oldest)):
        needed = f"driver {oldest} or newer" if oldest else "a newer driver"
        advice = f"install {needed}, or a build of torch for CUDA {facts['driver_cuda']} or older"
        return [bad("driver", f"{text}: the driver is too old", advice, **values)]
    return [good("driver", text, **values)]
