"""The one error that says a model can't be served, and why, in one sentence."""


class CannotSlice(Exception):
    """Raised when a model can't be cut at attention, or when it can't be proved that the cut model is the same.

    Attributes:
        model_type: the type that the model's configuration names.
        reason: the rest of the sentence, starting with a verb.
    """

    def __init__(self, model_type: str, reason: str) -> None:
        super().__init__(f"{model_type}: {reason}")
        self.model_type = model_type
        self.reason = reason


class Unsupported(Exception):
    """Raised inside the slicer, where the model's type isn't at hand; `CannotSlice` is made of it."""


def one_line(error: BaseException) -> str:
    """An error as `Type: first line`, short enough for a sentence."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first[:160]}"
