"""Processes of one run, as `accelerate launch` starts them, but forked from the test's own."""

import os
import sys
import traceback
from collections.abc import Callable

import torch
from torch.distributed import TCPStore

from compress import processes
from compress.__main__ import told_plainly


def launched(work: Callable[[], object], count: int = 2, **environment: str) -> list[int]:
    """Let `count` processes lead and help at `work`; their exit statuses, or minus the signals."""
    torch.set_num_threads(1)  # a fork copies one thread; OpenMP must not wait for others
    sys.stdout.flush()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the launcher has it
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            os.environ.update(
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(store.port),
                TORCHELASTIC_USE_AGENT_STORE="True",
                WORLD_SIZE=str(count),
                LOCAL_WORLD_SIZE=str(count),
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                **environment,
            )
            _end_with(work)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _end_with(work: Callable[[], object]) -> None:
    status = 1
    try:
        with told_plainly():
            processes.lead(work)
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
