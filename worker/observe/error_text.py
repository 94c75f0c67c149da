"""What an error of somebody else's package says, in the one line of a warning."""


def one_line(error: Exception, most: int = 300) -> str:
    """Its text without line breaks, at most so many characters; its type where it says nothing."""
    return " ".join(str(error).split())[:most] or type(error).__name__
