"""Runs a function in several processes that can talk to each other by gloo."""

import datetime
import multiprocessing
import time
import traceback
from multiprocessing import connection

import torch
import torch.distributed as dist

LIMIT = 60
"""Seconds after which processes that have not answered are killed."""


def run_ranks(size, function, *arguments, rendezvous, without=None):
    """What ``function(rank, *arguments)`` returns in each of `size` forked processes, by rank.

    rendezvous: a path at which there is no file yet. An exception in a process is given in the place of its result; a
    process that dies gives None. without: a rank that is not waited for, whose result is None.
    """
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(size)]
    processes = [
        context.Process(target=_rank, args=(rank, size, str(rendezvous), pipe[1], function, arguments), daemon=True)
        for rank, pipe in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, end in pipes:
        end.close()
    deadline, results = time.monotonic() + LIMIT, []
    try:
        for rank, ((pipe, _), process) in enumerate(zip(pipes, processes)):
            if rank == without:
                results.append(None)
                continue
            ready = connection.wait([pipe, process.sentinel], max(0.0, deadline - time.monotonic()))
            if pipe.poll():
                results.append(pipe.recv())
            else:
                results.append(None if ready else TimeoutError(f"no answer within {LIMIT} s"))
    finally:
        for process in processes:
            process.kill()
            process.join()
    return results


def _rank(rank, size, rendezvous, pipe, function, arguments):
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=LIMIT)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=timeout)
    try:
        result = function(rank, *arguments)
    except Exception as error:
        error.add_note(traceback.format_exc())
        result = error
    pipe.send(result)
    pipe.close()
    time.sleep(LIMIT)  # a process that ends early would cut its peers off; it is killed when all have answered
