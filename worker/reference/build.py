"""Makes the parts of a run that its options describe."""

import torch

from rsup.worker.activation_offload import ActivationOffload
from rsup.worker.numeric_faults import poisons
from rsup.worker.reference.data import Text
from rsup.worker.reference.eager_training import EagerSteps
from rsup.worker.reference.loss_scale import LossScale
from rsup.worker.reference.micro_batches import MicroBatches
from rsup.worker.reference.model import GPT, ExpertsOfBlock
from rsup.worker.reference.optimizer_schedule import LearningRate
from rsup.worker.reference.options import Options
from rsup.worker.reference.stepper import StepParts, Stepper
from rsup.worker.reference.worker_batches import WorkerReader


def make_model(options: Options, device: torch.device) -> GPT:
    """The model that the options describe, freshly initialised from torch's generator, on `device`."""
    model = GPT(
        options.num_layers,
        options.hidden_size,
        options.num_attention_heads,
        options.seq_length,
        options.attention_dropout,
        options.hidden_dropout,
        options.recompute_granularity,
        _experts(options),
    )
    if options.activation_offload:
        model.offload = ActivationOffload(device, options.fine_grained_offloading_max_inflight_offloads)
    return model.to(device)


def _experts(options: Options) -> ExpertsOfBlock | None:
    if not options.num_experts:
        return None
    width = options.moe_ffn_hidden_size or 4 * options.hidden_size
    return ExpertsOfBlock(options.num_experts, options.moe_router_topk, width, options.moe_aux_loss_coeff)


def make_optimizer(module: torch.nn.Module, options: Options) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices only."""
    matrices = [parameter for parameter in module.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in module.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    betas = (options.adam_beta1, options.adam_beta2)
    return torch.optim.AdamW(groups, lr=options.lr, betas=betas, eps=options.adam_eps, fused=True)


def make_schedule(options: Options) -> LearningRate:
    """The learning rate that the options describe."""
    decay_samples = options.lr_decay_samples or options.batch_sizes.consumed_after(options.train_iters)
    return LearningRate(
        lr=options.lr,
        min_lr=options.min_lr,
        warmup_init=options.lr_warmup_init,
        warmup_samples=options.lr_warmup_samples,
        decay_samples=decay_samples,
        decay_style=options.lr_decay_style,
        wsd_decay_samples=options.lr_wsd_decay_samples or 0,
    )


def make_loss_scale(options: Options) -> LossScale | None:
    """The loss scale of a run that begins; None where it has none."""
    return None if options.scale_rules is None else LossScale(options.scale_rules)


def make_loader(text: Text, options: Options, rank: int) -> MicroBatches:
    """That rank's micro-batches of the training split."""
    reader = None
    if options.num_workers:
        reader = WorkerReader(options.num_workers, options.dataloader_start_method, options.worker_signals)
    return MicroBatches(
        text,
        rank,
        options.micro_batch_size,
        options.samples_per_pass,
        options.batch_sizes,
        poisons(options.fault, rank),
        reader,
    )


def make_stepper(parts: StepParts) -> Stepper:
    """What runs the iterations, and attaches the module to the rerun machine. Collective."""
    if not parts.options.is_graphed:
        return EagerSteps(parts)
    from rsup.worker.reference.graph_training import GraphedSteps  # nobody else needs it

    return GraphedSteps(parts)
