"""Numbers of things in words."""


def counted(number: float, thing: str) -> str:
    """``1 group``, ``2 groups``."""
    return f"{number:.0f} {thing}{'' if number == 1 else 's'}"
