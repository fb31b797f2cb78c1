"""The load test of servers: each request is counted once, and losses and growth are faults."""

import asyncio
import sys
import time
from pathlib import Path

import pytest

for package in ("fastapi", "uvicorn", "prometheus_client", "openai", "httpx", "psutil"):
    pytest.importorskip(package, reason=f"needs the extra serve: {package}")

from server_fixtures import running, save_tool_model

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.host import load


def live(url, seconds, clients):
    """The counts of some clients."""
    made = load.Load([url], time.monotonic() + seconds)

    async def clients_at_once():
        await asyncio.gather(*(made.live(number) for number in range(clients)))

    asyncio.run(clients_at_once())
    return made


@pytest.mark.slow
def test_each_request_is_counted_once(tmp_path, monkeypatch):
    monkeypatch.setattr(load, "LENGTHS", (4, 16))
    with running(save_tool_model(tmp_path), slots=4, max_queue=64) as client:
        made = live(str(client.base_url), 0, 24)
        counts = made.counts
        assert counts["sent"] == sum(counts.values()) - counts["sent"] and not made.losses, made.losses
        assert counts["sent"] == 24 and min(counts["answered"], counts["rejected"], counts["left"]) > 0
        assert set(made.latencies) == {"first token", "stream", "whole answer"}
        deadline = time.monotonic() + 10
        while load.working(str(client.base_url)):
            assert time.monotonic() < deadline


def test_a_server_that_is_not_there_loses_requests():
    made = live("http://127.0.0.1:9", 0, 2)
    assert made.counts["lost"] == made.counts["sent"] == len(made.losses) == 2
    (fault,) = load.find_faults([{"is warm": True, "memory mb": {"a": 1.0}}], made.losses, 0.1)
    assert fault.startswith(f"lost {len(made.losses)}") and "ConnectError" in fault


@pytest.mark.parametrize(("last", "faults"), [(109.0, 0), (111.0, 1)])
def test_growth_counts_from_the_end_of_the_warm_up(last, faults):
    sizes = [("start", 10.0), (True, 100.0), (True, 150.0), (True, last)]
    rows = [{"is warm": warm is True, "memory mb": {"server 1": size, "clients": size**2}} for warm, size in sizes]
    found = load.find_faults(rows, [], 0.1)
    assert len(found) == faults and all("server 1" in fault for fault in found)
