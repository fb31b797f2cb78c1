"""`Followers`: the processes of ranks 1 and up of a server whose model is shared out among several GPUs.

The server starts them. They load the same model, and follow the rounds of its manager. They end when the pipe to the
server breaks, so no process outlives it.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from typing import Any

from ..parallel.start import STORE

COMMAND = [sys.executable, "-m", "spec_compile.serve.followers"]
WATCH = 0.5
"""Seconds between two looks at the followers, while the model is loaded."""
TIMEOUT = 10
"""Seconds that a follower has to end by itself."""


class Followers:
    """Makes this process the first of `size` ranks, and starts the others.

    The model is loaded in its context. If loading fails here, the other ranks end; if one of them ends, so does this
    process, which would wait for it.
    """

    def __init__(self, size: int, arguments: dict[str, Any]):
        """size: number of ranks, one for each GPU. arguments: of `server.build`, all of them JSON."""
        folder = tempfile.mkdtemp(prefix="spec_compile_")  # of mode 0700: only this user can join the ranks
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        os.environ |= _rank_environment(0, size, folder)
        self._is_loaded = threading.Event()
        self.processes = [
            # They have their own sessions, so that Ctrl-C reaches only the server, which lets requests end.
            subprocess.Popen(
                COMMAND,
                stdin=subprocess.PIPE,
                start_new_session=True,
                env=os.environ | _rank_environment(rank, size, folder),
            )
            for rank in range(1, size)
        ]
        for process in self.processes:
            process.stdin.write(json.dumps(arguments).encode() + b"\n")
            process.stdin.flush()

    def __enter__(self) -> "Followers":
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        self._is_loaded.set()
        if error is not None:
            self.stop()

    def _watch(self) -> None:
        while not self._is_loaded.wait(WATCH):
            if ailment := self.ailment():
                print(f"{ailment} while the model was loaded", file=sys.stderr, flush=True)
                os._exit(1)

    def ailment(self) -> str | None:
        """A sentence that names a follower that has ended, or None."""
        for rank, process in enumerate(self.processes, 1):
            if process.poll() is not None:
                return f"rank {rank} has ended with status {process.returncode}"
        return None

    def stop(self) -> None:
        """End them all."""
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()


def _rank_environment(rank: int, size: int, folder: str) -> dict[str, str]:
    """The variables that torchrun would set, and a file in place of its address."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {name: str(value) for name, value in names.items()} | {STORE: os.path.join(folder, "store")}


def main() -> None:
    """Follow until the server has gone."""
    from .server import build

    arguments = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_server, daemon=True).start()
    requests = build(**arguments, follows=True).requests
    requests.manager.join(0.0)
    os._exit(0 if requests.is_alive() else 1)


def _end_with_the_server() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
