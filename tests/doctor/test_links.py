"""Links between GPUs and hosts, and the all-reduce over them, on texts in the form of nvidia-smi and NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpexp.doctor import allreduce, links
from ddpexp.doctor.setting import Setting

ANSWERS = Path(__file__).parent / "answers"
HERE = Setting("outputs", device="cuda", workers=4, world_size=4)
NVLINK = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n"
GPUS = [{"index": index, "pcie_gen": 4, "pcie_width": 16} for index in range(4)]
RESULT = {"ranks": 4, "backend": "nccl", "num_bytes": 256_000_000, "latency_us": 20.0, "correct": True}


def facts(topology: str, nvlink: str = "", **environment: str) -> dict[str, Any]:
    return {"topology": (ANSWERS / topology).read_text(), "nvlink": nvlink, "environment": environment}


def test_the_matrix_of_connections_is_read() -> None:
    table = links.parse_topology((ANSWERS / "topo_nvlink.txt").read_text())
    assert [len(row) for row in table] == [4, 4, 4, 4]
    assert table[0] == ["X", "NV18", "NV18", "NV18"]
    assert links.parse_topology("no matrix") == []


def test_links_are_as_fast_as_nvidia_smi_says() -> None:
    assert links.expected(facts("topo_nvlink.txt", NVLINK), GPUS) == ("NVLink (NV18)", 478.1)
    assert links.expected(facts("topo_nvlink.txt"), GPUS) == ("NVLink (NV18)", 450.0)


def test_a_ring_is_as_fast_as_its_slowest_link() -> None:
    bridges = facts("topo_bridges.txt")
    assert links.expected(bridges, GPUS) == ("PCIe (SYS)", 15.8)
    assert links.expected(bridges, GPUS[2:]) == ("NVLink (NV4)", 100.0)
    assert links.expected(bridges, GPUS[:1]) is None


def test_the_best_ring_is_found() -> None:
    slow_pair = [[9.0 if abs(a - b) != 2 else 1.0 for b in range(4)] for a in range(4)]
    assert links.ring(slow_pair) == 9.0


def test_an_idle_gpu_has_the_lanes_of_its_slot_and_the_generation_it_can() -> None:
    assert links.pcie_speed(GPUS) == pytest.approx(31.504)
    assert links.pcie_speed([*GPUS, {"pcie_gen": 4, "pcie_width": 8}]) == pytest.approx(15.752)
    assert links.pcie_speed([{"pcie_gen": None, "pcie_width": None}]) > 0


@pytest.mark.parametrize(
    ("variables", "warned"),
    [
        ({"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE=1 turns peer access between GPUs off"),
        ({"NCCL_P2P_DISABLE": "0"}, None),
        ({"NCCL_NVLS_ENABLE": "0"}, "NCCL_NVLS_ENABLE=0 turns NVLink SHARP off"),
        ({"NCCL_NVLS_ENABLE": "1"}, None),
    ],
)
def test_variables_that_turn_a_way_off_are_named(variables: dict[str, str], warned: str | None) -> None:
    findings = links.judge_links(facts("topo_nvlink.txt", **variables), GPUS, HERE)
    assert [found.text for found in findings if found.level == "doubtful"] == ([warned] if warned else [])


LOG = """gpu1:71:99 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>
gpu1:71:99 [0] NCCL INFO Using network {network}
gpu1:71:99 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via {way}
gpu1:71:99 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via {way}
"""
IB = {"ports": [{"name": "mlx5_0:1", "active": True, "gbit": 400.0, "layer": "InfiniBand"}]}


def test_the_ways_of_nccl_are_counted() -> None:
    log = links.parse_nccl_log(LOG.format(network="IB", way="P2P/CUMEM/read"))
    assert (log["ways"], log["network"]) == ({"P2P": 2}, "IB")
    [finding] = links.judge_nccl(log, ("NVLink (NV18)", 478.0), IB)
    assert (finding.level, finding.measured) == ("good", "2 channels by P2P")


def test_host_memory_in_place_of_nvlink_is_doubtful() -> None:
    log = links.parse_nccl_log(LOG.format(network="IB", way="SHM/direct/direct"))
    assert [found.level for found in links.judge_nccl(log, ("NVLink (NV18)", 478.0), IB)] == ["doubtful"]
    assert [found.level for found in links.judge_nccl(log, ("PCIe (PHB)", 31.5), IB)] == ["good"]


def test_sockets_in_place_of_infiniband_are_doubtful() -> None:
    log = links.parse_nccl_log(LOG.format(network="Socket", way="NET/Socket/0"))
    [finding] = links.judge_nccl(log, None, IB)
    assert finding.text == "NCCL uses sockets although InfiniBand is here"
    assert [found.level for found in links.judge_nccl(log, None, {"ports": []})] == ["good"]


def test_ports_are_read(tmp_path: Path) -> None:
    for name, state, rate in (("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)"), ("mlx5_1", "1: DOWN", "10 Gb/sec")):
        port = tmp_path / name / "ports/1"
        port.mkdir(parents=True)
        for file, text in (("state", state), ("rate", rate), ("link_layer", "InfiniBand")):
            (port / file).write_text(f"{text}\n")
    ports = links.gather_infiniband(tmp_path)
    assert [(port["name"], port["active"], port["gbit"]) for port in ports["ports"]] == [
        ("mlx5_0:1", True, 400.0),
        ("mlx5_1:1", False, 10.0),
    ]
    assert links.host_speed(ports, 1000) == 50.0
    [finding] = links.judge_infiniband(ports, None, HERE)
    assert (finding.level, finding.text) == ("good", "1 of 2 InfiniBand or RoCE ports active, 400 Gbit/s together")
    assert links.judge_infiniband(ports, 8 << 20, HERE)[0].level == "doubtful"
    assert links.gather_infiniband(tmp_path / "none") == {"ports": []}
    assert links.judge_infiniband({"ports": []}, 8 << 20, HERE) == []


@pytest.mark.parametrize(("speed", "level"), [(360.0, "good"), (60.0, "doubtful"), (9.0, "bad")])
def test_an_all_reduce_is_compared_with_the_links(speed: float, level: str) -> None:
    result = {**RESULT, "bus_gigabytes_a_second": speed}
    finding = allreduce.judge_all_reduce(result, ("NVLink (NV18)", 478.1), "on this host")
    assert finding.level == level
    assert f"{speed / 478.1:.0%} of NVLink (NV18)'s 478.1 GB/s" in finding.measured


def test_a_wrong_sum_is_bad_at_any_speed() -> None:
    result = {**RESULT, "bus_gigabytes_a_second": 360.0, "correct": False}
    assert allreduce.judge_all_reduce(result, None, "on this host").level == "bad"


def test_links_that_are_not_known_are_not_compared() -> None:
    finding = allreduce.judge_all_reduce({**RESULT, "bus_gigabytes_a_second": 1.0}, None, "on this host")
    assert (finding.level, "%" in finding.measured) == ("good", False)


@pytest.mark.parametrize(
    ("capability", "architectures", "supported"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 6), ["sm_80"], True),  # within a major version
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80", "sm_86"], False),
        ((9, 0), ["sm_80", "compute_80"], True),  # compiled when it is loaded
        ((6, 1), ["sm_75", "sm_80", "sm_90", "compute_90"], False),
        ((10, 0), ["sm_90a"], False),
        ((9, 0), ["sm_90a"], True),
        ((12, 0), ["sm_100", "sm_120"], True),
    ],
)
def test_a_build_of_torch_has_code_for_a_gpu(
    capability: tuple[int, int], architectures: list[str], supported: bool
) -> None:
    assert allreduce.supports(capability, architectures) is supported


def test_missing_peer_access_is_doubtful_beside_nvlink_alone() -> None:
    peers = [[True, False], [False, True]]
    assert [found.level for found in allreduce.judge_peers(peers, ("NVLink (NV4)", 100.0))] == ["doubtful"]
    assert [found.level for found in allreduce.judge_peers(peers, ("PCIe (PHB)", 16.0))] == ["good"]
    assert allreduce.judge_peers([[True]], None) == []


def test_clocks_that_disagree_are_doubtful() -> None:
    assert [found.level for found in allreduce.judge_skew({"a": 10.0, "b": 10.01})] == ["good"]
    [finding] = allreduce.judge_skew({"a": 10.0, "b": 14.5})
    assert (finding.level, finding.text) == ("doubtful", "the clock of b is ahead of the clock of a")
    assert allreduce.judge_skew({"a": 10.0}) == []


RANK = {"torch": "2.10.0", "nccl": "2.27.5", "architectures": ["sm_80", "sm_90"]}


def test_the_devices_of_all_ranks_are_counted() -> None:
    ranks = [{**RANK, "device": {"name": "NVIDIA H100", "capability": [9, 0]}}] * 2
    [finding] = allreduce.judge_devices(ranks)
    assert (finding.level, finding.text) == ("good", "torch 2.10.0 for 2 x NVIDIA H100, NCCL 2.27.5")


def test_a_device_that_torch_has_no_code_for_is_bad() -> None:
    old = {**RANK, "device": {"name": "Tesla P100", "capability": [6, 0]}}
    [finding] = allreduce.judge_devices([old, old])
    assert (finding.level, finding.text) == (
        "bad",
        "torch 2.10.0 has no code for Tesla P100 (compute capability 6.0)",
    )
