"""Decide which of a machine's GPUs the workers use, and how each is named to its worker: pure functions of facts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddpexp.system.nvml import Driver, Gpu

VISIBLE = "CUDA_VISIBLE_DEVICES"
NUMBER = "DDPEXP_GPU"  # the variable with a worker's device number, among those that it sees


@dataclass(frozen=True)
class Device:
    """A GPU, or a MIG instance of one: the device of one worker."""

    uuid: str  # the same in every process of the host
    gpu: str  # the UUID of the physical GPU
    entry: str  # names it in CUDA_VISIBLE_DEVICES
    alone: bool = False  # its worker must see no other device

    @property
    def is_mig(self) -> bool:
        """Return whether this is a MIG instance."""
        return self.uuid != self.gpu


@dataclass(frozen=True)
class Choice:
    """The devices that CUDA_VISIBLE_DEVICES leaves, and why it leaves no more."""

    devices: tuple[Device, ...]
    invalid: str | None = None  # the entry from which on the others are ignored
    repeated: str | None = None  # the entry that names a device again, which hides all


def visible(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> Choice:
    """Return the devices for workers that CUDA_VISIBLE_DEVICES leaves, in CUDA's order.

    As CUDA reads it: numbers, or UUIDs of which the beginning is enough; everything from the first invalid entry on is
    ignored, and a device named twice hides all. Numbers count the GPUs that this process may open.
    Source: CUDA programming guide, Environment Variables; torch.cuda._parse_visible_devices, from experiments.

    A CUDA process sees a single MIG instance, and with it no other GPU. So each instance is the device of a worker that
    sees nothing else, and the name of a GPU in MIG mode stands for its instances. Without the variable, instances count
    only where there is no whole GPU.
    Source: NVIDIA MIG user guide, Device Enumeration.
    """
    usable = [gpu for gpu in gpus if not gpu.obstacle]
    variable = environ.get(VISIBLE)
    if variable is None:
        partitioned = any(gpu.mig is not None for gpu in usable)
        whole = [
            Device(gpu.uuid, gpu.uuid, gpu.uuid if partitioned else str(number), partitioned)
            for number, gpu in enumerate(usable)
            if gpu.mig is None
        ]
        return Choice(tuple(whole or [device for gpu in usable for device in _instances(gpu)]))
    devices: list[Device] = []
    prefix = next((name for name in ("GPU-", "MIG-") if variable.lstrip().startswith(name)), "")
    for entry in (part.strip() for part in variable.split(",")):
        named = _named_by_uuid(entry, prefix, usable) if prefix else _named_by_number(entry, usable)
        if not named:
            return Choice(tuple(devices), invalid=entry)
        if {device.uuid for device in named} & {device.uuid for device in devices}:
            return Choice((), repeated=entry)
        devices += named
    return Choice(tuple(devices))


def _named_by_number(entry: str, gpus: Sequence[Gpu]) -> list[Device]:
    """Return the devices of the GPU with a number; CUDA reads it like C's strtoul, so `1gpu` is 1.

    Numbers follow NVML's order here and may follow another in CUDA (CUDA_DEVICE_ORDER). Nothing depends on it: all
    processes of a host use the same order.
    """
    digits = re.match(r"\+?(\d+)", entry)
    if digits is None or int(digits[1]) >= len(gpus):
        return []
    gpu = gpus[int(digits[1])]
    return [Device(gpu.uuid, gpu.uuid, digits[1])] if gpu.mig is None else _instances(gpu)


def _named_by_uuid(entry: str, prefix: str, gpus: Sequence[Gpu]) -> list[Device]:
    """Return the devices whose UUID begins with the entry; none if that is ambiguous."""
    if not entry.startswith(prefix):
        return []
    if prefix == "GPU-":
        matching = [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
        if len(matching) != 1:
            return []
        [gpu] = matching
        return [Device(gpu.uuid, gpu.uuid, gpu.uuid)] if gpu.mig is None else _instances(gpu)
    old = re.fullmatch(r"MIG-(GPU-.+)/(\d+)/(\d+)", entry)  # of drivers before R470, which newer ones understand too
    instances = [
        Device(instance.uuid, gpu.uuid, instance.uuid, alone=True)
        for gpu in gpus
        for instance in gpu.mig or ()
        if instance.uuid.startswith(entry)
        or (old and gpu.uuid.startswith(old[1]) and (instance.gpu_instance, instance.compute_instance)
            == (int(old[2]), int(old[3])))
    ]  # fmt: skip
    return instances if len(instances) == 1 else []


def _instances(gpu: Gpu) -> list[Device]:
    return [Device(instance.uuid, gpu.uuid, instance.uuid, alone=True) for instance in gpu.mig or ()]


def worker_variables(devices: Sequence[Device], index: int) -> dict[str, str]:
    """Return the variables that give a worker the device `index`: its number, or a CUDA_VISIBLE_DEVICES of its own."""
    if index < len(devices) and devices[index].alone:
        return {VISIBLE: devices[index].uuid, NUMBER: "0"}
    return {NUMBER: str(index)}


def shared_gpu(devices: Sequence[Device]) -> str | None:
    """Return the UUID of a GPU of which two of the devices are instances, or None."""
    gpus = [device.gpu for device in devices]
    return next((gpu for gpu in gpus if gpus.count(gpu) > 1), None)


def nccl_shares_gpus(environ: Mapping[str, str]) -> bool:
    """Return whether the user has allowed NCCL several ranks on a GPU.

    Without it NCCL refuses two MIG instances of one GPU, and before 2.30 with it too.
    Source: https://github.com/NVIDIA/nccl/issues/1716
    """
    return environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def is_too_old(answer: Driver, torch_cuda: str | None) -> bool:
    """Return whether the driver cannot run a torch that was built for a version of CUDA.

    A newer minor version of CUDA runs with every driver of its major version.
    Source: NVIDIA, CUDA compatibility, Minor version compatibility.
    """
    return bool(answer.cuda and torch_cuda) and int(answer.cuda.split(".")[0]) < int(str(torch_cuda).split(".")[0])


def why_hidden(answer: Driver, torch_cuda: str | None, environ: Mapping[str, str]) -> str:
    """Return why GPUs of this machine cannot be used, to follow a sentence; empty if all can or there are none.

    `torch_cuda` is the version of CUDA for which torch was built; None: for none.
    """
    if answer.error:
        return f" ({answer.error})"
    if torch_cuda is None:
        reason = "the installed torch is a CPU-only build"
    elif is_too_old(answer, torch_cuda):
        reason = f"the driver supports CUDA up to {answer.cuda}, and the installed torch is built for {torch_cuda}: "
        reason += "update the driver, or install a torch for that CUDA"
    else:
        reason = _hidden_by(answer.gpus, environ)
    return f" ({len(answer.gpus)} here, but {reason})" if answer.gpus and reason else ""


def _hidden_by(gpus: Sequence[Gpu], environ: Mapping[str, str]) -> str:
    obstacles = [gpu.obstacle for gpu in gpus if gpu.obstacle]
    if obstacles:
        return f"{len(obstacles)} cannot be opened: {'; '.join(dict.fromkeys(obstacles))}"
    choice, variable = visible(gpus, environ), f"{VISIBLE}={environ.get(VISIBLE, '')}"
    if choice.repeated is not None:
        return f"{variable} names {choice.repeated} twice, and CUDA shows none then"
    if choice.invalid not in (None, "", "-1"):
        following = ", and all after it are ignored" if "," in variable else ""
        return f"{variable} names {choice.invalid}, which is none of them{following}"
    if len(choice.devices) == sum(1 if gpu.mig is None else len(gpu.mig) for gpu in gpus) > 0:
        return ""
    if VISIBLE in environ:
        return f"{variable} hides {'the others' if choice.devices else 'all'}"
    if choice.devices:
        return f"beside whole GPUs, MIG instances are used only where {VISIBLE} names them"
    return "in MIG mode, without an instance for this process: `nvidia-smi mig -lci` lists the instances"
