"""Serve a checkpoint over HTTP, as OpenAI's clients speak it: docs/serving.md.

python -m compress.serve checkpoint=DIR [port=8000] [field=value ...]
"""

import asyncio
import errno
import os
import socket

from compress import options
from compress.errors import UserError
from compress.runtime.server.key import key_of
from compress.runtime.server.options import Options


def listen(host: str, port: int) -> socket.socket:
    """The socket, taken before the model is loaded; raises UserError where it cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, UnicodeError) as error:
        number = getattr(error, "errno", None) or 0
        reason = os.strerror(number) if number > 0 else getattr(error, "strerror", None) or error
        another = port != 0 and number in (errno.EADDRINUSE, errno.EACCES)
        advice = "; port=0 takes one that is free" if another else ""
        raise UserError(f"host={host} port={port}: {reason}{advice}") from error


def main(words: list[str]) -> None:
    """Read the options, load, serve."""
    settings, key = options.parsed(Options, words), key_of(os.environ)
    with listen(settings.host, settings.port) as listening:
        # Not above: torch and transformers take seconds, and what is wrong until here none.
        from compress.runtime.server.lifetime import run, served

        asyncio.run(run(served(settings), listening, settings, key))


if __name__ == "__main__":
    options.run(main, f"{__doc__}\n{Options.__doc__}\n")
