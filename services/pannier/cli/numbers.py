"""Numbers as people read them."""


def shown(value: float | None) -> str:
    """Four digits, more only of large numbers; a dash for what isn't known."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def times(ratio: float | None) -> str:
    """How many times as much; nothing if that isn't known."""
    return "" if ratio is None else f"{ratio:.2f}x"
