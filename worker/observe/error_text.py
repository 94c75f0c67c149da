"""What an error of somebody else's package says, in the one line of a warning."""


def one_line(error: Exception, most: int = 300) -> str:
    """Its text without line breaks, of so many characters at most; its type where it says nothing."""
    return shortened(str(error), most) or type(error).__name__


def shortened(text: str, most: int = 300) -> str:
    """Without line breaks; what is longer than so many characters ends behind a word there, with dots."""
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most + 1].rpartition(' ')[0] or text[:most]} ..."
