"""What can be wrong with a message."""


class WireError(ValueError):
    """A message that this protocol does not allow: unknown kind or field, wrong type, wrong length."""
