"""Who sends a request."""

from dataclasses import dataclass

from disagg.server.trace import AnswerTrace, RequestTrace


@dataclass(frozen=True)
class Client:
    """The sender of one request.

    key_name:   stands for its API key; "": it has none
    request_id: the X-Request-Id of the response; several requests may have the same
    trace:      of the request; None: it is not traced
    """

    key_name: str = ""
    request_id: str = ""
    trace: RequestTrace | None = None

    def note(self, answer: AnswerTrace) -> None:
        """One of its answers has ended."""
        if self.trace is not None:
            self.trace.answers.append(answer)


ANYONE = Client()
