"""Attacks on other clients' prompts: nothing that the server tells shows what they have, and nobody holds up others."""

import asyncio
import re
import threading
import time

import pytest
from server_fixtures import CHATS, COMPLETIONS, DIALECTS, EAGER, MESSAGES, ask, running, save_model, wait_until

from spec_compile.serve.call import CURRENT, WORKERS, HttpCall, Waiting, Workers

SECRET = "73914628"
TEXT = f"the number of the account is {SECRET} and nobody knows it\n" * 2
HITS = re.compile(r"^spec_compile:(?:prefix_cache_hits|prompt_tokens_cached)_total (\S+)$", re.M)
SERVER = dict(options=EAGER | {"adaptive": False})


@pytest.fixture(autouse=True)
def no_texts(client):
    requests = client.runner.requests
    requests.manager.model.speculation.ngram.reset()
    assert not (requests.policy.share_texts or requests.policy.isolate_prefixes)
    yield
    requests.policy.share_texts = requests.policy.isolate_prefixes = False


def guess(client, **fields):
    """The figures of an answer that is forced to one token after a known beginning."""
    tokenizer = client.runner.requests.tokenizer
    known, rest = TEXT[: TEXT.index(SECRET)], tokenizer(TEXT)["input_ids"]
    token = rest[len(tokenizer(known)["input_ids"])]
    figures = ask(client, COMPLETIONS, known, 4, logit_bias={str(token): 100}, **fields).figures
    return figures["per_step_accepted"], figures["per_step_drafted"]


@pytest.mark.parametrize("of_attacker", [{}, {"user": "mallory"}, {"user": "alice", "cache_salt": "m"}])
def test_figures_show_no_text_of_others(client, of_attacker):
    new = guess(client, **of_attacker)
    client.runner.requests.manager.model.speculation.ngram.reset()
    for of_victim in ({}, {"user": "alice"}, {"cache_salt": "a"}, {"user": "alice", "cache_salt": "a"}):
        ask(client, COMPLETIONS, TEXT, **of_victim)
        ask(client, COMPLETIONS, prediction={"type": "content", "content": TEXT}, **of_victim)
    ask(client, MESSAGES, TEXT, metadata={"user_id": "alice"})
    ask(client, CHATS, TEXT, safety_identifier="mallory")
    assert guess(client, **of_attacker) == new
    assert guess(client, user="alice") != new, "the same user's texts are drafted from"


def test_texts_of_all_if_the_server_says_so(client):
    new = guess(client)
    client.runner.requests.policy.share_texts = True
    ask(client, COMPLETIONS, TEXT)
    assert guess(client, user="mallory") != new


def hits(client):
    return [float(value) for value in HITS.findall(client.get("/metrics").text)]


def gained(client, prompt, others=0, **fields):
    """What both counters count of one request, beside others that go on."""
    before = hits(client)
    ask(client, COMPLETIONS, prompt, 1, **fields)
    wait_until(lambda: client.runner.requests.active() <= others)
    assert client.runner.requests.active() == others
    first, second = (after - earlier for after, earlier in zip(hits(client), before))
    assert first == second and first % 16 == 0
    return first


def test_counters_do_not_read_a_number(client, monkeypatch):
    """A number of a request that runs, digit by digit: the attacker takes the digit that is counted most."""
    start = "# " + "a b c d " * 12 + "the account has the number "
    manager, may_end = client.runner.requests.manager, threading.Event()
    step, fields = manager.scheduler.step, {"limit": 300, "ignore_eos": True, "temperature": 2.0, "seed": 1}

    def step_beside_a_guess():
        """Alone, the victim waits: 20 guesses take a round or two each, which its 300 tokens outlast."""
        has_begun = manager.metrics()["requests_running"]
        wait_until(lambda: not has_begun or manager.active_requests > 1 or may_end.is_set(), 600)
        return step()

    manager.scheduler.prefixes.forget()
    monkeypatch.setattr(manager.scheduler, "step", step_beside_a_guess)
    victim = threading.Thread(target=lambda: ask(client, COMPLETIONS, f"{start}{SECRET}\n", **fields))
    victim.start()
    try:
        wait_until(lambda: manager.metrics()["requests_running"] == 1)
        read = ""
        for _ in SECRET[:2]:  # of prompts that begin alike the newest 16 are compared, so that a third digit is safe
            counts = {digit: gained(client, start + read + digit + " zz", others=1) for digit in "0123456789"}
            read += max(counts, key=counts.get)
    finally:
        may_end.set()
        victim.join()
    assert read != SECRET[:2]


