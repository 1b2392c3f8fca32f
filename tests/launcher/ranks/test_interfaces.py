"""The interface towards other hosts. What real hosts do is held by tests/cluster."""

import psutil
import pytest

from longstride.launcher.ranks.rank_environment import choose_interface, interface_towards, is_loopback, source_address


def test_own_address_leads_to_its_interface() -> None:
    told = {name: address.address for name, all_ in psutil.net_if_addrs().items() for address in all_}
    outside = {name: address for name, address in told.items() if address.count(".") == 3 and not is_loopback(address)}
    for name, address in outside.items():
        assert source_address(address) == address
        assert interface_towards(address) == name


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "no-such-host.invalid"])
def test_loopback_and_unknown_hosts_have_none(host: str) -> None:
    assert interface_towards(host) is None


def test_choice_of_a_person_and_a_run_on_one_host_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longstride.launcher.ranks.rank_environment.interface_towards", {"10.0.0.1": "ib0"}.get)
    for environment, chosen in (
        ({}, None),
        ({"MASTER_ADDR": "127.0.0.1"}, None),
        ({"MASTER_ADDR": "10.0.0.1", "GLOO_SOCKET_IFNAME": "eth7"}, "eth7"),
        ({"MASTER_ADDR": "10.0.0.1"}, "ib0"),
    ):
        choose_interface(environment)
        assert environment.get("GLOO_SOCKET_IFNAME") == chosen


def test_first_host_of_a_step_asks_for_the_way_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own name, at which the ranks meet, may mean loopback to itself."""
    monkeypatch.setattr("longstride.launcher.ranks.rank_environment.interface_towards", {"node3": "ib0"}.get)
    step = {"MASTER_ADDR": "node1", "SLURM_STEP_NODELIST": "node[1-3]", "SLURM_STEP_NUM_NODES": "3"}
    choose_interface(step)
    assert step["GLOO_SOCKET_IFNAME"] == "ib0"
    alone = {"MASTER_ADDR": "node3", "SLURM_STEP_NODELIST": "node3", "SLURM_STEP_NUM_NODES": "1"}
    monkeypatch.setattr("longstride.launcher.ranks.rank_environment.interface_towards", lambda _: None)
    choose_interface(alone)
    assert "GLOO_SOCKET_IFNAME" not in alone
