"""Dumps of tensors for people who look for what went wrong: activations, gradients, parameters, tokens per expert.

    dumps = TensorDumps(DumpPlan(folder, {"wgrads": 100, "activations": 1000}), [model], warn=warn)
    for iteration in range(start, end):
        with dumps.iteration(iteration):          # hooks are there inside, on due iterations only
            dumps.begin_pass()
            for number, batch in enumerate(batches):
                dumps.micro_batch(number, len(batches))
                model(batch).backward()
            dumps.gradients()                     # reduced, before they are clipped
            optimizer.step()
            dumps.updated()
        dumps.write()                             # where a save would be: not in the time of the step

In iterations that are not due all calls together cost some microseconds. With a CUDA graph a due iteration has to run eagerly,
since hooks do not run in a replay (`GraphedStep(eager=dumps.due)`). Nothing here raises for want of room: a dump that does not
fit is left out with a warning, and training goes on. Files are plain dicts (`torch.load`, `weights_only`); see `dump_plan`.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from rsup.worker.observe.contract import Warn
from rsup.worker.observe.dump_files import append_lines, free_disk_bytes, memory_for_dumps_bytes, write_dump
from rsup.worker.observe.dump_hooks import Collected, IsWatched, ModuleHooks, is_linear
from rsup.worker.observe.dump_plan import ACTIVATIONS, DGRADS, LABELS, PARAMS, TOKENS_PER_EXPERT, WGRADS, DumpPlan, size_text
from rsup.worker.observe.error_text import one_line
from rsup.worker.observe.tokens_per_expert import ExpertPlace, TokenCounts, lines_until, place_of

_NOT_THERE = {WGRADS: "its gradients were not used", PARAMS: "its parameters were not updated"}
"""Why something is missing of an iteration that ran."""


class TensorDumps:
    """See the module, and `dump_plan.Dumps`. One thread; nothing is collective, but the plan has to be alike on all ranks.

    `chunks`: the model's parts on this rank, without a wrapper such as DistributedDataParallel; the first is `model_chunk0` in
    files. `is_watched`: of which modules activations and data gradients are dumped. `place`: see `tokens_per_expert.place_of`.
    """

    def __init__(
        self,
        plan: DumpPlan,
        chunks: Sequence[nn.Module],
        *,
        is_watched: IsWatched = is_linear,
        place: Callable[[str], ExpertPlace | None] = place_of,
        warn: Warn,
    ) -> None:
        self._plan = plan
        self._intervals = {interval for label, interval in plan.intervals.items() if label in LABELS and interval >= 1}
        self._chunks = {f"model_chunk{index}": chunk for index, chunk in enumerate(chunks)}
        self._hooks = ModuleHooks(self._chunks, is_watched, plan.micro_batches)
        self._warned: set[str] = set()
        self._warn_people = warn
        self._tokens = TokenCounts(place, warn=self._warn)
        self._due: frozenset[str] = frozenset()
        """What this rank collects now; empty outside of a due iteration."""
        self._collected = Collected(0)
        self._iteration = 0
        self._lines: list[str] = []
        self._missed: dict[str, str] = {}
        """What was due and not there to collect, and why, until `write` says it."""
        self._last_sizes: dict[str, int] = {}
        self._said_missing: set[tuple[str, str]] = set()
        """Labels, and why they are missing, without the figures; a label that is written again is forgotten."""
        for problem in plan.problems():
            self._warn(problem)

    def due(self, iteration: int) -> bool:
        """See `Dumps`."""
        return any(not iteration % interval for interval in self._intervals)

    def iteration(self, iteration: int) -> contextlib.AbstractContextManager[None]:
        """See `Dumps`. What is collected waits for `write`; after an exception there is nothing, and no hook stays."""
        assert not self._due, f"the dump of iteration {self._iteration} has not ended"
        due = self._plan.due_here(iteration) if self.due(iteration) else ()
        return self._collecting(iteration, frozenset(due)) if due else contextlib.nullcontext()

    @contextlib.contextmanager
    def _collecting(self, iteration: int, due: frozenset[str]) -> Iterator[None]:
        self._due, self._iteration = due, iteration
        try:
            self._collected = Collected(*self._budget())
            self._missed = {label: why for label, why in _NOT_THERE.items() if label in due}
            self._refuse_what_was_too_large()
            self._watch()
            yield
            if TOKENS_PER_EXPERT in due:
                self._lines = self._tokens.take_lines(iteration)
        except BaseException:
            self._drop()
            raise
        finally:
            self._due = frozenset()
            self._hooks.release()
            self._tokens.release()
            self._tokens.forget()

    def begin_pass(self) -> None:
        """See `Dumps`."""
        if self._due:
            self._tokens.forget()
            for label in (ACTIVATIONS, DGRADS, WGRADS, PARAMS):
                self._collected.forget(label)

    def micro_batch(self, number: int, count: int) -> None:
        """See `Dumps`."""
        if self._due:
            self._hooks.micro_batch(number, count)
            self._tokens.micro_batch(number)

    def gradients(self) -> None:
        """See `Dumps`. `main_grad` where a parameter has one, else `grad`; parameters without a gradient are left out."""
        self._missed.pop(WGRADS, None)
        if WGRADS in self._due:
            self._keep(WGRADS, _gradient)

    def updated(self) -> None:
        """See `Dumps`."""
        self._missed.pop(PARAMS, None)
        if PARAMS in self._due:
            self._keep(PARAMS, lambda parameter: parameter.data)

    def write(self, iteration: int | None = None) -> list[Path]:
        """See `Dumps`. Waits for the disk. Whatever cannot be written is said, once; the rest is written."""
        if iteration is not None and iteration != self._iteration:
            self._drop()
            self._iteration = iteration
            due = self._plan.due(iteration) if self._plan.position.is_writer else ()  # one rank says it for its part
            self._missed = {label: "it was left out" for label in LABELS if label in due}
        collected, lines, missed = self._collected, self._lines, self._missed
        self._drop()
        written = []
        for label, why in (missed | collected.refused).items():
            self._say_missing(label, why)
        if collected.left_out:
            kinds = ", ".join(f"{key} ({kind})" for key, kind in list(collected.left_out.items())[:3])
            self._warn(f"values that no file can hold are left out of dumps: {kinds}")
        for label, content in collected.content.items():
            path = self._plan.path(label, self._iteration)
            with self._said(label):
                self._require_room(collected.sizes[label])
                write_dump(path, dict(content))
                self._last_sizes[label] = collected.sizes[label]
                self._said_missing = {(other, why) for other, why in self._said_missing if other != label}
                written.append(path)
        if lines:
            with self._said(TOKENS_PER_EXPERT):
                append_lines(self._plan.tokens_path, lines)
                written.append(self._plan.tokens_path)
        return written

    def resumed(self, iteration: int) -> None:
        """See `Dumps`: lines of later iterations are dropped from this rank's file, as they come again."""
        path = self._plan.tokens_path
        if TOKENS_PER_EXPERT not in self._plan.intervals or not path.exists():
            return
        with self._said(TOKENS_PER_EXPERT):
            before = path.read_text(errors="replace")
            if (kept := lines_until(before, iteration)) != before:
                aside = path.with_name(f"{path.name}.unfinished")
                aside.write_text(kept)
                aside.replace(path)

    # ------------------------------------------------------------------------------------------------------- collecting

    def _watch(self) -> None:
        if self._due & {ACTIVATIONS, DGRADS}:
            try:
                num_modules = self._hooks.watch(self._due - self._collected.refused.keys(), self._collected)
                problem = "" if num_modules else "no module of the model is chosen"
            except Exception as error:  # of the caller's own function
                self._hooks.release()
                problem = f"is_watched failed: {type(error).__name__}: {one_line(error)}"
            if problem:
                self._warn(f"no activations or data gradients are dumped: {problem}")
        if TOKENS_PER_EXPERT in self._due:
            modules = {name: module for chunk in self._chunks.values() for name, module in chunk.named_modules()}
            self._tokens.watch(modules)

    def _keep(self, label: str, part: Callable[[nn.Parameter], torch.Tensor | None]) -> None:
        """Copies of a tensor of each parameter. How much they take is known before the first is made."""
        parts = [
            (chunk, name, tensor)
            for chunk, model in self._chunks.items()
            for name, parameter in model.named_parameters()
            if (tensor := part(parameter)) is not None
        ]
        if self._collected.has_room(label, sum(tensor.numel() * tensor.element_size() for _, _, tensor in parts)):
            for chunk, name, tensor in parts:
                self._collected.put(label, chunk, name, tensor)

    def _drop(self) -> None:
        self._collected, self._lines, self._missed = Collected(0), [], {}

    # ------------------------------------------------------------------------------------------------------------- room

    def _budget_bytes(self) -> int:
        return self._budget()[0]

    def _budget(self) -> tuple[int, str]:
        """What may be collected now, and of what that is: it has to fit into the host's memory, and then onto the disk, as the
        dumps of the other ranks of this node."""
        try:
            on_disk = free_disk_bytes(self._plan.folder) - self._plan.keep_free_bytes
        except OSError:  # the write will say what is wrong
            on_disk = 1 << 62
        in_memory = memory_for_dumps_bytes()
        kept = size_text(self._plan.keep_free_bytes)
        where = f"on the disk, of which {kept} stay free" if on_disk < in_memory else "in half of the host memory that is left"
        if self._plan.share < 1:
            where += ", shared with the other ranks of this node"
        return max(0, int(min(on_disk, in_memory) * self._plan.share)), where

    def _refuse_what_was_too_large(self) -> None:
        """Hooks copy before anybody knows how much there will be: the last dump of the same tells."""
        for label in self._due & self._last_sizes.keys():
            self._collected.has_room(label, self._last_sizes[label])

    def _require_room(self, size_bytes: int) -> None:
        left_bytes = free_disk_bytes(self._plan.folder) - size_bytes
        if left_bytes < self._plan.keep_free_bytes:
            kept = size_text(self._plan.keep_free_bytes)
            raise OSError(0, f"they take {size_text(size_bytes)}, and {kept} of the disk are to stay free")

    @contextlib.contextmanager
    def _said(self, label: str) -> Iterator[None]:
        """Say what is not written, and go on."""
        try:
            yield
        except OSError as error:
            self._say_missing(label, error.strerror or str(error))

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            self._warn_people(text)

    def _say_missing(self, label: str, why: str) -> None:
        kind = (label, re.sub(r"\d+(\.\d+)?( [KMGTP]?B)?", "", why))
        if kind not in self._said_missing:
            self._said_missing.add(kind)
            self._warn_people(
                f"{label.replace('_', ' ')} of iteration {self._iteration} are not dumped to {self._plan.folder}: {why}"
            )


def _gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    main: torch.Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main
