"""Runs a function in several processes that can talk to each other by gloo."""

import datetime
import multiprocessing
import subprocess
import sys
import time
import traceback
from multiprocessing import connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

LIMIT = 60  # seconds after which processes that have not answered are killed


def run_ranks(size, function, *arguments, rendezvous, without=None):
    """What ``function(rank, *arguments)`` returns in each of `size` forked processes, by rank.

    An exception in a process is raised here; a process that dies gives None.

    rendezvous: a path at which there is no file yet.
    without: a rank that is not waited for, whose result is None.
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
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def torchrun(size, *arguments):
    """What a script that torchrun starts on `size` GPUs prints."""
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} CUDA devices")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), *arguments]
    where = Path(__file__).parents[2]
    result = subprocess.run(launch, capture_output=True, text=True, timeout=1200, cwd=where)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    return result.stdout


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
