"""Which interface gloo and NCCL use: the user's choice stays, wherever it was made."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpexp.system.network import interface_variables

BOTH = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize(
    ("exported", "added"),
    [
        ({}, BOTH),
        ({"NCCL_SOCKET_IFNAME": "ib0", "NCCL_DEBUG": "INFO"}, {"GLOO_SOCKET_IFNAME": "lo"}),
        ({"GLOO_SOCKET_IFNAME": "eth0"}, {"NCCL_SOCKET_IFNAME": "lo"}),
        ({"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=ib0,ib1"}, {}),
        ({"NCCL_SOCKET_IFNAME": ""}, {"GLOO_SOCKET_IFNAME": "lo"}),
    ],
)
def test_an_exported_interface_is_kept(exported: dict[str, str], added: dict[str, str]) -> None:
    assert interface_variables("lo", exported, ()) == added


def test_an_interface_in_nccls_configuration_file_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "nccl.conf"
    assert interface_variables("lo", {}, (file,)) == BOTH
    file.write_text("# NCCL_SOCKET_IFNAME=eth0\nNCCL_DEBUG=WARN\n")
    assert interface_variables("lo", {}, (file,)) == BOTH
    file.write_text("NCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME=ib0\n")
    assert interface_variables("lo", {}, (tmp_path / "none", file)) == {"GLOO_SOCKET_IFNAME": "lo"}
    assert interface_variables("lo", {"NCCL_CONF_FILE": str(file)}) == {"GLOO_SOCKET_IFNAME": "lo"}
