"""What a run that breaks a promise raises."""


class Violation(AssertionError):
    """A promise of the engine is broken; the message says which."""
