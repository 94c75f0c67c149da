"""A fault that is put into a screen on purpose, to see that it is found: `kind=bitflip[,device=ID][,bit=N][,steady=1]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rsup.supervisor.wire import UsageError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class InjectedFault:
    """Flips bit `bit` of the first 32 bits of every product. `steady`: at each repetition alike, as a broken unit does; else
    only at the second, as a cosmic ray does. `device`: of that device only; empty: of all."""

    device: str = ""
    bit: int = 30
    steady: bool = False

    def spoil(self, result: torch.Tensor, repetition: int) -> None:
        """In place. `repetition` counts from 0."""
        import torch

        if result.is_floating_point() and result.dim() == 2 and (self.steady or repetition == 1):
            word = result.view(-1)[: max(1, 4 // result.element_size())].view(torch.int32)
            word ^= _signed(1 << self.bit)


def read_fault(text: str) -> InjectedFault | None:
    """The fault of `--fault`; None for an empty text. Raise `UsageError`."""
    if not text:
        return None
    words: dict[str, str] = {}
    for word in text.split(","):
        name, _, value = word.partition("=")
        words[name] = value
    unknown = sorted(words.keys() - {"kind", "device", "bit", "steady"})
    bit = words.get("bit", "30")
    if words.get("kind") != "bitflip" or unknown or not bit.isdecimal() or int(bit) > 31:
        raise UsageError(f"--fault {text}: write kind=bitflip[,device=ID][,bit=0-31][,steady=1]")
    return InjectedFault(words.get("device", ""), int(bit), words.get("steady", "0") not in ("", "0"))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
