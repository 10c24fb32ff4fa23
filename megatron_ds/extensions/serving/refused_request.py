"""`RefusedRequest`: why a request has no answer, with its HTTP status, as OpenAI's clients read it."""

from typing import Any

BAD = 400
FORBIDDEN = 403
ABSENT = 404
TOO_LARGE = 413
BUSY = 429
BROKEN = 500
CLOSING = 503
KINDS = {
    BUSY: "rate_limit_error",
    BROKEN: "server_error",
    CLOSING: "server_error",
}


class RefusedRequest(Exception):
    """A request that is not answered.

    message  what is wrong, and what to do
    param    the field of the body that is wrong, or None
    status   the HTTP status
    code     a word for programs, or None
    headers  further headers of the answer
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        status: int = BAD,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code
        self.headers = headers or {}

    def as_json(self) -> dict[str, Any]:
        """Return the body of the answer. Megatron's client reads "message" beside "error"."""
        error = {
            "message": self.message,
            "type": KINDS.get(self.status, "invalid_request_error"),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error, "message": self.message}


def closing(reason: str) -> RefusedRequest:
    """Return the refusal of a request that this server does not answer any more, although another one may."""
    return RefusedRequest(
        reason, status=CLOSING, headers={"Retry-After": "5", "Connection": "close"}
    )
