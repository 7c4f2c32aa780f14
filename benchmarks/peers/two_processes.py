"""Start a script as two processes of torch.distributed, as torchrun would, on the loopback interface.

    python two_processes.py SCRIPT ARGUMENTS...

torchrun's store listens to every interface. This one is given a socket that listens to 127.0.0.1.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from torch.distributed import TCPStore

COUNT = 2


def main() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    shared = {
        "WORLD_SIZE": str(COUNT), "LOCAL_WORLD_SIZE": str(COUNT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "peers", "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, *sys.argv[1:]], env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(COUNT)
    ]
    codes = [process.wait() for process in started]
    del store
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main()
