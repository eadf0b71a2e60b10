"""Refusals in the shape that OpenAI's clients understand."""

from starlette.responses import JSONResponse

INVALID = "invalid_request_error"


class Refusal(Exception):
    """A request that is not served: an HTTP status and an error object.

    param: the field at fault. code: a word that programs can test for.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> JSONResponse:
        """As an answer."""
        return JSONResponse(self.body, self.status, self.headers)


def busy() -> Refusal:
    """The queue is full: the clients of OpenAI wait and try again on this status."""
    return Refusal(
        429,
        "the queue is full; try again later",
        kind="rate_limit_error",
        code="queue_full",
        headers={"Retry-After": "1"},
    )


def stopping() -> Refusal:
    """The server was told to stop: another one, or this one started again, may answer."""
    return Refusal(
        503,
        "the server is stopping; send it again",
        kind="server_error",
        code="stopping",
        headers={"Retry-After": "5", "Connection": "close"},
    )


def failed(reason: str) -> Refusal:
    """The engine has failed."""
    return Refusal(503, reason, kind="server_error", code="unavailable")
