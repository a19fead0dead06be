"""The ranks of an engine: how rank 0 gets the others, and what these do.

Every rank builds the same engine, with its own part of the weights. Rank 0's is stepped; the others' workers do what
its worker does, as `engine/worker.py` marks it.
"""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from typing import NoReturn

from draftloop.config.engine import EngineConfig
from draftloop.config.env import Environment
from draftloop.distributed.group import ALONE
from draftloop.distributed.launcher import Meeting, Place, Ranks, check_place, join_from_stdin, meet
from draftloop.errors import ConfigError, DraftloopError
from draftloop.observability import log


def gather(config: EngineConfig, device_type: str, *, keep: bool = False) -> Ranks:
    """The ranks that a configuration asks for; this process is rank 0.

    In a process that torchrun has started as another rank it does not return, but follows rank 0 to the end of the
    process. Raises ConfigError where there are too few GPUs, or torchrun's processes are not as many as ranks.
    """
    import torch

    num_ranks, place = config.tensor_parallel_size, Place.read(os.environ)
    if num_ranks == 1:
        return Ranks(group=ALONE, device=torch.device(device_type))
    check_place(place, num_ranks)
    here = num_ranks if place is None else int(os.environ.get("LOCAL_WORLD_SIZE", 1 + place.local_rank))
    if device_type == "cuda" and torch.cuda.device_count() < here:
        raise ConfigError(
            f"tensor_parallel_size is {num_ranks}, but this machine has {torch.cuda.device_count()} GPUs; ask for as "
            "many, or start ranks on several machines by torchrun"
        )
    _check_can_be_sent(config)
    meeting = meet(num_ranks, place, keep=keep)
    if meeting.leader is not None:
        follow(meeting)
        _end()
    assert meeting.followers is not None
    meeting.followers.send(device_type)
    try:
        return meeting.join(device_type)
    except Exception:
        meeting.followers.explain()
        raise


def _check_can_be_sent(config: EngineConfig) -> None:
    try:
        pickle.dumps(config)
    except Exception as error:  # pickling raises whatever it likes
        raise ConfigError(
            f"settings cannot be sent to other processes: {error}; functions among them must be those of a module"
        ) from error


def follow(meeting: Meeting) -> None:
    """Build engine after engine and do what rank 0 does, until it has no more. Ends the process for what goes wrong."""
    from draftloop.engine.startup import start

    assert meeting.leader is not None
    try:
        ranks = meeting.join(meeting.leader.receive())
        while True:
            config = meeting.leader.receive()
            worker = start(config, progress=False, ranks=ranks).core.worker
            for orders in meeting.leader.orders():
                worker.obey(orders)
            worker = None  # its memory is for the next engine
    except EOFError:
        return
    except BaseException as error:
        expected = isinstance(error, DraftloopError)
        if not expected:
            traceback.print_exc()
        meeting.leader.give_reason(str(error) if expected else f"{type(error).__name__}: {error}")
        os._exit(1)  # other threads may wait for ranks for ever


def _end() -> NoReturn:
    """At once: nothing that a script does at its end is a follower's, and what is captured need not be taken apart."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    log.setup("ERROR", Environment.read().log_format)  # rank 0 says the rest
    follow(join_from_stdin())
    _end()
