"""The step as a graph: what `--cuda-graph-impl full_iteration` makes of the options.

Gradients are in static groups in place of DistributedDataParallel, the checks are on the device, and an iteration is settled
one call late. On a machine without CUDA the same parts run eagerly, with the same buffers, gate and rewind.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from rsup.worker.cuda_graph.capture import SharedCapture, shared_capture
from rsup.worker.cuda_graph.constraints import check_module
from rsup.worker.cuda_graph.contract import Batches, Fallback, ForwardBackward
from rsup.worker.cuda_graph.device_checks import DeviceChecks
from rsup.worker.cuda_graph.full_iteration import FullIterationGraph
from rsup.worker.cuda_graph.gradient_groups import GradientGroups
from rsup.worker.cuda_graph.graph_corruption import GraphCorruption
from rsup.worker.cuda_graph.graphed_step import GraphedStep, StepReport
from rsup.worker.cuda_graph.optimizer_graph import OptimizerGraph, prepare_optimizer_for_graph
from rsup.worker.observe.dump_plan import NO_DUMPS, Dumps
from rsup.worker.reference.mixed_precision import HOOKS, ScaledGradients, compute_dtype, scaled_gradients
from rsup.worker.reference.model import GPT, mean_loss
from rsup.worker.reference.model_chunks import chunked_loss, divided, inputs_of_chunks
from rsup.worker.reference.observed import Observed, StepTimers
from rsup.worker.reference.options import Options
from rsup.worker.reference.step_figures import logged_figures
from rsup.worker.reference.stepper import LOAD_BALANCING_LOSS, StepParts
from rsup.worker.unused_memory import empty_unused_memory


class TrainingPass:
    """Forward and backward of one iteration's micro-batches, with the checks: what is captured."""

    def __init__(
        self,
        options: Options,
        module: GPT,
        gradients: GradientGroups,
        checks: DeviceChecks,
        corruption: GraphCorruption,
        scaling: ScaledGradients | None = None,
        dumps: Dumps = NO_DUMPS,
        observed: Observed | None = None,
    ) -> None:
        self._options = options
        self._module = module
        self._observed = Observed() if observed is None else observed
        self._times = StepTimers(self._observed)
        self._chunks = divided(module, options.num_model_chunks)
        self._gradients = gradients
        self._checks = checks
        self._corruption = corruption
        self._compute = compute_dtype(options)
        self._scaling = scaling
        self._dumps = dumps
        self.balance = torch.zeros((), device=gradients.device)
        """Load balancing loss of the last pass, mean over micro-batches and blocks, where it counts."""

    def __call__(self, batches: Batches) -> torch.Tensor:
        """The loss, [], float32; leaves mean gradients in place, and the verdict in the checks' result. `batches`: by chunk,
        then by micro-batch, on the device."""
        self._observed.begin_pass()
        self._dumps.begin_pass()
        self._checks.begin()
        self._gradients.zero_()
        if self._module.aux_loss_coeff:
            self.balance.zero_()
        total = torch.zeros((), device=self._gradients.device)
        with torch.autocast(
            total.device.type, self._compute or torch.bfloat16, enabled=self._compute is not None
        ):  # casts weights once for all of them
            for number in range(self._options.num_microbatches):
                total += self._micro_batch(number, [of_chunk[number] for of_chunk in batches])
        if self._module.offload is not None:
            self._module.offload.join()
        self._checks.judge()
        self._dumps.gradients()
        return total

    def _micro_batch(self, number: int, inputs: Sequence[Any]) -> torch.Tensor:
        self._corruption.computes(number)
        self._dumps.micro_batch(number, self._options.num_microbatches)
        with self._times.forward:
            loss = chunked_loss(self._module, self._chunks, inputs, self._compute)
        self._corruption.damage_loss(loss)
        self._checks.loss(number, loss)
        if self._module.balance is not None:
            self.balance += self._module.balance / self._options.num_microbatches
        loss = loss / self._options.num_microbatches
        scaled = loss if self._scaling is None else self._scaling.scaled(loss)
        is_last = number == self._options.num_microbatches - 1
        reducing = self._gradients.reducing(self._checks.norm) if is_last else contextlib.nullcontext()
        with self._times.backward, reducing, torch.autocast(loss.device.type, enabled=False):
            scaled.backward()  # type: ignore[no-untyped-call]
        return loss.detach()


