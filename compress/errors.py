"""The ways a run ends other than well, each told without a traceback."""


class UserError(Exception):
    """A mistake that the user can mend: the thing, what was found, what was wanted, the way out.

    `python -m compress` prints the message alone and exits with status 2.
    """


class GateError(Exception):
    """A run that did all it was asked to, and whose result breaks the recipe's own limits.

    `python -m compress` prints the reasons and exits with status 3.
    """

    def __init__(self, reasons: list[str]) -> None:
        self.reasons = reasons
        super().__init__(f"score.gate is broken: {'; '.join(reasons)}")


class ConfigError(UserError):
    """One or more fields of the configuration that cannot be: all of them, a line each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))
