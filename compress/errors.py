"""The two ways a run ends early, each told in one line without a traceback."""


class UserError(Exception):
    """A mistake that the user can mend: the thing, what was found, what was wanted, the way out.

    `python -m compress` prints the message alone and exits with status 2.
    """


class ConfigError(UserError):
    """One or more fields of the configuration that cannot be: all of them, a line each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))