class GraphedSteps:
    """A `Stepper`. Attaches the module to the rerun machine. Collective."""

    def __init__(self, parts: StepParts) -> None:
        options, ranks, module = parts.options, parts.ranks, parts.module
        self._parts = parts
        self._capture = capture = shared_capture(ranks.device)
        capture.use_single_mempool = options.cuda_graph_use_single_mempool
        with capture.on_stream():
            _spread_from_rank_0(module)
            names, parameters = zip(*module.named_parameters(), strict=True)
            gradients = GradientGroups(
                parameters, names=names, measures_reduced=not parts.deterministic, in_rank_order=parts.deterministic
            )
            prepare_optimizer_for_graph(parts.optimizer)
        parts.rerun.attach(module, parts.optimizer, measures_gradients=False)
        checks = DeviceChecks(
            options.num_microbatches,
            gradients.num_groups,
            ranks.device,
            config=options.rerun_config,
            large=parts.rerun.large_values,
        )
        self._corruption = GraphCorruption(
            options.fault, ranks.rank, parts.device, parts.marks, module, options.num_microbatches, ranks.device
        )
        training_pass = TrainingPass(
            options,
            module,
            gradients,
            checks,
            self._corruption,
            scaled_gradients(parts.loss_scale, module),
            parts.observed.dumps,
            parts.observed,
        )
        self._times = StepTimers(parts.observed)
        figures = dict(logged_figures(options, module, parts.observed))
        if module.aux_loss_coeff:
            figures[LOAD_BALANCING_LOSS] = lambda: training_pass.balance
        self._optimizer = OptimizerGraph(
            parts.optimizer,
            ranks.device,
            gate=checks.gate,
            max_norm=options.clip_grad or float("inf"),
            gradients=gradients,
            exact_norm=parts.deterministic,
            warmup_steps=options.cuda_graph_warmup_steps,
            captures=options.optimizer_cuda_graph,
            capture=capture,
            group=ranks.control,
            fallback=Fallback(options.cuda_graph_fallback),
        )
        captured_optimizer = parts.optimizer if options.optimizer_cuda_graph else None
        check_module(module, captured_optimizer, warmup_steps=options.cuda_graph_warmup_steps, allowed_hooks=[HOOKS])
        self._step = GraphedStep(
            _graph(parts, capture, "training", training_pass),
            self._optimizer,
            checks,
            parts.rerun,
            parts.data,
            self._take_batches,
            [f"grad norm of bucket {number}" for number in range(gradients.num_groups)],
            before_pass=self._before_pass,
            on_replay=parts.sections.on_replay,
            around=capture.on_stream,
            figures=figures,
            eager=parts.observed.dumps.due,
            timed=(self._times.forward_backward, self._times.optimizer),
            launched=parts.observed.replayed,
        )
        self._evaluation = _graph(parts, capture, "evaluation", self._evaluation_loss)

    def run(self, iteration: int, lr: float) -> StepReport:
        """Launch the iteration, and settle the one before. An injected fault strikes once: what is launched behind a rejected
        iteration is launched again, so its faults wait until that one is settled, on all ranks."""
        is_dumped = self._parts.observed.dumps.due(iteration)
        before = self._step.settle() if is_dumped or self._has_fault(iteration) else StepReport()
        if before.exit.should_exit:
            return before
        report = self._run_dumped(iteration, lr) if is_dumped else self._step.run(iteration, lr)
        report = StepReport(report.exit, before.settled + report.settled)
        for at_level in (1, 2):
            empty_unused_memory(self._parts.options.empty_unused_memory_level, at_level, self._parts.ranks.device)
        return report

    def _run_dumped(self, iteration: int, lr: float) -> StepReport:
        """The same from launch to update: hooks run only where nothing is replayed, and what they see has to be of the pass
        that counts."""
        dumps = self._parts.observed.dumps
        with dumps.iteration(iteration):
            report = self._step.run(iteration, lr)
            if report.exit.should_exit:
                return report
            last = self._step.settle()
            settled = report.settled + last.settled
            if not last.exit.should_exit and not settled[-1].skipped:
                with self._capture.on_stream():
                    dumps.updated()
        return StepReport(last.exit, settled)

    def settle(self) -> StepReport:
        """Wait for what is launched."""
        return self._step.settle()

    def skip(self, iteration: int) -> StepReport:
        """Take an iteration's data and compute nothing."""
        return self._step.skip(iteration)

    def evaluated(self, text: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of validation samples; it holds until the next call."""
        with self._capture.on_stream():
            loss: torch.Tensor = self._evaluation([[{"text": text}]]).value
        return loss

    def optimizer_moves(self) -> None:
        """The optimizer's graph goes, and is captured anew later."""
        self._optimizer.reset()

    def _has_fault(self, iteration: int) -> bool:
        faults = self._parts.options.fault
        return any(not fault.repeat and fault.iteration == iteration for fault in faults)

    def _take_batches(self) -> Batches:
        options = self._parts.options
        drawn = [self._next_batch() for _ in range(options.num_microbatches)]
        return list(zip(*(inputs_of_chunks(batch, options.num_model_chunks) for batch in drawn), strict=True))

    def _next_batch(self) -> Any:
        with self._times.batch_generator:
            return next(self._parts.data)

    def _before_pass(self, iteration: int, number: int, batches: Batches) -> None:
        self._parts.rerun.data_position["consumed_samples"] = self._parts.consumed_before(iteration)
        self._parts.faults.at_step(iteration, number)
        self._corruption.before_pass(iteration, batches[-1])

    def _evaluation_loss(self, batches: Batches) -> torch.Tensor:
        return mean_loss(self._parts.module, batches[0][0]["text"], compute_dtype(self._parts.options))


def _graph(parts: StepParts, capture: SharedCapture, name: str, forward_backward: ForwardBackward) -> FullIterationGraph:
    return FullIterationGraph(
        forward_backward,
        parts.ranks.device,
        name=name,
        warmup_steps=parts.options.cuda_graph_warmup_steps,
        fallback=Fallback(parts.options.cuda_graph_fallback),
        parameters=parts.module.named_parameters(),
        group=parts.ranks.control,
        capture=capture,
    )


def _spread_from_rank_0(module: torch.nn.Module) -> None:
    """Equal seeds make equal parameters; this is what DistributedDataParallel does all the same."""
    if dist.get_world_size() > 1:
        for parameter in module.parameters():
            dist.broadcast(parameter.data, src=0)