def test_prompts_of_another_salt_are_not_in_the_cache(client):
    prompt = "# a b c d " * 12
    client.runner.requests.manager.scheduler.prefixes.forget()
    for salt in ({}, {"cache_salt": "one"}, {"cache_salt": "two"}):
        assert [gained(client, prompt, **salt) > 0 for _ in range(2)] == [False, True]
    client.runner.requests.policy.isolate_prefixes = True
    assert [gained(client, prompt) > 0 for _ in range(2)] == [False, False]
    assert [gained(client, prompt, cache_salt="one") > 0 for _ in range(2)] == [False, True]


def test_whose_a_call_is():
    def belonging(shares=False, isolates=False, owner="", **fields):
        return HttpCall(None, owner, "10.0.0.1", fields=fields).belonging(shares, isolates)

    assert belonging() == {"client": "10.0.0.1", "cache_salt": "", "share_text": ""}
    assert belonging(owner="k", shares=True, cache_salt="s") == {"client": "k", "cache_salt": "s"}
    kinds = [{}, {"owner": "k"}, {"owner": "l"}, {"user": "k"}, {"cache_salt": "k"}, {"owner": "k", "user": "l"}]
    texts = [belonging(**kind)["share_text"] for kind in kinds]
    assert len({*texts}) == len(kinds) and all(len(text) == 64 for text in texts[1:])
    assert belonging(owner="k", user="l")["share_text"] == texts[-1]
    salts = [belonging(isolates=True, **kind)["cache_salt"] for kind in kinds]
    assert salts[1] == salts[5] and len({*salts}) == 5
    assert belonging(isolates=True)["cache_salt"] != salts[0], "a call without a name shares with its own choices only"


@pytest.mark.parametrize("path", DIALECTS)
def test_a_salt_may_be_long(client, path):
    assert ask(client, path, cache_salt="s" * 256)


def test_the_options_of_a_server(tmp_path):
    with running(save_model(tmp_path), share_texts=True, isolate_prefixes=True) as client:
        assert client.runner.requests.policy.share_texts and client.runner.requests.policy.isolate_prefixes


def test_preparations_take_turns():
    """Of each client as many requests as there are threads begin at a time, and each has a share of the number."""
    events: list[str] = []
    release = threading.Event()

    async def request(name, future, waits):
        if waits:
            release.wait()
            time.sleep(0.02)
        events.append(name)
        await Waiting(future)

    async def main():
        workers, loop = Workers(), asyncio.get_running_loop()
        done = loop.create_future()

        async def drive(client, name, waits=False):
            CURRENT.set(HttpCall(loop, client))
            await workers.drive(request(name, done, waits))

        def has_room(client, most):
            CURRENT.set(HttpCall(loop, client))
            return workers.has_room(most)

        tasks = [asyncio.create_task(drive("heavy", f"h{number}", True)) for number in range(6)]
        await asyncio.sleep(0.05)
        tasks.append(asyncio.create_task(drive("light", "l")))
        await asyncio.sleep(0)
        assert workers.busy == 7 and not has_room("heavy", 12) and has_room("light", 12) and has_room("new", 3)
        release.set()
        while len(events) < 7:
            await asyncio.sleep(0.01)
        done.set_result(None)
        await asyncio.gather(*tasks)
        assert workers.busy == 0 and has_room("heavy", 1)
        workers.close()

    asyncio.run(main())
    assert events.index("l") <= WORKERS + 1
