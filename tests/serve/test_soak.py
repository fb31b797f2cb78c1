"""Many clients over HTTP for a while: every answer is that of generate(), every request ends once, nothing is left.

It runs for 10 seconds, or for as many as SPEC_COMPILE_SOAK says: ``SPEC_COMPILE_SOAK=600 pytest -s ...``.
"""

import asyncio
import os
import random
import threading
import time
from collections import Counter

import httpx
import psutil
import pytest

from server_fixtures import (  # isort: skip
    CHATS, COMPLETIONS, RESPONSES, body, expected, load_alone, read, running, save_model, wait_until,
)  # fmt: skip

SECONDS = float(os.environ.get("SPEC_COMPILE_SOAK", "10"))
CLIENTS = 64
KINDS = 48
"""Different requests, each of which is sent many times."""
PROMPTS = ("def mean(values):\n", "x = [1, 1, 1, 1, 1,", "class Stack:\n    def", "import json\n\nx =", "a", "é = 1\n")
MALFORMED = (
    {"max_tokens": 10**13, "max_output_tokens": 10**13}, {"temperature": "hot"}, {"cache_salt": ""},
    {"seed": 1 << 70}, {"generation_config": '{"top_k": "a"}'}, {"model": "other"}, {"stream": "yes"},
)  # fmt: skip


def make(draws, alone):
    """A request: its path, its body, and the text that generate() gives for it."""
    prompt, limit = draws.choice(PROMPTS) * draws.choice((1, 1, 1, 12)), draws.choice((1, 5, 24, 60))
    fields, options, seed = {}, {"max_new_tokens": limit, "do_sample": False}, 0
    if draws.random() < 0.5:
        seed = draws.randrange(1 << 40)
        fields = {"temperature": draws.choice((0.7, 1.3)), "seed": seed, "top_p": draws.choice((0.8, 1.0))}
        options |= {"do_sample": True, "temperature": fields["temperature"], "top_p": fields["top_p"]}
    path = draws.choice((COMPLETIONS, CHATS, RESPONSES))
    if path != RESPONSES and draws.random() < 0.4:
        fields["stop"] = [draws.choice(("\n", "1", "def", ")"))]
        options |= {"stop_strings": fields["stop"], "tokenizer": alone[1]}
    if path != RESPONSES and draws.random() < 0.3:
        fields["logit_bias"] = {"7": 3, "11": -100}
        options["sequence_bias"] = {(7,): 3.0, (11,): -100.0}
    wanted = expected(alone, prompt if path == COMPLETIONS else f"# {prompt}\n", seed, **options)
    for stop in fields.get("stop", []):
        wanted = wanted.partition(stop)[0]
    return path, body(path, prompt, limit, **fields), wanted


async def live(client, cases, draws, end, counts):
    """One client, until the end."""
    while time.monotonic() < end:
        path, fields, wanted = draws.choice(cases)
        dice, stream = draws.random(), {"stream": True} if draws.random() < 0.5 else {}
        if dice < 0.1:
            response = await client.post(path, json=fields | draws.choice(MALFORMED))
            assert response.status_code in (400, 404, 422) and response.json()["error"]["message"], response.text
            counts["malformed"] += 1
            continue
        asking = asyncio.ensure_future(client.post(path, json=fields | stream))
        if dice < 0.2:
            await asyncio.sleep(draws.random() * 0.2)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            answer = None
        else:
            response = await asking
            answer = read(response).text if response.status_code == 200 else response.status_code
        if answer is None:
            counts["left"] += 1
        elif answer == 429:
            counts["429"] += 1
            await asyncio.sleep(0.05)
        else:
            assert answer == wanted, (path, fields, answer, wanted)
            counts["answered"] += 1


@pytest.mark.slow
def test_many_clients_for_a_while(tmp_path):
    alone, draws = load_alone(save_model(tmp_path)), random.Random(0)
    cases = [make(draws, alone) for _ in range(KINDS)]
    counts, sizes, process = Counter(), [], psutil.Process()
    threads = {*threading.enumerate()}

    async def soak(base_url, end):
        limits = httpx.Limits(max_connections=2 * CLIENTS)
        async with httpx.AsyncClient(base_url=base_url, timeout=120, limits=limits) as client:
            lives = [live(client, cases, random.Random(number), end, counts) for number in range(CLIENTS)]

            async def measure():
                while time.monotonic() < end:
                    sizes.append(process.memory_info().rss >> 20)
                    await asyncio.sleep(SECONDS / 20)

            await asyncio.gather(*lives, measure())

    with running(tmp_path, slots=8, max_queue=128) as client:
        requests = client.runner.requests
        manager, ended = requests.manager, Counter()
        manager.observers.append(lambda output: ended.update([output.request_id]))
        asyncio.run(soak(client.base_url, time.monotonic() + SECONDS))
        wait_until(lambda: requests.active() == 0 and not manager.output_router.result_handlers)
        assert manager.output_router.output_queue.empty() and requests.workers.busy == 0
        assert set(ended.values()) == {1}
        assert requests.ailment() is None
    wait_until(lambda: {*threading.enumerate()} <= threads)
    print(f"\n{SECONDS:.0f} s, {dict(counts)}, {sum(ended.values())} requests ended once, memory in MB: {sizes}")
    assert counts["answered"] > 20 and counts["malformed"] and counts["left"]
    later = sizes[len(sizes) // 4 :]  # the first requests fill caches
    if SECONDS >= 60:
        assert later[-1] < 1.15 * later[0], sizes
