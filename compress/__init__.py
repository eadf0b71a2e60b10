"""Take a language model from what it is to what can be deployed, and say what it cost."""

import sys
from types import TracebackType


def _told(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write("compress: stopped\n")
    else:
        sys.__excepthook__(kind, error, traceback)


# `python -m compress.…` imports torch and transformers, which takes seconds, before its own code is
# there to tell of Ctrl-C in a line.
if sys.argv[:1] == ["-m"]:
    sys.excepthook = _told
